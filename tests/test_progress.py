"""The planner's figures of progress follow from the lines of the evidence."""

import json
from typing import Any

import pytest

from benchmarks.choosing import evidence
from benchmarks.progress import PRIORS, PROGRESS, measured, merged


def _line(strategy: str, loss: float, **cell: Any) -> dict[str, Any]:
    """A run whose loss falls from 5 to `loss` on a straight line."""
    own = {
        "kind": "tuning",
        "strategy": strategy,
        "workers": 2,
        "size": "small",
        "steps": 1500,
        "lr": 0.006,
        "seed": 1,
        "options": {},
        "optimizer": "adamw",
        **cell,
    }
    return {"cell": own, "loss": loss, "losses": [[0, 5.0], [1500, loss]]}


def test_a_step_of_a_method_that_ends_lower_is_worth_one_of_dense() -> None:
    local = {"options": {"k_steps": 32}}
    (found,) = measured([_line("dense", 2.0), _line("localsgd", 1.0, **local)])
    assert found["progress"] == 1
    assert (found["method"], found["k_steps"]) == ("localsgd", 32)


def test_a_method_that_ends_higher_is_worth_less() -> None:
    (found,) = measured([_line("dense", 1.0), _line("powersgd", 3.0)])
    assert found["progress"] == 0.5  # dense has 3.0 half-way


def test_muon_is_compared_with_muon_and_the_best_rate_counts() -> None:
    muon = {"optimizer": "muon"}
    options = {"k_steps": 16, "compression": {"quantized": {"value_bits": 1}}}
    lines = [
        _line("dense", 4.0),
        _line("dense-muon", 1.0, **muon),
        _line("muon-local", 4.0, options=options, lr=0.1, **muon),
        _line("muon-local", 2.0, options=options, **muon),
    ]
    (found,) = measured(lines)
    assert found["progress"] == 0.75
    assert found["value_bits"] == 1


def test_priors_follow_measurements() -> None:
    priors = [
        {"method": "localsgd", "workers": 2, "k_steps": k, "progress": p}
        for k, p in ((16, 0.9), (64, 0.6))
    ]
    run = {"method": "localsgd", "workers": 2, "k_steps": 16, "progress": 0.45, "source": "runs"}
    later, new = merged(priors, [run])
    assert new == run
    assert later["k_steps"] == 64
    assert later["progress"] == pytest.approx(0.3)
    assert "scaled by 0.50" in later["source"]


def test_the_file_of_the_planner_is_that_of_the_evidence() -> None:
    priors = json.loads(PRIORS.read_text())
    assert json.loads(PROGRESS.read_text()) == merged(priors, measured(evidence()))
