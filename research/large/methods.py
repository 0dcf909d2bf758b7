"""Memory and time of each method at the size that users bring: bytes a parameter, seconds and
processor seconds of an averaging or exchange, save, load, start and join.

    python -m research.large.methods --sizes 34M 124M
    python -m research.large.methods --sizes 124M 350M --dtype bfloat16 \
        --methods muon-local adamw diloco
    python -m research.large.methods --sizes 124M --dtype bfloat16 --kinds join

Two gloo ranks of one thread on this machine train `research.gpt`, in fresh processes for every
method; figures are those of rank 0. Memory is what is resident beyond a process that has trained a
tiny model, as settled bytes at rest and as peaks of a local step, an averaging, a save that waits,
and a load. A join is that of one more member of `muon-local` on loopback. Every
measurement is a line of the results; what is there already is not made again. The tables are
written by `python -m research.pages`.
"""

import ctypes
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.common import Results, bare_parser, json_lines, markdown, surroundings
from benchmarks.memory import reset_peak, resident_bytes
from benchmarks.ranks import on_ranks
from research.gpt import GPT, SIZES, loss_of
from research.members import joining

RESULTS = Path(__file__).with_suffix(".jsonl")
RANKS, ROWS, LENGTH, TIMES, LARGEST = 2, 2, 8, 2, "350M"
SELDOM = 1000
"""Steps between averagings: those that are measured are asked for by `flush`."""
PEAKS = ("step", "averaging")
TIMED = ("start", "step", "save", "load", "join")
FLAGSHIP = "muon-local"
COMPUTED = (1e9, 7e9)
Optimizer = torch.optim.Optimizer


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def muon(model: nn.Module) -> Optimizer:
    return tw.optim.Muon(tw.optim.muon_groups(model), lr=1e-3)


def local(**options: Any) -> dict[str, Any]:
    return {"localsgd": tw.LocalSGD(SELDOM, begin_step=0, **options)}


@dataclass(frozen=True)
class Method:
    """A strategy with its optimizer; without fields DistributedDataParallel.

    Attributes:
        title: Its name in the tables.
        make: Makes the optimizer.
        fields: Of `DistributedStrategy`.
        on_host: Bytes a parameter that `state_device="cpu"` moves to the host: a computed figure.
    """

    title: str
    make: Callable[[nn.Module], Optimizer]
    fields: Mapping[str, Any] | None
    on_host: int = 0


OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
METHODS = {
    "adamw": Method("DDP", adamw, None),
    "dense": Method("dense engine", adamw, {}),
    "muon-local": Method("`muon-local`", muon, local(compression=tw.Quantized(1)), 8),
    "quantized-local": Method("`quantized-local`", adamw, local(compression=tw.Quantized(4)), 8),
    "localsgd": Method("`localsgd`", adamw, local(), 4),
    "diloco": Method("`diloco`", adamw, local(**OUTER), 8),
    "sparse-local": Method("`sparse-local`", adamw, local(compression=tw.Sparse(0.9)), 8),
    "dgc": Method("`dgc`, SGD", sgd, {"dgc": tw.DGC()}),
    "low-rank": Method("`low-rank`, SGD", sgd, {"low_rank": tw.LowRank(begin_step=0)}),
}


@dataclass(frozen=True)
class Cell:
    """What one line of the results is about."""

    kind: str
    method: str
    size: str
    dtype: str


def settled_bytes() -> int:
    """Resident memory without what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes("VmRSS")


@dataclass
class Costs:
    """Figures of this rank by name.

    Attributes:
        before: Resident bytes that are not the model's.
        found: Seconds, processor seconds and the peak of bytes beyond `before`, by name.
    """

    before: int
    found: dict[str, list[float]]

    def of(self, name: str, work: Callable[[], object]) -> None:
        """Run `work` and note it; of a name that comes again the least counts."""
        settled_bytes()
        dist.barrier()
        reset_peak()
        begun_s, processor_s = time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - begun_s, time.process_time() - processor_s
        new = [*seconds, float(resident_bytes("VmHWM") - self.before)]
        self.found[name] = [*map(min, new, self.found.get(name, new))]


class Trained:
    """A model of one method, its steps and its save."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(0)
        self.method = METHODS[cell.method]
        self.model = GPT(cell.size).to(getattr(torch, cell.dtype))
        self.vocabulary = SIZES[cell.size][0]
        self.engine: Any = None
        self.ddp: nn.Module = self.model

    def alone(self, costs: Costs) -> None:
        """Note a step without an exchange, which the exchange of others is the rest of."""
        optimizer = self.method.make(self.model)
        for _ in range(TIMES):
            costs.of("alone", lambda: self.plain_step(self.model, optimizer))

    def prepare(self) -> None:
        self.optimizer = self.method.make(self.model)
        if self.method.fields is None:
            self.ddp = DistributedDataParallel(self.model)
        else:
            strategy = tw.DistributedStrategy(**self.method.fields)
            self.engine = strategy.prepare(self.model, self.optimizer, loss_of)

    def start(self) -> None:
        self.prepare()
        torch.manual_seed(1 + dist.get_rank())
        self.step()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(self.vocabulary, (ROWS, LENGTH + 1))
        return x[:, :-1], x[:, 1:]

    def plain_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        inputs, targets = self.batch()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def step(self) -> None:
        if self.engine is None:
            self.plain_step(self.ddp, self.optimizer)
        else:
            self.engine.train_step(*self.batch())

    def save(self, folder: str) -> None:
        if self.engine is not None:
            self.engine.save(f"{folder}/checkpoint")
        elif dist.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            Path(folder, "checkpoint").mkdir()
            torch.save(state, f"{folder}/checkpoint/state")


def measured(cell: Cell, folder: str) -> dict[str, Any]:
    """Train, save and resume; return the figures of this rank."""
    costs, trained = Costs(settled_bytes(), {}), Trained(cell)
    averages = trained.method.on_host > 0
    if not averages:
        trained.alone(costs)
    costs.of("start", trained.start)
    if averages:
        costs.of("first averaging", trained.engine.flush)  # it makes what stays
    rest = settled_bytes() - costs.before
    params = sum(p.numel() for p in trained.model.parameters())
    for _ in range(TIMES if cell.size != LARGEST else 1):
        costs.of("step", trained.step)
        if averages:
            costs.of("averaging", trained.engine.flush)
    costs.of("save", partial(trained.save, folder))
    if trained.engine is not None:
        trained.engine.close()
    if cell.method == FLAGSHIP:
        trained = Trained(cell)
        trained.prepare()
        costs.of("load", partial(trained.engine.load, f"{folder}/checkpoint"))
        trained.engine.close()
    saved = [f.stat().st_size for f in Path(folder, "checkpoint").rglob("*") if f.is_file()]
    return {"params": params, "rest": rest, "saved": sum(saved), **costs.found}


def work(rank: int, size: int, cell: Cell, folder: str) -> dict[str, Any]:
    """One rank of one method."""
    warm = Path(folder, "warm")
    warm.mkdir(exist_ok=True)
    measured(replace(cell, size="tiny"), str(warm))
    return measured(cell, folder)


def of_method(cell: Cell) -> dict[str, Any]:
    """Measure a method on fresh processes."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        found: dict[str, Any] = on_ranks(work, RANKS, cell, folder)[0]
    return found


def made(cell: Cell) -> joining.Made:
    """Return what the members of a join train."""
    torch.manual_seed(os.getpid())
    model = GPT(cell.size).to(getattr(torch, cell.dtype))
    config = tw.LocalSGD(1, begin_step=0, compression=tw.Quantized(1))
    return model, METHODS[cell.method].make(model), config


def of_join(cell: Cell) -> dict[str, Any]:
    """Measure the join of a second member beside the first, which trains on."""
    plan = joining.Plan(partial(made, cell), founders=1, rounds=1, after=1, timeout_s=900.0)
    first, joiner = joining.joined(plan, None)
    if error := first.get("error") or joiner.get("error"):
        raise RuntimeError(f"{cell}: {error}")
    beside = [s for s, size in zip(first["rounds"], first["sizes"], strict=True) if size == 1]
    return {
        "params": sum(p.numel() for p in made(cell)[0].parameters()),
        "join": [joiner["entered_s"], joiner["processor_s"], joiner["grown"]],
        "received": joiner["stats"]["joining_bytes"],
        "rounds_s": beside,
        "given": first["grown"],
    }


def line_of(cell: Cell) -> dict[str, Any]:
    """Measure a cell; the line has the circumstances too."""
    found = {"method": of_method, "join": of_join}[cell.kind](cell)
    print(json.dumps(found), flush=True)
    return {**found, **surroundings(TIMES)}


def lines_of(kind: str, size: str, dtype: str) -> list[dict[str, Any]]:
    """Return what was measured, in the order of `METHODS`."""
    lines = {Cell(**line["cell"]): line for line in json_lines(RESULTS)}
    cells = [Cell(kind, name, size, dtype) for name in METHODS]
    return [lines[cell] for cell in cells if cell in lines]


def method_of(line: Mapping[str, Any]) -> Method:
    return METHODS[line["cell"]["method"]]


def exchange_of(line: Mapping[str, Any]) -> Sequence[float]:
    """Return seconds and processor seconds of an averaging; of an exchange processor seconds."""
    if "averaging" in line:
        found: Sequence[float] = line["averaging"][:2]
        return found
    return [max(0.0, line["step"][1] - line["alone"][1])]


def pair(seconds: Sequence[float] | None) -> str:
    """Show seconds with processor seconds in brackets, or these alone."""
    if seconds is None:
        return ""
    *before, processor_s = seconds[:2]
    return " ".join([*(f"{s:.1f}" for s in before), f"({processor_s:.1f})"])


def memory_table(size: str, dtype: str) -> list[str]:
    """Return bytes a parameter, and the seconds of an averaging or exchange."""
    rows = []
    for line in lines_of("method", size, dtype):
        found = [line["rest"], *(line[kind][2] if kind in line else None for kind in PEAKS)]
        bytes_each = ["" if n is None else f"{n / line['params']:.1f}" for n in found]
        method = method_of(line)
        rows.append([method.title, *bytes_each, method.on_host or "", pair(exchange_of(line))])
    titles = [f"{size} {dtype}", "at rest", *PEAKS, "host", "time, s"]
    return markdown(titles, rows)


def time_table(sizes: Sequence[str], dtype: str) -> list[str]:
    """Return seconds and processor seconds of `muon-local`, and what a save has on the disk."""
    rows = []
    for size in sizes:
        lines = lines_of("method", size, dtype) + lines_of("join", size, dtype)
        found: dict[str, Any] = {}
        for line in lines:
            found |= line if line["cell"]["method"] == FLAGSHIP else {}
        shown = [pair(found.get(name)) for name in TIMED]
        rows.append([f"{size} {dtype}", *shown, f"{found.get('saved', 0) / RANKS / 1e9:.1f}"])
    titles = ["seconds", *TIMED, "GB a rank"]
    return markdown(titles, rows)


def computed_table(size: str, dtype: str) -> list[str]:
    """Return what the figures of a size are for more parameters, in proportion."""
    rows = []
    for line in lines_of("method", size, dtype):
        method, peak = method_of(line), max(line[kind][2] for kind in PEAKS if kind in line)
        host = method.on_host * line["params"]
        each = [line["rest"] / 1e9, peak / 1e9, host / 1e9]
        each += [exchange_of(line)[-1], line["save"][1]]
        shown = [[n * params / line["params"] for params in COMPUTED] if n else [] for n in each]
        rows.append([method.title, *(", ".join(f"{n:,.0f}" for n in both) for both in shown)])
    titles = [f"computed from {size}: 1 billion, 7 billion", "GB at rest", "peak", "on the host"]
    return markdown([*titles, "averaging, processor s", "save"], rows)


def saves(lines: Sequence[Mapping[str, Any]]) -> str:
    """Tell what a save that waits adds at most."""
    more = max((line["save"][2] - line["rest"]) / line["params"] for line in lines)
    return f"A save that waits adds {more:.1f} bytes at most. Of `muon-local`:"


def tables() -> list[str]:
    """Return what docs/choosing.md has no room for: measured, then computed."""
    float32, bfloat16 = ("124M", "float32"), ("350M", "bfloat16")
    shown = [
        memory_table(*bfloat16),
        [saves(lines_of("method", *float32) + lines_of("method", *bfloat16))],
        time_table(["124M", "350M"], "bfloat16"),
        computed_table(*bfloat16),
    ]
    return [line for one in shown for line in ["", *one]][1:]


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["34M"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--kinds", nargs="+", choices=("method", "join"), default=["method"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    results = Results(given.results, line_of)
    for kind in given.kinds:
        for size in given.sizes:
            for method in given.methods if kind == "method" else [FLAGSHIP]:
                results.of(Cell(kind, method, size, given.dtype))


if __name__ == "__main__":
    main()
