"use strict";
// Without this script every point still shows its values as the browser's own tooltip.
for (const svg of document.querySelectorAll("svg.plot")) {
  const points = [...svg.querySelectorAll(".pt")].map((mark) => {
    const title = mark.querySelector("title");
    const [x, y] = mark.getAttribute("transform").match(/[-\d.]+/g).map(Number);
    const text = title.textContent;
    title.remove();
    return { mark, x, y, text };
  });
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  svg.after(tip);
  let shown = -1;
  const show = (number) => {
    if (shown >= 0) points[shown].mark.classList.remove("on");
    shown = number;
    tip.hidden = number < 0;
    if (number < 0) return;
    const { mark, x, y, text } = points[number];
    mark.classList.add("on");
    tip.textContent = text;
    const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
    const around = svg.parentElement.getBoundingClientRect();
    const left = at.x - around.left - tip.offsetWidth / 2;
    tip.style.left = `${Math.max(0, Math.min(left, around.width - tip.offsetWidth))}px`;
    const above = at.y - around.top - tip.offsetHeight - 10;
    tip.style.top = `${above < 0 ? at.y - around.top + 12 : above}px`;
  };
  const nearest = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = -1;
    let least = 40 ** 2;
    points.forEach(({ x, y }, number) => {
      const distance = (x - at.x) ** 2 + (y - at.y) ** 2;
      if (distance < least) [least, best] = [distance, number];
    });
    show(best);
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", () => show(-1));
  svg.addEventListener("blur", () => show(-1));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined || points.length === 0) return;
    event.preventDefault();
    show((shown + step + points.length) % points.length);
  });
}
for (const button of document.querySelectorAll("button[data-copy]")) {
  const source = document.getElementById(button.dataset.copy);
  const label = button.textContent;
  const done = () => {
    button.textContent = "copied";
    setTimeout(() => { button.textContent = label; }, 2000);
  };
  const select = () => {
    getSelection().selectAllChildren(source);
    if (document.execCommand("copy")) done();
  };
  button.addEventListener("click", () => {
    if (navigator.clipboard) navigator.clipboard.writeText(source.textContent).then(done, select);
    else select();
  });
}
