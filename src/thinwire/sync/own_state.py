"""State that only this rank holds cannot be compared over ranks: its memory is compared with what was last written."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.core.checksum import word_sums

__all__ = ["OwnState"]


@dataclass(frozen=True, slots=True)
class _Seal:
    tensor: "weakref.ref[Tensor]"
    version: int
    words: int

    def holds_for(self, tensor: Tensor) -> bool:
        """Whether nobody has written to it, or put another in its place, in a way that torch counts."""
        return self.tensor() is tensor and tensor._version == self.version


class OwnState:
    """Checksums of this rank's own state, taken when the library last wrote it and compared before it is used again.

    What the user changes on purpose, by `load_state_dict` or in place, raises the version that torch keeps of every
    tensor, and is taken as it is.

    Args:
        tensors: Gives the state, by names for errors.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._tensors = tensors
        self._seals: dict[str, _Seal] = {}
        self._step = 0

    def seal(self, step: int) -> None:
        """The library has written what there is, in the update after which there were `step`."""
        now = self._tensors()
        sums = _sums(list(now.values()))
        self._seals = {
            name: _Seal(weakref.ref(tensor), tensor._version, words)
            for (name, tensor), words in zip(now.items(), sums, strict=True)
        }
        self._step = step

    def damage(self, step: int) -> str | None:
        """What has changed since, in words, or None."""
        now = self._tensors()
        kept = {n: t for n, t in now.items() if n in self._seals and self._seals[n].holds_for(t)}
        for name, words in zip(kept, _sums(list(kept.values())), strict=True):
            if words != self._seals[name].words:
                return (
                    f"{name} changed in memory between update {self._step} and update {step}, and neither the library "
                    "nor torch wrote it: a fault of memory, or a write through another view of it. Restart from the "
                    "last checkpoint"
                )
        return None


def _sums(tensors: list[Tensor]) -> list[int]:
    found: dict[int, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        found.update(zip(places, word_sums([tensors[place] for place in places]), strict=True))
    return [found[place] for place in range(len(tensors))]
