"""Whether ranks have gradients for the same tensors step after step, so that they may send before
they have agreed.
"""

from collections.abc import Sequence

from thinwire.sync.agreement import DENSE, ROW_SPARSE

__all__ = ["Steady"]

_FIRST_PATIENCE = 2


class Steady:
    """Learns from agreed steps which tensors have a dense gradient on every rank; alike on all
    ranks.

    Whoever sends early has to know the tensors beforehand, and pays twice where they turn out to be
    others. So it takes two equal steps in a row to begin with, and twice as many after every
    disappointment.
    """

    def __init__(self) -> None:
        self.keys: frozenset[int] | None = None
        """The tensors to send early; None where nothing may be."""
        self._patience = _FIRST_PATIENCE
        self._kinds = ""
        self._equal = 0

    def see(self, kinds: Sequence[str]) -> None:
        """Look at what the ranks have agreed on in one step: per rank one letter for every
        tensor.
        """
        first = kinds[0]
        usable = all(each == first for each in kinds) and ROW_SPARSE not in first
        self._equal = self._equal + 1 if usable and first == self._kinds else int(usable)
        self._kinds = first
        if self._equal < self._patience:
            self.keys = None
        elif self.keys is None:
            self.keys = frozenset(key for key, kind in enumerate(first) if kind == DENSE)

    def lose(self) -> None:
        """A step did not have the gradients that were expected."""
        self.keys, self._equal = None, 0
        self._patience *= 2
