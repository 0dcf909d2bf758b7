// A table that is wider than its page becomes blocks: a row each, every value after its column's title.
const tables = [...document.querySelectorAll("article table.docutils")];
for (const table of tables) {
  const titles = [...table.querySelectorAll("thead th")];
  for (const name of table.querySelectorAll("thead th, td strong")) {
    name.innerHTML = name.innerHTML.replaceAll("_", "_<wbr>");
  }
  for (const row of table.tBodies[0]?.rows ?? []) {
    [...row.cells].forEach((cell, i) => cell.setAttribute("data-label", titles[i]?.textContent ?? ""));
  }
}
function fit() {
  for (const table of tables) {
    table.classList.remove("blocks");
    const page = table.parentElement;
    table.classList.toggle("blocks", page.scrollWidth > page.clientWidth);
  }
}
addEventListener("resize", fit);
document.fonts.ready.then(fit);
