"""What a plan says of the loss includes what was measured, and is fitted to it."""

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

import thinwire as tw
from benchmarks.choosing import Scope, evidence, rows
from benchmarks.common import json_lines
from benchmarks.gaps import RESULTS, measured
from thinwire.tools.planning.loss import MEASURED, loss_gap

SMALL, SMALLEST = 869_504, 100_000


@pytest.mark.parametrize("workers", [2, 4])
def test_measured_gaps_lie_inside(workers: int) -> None:
    """At 0.87 million parameters, where the figures are from."""
    plan = tw.plan(params=SMALL, step_seconds=0.1, workers=workers)
    found = {row.name: row.loss for row in rows(evidence(), Scope(workers, "small"))}
    local = ("muon-local", "quantized-local", "sparse-local", "localsgd", "diloco")
    for name in (name for name in local if name in found):
        low, _, high = plan[name].loss_gap
        dense = found["dense-muon" if name == "muon-local" else "dense"]
        assert low < found[name] / dense - 1 < high, name
    for name in ("powersgd", "low-rank", "dgc"):
        assert plan[name].loss_gap[1] == pytest.approx(found[name] / found["dense"] - 1, abs=5e-4)
    low, mid, high = plan["fp16"].loss_gap
    assert (mid, low < found["fp16"] / found["dense"] - 1 < high) == (0, True)


def test_measured_settings_equal_the_data_of_the_fit() -> None:
    # 45,216 parameters are too few to be asked for advice
    gaps = [gap for gap in measured() if gap.numel > SMALLEST]
    seeds = Counter(replace(gap.cell, lr=0.0, seed=0) for gap in gaps)
    found: dict[tuple[str, int], set[int]] = {}
    for cell, count in seeds.items():
        if count >= 3:
            found.setdefault((cell.optimizer, cell.bits), set()).add(cell.interval)
    of_all = Counter(replace(gap.cell, lr=0.0, seed=0) for gap in measured())
    assert max(cell.workers for cell, count in of_all.items() if count >= 3) == 96
    whole = {(kind, bits): span for (kind, share, bits), span in MEASURED.items() if share == 1}
    assert whole == {key: (min(steps), max(steps)) for key, steps in found.items()}


def test_dense_training_with_other_batches_of_equal_tokens_lies_inside() -> None:
    """A worker has a sequence; beyond 96 of them the interval is over 96."""
    found: dict[int, dict[int, float]] = {}
    for line in json_lines(RESULTS.with_name("law_batch.jsonl")):
        cell = line["cell"]
        assert cell["steps"] * cell["batch"] == 46_080
        if cell["part"] == "held_out":
            found.setdefault(cell["batch"], {})[cell["seed"]] = line["loss"]
    assert found.keys() >= {12, 48, 96, 192}
    for batch, losses in found.items():
        seeds = losses.keys() & found[96].keys()
        gap = fmean(losses[s] for s in seeds) / fmean(found[96][s] for s in seeds) - 1
        low, _, high, *_ = loss_gap("dense", tw.DistributedStrategy(), None, 45_216, batch)
        assert batch <= 96 or low < gap < high, batch
