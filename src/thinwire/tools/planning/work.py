"""The model and its step, as far as an exchange sees them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt

__all__ = ["Work", "matrices", "numel_of"]

Shape = tuple[int, ...]
_MOST_MATRICES, _LEAST_NUMEL = 48, 2**18
_FORWARD_SHARE = 1 / 3
"""Of a step; the backward pass computes two products for each one of the forward pass."""


@dataclass(frozen=True)
class Work:
    """What one rank computes between two exchanges.

    Attributes:
        numel: Trainable numbers.
        shapes: Of the parameters, in the order of the forward pass.
        step_s: Seconds of forward pass, backward pass and update, with nothing exchanged.
        cuda: Whether a GPU computes.
        forward: Seconds until the backward pass begins; None for a third of the step.
        ready_s: Second of the step at which each gradient is ready, in the order of `shapes`; None
            where the backward pass takes time as there are numbers.
        muon_s: What an update by Muon takes longer; None where it was not measured, and counts for
            nothing.
        muon_numel: Numbers that Muon would train, AdamW the rest; None where that is not known.
        width: Bytes of a gradient's number, the mean over all.
        assumed: Whether the shapes are ours, for a number of parameters.
    """

    numel: int
    shapes: tuple[Shape, ...]
    step_s: float
    cuda: bool = False
    forward: float | None = None
    ready_s: tuple[float, ...] | None = None
    muon_s: float | None = None
    muon_numel: int | None = None
    width: float = 4.0
    assumed: bool = False

    def by(self, optimizer: str | None) -> "Work":
        """With an update by the optimizer that a strategy brings along; None for the task's own."""
        if optimizer != "muon" or self.muon_s is None:
            return self
        return replace(self, step_s=self.step_s + self.muon_s)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Entries of each parameter."""
        return tuple(map(numel_of, self.shapes))

    @property
    def forward_s(self) -> float:
        """Until the backward pass begins."""
        return self.step_s * _FORWARD_SHARE if self.forward is None else self.forward

    def buckets(self, first_bytes: int, bucket_bytes: int) -> Iterator[tuple[float, list[Shape]]]:
        """The tensors that leave together, and the second of the step at which they are ready.

        Gradients come from the last parameter to the first.
        """
        limit, mine, nbytes, latest = first_bytes, list[Shape](), 0, 0.0
        backward = zip(
            reversed(self.shapes), reversed(self.numels), reversed(self._ready()), strict=True
        )
        for shape, numel, ready_s in backward:
            mine.append(shape)
            nbytes += 4 * numel
            latest = max(latest, ready_s)
            if nbytes >= limit:
                yield latest, mine
                limit, mine, nbytes = bucket_bytes, [], 0
        if mine:
            yield latest, mine

    def _ready(self) -> tuple[float, ...]:
        if self.ready_s is not None:
            return self.ready_s
        begin, done, found = self.forward_s, 0, []
        whole = sum(self.numels)
        for numel in reversed(self.numels):
            done += numel
            found.append(begin + (self.step_s - begin) * done / whole)
        return tuple(reversed(found))


def numel_of(shape: Shape) -> int:
    """Entries of a tensor."""
    product = 1
    for side in shape:
        product *= side
    return product


def matrices(params: int) -> tuple[Shape, ...]:
    """Shapes of a model of which only the number of parameters is known: up to 48 equal matrices.

    More parameters never make fewer or smaller ones.
    """
    count = min(_MOST_MATRICES, max(1, params // _LEAST_NUMEL))
    columns = max(1, isqrt(params // count))
    rows, over = divmod(params // columns, count)
    return tuple((rows + (i < over), columns) for i in range(count) if rows + (i < over))
