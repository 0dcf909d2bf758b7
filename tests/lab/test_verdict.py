"""The verdict is true in all cases: who won, who did not finish, and that nothing was emulated."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.api import Asked, Failure, Interruption, Run, Verdict, common_loss, verdict
from tests.lab.test_results import results, run


def judged(*runs: Run, seconds: float | None = 20.0, **changes: Any) -> Verdict:
    """The verdict on runs, whose times to a loss are worked out as in `Ledger`."""
    dense = next((one.evaluations[-1].loss for one in runs if one.strategy == "dense"), None)
    common = common_loss([one.evaluations for one in runs])
    whole = replace(
        results(),
        strategies=[one.reaching(common, dense) for one in runs],
        dense_loss=dense,
        common_loss=common,
        **changes,
    )
    whole.settings = replace(whole.settings, seconds=seconds, steps=None if seconds else 20)
    return verdict(whole)


def dense(*losses: float) -> Run:
    return run("dense", list(losses or (5.0, 4.0, 3.0)), 1.0, 4000)


def test_verdict_names_the_strategy_to_repeat() -> None:
    found = judged(dense(), run("dgc", [5.0, 3.5, 2.5, 2.0], 0.5, 80))
    assert found == Verdict(
        "On this link (100mbit) dgc reached dense's loss (3.000) in 7.5 s instead of 20.0 s (2.7 "
        "times as fast), with 67 times fewer bytes to that loss.",
        "dgc",
    )


def test_runs_that_began_differently_are_not_compared() -> None:
    found = judged(dense(), run("dgc", [2.0, 1.5], 0.5, 80))
    assert "initial parameters differ" in found.text
    found = judged(run("dgc", [5.0, 4.0], 0.5, 80), run("low-rank", [3.0, 2.0], 0.5, 80))
    assert found.winner is None
    assert "initial parameters differ" in found.text
    found = judged(dense(8.4, 7.7, 7.5), run("dgc", [7.8, 7.4, 7.0], 0.5, 80))
    assert found.winner is None
    assert "initial parameters differ" in found.text


def test_ranks_of_torchrun_have_a_network_between_them() -> None:
    link = replace(results().link, emulated=False, reason=None, joined=True)
    found = judged(dense(), run("dgc", [5.0, 3.5, 2.5, 2.0], 0.5, 80), link=link)
    assert found.text.startswith("Over the network between the ranks dgc reached dense's loss")


def test_where_dense_wins_it_says_so() -> None:
    found = judged(dense(), run("dgc", [5.0, 4.5, 4.0], 1.0, 80))
    assert found.winner == "dense"
    assert found.text == (
        "On this link (100mbit) no other strategy reached dense's loss (3.000) within 20 s; "
        "the closest was dgc with 4.000."
    )
    late = judged(dense(), run("dgc", [5.0, 4.0, 3.5, 3.0], 1.0, 80))
    assert late.winner == "dense"
    assert (
        "dense was the fastest to its own loss (3.000): 20.0 s; next came dgc with 30.0 s (1.5 "
        "times" in late.text
    )
    assert "33 times fewer bytes" in late.text


def test_times_that_are_alike_are_not_called_faster() -> None:
    for other, winner in (
        (run("dgc", [5.0, 4.0, 3.0], 0.97, 80), "dgc"),
        (run("slow", [5.0, 4.0, 3.0], 1.0, 4000), "dense"),
    ):
        found = judged(dense(), other)
        assert "about as fast as dense itself" in found.text
        assert "times as fast" not in found.text
        assert found.winner == winner


def test_as_many_steps_for_all_are_not_as_much_time() -> None:
    found = judged(dense(), run("dgc", [5.0, 4.5, 4.0], 0.1, 80), seconds=None)
    assert found.winner == "dgc"
    assert "no other strategy reached dense's loss (3.000) within 20 steps" in found.text
    assert (
        "By time, dgc was the first to reach the common loss (4.000): 2.0 s; the next, dense, "
        "took 10.0 s" in found.text
    )
    assert found.text.endswith("At the end dense had the lowest loss (3.000; dgc 4.000).")


def test_without_dense_the_loss_that_all_reached_decides() -> None:
    found = judged(run("fp16", [5.0, 4.0, 3.0], 1.0, 2000), run("dgc", [5.0, 4.0, 2.5], 0.5, 80))
    assert found.winner == "dgc"
    assert (
        "dgc was the first to reach the common loss (3.000): 8.3 s; the next, fp16, took "
        "20.0 s" in found.text
    )
    assert "dense" not in found.text


def test_one_strategy_alone_wins_nothing() -> None:
    found = judged(dense())
    assert found.winner is None
    assert found.text == (
        "On this link (100mbit) dense reached a held-out loss of 3.000 after 20 steps in 20.0 s; "
        "no other strategy was compared."
    )


def test_a_run_that_learned_nothing_is_no_measure() -> None:
    nothing = judged(dense(5.0, 5.2, 5.1), run("dgc", [5.0, 4.0, 3.0], 1.0, 80))
    assert nothing.winner is None
    assert "dense learned nothing in this run" in nothing.text
    other = judged(run("fp16", [5.0, 4.0, 3.0], 1.0, 2000), run("dgc", [5.0, 5.5, 5.5], 1.0, 80))
    assert other.winner is None
    assert "dgc learned nothing in this run" in other.text


def test_missing_part_is_reported() -> None:
    failures = [Failure(name, "it broke") for name in ("dgc", "fp16")]
    assert judged(dense(), failures=failures).text.endswith("dgc and fp16 failed and are excluded.")
    told = Interruption("Ctrl-C", "dgc", 0.4, ["fp16"])
    assert judged(dense(), interrupted=told).text.endswith(
        "The comparison is incomplete: dgc and fp16 are missing."
    )


def test_a_link_that_was_not_emulated_is_only_estimated() -> None:
    link = replace(results(emulated=False).link, rate_bit_s=8000.0, asked="8kbit")
    found = judged(dense(), run("dgc", [5.0, 4.0, 3.0], 2.0, 80), link=link)
    # dense: 20 s of training and 80 s for 80 kB; dgc: 40 s and 1.6 s
    assert found.text.startswith(
        "By an estimate for a link of 8kbit, which was NOT emulated, dgc reached dense's loss "
        "(3.000) in 41.6 s instead of 100.0 s (2.4 times as fast)"
    )
    asked = Asked("loopback", None, 0.0, emulated=False, reason=None, joined=False)
    assert judged(dense(), run("dgc", [5.0, 4.0, 3.0], 2.0, 80), link=asked).text.startswith(
        "Over this machine's loopback dense was the fastest"
    )


@pytest.mark.parametrize("names", [("dense", "dgc"), ("dgc", "dense")])
def test_the_loss_is_looked_for_in_the_same_way_for_all(names: tuple[str, str]) -> None:
    """Equal curves are equally soon at dense's loss, also if it rose again at the end."""
    for losses in ([5.0, 4.0, 3.0], [5.0, 3.0, 3.5]):
        found = judged(*(run(name, losses, 1.0, 4000) for name in names))
        times = re.findall(r"\((\d+\.\d) s and (\d+\.\d) s\)", found.text)
        assert len(times) == 1
        assert times[0][0] == times[0][1]
