"""Lines between sites: the network of all, and groups of near ranks that average first."""

from pathlib import Path
from typing import Any

import pytest

import thinwire as tw

REGIONS = Path(__file__).parents[2] / "examples" / "plan" / "regions.csv"
NUMBERS: dict[str, Any] = {"params": "1B", "step_seconds": 1.0}
TWO = "from,to,ms,mbit\nParis,Texas,110,100\nParis,Paris,0.2,25000\nTexas,Texas,0.2,25000\n"


def matrix(folder: Path, text: str) -> Path:
    path = folder / "lines.csv"
    path.write_text(text)
    return path


def test_all_ranks_go_at_the_pace_of_the_worst_line() -> None:
    regions = tw.plan(**NUMBERS, matrix=REGIONS)
    assert (regions.link["workers"], regions.link["latency_s"]) == (10, 0.265 / 2)
    worst = tw.plan(**NUMBERS, workers=10, link="326mbit", latency="132.5ms")
    for row in worst.strategies:
        assert regions[row.name].step_seconds == row.step_seconds, row.name
        assert regions[row.name].loss_gap == row.loss_gap


def test_groups_are_of_near_sites_and_of_one_size() -> None:
    groups = tw.plan(**NUMBERS, matrix=REGIONS, workers=20).link["groups"]
    assert set(groups) == {2, 4}
    assert all(sorted(sites) == sorted(groups[2]) for sites in groups.values())
    pairs = [frozenset(groups[4][at : at + 2]) for at in range(0, 10, 2)]
    assert frozenset(("Virginia", "Ohio")) in pairs
    assert frozenset(("London", "Ireland")) in pairs
    assert not tw.plan(**NUMBERS, workers=20, link="1gbit").link["groups"]


@pytest.mark.parametrize("params", ["124M", "350M", "1B"])
def test_groups_are_recommended_where_lines_inside_are_fast(tmp_path: Path, params: str) -> None:
    given: dict[str, Any] = {"params": params, "step_seconds": 0.3, "workers": 8}
    fast = tw.plan(**given, matrix=matrix(tmp_path, TWO))
    best = fast[fast.recommended]
    assert best.document is not None
    assert best.document["localsgd"]["node_size"] == 4
    assert "ranks in the order of Paris, Texas" in fast.reason
    assert best.time_at_worst == min(row.time_at_worst for row in fast.strategies)
    alike = tw.plan(**given, matrix=matrix(tmp_path, TWO.replace("0.2,25000", "110,100")))
    document = alike[alike.recommended].document
    assert document is not None
    assert "node_size" not in document["localsgd"]


def test_means_inside_groups_lower_the_gap_and_cost_their_bytes(tmp_path: Path) -> None:
    plan = tw.plan(**NUMBERS, workers=8, matrix=matrix(tmp_path, TWO))
    for k_steps in (16, 32, 64):
        name = f"muon-local k{k_steps}" if k_steps != 16 else "muon-local"
        rare, eight, four = (plan[f"{name} n4{often}"] for often in ("", " m8", " m4"))
        flat = plan[name]
        assert rare.loss_gap == flat.loss_gap > eight.loss_gap > four.loss_gap
        assert rare.bytes_per_step < eight.bytes_per_step < four.bytes_per_step
        assert four.loss_gap > plan["muon-local k4"].loss_gap
        added = four.bytes_per_step - rare.bytes_per_step
        assert added == pytest.approx(2 * 3 / 4 * 4e9 * (1 / 4 - 1 / k_steps))
        assert f"node_steps={4}" in four.python


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        ("a,b\n", {}, "must begin with from,to,ms,mbit"),
        (TWO + "Paris,Rome,x,100\n", {}, "line 5: no line between two sites"),
        (TWO + "Paris,Rome,10,0\n", {}, "line 5: no line between two sites"),
        (TWO + "Paris,Rome,10,100\n", {}, "no line between Rome and Texas"),
        ("from,to,ms,mbit\nParis,Paris,1,1\n", {}, "1 sites; two are needed"),
        (TWO, {"workers": 3}, "workers=3 of 2 sites: give as many to each, as 2 does"),
        (TWO, {"link": "1gbit"}, "link='1gbit' is given, but matrix="),
        (TWO, {"shard": 2}, "omit shard"),
        (None, {}, "cannot be read"),
    ],
)
def test_a_file_without_lines_between_all_sites_is_refused(
    tmp_path: Path, text: str | None, given: dict[str, Any], says: str
) -> None:
    path = tmp_path / "missing" if text is None else matrix(tmp_path, text)
    with pytest.raises(ValueError, match=says):
        tw.plan(**NUMBERS, matrix=path, **given)
