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

// A button that copies a block of code; a browser offers the clipboard only over https and on the machine itself.
function addCopyButton(block) {
  if (!navigator.clipboard) return;
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("pre").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  block.append(button);
}
document.querySelectorAll("article div.highlight").forEach(addCopyButton);
