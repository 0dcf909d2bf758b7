"""`benchmarks.law`: losses of real ranks, a fit by hand, lines that are not made again."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks import evidence, law
from benchmarks.evidence import as_it_is, measured
from benchmarks.law import SIZES, Cell, fit_table, fitted, gaps, prediction, steps_of, train
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
def test_losses_are_those_of_real_ranks(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "EVALUATIONS", 1)
    monkeypatch.setattr(law, "EVALUATIONS", 1)
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
    (found,) = gaps(lines).values()
    assert [workers for workers, _ in found.points] == [2, 4]
    assert [gap for _, gap in found.points] == pytest.approx([0.05, 0.2])
    assert "| 1,000 | muon | 4 | 1 | 8 | 90 | 0." in fit_table(lines)[2]
    assert fit_table([])[2:] == []


def test_numbers_of_parameters_and_of_steps() -> None:
    for size in ("0.14M", "0.87M"):
        model: nn.Module = ByteTransformer(SIZES[size])
        assert law._numel(size) == sum(p.numel() for p in model.parameters())
    assert [round(law._numel(size) / 1e6, 1) for size in SIZES] == [
        0.1,
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


def test_a_file_is_text_whose_end_is_held_out(tmp_path: Path) -> None:
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
    monkeypatch.setattr(sys, "argv", ["law", "fit", "--results", str(results)])
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
