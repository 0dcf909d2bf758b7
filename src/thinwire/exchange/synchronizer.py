"""What every exchange stands on: the ranks that agree, and what they must hold alike."""

from collections.abc import Sequence
from typing import Any, Literal

from thinwire.comm import Group, Replicas, Sources
from thinwire.core.stats import Pace
from thinwire.exchange.agreement import COMPARING, Agreement, Check
from thinwire.exchange.digest import RollingDigest, SameState
from thinwire.exchange.likeness import Likeness

__all__ = ["NO_TRAFFIC", "Synchronizer"]

NO_TRAFFIC: dict[str, Any] = {
    "bytes_sent": 0,
    "bytes_received": 0,
    "bytes_between_nodes": None,
    "wait_s": 0.0,
    "rate_bit_s": 0.0,
    "waiting_share": 0.0,
}
"""Before the first exchange; see `Synchronizer.traffic`."""


class Synchronizer:
    """Base of the two exchanges: `GradientExchange`, in every update, and `Averager`, now and then.

    Both take the same way: measure what this rank would send, agree that it may be sent, send,
    verify what came, agree that all is well, and only then change parameters and state.

    Args:
        group: The ranks that agree.
        sources: Those who count as one each in what is exchanged.
        what: What is exchanged.
        before: Checks that judge before all others.
        after: Checks that judge after all others.
    """

    def __init__(
        self,
        group: Group,
        sources: Sources,
        *,
        what: Literal["gradients", "changes"],
        before: Sequence[Check] = (),
        after: Sequence[Check] = (),
    ) -> None:
        self.group, self.sources = group, sources
        exchanging = getattr(sources, "all_ranks", sources)
        # sources count the agreements of sites, and their own
        apart = exchanging is not group and not isinstance(sources, Replicas)
        self._votes = group if apart else None
        self.likeness = Likeness(what)
        self.agreement = Agreement(group, [*before, self.likeness, *after])
        self._after = len(after)
        self.pace = Pace()
        self.same: SameState | None = None
        """Compares what all ranks must hold alike; None where nothing is compared."""
        self.bytes_of_others = 0
        """What a DistributedDataParallel model that averages besides has sent, since it was found.
        """
        self._received_before, self._waited_before = 0, 0.0
        self.count_from(0)

    def add_check(self, check: Check) -> None:
        """Let all agreements have one more, which judges after those that were added before."""
        checks = self.agreement.checks
        checks.insert(len(checks) - self._after, check)

    def watch(self, digest: RollingDigest | None, identity: str) -> None:
        """Have what all ranks must hold alike compared at every step.

        Args:
            digest: Of it; None to compare nothing.
            identity: Which of the engines and optimizers over these ranks this is.
        """
        self.agreement.engine = identity
        if self.same is not None:
            self.agreement.checks.remove(self.same)
        alone = self.group.size == 1 and self.group.stays
        self.same = None if digest is None or alone else SameState(digest)
        if self.same is not None:
            self.add_check(self.same)

    def require_equal(self, step: int) -> None:
        """Compare everything that all ranks must hold alike.

        Raises:
            Diverged: On every rank.
            Mismatch: Ranks are at different places.

        Communication: 24 bytes a rank, twice.
        """
        if self.same is None:
            return
        with self.group.uncounted():  # no exchange of an update
            self.agreement(step, COMPARING, first=False)
            if self.group.size > 1:
                self.same.digest.require_equal(self.agreement, step)

    def count_from(self, bytes_sent: int) -> None:
        """So many bytes were sent until now, in runs before this one."""
        self._bytes_before = bytes_sent - self._bytes_given

    def start_counting(self) -> None:
        """What was exchanged until now was for the start."""
        self.count_from(0)
        self._received_before, self._waited_before = self._bytes_received, self._wait_s

    def count_start(self) -> None:
        """What was exchanged until now counts too."""
        self._bytes_before = 0

    @property
    def bytes_sent(self) -> int:
        """What this rank gave, with headers and agreements; in runs before this one too."""
        return self._bytes_before + self._bytes_given

    @property
    def wait_s(self) -> float:
        """Seconds for which this rank was blocked by others."""
        return self._wait_s - self._waited_before

    def traffic(self) -> dict[str, Any]:
        """What this rank has exchanged, under the names of `thinwire.core.stats.numbers`."""
        votes, between = self._votes, None
        if not isinstance(self.sources, Group):
            between = self.sources.bytes_between_nodes + (votes.bytes_sent if votes else 0)
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self._bytes_received - self._received_before,
            "bytes_between_nodes": between,
            "wait_s": self.wait_s,
            "rate_bit_s": self.sources.rate_bit_s,
            "waiting_share": self.pace.waiting_share,
        }

    @property
    def _bytes_given(self) -> int:
        votes = self._votes.bytes_sent if self._votes else 0
        return self.sources.bytes_sent + votes + self.bytes_of_others

    @property
    def _bytes_received(self) -> int:
        return self.sources.bytes_received + (self._votes.bytes_received if self._votes else 0)

    @property
    def _wait_s(self) -> float:
        return self.sources.wait_s + (self._votes.wait_s if self._votes else 0.0)
