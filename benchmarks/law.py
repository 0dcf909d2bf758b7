"""The loss of K local workers against dense training, by workers, parameters and interval.

python -m benchmarks.law --size 0.87M --workers 1 2 4 8 --interval 16 --bits 1 --seeds 5 6 7
python -m benchmarks.law fit --figure docs/law.svg
python -m benchmarks.law --seeds 8 --lr 0.024 --results benchmarks/results/law_check.jsonl
python -m benchmarks.law check
python -m benchmarks.law regret
python -m benchmarks.law predict --size 124M

All K workers train in turn in one process, on a CPU or one GPU, with the library's own local
updates (`benchmarks.lockstep`, to the bit those of real ranks); dense training is one model with
the mean gradient of as many batches. Tokens, steps, batches and seeds are the same for both. Rates
are chosen on the validation part with seed 1, each for its own K; the others are held out. A run is
a line of the results: what is there is not made again. A run that was interrupted goes on from a
file in --folder, to the bit. On a GPU models compute in bfloat16.
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import thinwire as tw
from benchmarks.common import Results, bare_parser, json_lines, markdown
from benchmarks.evidence import TUNING_SEED, tuned
from benchmarks.gaps import (
    CHECKS,
    RESULTS,
    SIZES,
    WIDE,
    Cell,
    check,
    draw,
    fit_table,
    gaps,
    left_out,
    local_strategy,
    measured,
    regret,
)
from benchmarks.lockstep import LocalRanks
from thinwire.core.muon import muon_
from thinwire.optim.muon import _rule as muon_rule
from thinwire.tools.planning.loss import law, loss_gap
from thinwire.tools.run.built_in import NextByte
from thinwire.tools.run.config import Recipe, RunConfig
from thinwire.tools.run.task import OwnTask, called, device_of
from thinwire.tools.run.text import Corpus, read_folder, read_standard_library
from thinwire.tools.run.trainers import BETAS, WEIGHT_DECAY, Setup
from thinwire.tools.run.training import rate_factor

RATES = {"muon": (0.012, 0.024, 0.048), "adamw": (0.003, 0.006, 0.012)}
EVALUATIONS, HELD_OUT_SEQUENCES = 5, 512
PREDICTED = "2026-11-26"
_KEPT_EVERY_S = 600.0
_HELD_OUT_BATCH = 32
_IN_TURN = 48
"""More workers than these train as one batch."""


@cache
def _corpus(data: str) -> Corpus:
    path = Path(data)
    if data and path.is_file():
        whole = path.read_bytes()
        part = len(whole) // 100
        parts = whole[: -2 * part], whole[-2 * part : -part], whole[-part:]
        return Corpus(*parts, 1, f"the bytes of {path.name}")
    return read_folder(Path(data)) if data else read_standard_library()


def works_of(cell: Cell, device: str, folder: Path) -> list[Any]:
    """Return the task of each worker; the first one evaluates on all held-out data."""
    if cell.data.partition(":")[0].endswith(".py"):
        where = device_of(device, 0)
        return [OwnTask(cell.data, cell.seed, k, cell.workers, where) for k in range(cell.workers)]
    corpus = _corpus(cell.data)
    texts = {"train": corpus.train, "held_out": getattr(corpus, cell.part)}
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    config = RunConfig(
        recipe=Recipe("law", "", "", {}, ""),
        optimizer=cell.optimizer,
        lr=cell.lr,
        task=None,
        device=device,
        model=SIZES[cell.size],
        seed=cell.seed,
        steps=cell.steps,
        seconds=None,
        batch=_HELD_OUT_BATCH,
        ramp_steps=1,
        train_file=str(folder / "train"),
        held_out_file=str(folder / "held_out"),
        held_out_sequences=HELD_OUT_SEQUENCES,
        interface=None,
        launched_unix_s=0.0,
    )
    where = device_of(device, 0)
    works = [
        NextByte(config, SIZES[cell.size], k, cell.workers if k else 1, where)
        for k in range(cell.workers)
    ]
    for work in works:
        work.batch = cell.batch
    return works


def train(cell: Cell, device: str = "cpu", kept: Path | None = None) -> dict[str, Any]:
    """Train, and return the losses; None instead of the last one if it diverges.

    Args:
        cell: Which one.
        device: "cpu" or "cuda".
        kept: A folder for what an interrupted training goes on from.
    """
    begin_s = time.monotonic()
    file = None
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        key = json.dumps([asdict(cell), device], sort_keys=True)
        file = kept / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
    with tempfile.TemporaryDirectory() as folder, alone():
        works = works_of(cell, device, Path(folder))
        try:
            training = Training(cell, works)
            if cell.workers > _IN_TURN and cell.interval:
                training.train_together()
            training.run(file)
        except FloatingPointError as error:
            return {"loss": None, "error": str(error)}
    if file is not None:
        file.unlink(missing_ok=True)
    return {
        "loss": round(training.losses[-1][1], 5),
        "losses": [[step, round(loss, 5)] for step, loss in training.losses],
        "rounds": training.sync.rounds if training.sync else cell.steps,
        "parameters": sum(p.numel() for p in works[0].model.parameters()),
        "device": device,
        "seconds": round(time.monotonic() - begin_s, 1),
    }


@contextmanager
def alone() -> Iterator[None]:
    """Open a process group of one rank, in which tasks evaluate."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Together:
    """Updates of all workers as one batch, which takes half of the time of one after the other."""

    def __init__(self, training: "Training") -> None:
        self.works, self.loss_fn = training.works, training.setup.loss_fn
        self.model = training.models[0]
        named = [dict(model.named_parameters()) for model in training.models]
        self.params = {n: torch.stack([own[n].detach() for own in named]) for n in named[0]}
        for name, whole in self.params.items():
            for own, part in zip(named, whole, strict=True):
                own[name].data = part
        group = training.optimizers[0].param_groups[0]
        muon = training.cell.optimizer == "muon"
        matrices = {p: name for name, p in named[0].items() if muon and p.ndim == 2}
        shapes = dict[torch.Size, list[str]]()
        for p in group["params"]:
            if p in matrices:
                shapes.setdefault(p.shape, []).append(matrices[p])
        self.matrices = list(shapes.values())
        self.rule = muon_rule(group["params"][0], group) if self.matrices else None
        self.momentum = {n: torch.zeros_like(self.params[n]) for ns in self.matrices for n in ns}
        others = [p for n, p in self.params.items() if n not in self.momentum]
        self.adamw = torch.optim.AdamW(others, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.grads = torch.func.vmap(torch.func.grad(self._loss))

    def _loss(self, params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss_fn(torch.func.functional_call(self.model, params, (inputs,)), targets)

    def __call__(self, rate: float) -> None:
        batches = map(torch.stack, zip(*(work.next_batch() for work in self.works), strict=True))
        with sdpa_kernel(SDPBackend.MATH):
            grads = self.grads(self.params, *batches)
        for names in self.matrices:
            params, parts, buffers = (
                [part for name in names for part in tensors[name].unbind()]
                for tensors in (self.params, grads, self.momentum)
            )
            assert self.rule is not None, "it has matrices"
            muon_(params, parts, buffers, rate, self.rule)
        for name, param in self.params.items():
            param.grad = grads[name]
        self.adamw.param_groups[0]["lr"] = rate
        self.adamw.step()

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum = state["momentum"]
        self.adamw.load_state_dict(state["adamw"])


class Training:
    """All workers of a cell; in dense training they share one model. `local` is another config of
    local updates than that of the cell.
    """

    def __init__(self, cell: Cell, works: Sequence[Any], local: tw.LocalSGD | None = None) -> None:
        self.cell, self.works = cell, works
        self.setup = Setup(cell.optimizer, works[0].loss_fn)
        self.models = [work.model if cell.interval else works[0].model for work in works]
        own = list(dict.fromkeys(self.models))
        self.optimizers = [self.setup.optimizer_of(model) for model in own]
        self.sync: LocalRanks | None = None
        if cell.interval:
            changes = tw.Quantized(cell.bits) if cell.bits < 32 else None
            local = local or tw.LocalSGD(cell.interval, compression=changes)
            self.sync = LocalRanks(own, local)
        self._holders = [*own, *self.optimizers, *([self.sync] if self.sync else [])]
        device = works[0].device.type
        self._half = torch.autocast(device, torch.bfloat16, device == "cuda")
        self.update = self._update
        """Updates every model at a rate."""
        self.done = 0
        self.losses = [(0, self._loss())]

    def train_together(self) -> None:
        """Update all workers as one batch, whose sums round differently than in turn."""
        self.update = self.update_of_all = together = Together(self)
        self._holders = [*self.models, together, *([self.sync] if self.sync else [])]

    def run(self, file: Path | None) -> None:
        """Take all steps; begin with the state in the file if there is one."""
        if file is not None and file.exists():
            self._load(file)
        kept_s = time.monotonic()
        while self.done < self.cell.steps:
            self.step()
            if file is not None and time.monotonic() - kept_s > _KEPT_EVERY_S:
                self._save(file)
                kept_s = time.monotonic()

    def step(self) -> None:
        """Take a step."""
        cell, sync = self.cell, self.sync
        self.update(cell.lr * rate_factor(self.done / cell.steps))
        self.done += 1
        ends = self.done == cell.steps
        if sync:
            sync.step()
            if ends:
                sync.flush()
        before, now = (step * EVALUATIONS // cell.steps for step in (self.losses[-1][0], self.done))
        if ends or (now > before and (sync is None or sync.synced)):
            self.losses.append((self.done, self._loss()))

    def _update(self, rate: float) -> None:
        """Update every model at a rate."""
        share = 1 if self.sync else 1 / self.cell.workers
        for work, model in zip(self.works, self.models, strict=True):
            with self._half:
                inputs, targets = work.next_batch()
                loss = self.setup.loss_fn(called(model, inputs), targets) * share
            loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self) -> float:
        loss = float(self.works[0].evaluate(self.models[0]))
        if not math.isfinite(loss):
            raise FloatingPointError(f"the held-out loss after {self.done} steps is not finite")
        return loss

    def _save(self, file: Path) -> None:
        states = [holder.state_dict() for holder in self._holders]
        whole = file.with_suffix(".new")
        torch.save({"step": self.done, "losses": self.losses, "states": states}, whole)
        whole.replace(file)

    def _load(self, file: Path) -> None:
        found = torch.load(file, map_location=self.works[0].device)
        self.done, self.losses = found["step"], found["losses"]
        for holder, state in zip(self._holders, found["states"], strict=True):
            holder.load_state_dict(state)
        for work in self.works:
            for _ in range(self.done):
                work.next_batch()


def prediction(size: str, intervals: Sequence[int], bits: Sequence[int]) -> list[str]:
    """Return the predicted gaps of a size by the planner's law, with their interval and date."""
    numel = numel_of(size)
    rows: list[list[object]] = []
    for interval in intervals:
        for value_bits in bits:
            strategy = local_strategy(interval, value_bits)
            for workers in (2, 4, 8):
                gap = loss_gap("muon-local", strategy, "muon", numel, workers)
                numbers = [law("muon", numel, workers), gap.low, gap.mid, gap.high]
                shown = (f"{100 * part:+.2f} %" for part in numbers)
                rows.append([interval, value_bits, workers, *shown])
    command = (
        f"python -m benchmarks.law --size {size} --device cuda --workers 2 4 8 --interval "
        f"{' '.join(map(str, intervals))} --bits {' '.join(map(str, bits))} --text FILE"
    )
    return [
        f"Predicted {PREDICTED}: {numel:,} parameters, Muon inside, 20 tokens a parameter, over "
        "dense Muon of the same K, tokens and steps.",
        "",
        *markdown(["steps", "bits", "K", "law", "low", "mid", "high"], rows),
        "",
        "To falsify it (--lr 0.012 --seeds 5 for one rate and one seed):",
        "",
        f"    {command}",
    ]


def numel_of(size: str) -> int:
    shape = SIZES[size]
    # embeddings of bytes and positions, blocks of four matrices and two norms, the last norm, the
    # output
    block = 12 * shape.width**2 + 2 * shape.width
    return (2 * 256 + shape.context + 1) * shape.width + shape.layers * block


def _parser() -> argparse.ArgumentParser:
    parser = bare_parser(__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("train", "fit", "check", "predict", "regret"), default="train"
    )
    parser.add_argument("--size", nargs="+", default=["0.14M"], help=", ".join(SIZES))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--interval", type=int, nargs="+", default=[16])
    parser.add_argument("--bits", type=int, nargs="+", default=[1])
    parser.add_argument("--optimizer", nargs="+", choices=("muon", "adamw"), default=["muon"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--task", help="FILE.py:NAME, a function that gives a thinwire.Task")
    parser.add_argument(
        "--text", help="a file, or a folder of up to 64 MB, instead of Python's standard library"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--batch", type=int, default=8, help="sequences of a worker and step")
    parser.add_argument("--tokens", type=float, default=20.0, help="a parameter, over all workers")
    parser.add_argument("--steps", type=int, help="of each worker, instead of --tokens")
    parser.add_argument("--lr", type=float, nargs="+", help="one is taken; of more the best")
    parser.add_argument(
        "--tune-workers", type=int, help="choose rates with so many workers, for all; else for each"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/law"))
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help=f"{CHECKS.name} beside it has the runs that the law is not fitted to",
    )
    parser.add_argument("--figure", type=Path, help="with fit: draw it, as SVG (matplotlib)")
    return parser


def steps_of(size: str, workers: int, batch: int, tokens: float) -> int:
    """Return the steps of each worker for a number of tokens per parameter."""
    return max(1, round(tokens * numel_of(size) / (workers * batch * SIZES[size].context)))


def main() -> None:
    """Train what the results lack, or print what they say."""
    parser = _parser()
    given = parser.parse_args()
    unknown = [size for size in given.size if size not in SIZES]
    if unknown and not given.task:
        parser.error(f"--size {unknown[0]}: choose from {', '.join(SIZES)}")
    if given.task and given.steps is None:
        parser.error("--task needs --steps: how many tokens a batch has is known of text alone")
    if given.what == "fit":
        print("\n".join(fit_table(measured())))
        if given.figure is not None:
            draw(measured(), given.figure)
        return
    if given.what == "check":
        print("\n".join([*left_out(measured()), "", *check(measured(), gaps(json_lines(CHECKS)))]))
        return
    if given.what == "regret":
        print(
            "\n".join(
                regret(
                    gaps([line for file in (RESULTS, WIDE, CHECKS) for line in json_lines(file)])
                )
            )
        )
        return
    if given.what == "predict":
        for size in given.size:
            print("\n".join(prediction(size, given.interval, given.bits)))
        return
    _make(given)


def _make(given: argparse.Namespace) -> None:
    """Train what the results lack."""
    results: Results[Cell] = Results(
        given.results, lambda cell: train(cell, given.device, given.folder)
    )
    ways = [(0, 32), *((interval, bits) for interval in given.interval for bits in given.bits)]
    for size in given.size:
        steps = {
            k: given.steps or steps_of(size, k, given.batch, given.tokens)
            for k in {*given.workers, given.tune_workers or 1}
        }
        for workers in given.workers:
            for optimizer in given.optimizer:
                for interval, bits in ways:
                    base = Cell(
                        part="validation",
                        size=size,
                        workers=workers,
                        interval=interval,
                        bits=bits,
                        optimizer=optimizer,
                        steps=steps[workers],
                        batch=given.batch,
                        lr=0.0,
                        seed=TUNING_SEED,
                        data=given.task or given.text or "",
                    )
                    rates = given.lr or RATES[optimizer]
                    rate = rates[0]
                    if len(rates) > 1:
                        known = given.tune_workers or workers
                        rate = tuned(
                            results, replace(base, workers=known, steps=steps[known]), rates
                        )
                    for seed in given.seeds:
                        results.of(replace(base, part="held_out", lr=rate, seed=seed))


if __name__ == "__main__":
    main()
