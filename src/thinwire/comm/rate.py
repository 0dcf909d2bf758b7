"""What a rank's line carries, from exchanges that were waited for anyway."""

__all__ = ["Rate"]

_LEAST_BYTES, _SEEN_S = 2**16, 1e-4
_KEPT = 0.95
"""Of the mean so far at each exchange: it is that of about the last 20."""


class Rate:
    """A moving mean of the payload that this rank sends while an exchange is under way.

    Only exchanges whose end this rank has seen count, since it was blocked until then, and only
    those of 64 KiB and more. Waiting for ranks that come late is in it.
    """

    def __init__(self) -> None:
        self._bytes = self._s = self._until_s = 0.0

    @property
    def bit_s(self) -> float:
        """Bits in a second; 0 before the first exchange that counts."""
        return 8 * self._bytes / self._s if self._s else 0.0

    def ended(self, nbytes: float, launched_s: float, waits_s: float, now_s: float) -> None:
        """An exchange is over.

        Args:
            nbytes: What this rank has put on the wire for it.
            launched_s: When it was launched, by the clock of the other two.
            waits_s: When this rank began to wait for its end.
            now_s: When the wait was over.
        """
        if nbytes < _LEAST_BYTES or now_s - waits_s < _SEEN_S:
            return
        seconds = now_s - max(launched_s, self._until_s)
        self._until_s = now_s
        self._bytes = _KEPT * self._bytes + nbytes
        self._s = _KEPT * self._s + seconds
