"""The outcome of a comparison, in sentences that a person would repeat; nothing in them that was
not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.tools.report.measures import loss_text

__all__ = ["Verdict", "interruption", "verdict"]

_ALIKE = 0.05
"""Times and bytes that differ by less than this part count as equal: one run each says no more."""

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        text: One sentence, or a few.
        winner: The strategy to take on this link, as far as the comparison shows it; None where it
            shows none.
    """

    text: str
    winner: str | None


def verdict(results: Mapping[str, Any]) -> Verdict:
    """The verdict on the content of `results.json`."""
    runs = results["strategies"]
    dense = next((run for run in runs if run["strategy"] == "dense"), None)
    clock = _Clock(results)
    if len(runs) == 1:
        main = _alone(runs[0], clock)
    elif dense is not None:
        main = _against_dense(results, dense, clock)
    else:
        main = _among(results, clock, clock.place)
    return Verdict(
        " ".join([main.text, *_lowest(runs, main), *_reservations(results)]), main.winner
    )


_UNLIKE = (
    "some strategies began at another loss than others, so they did not begin from the same "
    "parameters, and nothing can be said: let the task make the same model, and the same held-out "
    "data, for the same seed."
)
_ALL_THE_SAME = (
    "All ranks began with the very same batch: unless batches(rank, world) gives each its own, "
    "more ranks bring nothing, and local updates look better than they are."
)
_SAME = 0.01
"""Part by which the loss of one model may differ from one evaluation to another: some are drawn."""


class _Clock:
    """Times to a loss on the link that was asked for, and how to speak of it."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        link = results["link"]
        self.rate_bit_s = None if link["emulated"] else link["rate_bit_s"]
        if link["emulated"]:
            self.place = f"On this link ({link['asked']})"
        elif link.get("joined"):
            self.place = "Over the network between the ranks"
        elif link["reason"] is None:
            self.place = "Over this machine's loopback"
        elif self.rate_bit_s is None:
            self.place = (
                f"Over this machine's loopback (the link of {link['asked']} was NOT emulated)"
            )
        else:
            left_out = " and whose latency is left out," if link["latency_s"] else ""
            self.place = (
                f"By an estimate for a link of {link['asked']}, which was NOT emulated,{left_out}"
            )

    def to_loss(self, run: Run, which: str) -> float | None:
        seconds, sent = run[f"seconds_to_{which}_loss"], run[f"bytes_to_{which}_loss"]
        if seconds is None or self.rate_bit_s is None:
            return None if seconds is None else float(seconds)
        return float(seconds + 8 * sent / self.rate_bit_s)


def _alone(run: Run, clock: _Clock) -> Verdict:
    text = (
        f"{clock.place} {run['strategy']} came to a held-out loss of "
        f"{loss_text(run['final_loss'])} after "
        f"{run['steps']} steps in {_seconds(run['seconds'])}; there is no other strategy to "
        "compare it with."
    )
    return Verdict(text, None)


def _against_dense(results: Mapping[str, Any], dense: Run, clock: _Clock) -> Verdict:
    target = results["dense_loss"]
    own_s = clock.to_loss(dense, "dense")
    if target >= dense["evaluations"][0]["loss"] or not own_s:
        return Verdict(
            f"{clock.place} dense learned nothing in this run (held-out loss "
            f"{loss_text(dense['evaluations'][0]['loss'])} at the start, {loss_text(target)} at "
            "the end), "
            "so there is nothing to measure the others by: let it run longer.",
            None,
        )
    others = [run for run in results["strategies"] if run is not dense]
    below = any(target >= run["evaluations"][0]["loss"] for run in others)
    if below or _began_apart([dense, *others]):
        return Verdict(f"{clock.place} {_UNLIKE}", None)
    reached = sorted(
        ((seconds, run) for run in others if (seconds := clock.to_loss(run, "dense")) is not None),
        key=lambda pair: pair[0],
    )
    if not reached:
        return _nobody(results, dense, others, clock)
    seconds, first = reached[0]
    name, with_bytes = first["strategy"], _bytes(dense, first, "dense")
    if seconds < (1 - _ALIKE) * own_s:
        return Verdict(
            f"{clock.place} {name} reached dense's loss ({loss_text(target)}) in "
            f"{_seconds(seconds)} "
            f"instead of {_seconds(own_s)} ({_times(own_s / seconds)} times as fast){with_bytes}.",
            name,
        )
    if seconds <= (1 + _ALIKE) * own_s:
        fewer = first["bytes_to_dense_loss"] < (1 - _ALIKE) * dense["bytes_to_dense_loss"]
        return Verdict(
            f"{clock.place} {name} reached dense's loss ({loss_text(target)}) about as soon as "
            "dense "
            f"itself ({_seconds(seconds)} and {_seconds(own_s)}){with_bytes}.",
            name if fewer else "dense",
        )
    return Verdict(
        f"{clock.place} dense was the fastest to its own loss ({loss_text(target)}): "
        f"{_seconds(own_s)}; "
        f"next came {name} with {_seconds(seconds)} ({_times(seconds / own_s)} times as "
        f"long){with_bytes}.",
        "dense",
    )


def _began_apart(runs: Sequence[Run]) -> bool:
    """Whether the losses before the first update are not those of one model."""
    losses = [float(run["evaluations"][0]["loss"]) for run in runs]
    return max(losses) - min(losses) > _SAME * abs(max(losses))


def _nobody(
    results: Mapping[str, Any], dense: Run, others: Sequence[Run], clock: _Clock
) -> Verdict:
    nearest = min(others, key=lambda run: float(run["best_loss"]))
    budget = results["settings"]["seconds"]
    within = f"{dense['steps']} steps" if budget is None else f"{budget:g} s"
    text = (
        f"{clock.place} no other strategy reached dense's loss "
        f"({loss_text(results['dense_loss'])}) "
        f"within {within}; the nearest was {nearest['strategy']} with "
        f"{loss_text(nearest['best_loss'])}."
    )
    if budget is not None:
        return Verdict(text, "dense")
    # as many steps for all say nothing about as much time for all
    main = _among(results, clock, "By time,")
    return Verdict(f"{text} {main.text}", main.winner or "dense")


def _among(results: Mapping[str, Any], clock: _Clock, place: str) -> Verdict:
    """By the loss that all of them reached, where dense's is not there or says nothing."""
    runs = results["strategies"]
    target = results["common_loss"]
    if _began_apart(runs):
        return Verdict(f"{place} {_UNLIKE}", None)
    if any(target >= run["evaluations"][0]["loss"] for run in runs):
        stuck = [
            run["strategy"] for run in runs if run["best_loss"] >= run["evaluations"][0]["loss"]
        ]
        if not stuck:
            return Verdict(f"{place} {_UNLIKE}", None)
        return Verdict(
            f"{place} {_listed(stuck)} learned nothing in this run, so there is no loss that all "
            "reached: let it run longer.",
            None,
        )
    times = sorted(
        ((clock.to_loss(run, "common") or 0.0, run) for run in runs), key=lambda pair: pair[0]
    )
    (first_s, first), (next_s, later) = times[0], times[1]
    name, with_bytes = first["strategy"], _bytes(later, first, "common")
    if first_s >= (1 - _ALIKE) * next_s:
        return Verdict(
            f"{place} {name} and {later['strategy']} were about equally soon at the loss that all "
            f"reached ({loss_text(target)}): {_seconds(first_s)} and "
            f"{_seconds(next_s)}{with_bytes and f', {name}{with_bytes}'}.",
            name,
        )
    return Verdict(
        f"{place} {name} was the first at the loss that all reached ({loss_text(target)}): "
        f"{_seconds(first_s)}, where {later['strategy']}, the next, took {_seconds(next_s)} "
        f"({_times(next_s / first_s)} times as long){with_bytes and f'; {name}{with_bytes}'}.",
        name,
    )


def _lowest(runs: Sequence[Run], main: Verdict) -> list[str]:
    """The strategy of the lowest loss at the end, where that is not the winner or the only one."""
    best = min(runs, key=lambda run: float(run["final_loss"]))
    winner = next((run for run in runs if run["strategy"] == main.winner), None)
    if winner is None or loss_text(best["final_loss"]) == loss_text(winner["final_loss"]):
        return []
    return [
        f"At the end {best['strategy']} had the lowest loss ({loss_text(best['final_loss'])}; "
        f"{winner['strategy']} {loss_text(winner['final_loss'])})."
    ]


def _reservations(results: Mapping[str, Any]) -> list[str]:
    """What stands in the way of believing the rest."""
    failed = [failure["strategy"] for failure in results["failures"]]
    stop = results["interrupted"]
    sentences = [_ALL_THE_SAME] if any(run.get("alike") for run in results["strategies"]) else []
    sentences += (
        [f"{_listed(failed)} failed and {'is' if len(failed) == 1 else 'are'} left out."]
        if failed
        else []
    )
    if stop is not None:
        absent = [*([stop["during"]] if stop["during"] else []), *stop["not_begun"]]
        sentences.append(
            f"The comparison is not complete: {_listed(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} missing."
        )
    return sentences


def _bytes(reference: Run, run: Run, which: str) -> str:
    """By how many times the bytes of `run` differ from those of `reference`, beginning with a comma
    or a blank.
    """
    mine, others = run[f"bytes_to_{which}_loss"], reference[f"bytes_to_{which}_loss"]
    if not mine or not others:
        return ""
    if mine <= (1 - _ALIKE) * others:
        return f", with {_times(others / mine)} times fewer bytes to that loss"
    if mine >= (1 + _ALIKE) * others:
        return f", with {_times(mine / others)} times as many bytes to that loss"
    return ", with as many bytes to that loss"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def interruption(results: Mapping[str, Any]) -> str | None:
    """Say what is missing and why, in a sentence; None where the comparison has come to its end."""
    stop = results["interrupted"]
    if stop is None:
        return None
    by = (
        f"was interrupted by {stop['by']}"
        if stop["by"]
        else "had not come to its end when this was written"
    )
    during = f" during {stop['during']} (at {stop['progress']:.0%})" if stop["during"] else ""
    later = f"; {', '.join(stop['not_begun'])} had not begun" if stop["not_begun"] else ""
    return f"The comparison {by}{during}{later}."
