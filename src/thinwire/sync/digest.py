"""Whether ranks that must hold the same still do: a digest that rides in agreements, a slice of the
model at a time.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Group, mapping_of
from thinwire.core.checksum import checksum
from thinwire.errors import Diverged

__all__ = ["DIGEST_EVERY", "RollingDigest", "Watched", "optimizer_state"]

DIGEST_EVERY = 64
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


class RollingDigest:
    """Compares what all ranks must hold alike, within `every` updates all of it.

    The digest of update s covers slice s mod `every` of `slowly`, and all of `at_once`. A slice is
    a run of bytes of the model, cut between rows of the first dimension. What differs is looked for
    only once a digest did.

    Args:
        slowly: Gives the tensors in which a difference stays: parameters. Asked at every update;
            sharded ones, whose ranks hold different parts, are left out.
        at_once: Gives those in which one may fade: moments.
        every: Updates in which all of `slowly` is seen, >= 1.

    Communication: none but the digest, which `agree_on_step` compares; where it differs, `explain`
    gathers 8 bytes and a name per piece.
    """

    def __init__(
        self, slowly: Callable[[], Watched], at_once: Callable[[], Watched], *, every: int
    ) -> None:
        self._slowly, self._at_once, self._every = slowly, at_once, every
        self._layout: list[tuple[str, torch.Size]] = []
        self._slices: list[list[_Piece]] = [[]] * every
        self._good: dict[str, int] = {}
        self._whole = self._since = self._slice = 0

    def at(self, step: int, turn: int | None = None) -> str:
        """The digest for the agreement of this update, in hexadecimal digits.

        Args:
            step: Updates made before.
            turn: Counts the digests, where not every update has one.
        """
        self._slice = (step if turn is None else turn) % self._every
        slowly = _whole_ones(self._slowly())
        self._cut(slowly)
        pieces = [piece.of(slowly[piece.name]) for piece in self._slices[self._slice]]
        return f"{checksum([*pieces, *_whole_ones(self._at_once()).values()]):016x}"

    def agreed(self, step: int) -> None:
        """All ranks have given the same digest for this update."""
        self._good.update((str(piece), step) for piece in self._slices[self._slice])
        self._whole = step

    def start_from(self, step: int) -> None:
        """Take all ranks for equal after this update: all of it has been compared, or loaded."""
        self._good.clear()
        self._since = self._whole = step

    def require_equal(self, group: Group, step: int) -> None:
        """Compare everything at once.

        Raises:
            Diverged: On every rank.

        Communication: 24 bytes a rank where all are equal.
        """
        everything = {**_whole_ones(self._slowly()), **_whole_ones(self._at_once())}
        mine = f"{checksum(list(everything.values())):016x}".encode()
        answers = group.gather_bytes(mine, what=f"comparing replicas at step {step}")
        if any(answer != mine for answer in answers):
            self.explain(group, step)
        self._good.clear()
        self._since = self._whole = step

    def explain(self, group: Group, step: int) -> None:
        """Find out what differs.

        Raises:
            Diverged: On every rank, with the same text.
        """
        slowly, at_once = _whole_ones(self._slowly()), _whole_ones(self._at_once())
        self._cut(slowly)
        pieces = [(piece, slowly[piece.name]) for each in self._slices for piece in each]
        pieces += [(_Piece(name), tensor) for name, tensor in at_once.items()]
        mine = {str(piece): f"{checksum([piece.of(tensor)]):016x}" for piece, tensor in pieces}
        answers = group.gather_bytes(
            json.dumps(mine).encode(), what=f"looking for what differs at step {step}"
        )
        rows = [mapping_of(answer) for answer in answers]
        places = {str(piece): piece.name for piece, _ in pieces}
        for place in dict.fromkeys(key for row in rows for key in row):
            held = [row.get(place) for row in rows]
            if len(set(held)) > 1:
                name = places.get(place, place)
                since = self._whole if name in at_once else self._good.get(place, self._since)
                raise Diverged(_text(name, held, since, step))
        raise Diverged(
            f"step {step}: the digests of the ranks differ, and no tensor does: memory changed "
            "while it was compared. Nothing of this update was applied; restart from the last "
            "checkpoint"
        )

    def _cut(self, slowly: Watched) -> None:
        layout = [(name, tensor.shape) for name, tensor in slowly.items()]
        if layout == self._layout:
            return
        total = sum(tensor.nbytes for tensor in slowly.values())
        length = max(1, math.ceil(total / self._every))
        self._layout, self._slices = layout, [[] for _ in range(self._every)]
        at = 0
        for name, tensor in slowly.items():
            for piece, nbytes in _pieces(name, tensor, length):
                self._slices[min(at // length, self._every - 1)].append(piece)
                at += nbytes


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
        f"{key} of {name}": value
        for param, name in names.items()
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and key != "step"
    }


def _whole_ones(tensors: Watched) -> dict[str, Tensor]:
    """Without those of which every rank has another part, or that hold nothing."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.layout is torch.strided and tensor.numel() and not hasattr(tensor, "full_tensor")
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


def _text(name: str, held: Sequence[object], since: int, step: int) -> str:
    """What to tell of a tensor of which each rank gave a checksum, or None where it has none."""
    (most, count), *_ = Counter(held).most_common()
    odd = [rank for rank, each in enumerate(held) if each != most]
    if 2 * count > len(held):
        who = (
            f"rank {', '.join(map(str, odd))} differ{'s' if len(odd) == 1 else ''} from the others"
        )
    else:
        who = (
            "ranks "
            + " and ".join(str(rank) for rank in range(len(held)))
            + " do not hold the same"
        )
    return (
        f"step {step}: {name}: {who}. It happened between update {since} and update {step}. What "
        "all ranks must hold alike was changed on some of them only, by the script or by a fault "
        f"of memory or processor. Nothing of update {step + 1} was applied; restart from the last "
        "checkpoint"
    )
