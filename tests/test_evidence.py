"""The evidence behind the tables: what is measured once, how rates are chosen, what tables say."""

import json
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


def test_tables_put_loss_and_time_of_a_step_together() -> None:
    dense, other = choosing.table(lines(), TINY)[2:]
    assert "2.000 (1 seed)" in dense
    assert "150 s" in dense
    assert "-50.0 %" in other
    assert "| 512 |" in other
    assert "75 s, 2 x" in other
    for line in (uncounted := lines()):
        line.pop("kernel_bytes_per_step", None)
    assert "bytes" not in choosing.table(uncounted, TINY)[0]


def test_the_track_scores_seconds_to_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SIZE", TINY.size)
    assert choosing.track(lines(), 3.5)[2:] == [
        # half way down: 375 and 750 steps of 0.1 s
        "| `muon-local` | 38 s | - | - | - | - | - |",
        "| `dense` | 75 s | - | - | - | - | - |",
    ]
    assert choosing.track(lines(), 0.5)[-1] == "Never, or not timed: `dense`, `muon-local`."


def test_a_table_tells_how_many_trainings_a_row_was_tuned_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = lines()
    screened = {**made[0]["cell"], "kind": "tuning", "steps": 300}
    monkeypatch.setattr(choosing, "SCREENING", tmp_path / "screening.jsonl")
    choosing.SCREENING.write_text(json.dumps({"cell": screened, "loss": 3.0}) + "\n")
    dense = made[0]["cell"]
    for rate in (0.003, 0.006):
        tried = {**dense, "kind": "tuning", "lr": rate}
        made.append({"cell": tried, "loss": 2.0, "losses": [[0, 2.0]]})
        made.append({"cell": {**tried, "optimizer": "sgd"}, "loss": 2.0, "losses": [[0, 2.0]]})
    text = choosing.table(made, TINY)
    assert text[0].startswith("|  | tuned by | peak rate |")
    assert text[2].startswith("| `dense` | 2 + 1 | 0.003 |")
    assert len(text) == 4


def test_a_strategy_with_another_optimizer_has_a_row_of_its_own() -> None:
    made = lines()
    changed = replace(CELL, **as_it_is("low-rank", "muon"), kind="training", steps=1500, seed=5)
    made.append({"cell": asdict(changed), "loss": 1.0, "losses": [[0, 5.0], [1500, 1.0]]})
    assert choosing.table(made, TINY)[-1].startswith("| `low-rank`, Muon | 0 | 0.003 | 1.000 ")
    assert not any("low-rank" in line for line in choosing.settings(made, TINY))


def test_trainings_on_a_link_stand_beside_combined_rows() -> None:
    made = lines()
    for line, seconds in ((made[0], 160.0), (made[3], 150.0)):
        cell = {**line["cell"], "kind": "whole", "link": "20mbit"}
        at = [seconds * step / evidence.STEPS for step, _ in line["losses"]]
        made.append({**line, "cell": cell, "seconds": at, "sent": [1e6 * s for s in at]})
    dense, other = choosing.whole(made, TINY)[2:]
    assert dense == (
        "| `dense` | 20mbit | 2.00000 | 2.00000 | 160.0 s | 150.0 s | 160.0 s | 160 MB |"
    )
    assert "| 1.00000 | 1.00000 | 150.0 s | 150.0 s | 75.0 s | 75 MB |" in other
    assert choosing.whole(made, Scope(2, "tiny", 60))[2:] == []


def test_a_strategy_without_an_optimizer_takes_the_one_that_is_given() -> None:
    assert as_it_is("dense", "sgd")["optimizer"] == "sgd"
    assert as_it_is("muon-local", "sgd")["optimizer"] == "muon"


def test_pages_are_filled_between_their_marks() -> None:
    page = "before\n<!-- evidence: table tiny 2 -->\nold\n<!-- end -->\nafter\n"
    filled = choosing.filled(page, lines())
    assert "old" not in filled
    assert filled.startswith("before\n<!-- evidence: table tiny 2 -->\n")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert choosing.filled(filled, lines()) == filled


def test_pages_have_the_tables_of_today() -> None:
    lines = choosing.evidence()
    old = [p.name for p in choosing.PAGES if choosing.filled(text := p.read_text(), lines) != text]
    assert old == [], "run: python -m benchmarks.choosing --write"


def test_strategy_with_changed_options_is_not_left_out_silently() -> None:
    made = lines()
    made[0]["cell"]["options"] = {"other": 1}
    with pytest.raises(ValueError, match="dense was measured, but not as it is now"):
        choosing.table(made, TINY)


def test_a_cell_leaves_out_the_hook_that_its_strategy_implies() -> None:
    cell = replace(CELL, **as_it_is("powersgd"))
    assert cell.options == {}
    assert cell.recipe().options == {"hook": "powersgd"}
