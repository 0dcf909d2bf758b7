"""Whether memory still holds what it should: a digest of what ranks hold alike rides in agreements,
a slice of the model at a time; what only this rank holds is compared with what was last written.
"""

import hashlib
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Group, mapping_of
from thinwire.core.checksum import checksum, word_sums
from thinwire.core.sharded import shard_of
from thinwire.errors import Diverged

__all__ = [
    "DIGEST_EVERY",
    "OwnState",
    "RollingDigest",
    "Watched",
    "optimizer_state",
]

DIGEST_EVERY = 64
_FADING_EVERY = 8
"""Updates in which all moments are seen. To read all of them in each took 8 % of a dense step of 3
million parameters on a CPU."""
_WHOLE = 1 << 16
"""Bytes; a smaller tensor is never cut."""

Watched = Mapping[str, Tensor]
"""Tensors by what they are called in errors, such as "parameter 0.weight"; the same names and order
on all ranks."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of one tensor; all of it where `stop` is None."""

    name: str
    start: int = 0
    stop: int | None = None

    def __str__(self) -> str:
        return self.name if self.stop is None else f"{self.name}[{self.start}:{self.stop}]"

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.stop is None else tensor[self.start : self.stop]


class _Rolling:
    """Tensors of which every turn reads one slice: a run of bytes, cut between rows of the first
    dimension.

    Args:
        tensors: Gives them; asked at every turn.
        every: Turns in which all are seen, >= 1.
    """

    def __init__(self, tensors: Callable[[], Watched], every: int) -> None:
        self._tensors, self._every = tensors, every
        self._layout: list[tuple[str, torch.Size]] = []
        self._slices: list[list[_Piece]] = [[]] * every
        self.pieces: Sequence[_Piece] = ()
        """Of the last turn."""

    def read(self, turn: int) -> list[Tensor]:
        """The slice of this turn."""
        tensors = self.whole()
        self.pieces = self._slices[turn % self._every]
        return [piece.of(tensors[piece.name]) for piece in self.pieces]

    def everything(self) -> Iterator[tuple[_Piece, Tensor]]:
        """All slices."""
        tensors = self.whole()
        return ((p, p.of(tensors[p.name])) for pieces in self._slices for p in pieces)

    def whole(self) -> dict[str, Tensor]:
        """Without those that are not dense, or hold nothing."""
        tensors = {
            name: tensor
            for name, tensor in self._tensors().items()
            if tensor.layout is torch.strided and tensor.numel()
        }
        layout = [(name, tensor.shape) for name, tensor in tensors.items()]
        if layout != self._layout:
            self._layout = layout
            self._divide(tensors)
        return tensors

    def _divide(self, tensors: Watched) -> None:
        total = sum(tensor.nbytes for tensor in tensors.values())
        length = max(1, math.ceil(total / self._every))
        self._slices = [[] for _ in range(self._every)]
        at = 0
        for name, tensor in tensors.items():
            for piece, nbytes in _pieces(name, tensor, length):
                self._slices[min(at // length, self._every - 1)].append(piece)
                at += nbytes


class RollingDigest:
    """Compares what all ranks must hold alike, within `every` updates all of it.

    The digest of an update covers one slice of `lasting`, and a larger one of `fading`. What
    differs is looked for only once a digest did.

    Args:
        lasting: Gives the tensors in which a difference stays: parameters, or this rank's shards of
            them. Asked at every update.
        fading: Gives those in which one may fade, all of which is seen within 8 updates: moments.
        every: Updates in which all of `lasting` is seen, >= 1.

    Communication: none but the digest, which `agree_on_step` compares; where it differs, `explain`
    gathers 8 bytes and a name per piece.
    """

    def __init__(
        self, lasting: Callable[[], Watched], fading: Callable[[], Watched], *, every: int
    ) -> None:
        self._parts = _Rolling(lasting, every), _Rolling(fading, min(every, _FADING_EVERY))
        self._good: dict[str, int] = {}
        self._since = 0

    def at(self, step: int, turn: int | None = None) -> str:
        """The digest for the agreement of this update, in hexadecimal digits.

        Args:
            step: Updates made before.
            turn: Counts the digests, where not every update has one.
        """
        turn = step if turn is None else turn
        return f"{checksum([piece for part in self._parts for piece in part.read(turn)]):016x}"

    def agreed(self, step: int) -> None:
        """All ranks have given the same digest for this update."""
        self._good.update((str(piece), step) for part in self._parts for piece in part.pieces)

    def start_from(self, step: int) -> None:
        """Take all ranks for equal after this update: all of it has been compared, or loaded."""
        self._good.clear()
        self._since = step

    def require_equal(self, group: Group, step: int) -> None:
        """Compare everything at once.

        Raises:
            Diverged: On every rank.

        Communication: 24 bytes a rank where all are equal.
        """
        everything = [tensor for part in self._parts for tensor in part.whole().values()]
        mine = f"{checksum(everything):016x}".encode()
        if group.shards is not None:
            shards = group.shards.gather_now(mine, f"comparing shards at step {step}")
            mine = hashlib.blake2b(b"".join(shards), digest_size=8).hexdigest().encode()
        answers = group.gather_bytes(mine, what=f"comparing replicas at step {step}")
        if any(answer != mine for answer in answers):
            self.explain(group, step)
        self.start_from(step)

    def explain(self, group: Group, step: int) -> None:
        """Find out what differs.

        Raises:
            Diverged: On every rank, with the same text.
        """
        text = self._difference(group, group.replicas, step)
        if group.replicas is not None:
            found = group.gather_bytes(text.encode(), what=f"telling what differs at step {step}")
            shard, text = next(((r, t.decode()) for r, t in enumerate(found) if t), (0, ""))
            text = text and f"in the shard of rank {shard}: {text}"
        if text:
            raise Diverged(text)
        raise Diverged(
            f"step {step}: the digests of the ranks differ, and no tensor does: memory changed "
            "while it was compared. Nothing of this update was applied; restart from the last "
            "checkpoint"
        )

    def _difference(self, ranks: Group, sites: Group | None, step: int) -> str:
        """What differs between these ranks, or sites, in words; empty where nothing does."""
        group = ranks if sites is None else sites
        pieces = [each for part in self._parts for each in part.everything()]
        mine = {str(piece): f"{checksum([tensor]):016x}" for piece, tensor in pieces}
        answers = group.gather_bytes(
            json.dumps(mine).encode(), what=f"looking for what differs at step {step}"
        )
        rows = [mapping_of(answer) for answer in answers]
        places = {str(piece): piece.name for piece, _ in pieces}
        for place in dict.fromkeys(key for row in rows for key in row):
            held = [row.get(place) for row in rows]
            if len(set(held)) > 1:
                who = "rank" if sites is None else "site"
                since = self._good.get(place, self._since)
                return _text(places.get(place, place), held, since, step, who)
        return ""


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> dict[str, Tensor]:
    """Tensors of an optimizer that updates every rank's replica alike, by key and parameter.

    None of optimizers that are neither torch's nor this library's: theirs may differ from rank to
    rank by design.
    """
    home = type(optimizer).__module__
    if not home.startswith(("torch.optim.", "thinwire.")):
        return {}
    return {
        f"{key} of {name}": shard_of(value)
        for param, name in names.items()
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and key != "step"
    }


def _pieces(name: str, tensor: Tensor, length: int) -> Iterator[tuple[_Piece, int]]:
    """Runs of rows of about `length` bytes each, and their bytes."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row_bytes = tensor.nbytes // max(rows, 1)
    # by eights, so that a piece can be read as 64-bit words wherever its tensor can
    step = max(8, length // max(row_bytes, 1) // 8 * 8)
    if tensor.nbytes <= max(_WHOLE, length) or step >= rows:
        yield _Piece(name), tensor.nbytes
        return
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield _Piece(name, start, stop), (stop - start) * row_bytes


def _text(name: str, held: Sequence[object], since: int, step: int, kind: str) -> str:
    """What to tell of a tensor of which each rank, or site, gave a checksum, or None where it has
    none.
    """
    (most, count), *_ = Counter(held).most_common()
    odd = [rank for rank, each in enumerate(held) if each != most]
    if 2 * count > len(held):
        names = ", ".join(map(str, odd))
        who = f"{kind} {names} differ{'s' if len(odd) == 1 else ''} from the others"
    else:
        who = (
            f"{kind}s "
            + " and ".join(str(rank) for rank in range(len(held)))
            + " do not hold the same"
        )
    return (
        f"step {step}: {name}: {who}. It happened between update {since} and update {step}. What "
        "all ranks must hold alike was changed on some of them only, by the script or by a fault "
        f"of memory or processor. Nothing of update {step + 1} was applied; restart from the last "
        "checkpoint"
    )


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

    def start_anew(self) -> None:
        """All of it has been loaded: what was found before is gone with it."""
        self._seals.clear()
        self._found = None

    def damage(self, step: int, *, everything: bool = False) -> str | None:
        """What has changed since, in words, or None.

        Args:
            step: Updates made.
            everything: Whether to read what loops have summed too.
        """
        if self._found is not None:
            return self._found
        if not everything and all(seal.by_loop for seal in self._seals.values()):
            return None
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
