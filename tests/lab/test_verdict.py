"""The verdict is true in all cases: who won, who did not finish, and that nothing was emulated."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.api import Asked, Failure, Run, Verdict, common_loss, verdict
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
    steps = None if seconds else 20
    whole.settings = {**whole.settings, "seconds": seconds, "steps": steps}
    return verdict(whole)


def dense(*losses: float) -> Run:
    return run("dense", list(losses or (5.0, 4.0, 3.0)), 1.0, 4000)


def dgc(losses: list[float], step_s: float = 0.5) -> Run:
    return run("dgc", losses, step_s, 80)


FP16 = run("fp16", [5.0, 4.0, 3.0], 1.0, 2000)
DIFFER = ["initial parameters differ"]


@pytest.mark.parametrize(
    ("runs", "winner", "facts"),
    [
        (
            [dense(), dgc([5.0, 3.5, 2.5, 2.0])],
            "dgc",
            ["3.000", "7.5 s", "20.0 s", "67"],
        ),
        # which began differently
        ([dense(), dgc([2.0, 1.5])], None, DIFFER),
        ([dgc([5.0, 4.0]), run("low-rank", [3.0, 2.0], 0.5, 80)], None, DIFFER),
        ([dense(8.4, 7.7, 7.5), dgc([7.8, 7.4, 7.0])], None, DIFFER),
        # dense is ahead, of one that never has its loss or has it later
        ([dense(), dgc([5.0, 4.5, 4.0], 1.0)], "dense", ["within 20 s", "closest", "dgc", "4.000"]),
        ([dense(), dgc([5.0, 4.0, 3.5, 3.0], 1.0)], "dense", ["20.0 s", "dgc took 30.0 s", "33"]),
        # as fast as each other
        (
            [dense(), dgc([5.0, 4.0, 3.0], 0.97)],
            "dgc",
            ["dgc and dense", "about equally fast", "dgc with 50 times"],
        ),
        (
            [dense(), run("slow", [5.0, 4.0, 3.0], 1.0, 4000)],
            "dense",
            ["dense and slow", "about equally fast"],
        ),
        # without dense the loss that all reached decides
        ([FP16, dgc([5.0, 4.0, 2.5])], "dgc", ["common loss (3.000): 8.3 s", "fp16 took 20.0 s"]),
        ([dense()], None, ["3.000 after 20 steps in 20.0 s", "no other"]),
        ([dense(5.0, 5.2, 5.1), dgc([5.0, 4.0, 3.0], 1.0)], None, ["dense learned nothing"]),
        ([FP16, dgc([5.0, 5.5, 5.5], 1.0)], None, ["dgc learned nothing"]),
    ],
)
def test_verdict_has_its_figures(runs: list[Run], winner: str | None, facts: list[str]) -> None:
    found = judged(*runs)
    assert found.winner == winner
    assert all(fact in found.text for fact in facts), found.text
    assert "dense" not in found.text or any(one.strategy == "dense" for one in runs)


def test_as_many_steps_for_all_are_not_as_much_time() -> None:
    found = judged(dense(), dgc([5.0, 4.5, 4.0], 0.1), seconds=None)
    assert found.winner == "dgc"
    for fact in ("within 20 steps", "common loss (4.000): 2.0 s", "took 10.0 s", "3.000; dgc 4"):
        assert fact in found.text


def test_failed_strategies_are_named() -> None:
    failures = [Failure(name, "it broke") for name in ("dgc", "fp16")]
    assert "dgc and fp16 failed" in judged(dense(), failures=failures).text


def test_a_link_that_was_not_emulated_is_only_estimated() -> None:
    link = replace(results(emulated=False).link, rate_bit_s=8000.0, asked="8kbit")
    late = dgc([5.0, 4.0, 3.0], 2.0)
    found = judged(dense(), late, link=link).text
    # dense: 20 s of training and 80 s for 80 kB; dgc: 40 s and 1.6 s
    assert found.startswith("By an estimate for a link of 8kbit, which was NOT emulated, dgc")
    assert "41.6 s" in found
    assert "dense took 100.0 s" in found
    asked = Asked("loopback", None, 0.0, emulated=False, reason=None)
    here = judged(dense(), late, link=asked).text
    assert here.startswith("dense was the first to reach")


@pytest.mark.parametrize("with_dense", [True, False])
@pytest.mark.parametrize(
    ("steps_s", "named"),
    [
        ((0.52, 0.54, 0.53, 0.9), ["dgc", "fp16", "low-rank"]),
        ((0.52, 0.60, 0.54, 0.9), ["dgc", "low-rank"]),
        ((0.52, 0.60, 0.61, 0.9), ["dgc"]),
    ],
)
def test_methods_within_five_percent_are_named_together(
    steps_s: tuple[float, ...], named: list[str], with_dense: bool
) -> None:
    """And of these the one with the lowest last loss is recommended."""
    names, ends = ("dgc", "fp16", "low-rank", "diloco"), (2.9, 2.8, 2.7, 2.6)
    runs = [
        run(name, [5.0, 4.0, 3.0, 2.9, end], step_s, 4000)
        for name, step_s, end in zip(names, steps_s, ends, strict=True)
    ]
    found = judged(*[dense()] * with_dense, *runs)
    first = found.text.partition(". ")[0]
    heads = [name for name in names if name in re.split("reached|was the first", first)[0]]
    assert heads == named
    assert found.winner == named[-1]
    losses = re.search(r"last loss: ([^;.]*\.\d+)(, [^;.]*\.\d+)*", first)
    assert losses is not None
    assert all(f"{ends[names.index(name)]:.3f}" in losses[0] for name in named)


@pytest.mark.parametrize("names", [("dense", "dgc"), ("dgc", "dense")])
def test_the_loss_is_looked_for_in_the_same_way_for_all(names: tuple[str, str]) -> None:
    """Equal curves are equally soon at dense's loss, also if it rose again at the end."""
    for losses in ([5.0, 4.0, 3.0], [5.0, 3.0, 3.5]):
        found = judged(*(run(name, losses, 1.0, 4000) for name in names))
        assert re.search(r"about equally fast: \d+\.\d s,", found.text)
