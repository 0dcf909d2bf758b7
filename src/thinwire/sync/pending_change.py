"""The driver of a compression of changes: launches what it asks for and hands it the answers."""

from torch import Tensor

from thinwire.comm import Group, Pending
from thinwire.core.checksum import checksum
from thinwire.sync.change_protocol import AllGather, AllReduce, MeanChange, Sending

__all__ = ["PendingChange"]


class PendingChange:
    """The collectives of one averaging: the first is launched at once, each other one in `finish` when one has come.

    Args:
        group: The ranks.
        sending: The same collectives on all of them.
        what: The averaging, for errors.
    """

    def __init__(self, group: Group, sending: Sending, what: str) -> None:
        self._group, self._sending, self._what = group, sending, what
        self._digest = 0
        self._request = next(sending)
        self._pending = self._launched()

    def finish(self) -> MeanChange:
        """Wait for the answers.

        Raises:
            PayloadCorrupt: A message is damaged or belongs elsewhere; names its source.
            PeerLost, PeerStalled: See `Group`.
        """
        while True:
            answer = self._pending.wait()
            if isinstance(self._request, AllReduce) and self._group.size > 1:
                self._digest = (self._digest * 1_000_003 + checksum([answer])) % (1 << 64)
            try:
                self._request = self._sending.send(answer)
            except StopIteration as end:
                mean: MeanChange = end.value
                return mean
            self._pending = self._launched()

    @property
    def digest(self) -> int:
        """Of the sums that have arrived, which are the same on all ranks; 0 without any."""
        return self._digest

    def _launched(self) -> Pending[Tensor]:
        if isinstance(self._request, AllGather):
            return self._group.gather(self._request.message, what=f"gathering changes, {self._what}")
        return self._group.sum_(self._request.buffer, what=f"adding up changes, {self._what}")
