"""`benchmarks.law`: losses of real ranks, a fit by hand, lines that are not made again."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import thinwire as tw
from benchmarks import evidence, law
from benchmarks.evidence import as_it_is, measured
from benchmarks.gaps import (
    Cell,
    Gap,
    Law,
    evidence_gaps,
    fitted,
    regret,
)
from benchmarks.law import train
from tests.api import rate_factor

CELL = Cell(
    part="held_out",
    size="0.14M",
    workers=2,
    interval=4,
    bits=1,
    optimizer="muon",
    steps=10,
    batch=8,
    lr=0.012,
    seed=5,
    data="",
)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 4])
def test_losses_equal_real_ranks(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "EVALUATIONS", 1)
    monkeypatch.setattr(law, "EVALUATIONS", 1)
    monkeypatch.setattr(law, "HELD_OUT_SEQUENCES", evidence.HELD_OUT_SEQUENCES)
    name = "muon-local" if interval else "dense-muon"
    about = as_it_is(name)
    if interval:
        about["options"] = {**about["options"], "k_steps": interval}
    real = measured(
        evidence.Cell(kind="training", workers=2, size="tiny", steps=10, lr=0.012, seed=5, **about)
    )
    found = train(replace(CELL, interval=interval, bits=1 if interval else 32))
    assert found["losses"][0][1] == pytest.approx(real["losses"][0][1], abs=1e-4)
    assert found["loss"] == pytest.approx(real["loss"], abs=3e-4)


def line(cell: Cell, loss: float) -> dict[str, Any]:
    return {"cell": asdict(cell), "loss": loss, "rounds": 90, "parameters": 1000}


def test_a_fit_by_hand() -> None:
    assert fitted([(2, 2**0.03 - 1)]) == pytest.approx((0.03, math.inf))
    slope, half = fitted([(2, 2**0.02 - 1), (2, 2**0.04 - 1)])
    assert slope == pytest.approx(0.03)
    # residuals +-0.01 ln 2, one degree of freedom: t sqrt(2 (0.01)^2 / 2)
    assert half == pytest.approx(12.71 * 0.01)


def test_runs_of_real_ranks_have_gaps_too() -> None:
    def trained(name: str, loss: float, **more: Any) -> dict[str, Any]:
        cell = evidence.Cell(
            kind="training", workers=2, size="tiny", steps=33, lr=0.01, seed=5, **as_it_is(name)
        )
        return {"cell": {**asdict(cell), **more}, "loss": loss, "parameters": 139_584}

    sparse = {"k_steps": 16, "compression": {"sparse": {"sparsity": 0.9, "value_bits": 2}}}
    found = evidence_gaps(
        [
            trained("muon-local", 2.1),
            trained("muon-local", 2.4, seed=6),  # without dense training of its own
            trained("sparse-local", 9.0, options=sparse),
            trained("localsgd", 3.3),
            trained("dense", 3.0),
            trained("dense-muon", 2.0),
        ]
    )
    assert [point.gap for point in found] == pytest.approx([0.05, 0.1])
    assert [point.cell.bits for point in found] == [1, 32]
    assert [point.rounds for point in found] == [3, 2]


def made_by_a_law(workers: int, interval: int, numel: int, rounds: int, noise: float) -> Gap:
    beta = 0.02 * (numel / 1e6) ** -0.3 * (interval / 16) ** 0.5 * (rounds / 200) ** -0.7
    cell = replace(CELL, workers=workers, interval=interval)
    return Gap(cell, numel, rounds, math.expm1(beta * math.log(workers) + noise))


def grid(spread: float) -> list[Gap]:
    random = Random(1)
    return [
        made_by_a_law(k, interval, numel, rounds, random.gauss(0, spread))
        for k in (2, 4, 8)
        for interval in (4, 16)
        for numel in (10**5, 10**6)
        for rounds in (100, 400)
    ]


def test_a_law_is_found_again_and_its_intervals_cover_other_runs() -> None:
    assert Law.of(grid(0.0)).theta.tolist() == pytest.approx(
        [math.log(0.02), -0.3, 0.0, 0.5, -0.7], abs=1e-6
    )
    law = Law.of(grid(0.001))
    assert law.identified
    assert law.free == 24 - 5
    assert law.theta[1] == pytest.approx(-0.3, abs=0.1)
    random, inside = Random(2), 0
    for _ in range(200):
        point = made_by_a_law(16, 8, 300_000, 200, random.gauss(0, 0.001))
        low, mid, high = law.interval(point)
        assert low < mid < high
        inside += low <= point.gap <= high
    assert inside > 180


def test_regret_is_of_the_interval_that_plan_chooses() -> None:
    """None where the gaps of all intervals are those of the plan; some where the shortest is the
    worst."""
    cell = replace(CELL, workers=4, size="0.14M")
    plan = tw.plan(params=139_584, step_seconds=1.0, workers=4, link="1mbit")
    names = {4: "muon-local k4", 8: "muon-local k8", 16: "muon-local", 32: "muon-local k32"}
    planned = {k: plan[name].loss_gap[1] for k, name in names.items()}
    others = dict(zip(planned, (0.2, 0.1, 0.05, 0.0), strict=True))
    for gap_of, none in ((planned, True), (others, False)):
        text = regret([Gap(replace(cell, interval=k), 139_584, 100, gap_of[k]) for k in gap_of])
        assert len(text) == 2 + 3 + 1
        chosen_and_best = {tuple(row.split(" | ")[4:6]) for row in text[2:-1]}
        assert all(chosen == best for chosen, best in chosen_and_best) == none
        assert text[-1].startswith("\nmean 0.00%, largest 0.00% of 3") == none
    assert len(regret([Gap(cell, 139_584, 100, 0.02)])) == 2


def test_a_line_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "law.jsonl"
    words = ["law", "--size", "0.14M", "--workers", "2", "--interval", "2", "--steps", "3"]
    words += ["--seeds", "5", "--lr", "0.01", "--batch", "1", "--results", str(results)]
    monkeypatch.setattr(law, "HELD_OUT_SEQUENCES", 2)
    monkeypatch.setattr(sys, "argv", words)
    law.main()
    lines = results.read_text()
    assert [json.loads(line)["cell"]["interval"] for line in lines.splitlines()] == [0, 2]
    law.main()
    assert results.read_text() == lines
    monkeypatch.setattr(sys, "argv", ["law", "fit"])
    monkeypatch.setattr("benchmarks.gaps.RESULTS", results)
    capsys.readouterr()
    law.main()
    assert "| 139,584 | muon | 2 | 1 | 1 | 2 (few) |" in capsys.readouterr().out


@pytest.mark.parametrize("interval", [0, 4])
def test_a_run_that_was_interrupted_goes_on_to_the_bit(
    interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = replace(CELL, interval=interval, bits=1 if interval else 32, batch=2)
    monkeypatch.setattr(law, "HELD_OUT_SEQUENCES", 2)
    whole = train(cell)
    factor = rate_factor

    def stopped(progress: float) -> float:
        if progress > 0.6:
            raise KeyboardInterrupt
        return factor(progress)

    monkeypatch.setattr(law, "_KEPT_EVERY_S", -1.0)
    monkeypatch.setattr(law, "rate_factor", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(cell, kept=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(
        law, "rate_factor", lambda progress: factor(progress) if progress > 0.6 else 0
    )
    again = train(cell, kept=tmp_path)
    assert again["losses"] == whole["losses"]
    assert again["rounds"] == whole["rounds"]
    assert not list(tmp_path.iterdir())
