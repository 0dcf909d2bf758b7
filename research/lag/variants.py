"""How far deep gradient compression stays behind dense training at equal steps, and what helps.

python -m research.lag.variants --size small --steps 3000 --variants dense "0.1 %" "1 %"
python -m research.pages               # the table of research/README.md

One process plays all ranks, one after the other, with the model, the text, the batches and the rate
schedule of `thinwire compare`; values travel as they are, in 32 bits. `research/tests/test_lag.py`
compares it with real ranks. Rates come from the validation part with seed 1: 0.8 and 1.6, and on by
factors of two while the best is at the edge (dense, 0.1 % and 1 % were also tried from 0.05 on and
get better up to 1.6); the loss is that of the held-out part. What is measured is a line of
variants.jsonl and not made again.
"""

import contextlib
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import evidence
from benchmarks.common import Results, bare_parser
from benchmarks.evidence import SEEDS, TUNING_SEED, as_it_is, configured, tuned
from thinwire.tools.run.built_in import NextByte
from thinwire.tools.run.config import ModelSize
from thinwire.tools.run.training import BySteps, rate_factor

RESULTS = Path(__file__).with_suffix(".jsonl")
RATES = (0.8, 1.6)
MOMENTUM, MIN_NUMEL = 0.9, 16_384
"""Tensors with fewer entries travel whole: three tenths of the tiny model's."""
_RAMP = tuple(1 - sparsity for sparsity in (0.75, 0.9375, 0.984375, 0.996))
_SWITCH_STEPS, _SWITCH_CHANGE, _SWITCHED_DENSITY = 50, 0.5, 0.01
_THRESHOLD_GAIN = 0.1


@dataclass(frozen=True)
class Variant:
    """One way to choose what is sent, and what becomes of it.

    Attributes:
        says: What it is.
        stages: Shares of the steps, each with the density until there; in the first eighty steps
            (fewer in a short run) 25, 6.25, 1.6 and 0.4 % where that is more. None sends all.
        masking: Whether momentum is cleared where entries were sent.
        senders: Whether sums are divided by the ranks that sent the entry, not by all.
        threshold: Whether one magnitude for all tensors decides, which is adjusted slowly until the
            mean density is that of the stages, not the largest entries of each tensor.
        switch: Whether a tensor sends 1 % at first and wherever the norm of the sum of 50 mean
            gradients differs by a half or more from that of the 50 before. After Agarwal et al.,
            arXiv 2010.16248 (Accordion). Differs: steps, not epochs; a falling rate is no reason;
            no real rank has the dense mean.
        late: Whether momentum is that of the mean, after the exchange.
    """

    says: str
    stages: tuple[tuple[float, float], ...] = ()
    masking: bool = True
    senders: bool = False
    threshold: bool = False
    switch: bool = False
    late: bool = False

    def density(self, step: int, steps: int) -> float:
        """Share of the entries that step `step`, from 0, sends."""
        if not self.stages:
            return 1.0
        last = next(density for until, density in self.stages if step < until * steps)
        level = step * (len(_RAMP) + 1) // max(1, min(100, steps // 4))
        return max(last, _RAMP[level]) if level < len(_RAMP) else last


VARIANTS = {
    "dense": Variant("everything, with momentum of the mean"),
    "0.1 %": Variant("0.1 % of every tensor", ((1, 0.001),)),
    "1 %": Variant("1 % of every tensor", ((1, 0.01),)),
    "1 %, then 0.1 %": Variant("1 % for two thirds of the steps", ((2 / 3, 0.01), (1, 0.001))),
    "0.1 %, then 1 %": Variant("1 % for the last third", ((2 / 3, 0.001), (1, 0.01))),
    "4 %": Variant("4 % of every tensor", ((1, 0.04),)),
    "0.1 %, slow ramp": Variant(
        "25, 6.25, 1.6 and 0.4 %, each for a tenth of the steps, then 0.1 %",
        ((0.1, 0.25), (0.2, 0.0625), (0.3, 0.016), (0.4, 0.004), (1, 0.001)),
    ),
    "0.1 %, unmasked": Variant("momentum is not cleared", ((1, 0.001),), masking=False),
    "1 %, unmasked": Variant("momentum is not cleared", ((1, 0.01),), masking=False),
    "0.1 %, senders": Variant("sums divided by the ranks that sent", ((1, 0.001),), senders=True),
    "1 %, senders": Variant("sums divided by the ranks that sent", ((1, 0.01),), senders=True),
    "0.1 %, threshold": Variant("one magnitude for all tensors", ((1, 0.001),), threshold=True),
    "1 %, threshold": Variant("one magnitude for all tensors", ((1, 0.01),), threshold=True),
    "0.1 %, switch": Variant("1 % where gradients change (Accordion)", ((1, 0.001),), switch=True),
    "0.1 %, late momentum": Variant("momentum of the mean", ((1, 0.001),), late=True),
    "1 %, late momentum": Variant("momentum of the mean", ((1, 0.01),), late=True),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training; a line of the results begins with these."""

    kind: str
    variant: str
    workers: int
    size: str
    steps: int
    lr: float
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.variant} x{self.workers} {self.size} {self.steps} steps "
            f"lr {self.lr:g} seed {self.seed}"
        )


class Exchange:
    """One tensor on all ranks; rows are ranks.

    Args:
        variant: How it is sent.
        numel: Entries of the tensor.
        workers: Ranks.
        dense: Whether it travels whole in any case.
    """

    def __init__(self, variant: Variant, numel: int, workers: int, dense: bool) -> None:
        self.variant, self.dense = variant, dense
        self.grads, self.residual = torch.zeros(workers, numel), torch.zeros(workers, numel)
        self.buffer, self.mean_buffer = torch.zeros(workers, numel), torch.zeros(numel)
        self.sent = self._steps = 0
        self._sum, self._norm, self._changing = torch.zeros(numel), 0.0, variant.switch

    def fold(self) -> None:
        """Add what the ranks have found to their residuals."""
        if self.dense:
            return
        if self.variant.late:
            self.residual += self.grads
        else:
            self.buffer.mul_(MOMENTUM).add_(self.grads)
            self.residual += self.buffer
        if self.variant.switch:
            self._watch()

    def _watch(self) -> None:
        """Accordion: compare the gradient of these steps with that of as many before."""
        self._sum += self.grads.mean(0)
        self._steps += 1
        if self._steps % _SWITCH_STEPS == 0:
            norm = float(self._sum.norm())
            self._changing = abs(self._norm - norm) >= _SWITCH_CHANGE * self._norm
            self._norm = norm
            self._sum.zero_()

    def update(self, density: float, threshold: float | None) -> Tensor:
        """Return the update before the learning rate, shape (numel,)."""
        if self.dense:
            return self.mean_buffer.mul_(MOMENTUM).add_(self.grads.mean(0))
        if threshold is None:
            share = max(density, _SWITCHED_DENSITY) if self._changing else density
            count = max(1, round(self.residual.shape[1] * share))
            positions = self.residual.abs().topk(count, dim=1).indices
            chosen = torch.zeros_like(self.residual, dtype=torch.bool).scatter_(1, positions, True)
        else:
            chosen = self.residual.abs() >= threshold
        self.sent += int(chosen.sum())
        total = (self.residual * chosen).sum(0)
        self.residual.masked_fill_(chosen, 0.0)
        if self.variant.masking:
            self.buffer.masked_fill_(chosen, 0.0)
        mean = total / (chosen.sum(0).clamp(min=1) if self.variant.senders else len(chosen))
        return self.mean_buffer.mul_(MOMENTUM).add_(mean) if self.variant.late else mean


class Threshold:
    """The magnitude from which on entries are sent; follows the density slowly."""

    def __init__(self) -> None:
        self.value, self.density = 0.0, 0.0

    def follow(self, exchanges: list[Exchange], density: float) -> float:
        """That of this step; exact where the density is another than in the step before."""
        rows = [exchange.residual for exchange in exchanges]
        if density != self.density or not self.value:
            magnitudes = torch.cat([row.flatten() for row in rows]).abs()
            count = max(1, round(len(magnitudes) * density))
            self.value, self.density = float(magnitudes.topk(count).values[-1]), density
            return self.value
        above = sum(int((row.abs() >= self.value).sum()) for row in rows)
        share = above / sum(row.numel() for row in rows)
        error = max(-1.0, min(1.0, math.log(max(share, 1e-9) / density)))
        self.value *= math.exp(_THRESHOLD_GAIN * error)
        return self.value


@torch.no_grad()
def train(cell: Cell, evaluations: int = 15) -> dict[str, Any]:
    """Loss at the end and on the way, and the share of the entries that was sent."""
    variant = VARIANTS[cell.variant]
    with _texts(cell) as (works, held_out):
        model = works[0].model
        parameters = list(model.parameters())
        exchanges = [
            Exchange(variant, p.numel(), cell.workers, not variant.stages or p.numel() < MIN_NUMEL)
            for p in parameters
        ]
        sparse = [exchange for exchange in exchanges if not exchange.dense]
        threshold = Threshold() if variant.threshold else None
        budget = BySteps(cell.steps, evaluations)
        losses: list[list[float]] = []
        for step in range(cell.steps):
            for rank, work in enumerate(works):
                inputs, targets = work.next_batch()
                with torch.enable_grad():
                    loss = work.loss_fn(model(inputs), targets)
                for exchange, grad in zip(
                    exchanges, torch.autograd.grad(loss, parameters), strict=True
                ):
                    exchange.grads[rank] = grad.flatten()

            for exchange in exchanges:
                exchange.fold()
            density = variant.density(step, cell.steps)
            least = None if threshold is None else threshold.follow(sparse, density)
            lr = cell.lr * rate_factor(budget.progress(step))
            for parameter, exchange in zip(parameters, exchanges, strict=True):
                parameter.sub_(exchange.update(density, least).view_as(parameter), alpha=lr)
            if step + 1 in budget.marks:
                losses.append([step + 1, round(held_out.evaluate(model), 5)])
                if not math.isfinite(losses[-1][1]):
                    return {"loss": None}
    entries = cell.steps * sum(exchange.residual.numel() for exchange in sparse)
    share = sum(exchange.sent for exchange in sparse) / entries if sparse else 1.0
    return {"loss": losses[-1][1], "losses": losses, "sent_share": round(share, 6)}


@contextlib.contextmanager
def _texts(cell: Cell) -> Iterator[tuple[list[NextByte], NextByte]]:
    """The batches of every rank, and the part that is evaluated."""
    given = {key: value for key, value in asdict(cell).items() if key != "variant"}
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = configured(evidence.Cell(**given, **as_it_is("dense", "sgd")), Path(folder))
            assert isinstance(config.model, ModelSize)
            texts = [
                NextByte(config, config.model, rank, world, torch.device("cpu"))
                for rank, world in (*((r, cell.workers) for r in range(cell.workers)), (0, 1))
            ]
            yield texts[:-1], texts[-1]
    finally:
        dist.destroy_process_group()


def table(lines: Iterable[Mapping[str, Any]], size: str, workers: int, steps: int) -> list[str]:
    """Markdown: every variant beside dense, where both were trained with the same seeds."""
    text = ["| | what is sent | peak rate | seeds | loss | over dense |", "|" + "---|" * 6]
    trained: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        cell = line["cell"]
        key = (cell["kind"], cell["size"], cell["workers"], cell["steps"])
        if key == ("training", size, workers, steps):
            trained[cell["variant"]].append(line)
    dense = {line["cell"]["seed"]: line["loss"] for line in trained["dense"] if line["loss"]}
    for name, variant in VARIANTS.items():
        runs = [line for line in trained[name] if line["loss"] and line["cell"]["seed"] in dense]
        diverged = sum(line["loss"] is None for line in trained[name])
        if runs:
            loss = fmean(line["loss"] for line in runs)
            beside = fmean(dense[line["cell"]["seed"]] for line in runs)
            share = fmean(line["sent_share"] for line in runs)
            seeds = f"{len(runs)}, {diverged} diverged" if diverged else f"{len(runs)}"
            text.append(
                f"| {name} | {variant.says}: {100 * share:.3g} % | {runs[0]['cell']['lr']:g} "
                f"| {seeds} | {loss:.3f} | {100 * (loss / beside - 1):+.1f} % |"
            )
    return text


def main() -> None:
    """Make what is missing."""
    parser = bare_parser(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(given.results, train)
    for variant in given.variants:
        base = Cell(
            kind="tuning",
            variant=variant,
            workers=given.workers,
            size=given.size,
            steps=given.steps,
            lr=0.0,
            seed=TUNING_SEED,
        )
        rate = tuned(results, base, RATES)
        for seed in given.seeds:
            results.of(replace(base, kind="training", lr=rate, seed=seed))


if __name__ == "__main__":
    main()
