"""What the replicas of one stage exchange, all stages apply, or none: one of them must not go on
where another cannot.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from thinwire.comm import Group
from thinwire.comm.grid import Grid
from thinwire.errors import PeerLost, PeerStalled, ThinwireError
from thinwire.exchange.vote import COMPARING, Drops, Report, agree_on_step
from thinwire.strategy.exchanges import Exchange, ExchangingStep, Grads, MeanThenStep

__all__ = ["AllStages"]

_T = TypeVar("_T")


class AllStages(Exchange):
    """An exchange among the replicas of one stage, whose outcome is one of all stages: every rank
    applies its update, or all drop it, or all raise the same error.

    Args:
        inner: Among the replicas of this rank's stage; asks for the verdict before it applies
            anything.
        grid: All ranks.
        names: Of the parameters of all stages.

    Communication: 24 bytes a rank and update over all ranks, after the messages of the stages and
    before any of them is applied.
    Failure: the error of one stage is raised on every rank, with the stage and its ranks; nothing
    was applied. Where a rank is lost, those who miss it raise that themselves.
    """

    local = False

    def __init__(
        self, inner: MeanThenStep | ExchangingStep, grid: Grid, names: Sequence[str]
    ) -> None:
        self._inner: Exchange = inner
        self._exchanging, self._all_ranks, self._names = inner, Group(), list(names)
        self._replica, self._where = grid.replica, _where(grid)
        self._drops = Drops()
        inner.verdict = self._verdict

    @property
    def moved(self) -> bool:
        return self._inner.moved

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent + self._all_ranks.bytes_sent

    @property
    def wait_s(self) -> float:
        return self._inner.wait_s + self._all_ranks.wait_s

    def counts(self, step: int) -> dict[str, float]:
        """As of the exchange inside, and what the agreement of all stages adds."""
        counts, votes = self._inner.counts(step), self._all_ranks
        besides: dict[str, float] = {
            "bytes_received": votes.bytes_received,
            "bytes_between_nodes": votes.bytes_sent,
        }
        return {key: value + besides.get(key, 0) for key, value in counts.items()}

    @property
    def dropped_steps(self) -> int:
        return self._drops.total

    def update(self, step: int, grads: Grads) -> bool:
        return self._inner.update(step, grads)

    def _verdict(self, step: int, exchange: Callable[[], _T | None]) -> _T | None:
        """What came, once all stages have something; None where one of them drops the step."""
        with contextlib.ExitStack() as unused:
            unused.callback(self._forget)
            done, failure = _tried(exchange)
            report = Report(step, "all stages")
            if done is None and failure is None:
                report = self._blaming(report)
            reports = self._heard(report, failure)
            if self._drops.needed(reports, self._names):
                return None
            unused.pop_all()
        return done

    def _heard(self, report: Report, failure: Exception | None) -> list[Report]:
        """The reports of all ranks; or the error of one of them, on all."""
        if failure is not None:
            report = replace(report, failure=_told(failure, self._where))
        try:
            return agree_on_step(self._all_ranks, report, [])
        except (PeerLost, PeerStalled):
            if failure is not None:  # it came first, and may be why
                raise failure from None
            raise
        except ThinwireError as error:
            raise error from failure

    def _blaming(self, report: Report) -> Report:
        """The report of a rank whose stage drops the step: its own gradient, or that of another
        replica.
        """
        gradients = self._exchanging.gradients
        assert gradients is not None, "it has exchanged"
        culprit = gradients.drops.culprit
        assert culprit is not None, "no loss scale has dropped it"
        replica, place, added = culprit
        index = self._names.index(gradients.names[place])
        if replica == self._replica and not added:
            return replace(report, non_finite=index)
        return replace(report, sum_non_finite=index)

    def _forget(self) -> None:
        """Of a step that is not applied, though this stage could have."""
        if (gradients := self._exchanging.gradients) is not None:
            gradients.forget()

    def require_equal(self, step: int) -> None:
        with self._all_ranks.uncounted():  # no exchange of an update
            _, failure = _tried(lambda: self._inner.require_equal(step))
            self._heard(Report(step, COMPARING), failure)

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self._inner.state_dict(),
            "dropped": self._drops.total,
            "in a row": self._drops.in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._inner.load_state_dict(state["inner"])
        self._drops.total, self._drops.in_a_row = state["dropped"], state["in a row"]


def _tried(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """What it returned, and its error; where a rank is lost, there is nobody to agree with."""
    try:
        return call(), None
    except (PeerLost, PeerStalled):
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        return None, error


def _told(error: Exception, where: str) -> tuple[str, str]:
    """Name and text of an error, for other stages."""
    kind = type(error).__name__
    named = "" if isinstance(error, ThinwireError) else f"{kind}: "
    return kind, f"{where}: {named}{error}"


def _where(grid: Grid) -> str:
    """Which stage this is; errors count its replicas, not ranks."""
    ranks = [replica * grid.stages + grid.stage for replica in range(grid.replicas)]
    stage = f"stage {grid.stage + 1} of {grid.stages}"
    if len(ranks) == 1:
        return f"{stage}, on rank {ranks[0]}, the only one that is counted here"
    return f"{stage}, whose ranks {ranks} are counted from 0 here"
