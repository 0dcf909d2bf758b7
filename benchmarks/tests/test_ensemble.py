"""Models that train as one batch end where models that train alone do."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import ensemble, ensemble_texts, law
from benchmarks.ensemble_averaging import Run

GRID = {
    "size": ["0.04M"],
    "workers": [2],
    "interval": [0, 2],
    "lr": [0.02],
    "seeds": [5],
    "steps": 4,
}


def test_an_ensemble_trains_as_the_law_does(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    ensemble_texts.write(texts, None)
    runs = list(ensemble.runs_of(GRID))
    other = Run(replace(runs[0].cell, lr=0.01, seed=6), {"rows": 0.95})
    lines = ensemble.train([other, *runs], texts, "cpu", float("inf"))
    found = {ensemble.key_of(line["cell"], line["options"]): line for line in lines}
    assert len(found) == 3
    for run in runs:
        alone, together = law.train(run.cell), found[ensemble.key_of(asdict(run.cell), {})]
        assert together["loss"] == pytest.approx(alone["loss"], rel=2e-4)
        assert together["rounds"] == alone["rounds"]

    parts = ensemble_texts.Texts(texts, "held_out")
    for worker in (0, 1):
        starts = parts.starts(replace(runs[0].cell, steps=99), worker, own_folders=True).flatten()
        for other_worker in (0, 1):
            spans = [span for own in parts.spans[other_worker::2] for span in own]
            inside = [any(a <= start < b for a, b in spans) for start in starts.tolist()]
            assert all(inside) if other_worker == worker else not any(inside)
