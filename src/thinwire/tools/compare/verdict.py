"""Outcome of a comparison in plain sentences, from measured values only."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
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
            f"{clock.where} {run.strategy} reached a held-out loss of {loss_text(run.final_loss)} "
            f"after {run.steps} steps in {_seconds(run.seconds)}; no other strategy was compared.",
            None,
        )
    elif dense is not None:
        main = _against_dense(results, dense, clock)
    else:
        main = _by_common_loss(results, clock, clock.where)
    text = " ".join([main.text, *_lowest(results, main), *_reservations(results)])
    return Verdict(text, main.winner)


_UNLIKE = (
    "the strategies started at different losses, so their initial parameters differ and they "
    "cannot be compared: let the task build the same model and held-out data for the same seed."
)
_ALL_THE_SAME = (
    "All ranks started with the same batch: unless batches(rank, world) gives each rank its "
    "own data, more ranks do not help and local updates look better than they are."
)
_SAME = 0.01
"""Relative difference between evaluations of one model, since some evaluations are random."""


class _Clock:
    """Times to a loss on the requested link, and their wording."""

    def __init__(self, link: Asked) -> None:
        self.rate_bit_s = None if link.emulated else link.rate_bit_s
        if link.emulated:
            self.where = f"On this link ({link.asked})"
        elif link.joined:
            self.where = "Over the network between the ranks"
        elif link.reason is None:
            self.where = "Over this machine's loopback"
        elif self.rate_bit_s is None:
            self.where = f"Over this machine's loopback (the link of {link.asked} was NOT emulated)"
        else:
            left_out = " and whose latency is ignored," if link.latency_s else ""
            self.where = (
                f"By an estimate for a link of {link.asked}, which was NOT emulated,{left_out}"
            )

    def to_loss(self, run: Run, which: str) -> float | None:
        seconds, sent = _until(run, which)
        if seconds is None or sent is None or self.rate_bit_s is None:
            return seconds
        return seconds + 8 * sent / self.rate_bit_s


def _until(run: Run, which: str) -> list[float | None]:
    """Return seconds and bytes to reach dense's loss or the common loss."""
    return [getattr(run, f"{unit}_to_{which}_loss") for unit in ("seconds", "bytes")]


def _begins(run: Run) -> float:
    return run.evaluations[0].loss


def _against_dense(results: Results, dense: Run, clock: _Clock) -> Verdict:
    where = clock.where
    loss = loss_text(dense.final_loss)
    own_s = clock.to_loss(dense, "dense")
    if dense.final_loss >= _begins(dense) or not own_s:
        losses = f"{loss_text(_begins(dense))} at the start, {loss} at the end"
        nothing = f"{where} dense learned nothing in this run (held-out loss {losses})"
        return Verdict(f"{nothing}, so it is no baseline: run longer.", None)
    others = [run for run in results.strategies if run is not dense]
    if any(dense.final_loss >= _begins(run) for run in others) or _began_apart([dense, *others]):
        return Verdict(f"{where} {_UNLIKE}", None)
    times = [(clock.to_loss(run, "dense"), run) for run in others]
    reached = [(seconds, run) for seconds, run in times if seconds is not None]
    if not reached:
        return _nobody(results, dense, others, clock)
    lead = _fastest(reached)
    own = _seconds(own_s)
    name = lead.best.strategy
    more = lead.more(dense, "dense")
    if lead.least_s < (1 - _ALIKE) * own_s:
        fast = f"{lead.took} instead of {own} ({_times(own_s / lead.least_s)} times as fast){more}"
        return Verdict(f"{where} {lead.names} reached dense's loss ({loss}) in {fast}.", name)
    if lead.least_s <= (1 + _ALIKE) * own_s:
        sent = lead.best.bytes_to_dense_loss or 0.0
        by_dense = dense.bytes_to_dense_loss or 0.0
        alike = f"about as fast as dense itself ({lead.took} and {own}){more}"
        text = f"{where} {lead.names} reached dense's loss ({loss}) {alike}."
        return Verdict(text, name if sent < (1 - _ALIKE) * by_dense else "dense")
    later = f"{lead.names} with {lead.took} ({_times(lead.least_s / own_s)} times as long){more}"
    fastest = f"{where} dense was the fastest to its own loss ({loss}): {own}"
    return Verdict(f"{fastest}; next came {later}.", "dense")


class _Lead(NamedTuple):
    """Runs that were as fast as the fastest: one run each is no evidence for an order."""

    runs: list[Run]
    least_s: float
    took: str

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.final_loss)

    @property
    def names(self) -> str:
        return _listed([run.strategy for run in self.runs])

    def more(self, reference: Run, which: str) -> str:
        """Return clauses on bytes, of the best, and on the last loss of each; begins with ","."""
        sent = _bytes(reference, self.best, which)
        several = len(self.runs) > 1
        ends = [f"{run.strategy} " * several + loss_text(run.final_loss) for run in self.runs]
        by = f", {self.best.strategy}{sent[1:]}" if several and sent else sent
        return f"{by}; last loss: {', '.join(ends)}"


def _fastest(times: Iterable[tuple[float, Run]]) -> _Lead:
    ranked = sorted(times, key=itemgetter(0))
    alike = [pair for pair in ranked if (1 - _ALIKE) * pair[0] <= ranked[0][0]]
    ends = dict.fromkeys(f"{seconds:,.1f}" for seconds, _ in (alike[0], alike[-1]))
    return _Lead([run for _, run in alike], ranked[0][0], f"{' to '.join(ends)} s")


def _began_apart(runs: Sequence[Run]) -> bool:
    """Return True if losses before the first update differ, so the models differ."""
    losses = [_begins(run) for run in runs]
    return max(losses) - min(losses) > _SAME * abs(max(losses))


def _nobody(results: Results, dense: Run, others: Sequence[Run], clock: _Clock) -> Verdict:
    nearest = min(others, key=lambda run: run.best_loss)
    budget = results.settings["seconds"]
    within = f"{dense.steps} steps" if budget is None else f"{budget:g} s"
    text = (
        f"{clock.where} no other strategy reached dense's loss ({loss_text(dense.final_loss)}) "
        f"within {within}; the closest was {nearest.strategy} with {loss_text(nearest.best_loss)}."
    )
    if budget is not None:
        return Verdict(text, "dense")
    # as many steps for all say nothing about as much time for all
    main = _by_common_loss(results, clock, "By time,")
    return Verdict(f"{text} {main.text}", main.winner or "dense")


def _by_common_loss(results: Results, clock: _Clock, where: str) -> Verdict:
    """Return the verdict by the common loss, if dense's loss is missing or not informative."""
    runs, target = results.strategies, results.common_loss
    short = any(target >= _begins(run) for run in runs)
    stuck = [run.strategy for run in runs if run.best_loss >= _begins(run)]
    if _began_apart(runs) or (short and not stuck):
        return Verdict(f"{where} {_UNLIKE}", None)
    if short:
        nothing = f"{where} {_listed(stuck)} learned nothing in this run"
        return Verdict(f"{nothing}, so there is no common loss: run longer.", None)
    times = [(clock.to_loss(run, "common") or 0.0, run) for run in runs]
    lead = _fastest(times)
    loss = f"the common loss ({loss_text(target)})"
    name = lead.best.strategy
    text = f"{where} {lead.names} reached {loss} about equally fast: {lead.took}"
    if len(lead.runs) == len(runs):
        reference = next(run for run in lead.runs if run is not lead.best)
        return Verdict(f"{text}{lead.more(reference, 'common')}.", name)
    next_s, later = min((pair for pair in times if pair[1] not in lead.runs), key=itemgetter(0))
    if len(lead.runs) == 1:
        text = f"{where} {name} was the first to reach {loss}: {lead.took}"
    longer = f"took {_seconds(next_s)} ({_times(next_s / lead.least_s)} times as long)"
    more = lead.more(later, "common")
    return Verdict(f"{text}{more}; the next, {later.strategy}, {longer}.", name)


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
    stop = results.interrupted
    are = ("are", "is")
    sentences = [_ALL_THE_SAME] if any(run.alike for run in results.strategies) else []
    if failed:
        sentences.append(f"{_listed(failed)} failed and {are[len(failed) == 1]} excluded.")
    if stop is not None:
        absent = [*([stop.during] if stop.during else []), *stop.not_begun]
        missing = f"{_listed(absent)} {are[len(absent) == 1]} missing"
        sentences.append(f"The comparison is incomplete: {missing}.")
    return sentences


def _bytes(reference: Run, run: Run, which: str) -> str:
    """Return a clause on how many times more or fewer bytes `run` sent; begins with a comma."""
    (_, own), (_, others) = _until(run, which), _until(reference, which)
    if not own or not others:
        return ""
    if own <= (1 - _ALIKE) * others:
        return f", with {_times(others / own)} times fewer bytes to that loss"
    if own >= (1 + _ALIKE) * others:
        return f", with {_times(own / others)} times as many bytes to that loss"
    return ", with as many bytes to that loss"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
