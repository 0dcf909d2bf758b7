"""The evidence behind the tables: what is measured once, how rates are chosen, what tables say."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import choosing
from benchmarks.common import Results
from benchmarks.evidence import RATES, Cell, as_it_is, measured, tuned

CELL = Cell(
    kind="tuning", workers=2, size="tiny", steps=8, lr=0.003, seed=1, **as_it_is("muon-local")
)


@pytest.mark.slow
def test_a_cell_is_trained_on_real_ranks_and_not_twice(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first = Results(path, measured).of(CELL)
    assert 2 < first["loss"] < 8
    assert first["losses"][0][0] == 0
    assert first["losses"][-1] == [8, first["loss"]]
    # a dense averaging at the first step, and a last one
    assert 0 < first["bytes"] < 4 * first["parameters"] * 2
    again = Results(path, measured).of(CELL)
    assert again == first
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.006, {0.003, 0.006, 0.012}),
        (0.024, {0.003, 0.006, 0.012, 0.024, 0.048}),
        (0.0015, {0.003, 0.006, 0.012, 0.0015, 0.00075}),
    ],
)
def test_grid_goes_on_until_best_is_inside(best: float, tried: set[float], tmp_path: Path) -> None:
    seen = set()

    def lost(cell: Cell) -> dict[str, Any]:
        seen.add(cell.lr)
        return {"loss": abs(cell.lr / best - 1) if cell.lr < 0.04 else None}

    assert tuned(Results(tmp_path / "lines.jsonl", lost), CELL, RATES) == best
    assert seen == tried


def test_pages_have_the_tables_of_today() -> None:
    lines = choosing.evidence()
    old = [p.name for p in choosing.PAGES if choosing.filled(text := p.read_text(), lines) != text]
    assert old == [], "run: python -m benchmarks.choosing --write"
