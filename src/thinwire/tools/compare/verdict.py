"""Outcome of a comparison in plain sentences, from measured values only."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from thinwire.tools.compare.record import Asked, Results, Run
from thinwire.tools.report.page import loss_text

_ALIKE = 0.05
"""Relative difference below which times and bytes count as equal: one run each is no evidence."""


class Verdict(NamedTuple):
    """Outcome of a comparison."""

    text: str
    """One sentence, or a few."""
    winner: str | None
    """The recommended strategy on this link; None if the comparison does not show one."""


def verdict(results: Results) -> Verdict:
    """Return the verdict on a comparison."""
    runs = results.strategies
    dense = results.run_of("dense")
    clock = _Clock(results.link)
    if len(runs) == 1:
        run = runs[0]
        main = Verdict(
            f"{run.strategy} reached a held-out loss of {loss_text(run.final_loss)} "
            f"after {run.steps} steps in {_seconds(run.seconds)}; no other strategy was compared.",
            None,
        )
    else:
        main = _by_loss(results, clock, clock.where, dense)
    text = " ".join([main.text, *_lowest(results, main), *_reservations(results)])
    return Verdict(text, main.winner)


_UNLIKE = (
    "The strategies started at different losses, so their initial parameters differ and they "
    "cannot be compared: let the task build the same model and held-out data for the same seed."
)
_ALL_THE_SAME = (
    "All ranks started with the same batch: unless batches(rank, world) gives each rank its "
    "own data, more ranks do not help and local updates look better than they are."
)
_SAME = 0.01
"""Relative difference between evaluations of one model, since some evaluations are random."""


class _Clock:
    """Times to a loss on the requested link; `where` begins a sentence with estimated ones."""

    def __init__(self, link: Asked) -> None:
        self.rate_bit_s = None if link.emulated else link.rate_bit_s
        self.where = ""
        if self.rate_bit_s is not None:
            left_out = " and whose latency is ignored," if link.latency_s else ""
            self.where = (
                f"By an estimate for a link of {link.asked}, which was NOT emulated,{left_out} "
            )

    def to_loss(self, run: Run, which: str) -> float:
        seconds, sent = _until(run, which)
        return seconds + 8 * sent / (self.rate_bit_s or inf)


def _until(run: Run, which: str) -> list[float]:
    """Return seconds and bytes to reach dense's loss or the common loss; infinite if never."""
    found = [getattr(run, f"{unit}_to_{which}_loss") for unit in ("seconds", "bytes")]
    return [inf if value is None else value for value in found]


def _begins(run: Run) -> float:
    return run.evaluations[0].loss


def _by_loss(results: Results, clock: _Clock, where: str, dense: Run | None) -> Verdict:
    """Return the verdict by the times to dense's last loss; without dense, to the common loss."""
    runs = results.strategies
    which = "common" if dense is None else "dense"
    target = results.common_loss if dense is None else dense.final_loss
    if _began_apart(runs):
        return Verdict(_UNLIKE, None)
    if any(target >= _begins(run) for run in runs):
        stuck = [run for run in runs if run is dense or (dense is None and run.best_loss >= target)]
        nothing = f"{_names(stuck)} learned nothing in this run"
        return Verdict(f"{nothing}, so there is no loss to compare at: run longer.", None)

    def took_s(run: Run) -> float:
        return clock.to_loss(run, which)

    ranked = sorted((run for run in runs if took_s(run) < inf), key=took_s)
    if dense is not None and len(ranked) == 1:
        return _nobody(results, dense, clock)
    least_s = took_s(ranked[0])
    # one run each is no evidence for an order
    lead = [run for run in ranked if (1 - _ALIKE) * took_s(run) <= least_s]
    slower = [run for run in ranked if run not in lead]
    best = min(lead, key=lambda run: (run is dense, run.final_loss))
    rest = [run for run in lead if run is not best]
    other = next((run for run in ranked if run is dense and run is not best), None)
    other = other or (slower or rest)[0]
    several = len(lead) > 1
    ends = dict.fromkeys(f"{took_s(run):,.1f}" for run in (lead[0], lead[-1]))
    how = "reached" if several else "was the first to reach"
    clause = _bytes(other, best, which)
    sent = f", {f'{best.strategy} ' * several}{clause}" if clause else ""
    loss = "the common loss" if dense is None else "dense's loss"
    losses = [f"{run.strategy} " * several + loss_text(run.final_loss) for run in lead]
    text = (
        f"{where}{_names(lead)} {how} {loss} ({loss_text(target)})"
        f"{' about equally fast' * several}: {' to '.join(ends)} s{sent}; last loss: "
        f"{', '.join(losses)}"
    )
    if other in slower:
        times = _times(took_s(other) / least_s)
        text += f"; {other.strategy} took {_seconds(took_s(other))} ({times} times as long)"
    thin = _until(best, which)[1] < (1 - _ALIKE) * _until(other, which)[1]
    winner = other if other is dense and dense in lead and not thin else best
    return Verdict(f"{text}.", winner.strategy)


def _began_apart(runs: Sequence[Run]) -> bool:
    """Return True if losses before the first update differ, so the models differ."""
    losses = [_begins(run) for run in runs]
    return max(losses) - min(losses) > _SAME * abs(max(losses))


def _nobody(results: Results, dense: Run, clock: _Clock) -> Verdict:
    others = [run for run in results.strategies if run is not dense]
    nearest = min(others, key=lambda run: run.best_loss)
    budget = results.settings["seconds"]
    within = f"{dense.steps} steps" if budget is None else f"{budget:g} s"
    text = (
        f"{clock.where}no other strategy reached dense's loss ({loss_text(dense.final_loss)}) "
        f"within {within}; the closest was {nearest.strategy} with {loss_text(nearest.best_loss)}."
    )
    if budget is not None:
        return Verdict(text, "dense")
    # as many steps for all say nothing about as much time for all
    main = _by_loss(results, clock, "By time, ", None)
    return Verdict(f"{text} {main.text}", main.winner or "dense")


def _lowest(results: Results, main: Verdict) -> list[str]:
    """Name the strategy with the lowest final loss, unless it is the winner or the only one."""
    best = min(results.strategies, key=lambda run: run.final_loss)
    winner = results.run_of(main.winner)
    if winner is None or loss_text(best.final_loss) == loss_text(winner.final_loss):
        return []
    return [
        f"At the end {best.strategy} had the lowest loss ({loss_text(best.final_loss)}; "
        f"{winner.strategy} {loss_text(winner.final_loss)})."
    ]


def _reservations(results: Results) -> list[str]:
    """Return the caveats of the verdict."""
    failed = [failure.strategy for failure in results.failures]
    sentences = [_ALL_THE_SAME] if any(run.alike for run in results.strategies) else []
    if failed:
        are = "is" if len(failed) == 1 else "are"
        sentences.append(f"{_listed(failed)} failed and {are} excluded.")
    return sentences


def _bytes(reference: Run, run: Run, which: str) -> str:
    """Return a clause on how many times more or fewer bytes `run` sent; empty without any."""
    (_, own), (_, others) = _until(run, which), _until(reference, which)
    if not own or not others:
        return ""
    if own <= (1 - _ALIKE) * others:
        return f"with {_times(others / own)} times fewer bytes to that loss"
    if own >= (1 + _ALIKE) * others:
        return f"with {_times(own / others)} times as many bytes to that loss"
    return "with as many bytes to that loss"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def _names(runs: Sequence[Run]) -> str:
    return _listed([run.strategy for run in runs])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
