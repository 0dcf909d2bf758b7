"""State that only this rank holds cannot be compared over ranks: its memory is compared with what
was last written.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from thinwire.core.checksum import word_sums

__all__ = ["OwnState"]


_Sums = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Seal:
    tensor: "weakref.ref[Tensor]"
    version: int
    words: int
    by_loop: bool

    def holds_for(self, tensor: Tensor) -> bool:
        """Whether nobody has written to it, or put another in its place, in a way that torch
        counts.
        """
        return self.tensor() is tensor and tensor._version == self.version


class OwnState:
    """Checksums of this rank's own state, taken when the library last wrote it and compared when it
    is used again.

    State that a compressed exchange changes is summed by the loops that change it: they say what
    they found, which `damage` tells in the agreement of the next update, and what they left. All
    other state is read for it.

    What the user changes on purpose, by `load_state_dict` or in place, raises the version that
    torch keeps of every tensor, and is taken as it is.

    Args:
        tensors: Gives the state, by names for errors.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._tensors = tensors
        self._seals: dict[str, _Seal] = {}
        self._found: str | None = None
        self._step = 0

    def expected(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """The sums that a loop must find that is about to change these; without those that the user
        has changed.
        """
        seals = {name: self._seals.get(name) for name in tensors}
        return {n: s.words for n, s in seals.items() if s is not None and s.holds_for(tensors[n])}

    def changed(
        self, step: int, tensors: Mapping[str, Tensor], expected: Mapping[str, int], sums: _Sums
    ) -> None:
        """A loop has changed these, in the update after which there are `step`.

        Args:
            step: Updates, this one included.
            tensors: What it changed.
            expected: What `expected` gave before.
            sums: Of each what it found, and what it left.
        """
        for name, tensor in tensors.items():
            found, left = sums[name]
            if found != expected.get(name, found) and self._found is None:
                self._found = self._told(name, step - 1)
            self._seals[name] = _Seal(weakref.ref(tensor), tensor._version, left, by_loop=True)
        self._step = step

    def seal(self, step: int) -> None:
        """The library has written what no loop has summed, in the update after which there are
        `step`.
        """
        now = self._tensors()
        loose = {
            n: t for n, t in now.items() if n not in self._seals or not self._seals[n].holds_for(t)
        }
        loose |= {n: t for n, t in now.items() if n in self._seals and not self._seals[n].by_loop}
        for (name, tensor), words in zip(loose.items(), _sums(list(loose.values())), strict=True):
            self._seals[name] = _Seal(weakref.ref(tensor), tensor._version, words, by_loop=False)
        self._step = step

    def damage(self, step: int, *, everything: bool = False) -> str | None:
        """What has changed since, in words, or None.

        Args:
            step: Updates made.
            everything: Whether to read what loops have summed too.
        """
        if self._found is not None:
            return self._found
        now = self._tensors()
        seals = {name: self._seals.get(name) for name in now}
        kept = {
            name: (now[name], seal.words)
            for name, seal in seals.items()
            if seal is not None and (everything or not seal.by_loop) and seal.holds_for(now[name])
        }
        for (name, (_, sealed)), words in zip(
            kept.items(), _sums([t for t, _ in kept.values()]), strict=True
        ):
            if words != sealed:
                return self._told(name, step)
        return None

    def _told(self, name: str, step: int) -> str:
        return (
            f"{name} changed in memory between update {self._step} and update {step + 1}, and "
            "neither the library nor torch wrote it: a fault of memory, or a write through another "
            "view of it. Restart from the last checkpoint"
        )


def _sums(tensors: list[Tensor]) -> list[int]:
    found: dict[int, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        found.update(zip(places, word_sums([tensors[place] for place in places]), strict=True))
    return [found[place] for place in range(len(tensors))]
