"""The planner's figures of progress follow from the lines of the evidence."""

import json

import pytest

from benchmarks.choosing import evidence
from benchmarks.progress import PRIORS, PROGRESS, measured, merged


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
