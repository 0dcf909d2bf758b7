// The method chooser: four questions and a box above the table, which has an answer in every row.
const table = document.querySelector("article table.docutils");
const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
const QUESTIONS = {
  link: "Slowest link between workers: rate, and latency one way",
  workers: "Workers (with a sharded model: sites)",
  "model, step": "Parameters of the model, and seconds of a step without exchange",
  optimizer: "Optimizer",
};

const form = document.createElement("form");
form.className = "chooser";
const selects = Object.entries(QUESTIONS).map(([title, question]) => {
  const label = document.createElement("label");
  label.append(question);
  const select = document.createElement("select");
  select.name = title;
  const values = new Set(rows.map((row) => row[titles.indexOf(title)]));
  for (const value of values) select.append(new Option(value));
  label.append(select);
  form.append(label);
  return select;
});
const box = document.createElement("label");
box.className = "box";
const sharded = document.createElement("input");
sharded.type = "checkbox";
box.append(sharded, " The model needs several devices (FSDP inside a site)");
const output = document.createElement("output");
form.append(box, output);

function lines(method, optimizer) {
  if (method.startsWith("DDP")) {
    if (sharded.checked) return "fully_shard(model, mesh=mesh)  # torch alone, with a mesh of two dimensions (HSDP)";
    const ddp = "model = DistributedDataParallel(model)";
    return method === "DDP" ? ddp : `${ddp}\nmodel.register_comm_hook(None, fp16_compress_hook)`;
  }
  const muon = "groups = tw.optim.muon_groups(model)\noptimizer = tw.optim.Muon(groups, lr=...)\n";
  const mesh = sharded.checked ? ", mesh=mesh" : "";
  const local = method.replace(/\((.*)\)$/, "(\n    $1\n)");  // short lines, for a narrow screen
  return (
    (optimizer.startsWith("Muon") ? muon : "") +
    `local = ${local}\nstrategy = tw.DistributedStrategy(\n    localsgd=local\n)\n` +
    `engine = strategy.prepare(model, optimizer${mesh})`
  );
}

function part(heading, method, times, optimizer) {
  const title = document.createElement("p");
  const name = document.createElement("strong");
  name.textContent = heading;
  const gain = method === "DDP" ? "thinwire is predicted to gain less than 5 %" : `predicted ${times.replace("x", "times")} as fast as dense`;
  title.append(name, `: ${gain}`);
  const block = document.createElement("div");
  block.className = "highlight";
  const code = document.createElement("pre");
  code.textContent = lines(method, optimizer);
  block.append(code);
  addCopyButton(block);  // of site.js
  return [title, block];
}

function show() {
  const row = rows.find((cells) => selects.every((select) => cells[titles.indexOf(select.name)] === select.value));
  const optimizer = row[titles.indexOf("optimizer")];
  const [first, firstTimes] = row[titles.indexOf("start with")].split(": ");
  const [then, thenTimes] = row[titles.indexOf("then try")].split(": ");
  const parts = part("Start with", first, firstTimes, optimizer);
  if (then !== first) parts.push(...part("Then try", then, thenTimes, optimizer));
  output.replaceChildren(...parts);
}

const all = document.createElement("details");
const summary = document.createElement("summary");
summary.textContent = `All ${rows.length} answers as a table`;
const wrapper = table.closest(".table-wrapper") ?? table;
wrapper.before(form, all);
all.append(summary, wrapper);
all.addEventListener("toggle", () => dispatchEvent(new Event("resize")));  // site.js fits the table
form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
show();
