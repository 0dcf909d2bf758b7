"""`benchmarks.law`: losses of real ranks, a fit by hand, lines that are not made again."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import nn

import thinwire as tw
from benchmarks import evidence, law
from benchmarks.evidence import as_it_is, measured
from benchmarks.gaps import (
    SIZES,
    Cell,
    Gap,
    Law,
    check,
    evidence_gaps,
    fit_table,
    fitted,
    gaps,
    left_out,
    regret,
)
from benchmarks.law import prediction, steps_of, train
from tests.api import ByteTransformer, rate_factor

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


def test_a_gap_is_against_dense_training_with_the_same_workers_and_seed() -> None:
    lines = [
        line(CELL, 2.1),
        line(CELL.dense, 2.0),
        line(replace(CELL, workers=4), 2.4),
        line(replace(CELL.dense, workers=4), 2.0),
        line(replace(CELL, workers=8), 9.0),  # without dense training of its own
        line(replace(CELL, workers=4, part="validation"), 9.0),
        line(replace(CELL, workers=1), 2.0),
        line(replace(CELL.dense, workers=1), 2.0),
    ]
    found = gaps(lines)
    assert [each.cell.workers for each in found] == [2, 4]
    assert [each.gap for each in found] == pytest.approx([0.05, 0.2])
    assert "| 1,000 | muon | 4 | 1 | 8 | 90 | 0." in fit_table(found)[2]
    assert fit_table([])[2:] == []


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


def test_factors_that_do_not_vary_have_no_effect() -> None:
    law = Law.of([each for each in grid(0.0) if each.numel == 10**5])
    assert law.theta[1] == pytest.approx(0, abs=1e-12)
    assert (law.free, law.identified) == (12 - 4, True)
    together = Law.of([point for point in grid(0.0) if point.rounds * point.cell.interval == 1600])
    assert not together.identified


def test_runs_of_another_file_are_beside_the_interval() -> None:
    known = [
        line(cell, 2.0 * ratio)
        for k in (2, 4, 8)
        for seed, noise in ((5, 0.0), (6, 0.002))
        for cell, ratio in (
            (replace(CELL, workers=k, seed=seed), k**0.03 + noise),
            (replace(CELL.dense, workers=k, seed=seed), 1.0),
        )
    ]
    other = [
        line(replace(cell, data="other", workers=workers), loss)
        for workers, of_local in ((2, 2.043), (8, 2.4))
        for cell, loss in ((CELL, of_local), (CELL.dense, 2.0))
    ]
    text = check(gaps(known), gaps(other))
    inside = [[word for word in row.split(" | ")[-3:] if " to " not in word] for row in text[2:4]]
    assert inside == [["yes", "yes |"], ["no", "yes |"]]
    assert text[-2:] == ["\nlaw: 1 of 2 inside, 50%", "\nplan: 2 of 2 inside, 100%"]
    third = [{**each, "cell": {**each["cell"], "data": "third"}} for each in other]
    assert "\nlaw: 4 of 4 inside, 100%" in check(gaps(known), gaps([*other, *third]))


def test_every_setting_is_predicted_from_the_others() -> None:
    assert left_out(grid(0.0))[2].startswith("| muon | 1 bit | 6 | 24 | 100% | +- 0.0 %")
    odd = grid(0.001)[:-1]
    odd.append(odd[-1]._replace(gap=0.5, cell=replace(odd[-1].cell, steps=11)))
    assert left_out(odd)[2].startswith("| muon | 1 bit | 7 | 24 | 96% |")


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


def test_numbers_of_parameters_and_of_steps() -> None:
    for size in ("0.14M", "0.87M"):
        model: nn.Module = ByteTransformer(SIZES[size])
        assert law.numel_of(size) == sum(p.numel() for p in model.parameters())
    assert [round(law.numel_of(size) / 1e6, 2 if size < "0.1" else 1) for size in SIZES] == [
        0.05,
        0.1,
        0.4,
        0.9,
        3.3,
        10.9,
        29.2,
        125.5,
    ]
    assert steps_of("0.14M", 8, 4, 20.0) == round(20 * 139_584 / (8 * 4 * 128))


def test_a_prediction_has_its_date_and_the_command_that_falsifies_it() -> None:
    text = "\n".join(prediction("124M", [16], [1]))
    assert "Predicted 2026-11-26" in text
    assert text.count("\n| 16 | 1 |") == 3
    assert "python -m benchmarks.law --size 124M --device cuda" in text


def test_text_file_end_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    corpus = law._corpus(str(file))
    assert corpus.train + corpus.validation + corpus.held_out == file.read_bytes()
    assert len(corpus.validation) == len(corpus.held_out) == 20


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
