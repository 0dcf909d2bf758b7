"""Bytes a parameter that each method keeps, adds in an averaging, and adds in a save.

    python -m benchmarks.large --out benchmarks/results/large.json
    python -m benchmarks.large table benchmarks/results/large.json

Two gloo ranks of one thread on this machine, fresh processes for every method; resident memory of
rank 0 beyond a process that has trained a tiny model. Peaks are those of a local step, of a step
with its averaging (or exchange), and of a save that waits. Not part of `make bench`.
"""

import ctypes
import gc
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.common import markdown, parser_for, save, surroundings
from benchmarks.large_model_run import Model, loss_of
from benchmarks.memory import reset_peak, resident_bytes

SHAPES = {
    "quick": {"vocabulary": 500, "width": 64, "blocks": 2},
    "34M": {"vocabulary": 8192, "width": 512, "blocks": 14},
    "124M": {"vocabulary": 50257, "width": 768, "blocks": 18},
}
RANKS, K_STEPS, ROWS, LENGTH = 2, 3, 2, 8
Optimizer = torch.optim.Optimizer


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def muon(model: nn.Module) -> Optimizer:
    return tw.optim.Muon(tw.optim.muon_groups(model), lr=1e-3)


def local(**options: Any) -> dict[str, Any]:
    return {"localsgd": tw.LocalSGD(K_STEPS, begin_step=0, **options)}


@dataclass(frozen=True)
class Method:
    """A strategy with its optimizer; without fields DistributedDataParallel.

    Attributes:
        make: Makes the optimizer.
        fields: Of `DistributedStrategy`.
        on_host: Bytes a parameter that `state_device="cpu"` moves to the host: a computed figure.
    """

    make: Callable[[nn.Module], Optimizer]
    fields: Mapping[str, Any] | None
    on_host: int = 0


OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
METHODS = {
    "DDP, AdamW": Method(adamw, None),
    "dense, AdamW": Method(adamw, {}),
    "1 bit, Muon (`muon-local`)": Method(muon, local(compression=tw.Quantized(1)), 8),
    "4 bits, AdamW": Method(adamw, local(compression=tw.Quantized(4)), 8),
    "local SGD, AdamW": Method(adamw, local(), 4),
    "DiLoCo, AdamW": Method(adamw, local(**OUTER), 8),
    "largest tenth, AdamW": Method(adamw, local(compression=tw.Sparse(0.9)), 8),
    "DGC, SGD with momentum": Method(sgd, {"dgc": tw.DGC()}),
    "low rank, SGD with momentum": Method(sgd, {"low_rank": tw.LowRank(begin_step=0)}),
}
COMPUTED = {"torchft's DiLoCo, AdamW": (16, 4 + 4, 4)}
"""Bytes a parameter by its rules: weights, gradients and moments; backup and outer momentum, of
which so many are on the host."""


def settled_bytes() -> int:
    """Resident memory without what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes("VmRSS")


def peak_of(work: Callable[[], object]) -> int:
    """Return the most that is resident during a call."""
    settled_bytes()
    reset_peak()
    work()
    return resident_bytes("VmHWM")


class Trained:
    """A model of one method, its steps and its save."""

    def __init__(self, method: Method, shape: Mapping[str, int]) -> None:
        torch.manual_seed(0)
        self.model = Model(**shape)
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.optimizer = method.make(self.model)
        self.vocabulary, self.engine = shape["vocabulary"], None
        if method.fields is None:
            self.ddp = DistributedDataParallel(self.model)
        else:
            strategy = tw.DistributedStrategy(**method.fields)
            self.engine = strategy.prepare(self.model, self.optimizer, loss_of)
        torch.manual_seed(1 + dist.get_rank())

    def step(self) -> None:
        x = torch.randint(self.vocabulary, (ROWS, LENGTH + 1))
        if self.engine is not None:
            self.engine.train_step(x[:, :-1], x[:, 1:])
            return
        loss_of(self.ddp(x[:, :-1]), x[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def save(self, folder: str) -> None:
        if self.engine is not None:
            self.engine.save(f"{folder}/checkpoint")
        elif dist.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, f"{folder}/checkpoint")


def measured(method: Method, shape: Mapping[str, int], folder: str) -> dict[str, float]:
    """Return bytes a parameter of this rank."""
    warm = Trained(method, SHAPES["quick"])
    for _ in range(2 * K_STEPS):
        warm.step()
    warm.save(f"{folder}/warm")
    if warm.engine is not None:
        warm.engine.close()
    del warm
    before = settled_bytes()
    trained = Trained(method, shape)
    for _ in range(K_STEPS):  # the first averaging makes what stays
        trained.step()
    figures = {"rest": float(settled_bytes())}
    figures["step"] = peak_of(trained.step)
    for _ in range(K_STEPS - 2):
        trained.step()
    figures["averaging"] = peak_of(trained.step)
    figures["save"] = peak_of(lambda: trained.save(folder))
    found = {kind: (value - before) / trained.numel for kind, value in figures.items()}
    return found | {"params": trained.numel}


def work(name: str, size: str, rank: int, folder: str) -> None:
    """One rank of one method."""
    torch.set_num_threads(1)
    Path(folder, "warm").mkdir(exist_ok=True)
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    found = measured(METHODS[name], SHAPES[size], folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="ascii")
    dist.barrier()
    dist.destroy_process_group()


def row_of(name: str, size: str) -> dict[str, Any]:
    """Measure one method on fresh processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(name, size, rank, folder)) for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if codes := [worker.exitcode for worker in workers if worker.exitcode]:
            raise RuntimeError(f"{name}: the ranks ended with {codes}")
        found = json.loads(Path(folder, "0.json").read_text(encoding="ascii"))
    return {"name": name, "on_host": METHODS[name].on_host, **found}


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table: measured, then computed."""
    kinds = ("rest", "step", "averaging", "save")
    lines = [
        [row["name"], *(f"{row[kind]:.1f}" for kind in kinds), row["on_host"] or ""] for row in rows
    ]
    for name, (training, more, on_host) in COMPUTED.items():
        lines.append([f"{name}: computed", training + more, "", "", "", on_host])
    titles = ["bytes a parameter", "at rest", "a step", "an averaging", "a save"]
    return markdown([*titles, "of them on the host (computed)"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("what", nargs="*", help="`table FILE` prints the table of a result")
    parser.add_argument("--size", choices=SHAPES, default="34M")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    if arguments.what:
        print("\n".join(table(json.loads(Path(arguments.what[1]).read_text())["rows"])))
        return
    size = "quick" if arguments.quick else arguments.size
    around: dict[str, object] = surroundings(1)
    rows = []
    for name in arguments.only:
        rows.append(row_of(name, size))
        print(rows[-1], flush=True)
        save({**around, "ranks": RANKS, "shape": SHAPES[size], "rows": rows}, arguments.out)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
