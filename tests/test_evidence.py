"""The evidence behind the tables: what is measured once, how rates are chosen, what tables say."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import choosing, evidence
from benchmarks.choosing import Scope
from benchmarks.common import Results
from benchmarks.evidence import RATES, Cell, as_it_is, measured, timed, tuned

TINY = Scope(2, "tiny")
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
def test_the_grid_goes_on_until_the_best_has_neighbours(
    best: float, tried: set[float], tmp_path: Path
) -> None:
    seen = set()

    def lost(cell: Cell) -> dict[str, Any]:
        seen.add(cell.lr)
        return {"loss": abs(cell.lr / best - 1) if cell.lr < 0.04 else None}

    assert tuned(Results(tmp_path / "lines.jsonl", lost), CELL, RATES) == best
    assert seen == tried


def test_steps_of_a_timed_cell_have_whole_rounds() -> None:
    assert timed(CELL).steps == 4 * 16
    assert timed(replace(CELL, **as_it_is("localsgd"))).steps == 4 * 32
    assert timed(replace(CELL, **as_it_is("dense"))).steps == 16


def lines() -> list[dict[str, Any]]:
    """Dense falls from 5 to 2 in a straight line; the other is there in half of the steps."""
    made = []
    for name, share in (("dense", 1.0), ("muon-local", 0.5)):
        base = replace(CELL, **as_it_is(name), kind="training", steps=evidence.STEPS, seed=5)
        curve = [[0, 5.0], [round(share * evidence.STEPS), 2.0], [evidence.STEPS, 2.0 * share]]
        made.append(
            {"cell": asdict(base), "loss": 2.0 * share, "losses": curve, "bytes": 3e6 * share**8}
        )
        # what was sent again on the slower link does not count
        for link, step_ms, again in (("20mbit", 100.0, 1.5 / share), ("1gbit", 40.0, 1.0)):
            cell = asdict(replace(base, kind="link", link=link))
            sent = 2e3 * share**9 * again
            made.append({"cell": cell, "step_ms": step_ms, "kernel_bytes_per_step": sent})
    return made


def test_pages_have_the_tables_of_today() -> None:
    lines = choosing.evidence()
    old = [p.name for p in choosing.PAGES if choosing.filled(text := p.read_text(), lines) != text]
    assert old == [], "run: python -m benchmarks.choosing --write"


def test_strategy_with_changed_options_is_not_left_out_silently() -> None:
    made = lines()
    made[0]["cell"]["options"] = {"other": 1}
    with pytest.raises(ValueError, match="dense was measured, but not as it is now"):
        choosing.table(made, TINY)
