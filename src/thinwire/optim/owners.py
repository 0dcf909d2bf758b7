"""Muon on sharded matrices: one rank, the owner, holds each matrix whole to orthogonalise it."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.comm import Group, Pending, require_agreement, state_in_errors
from thinwire.comm.waiting import progressed
from thinwire.core.muon import MuonRule, descend_, direction_, muon_, newton_schulz, products
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.layout.owners import assign_owners, shard_lengths


class Matrix(NamedTuple):
    """A matrix to be updated."""

    label: str
    """Name of the matrix in messages."""
    param: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    lr: float
    rule: MuonRule

    def cut(self) -> tuple[ProcessGroup, int] | None:
        """Return the ranks over which it is sharded and the sharded dimension; None if it is whole
        here.

        Raises:
            ValueError: It is sharded in more than one way, or its gradient is sharded differently.
        """
        if not is_sharded(self.param):
            return None
        # it is a DTensor
        mesh: Any = self.param.device_mesh  # type: ignore[attr-defined]
        placements = self.param.placements  # type: ignore[attr-defined]
        if getattr(self.grad, "placements", None) != placements:
            raise ValueError(
                f"the gradient of {self.label} has placements "
                f"{getattr(self.grad, 'placements', 'none')} but the parameter has {placements}: "
                "run the backward pass again"
            )
        cuts = [i for i, p in enumerate(placements) if mesh.size(i) > 1 and not p.is_replicate()]
        if not cuts:
            return None
        if len(cuts) > 1 or type(placements[cuts[0]]).__name__ != "Shard":
            raise ValueError(
                f"{self.label} has placements {placements} on the mesh {mesh.mesh_dim_names} "
                f"{tuple(mesh.shape)}, but Muon needs matrices sharded along one dimension of one "
                "mesh dimension, as by fully_shard. Set 'muon' to False in the groups of the "
                "others"
            )
        return mesh.get_group(cuts[0]), placements[cuts[0]].dim

    def shards(self, dim: int, ranks: int) -> list[tuple[int, ...]]:
        """Return the shape of each rank's shard."""
        before, after = self.param.shape[:dim], self.param.shape[dim + 1 :]
        return [(*before, n, *after) for n in shard_lengths(self.param.shape[dim], ranks)]

    def description(self, dim: int) -> str:
        """Return a description that must be equal on all ranks that exchange it."""
        given, made = (str(holder.dtype)[6:] for holder in (self.grad, self.rule))
        shape = "x".join(map(str, self.param.shape))
        return f"{self.label}, {shape} cut along {dim}, {given} iterated in {made}"


_Kind = tuple[ProcessGroup, int, torch.device, torch.dtype, torch.dtype]
"""Key of matrices that travel together: ranks, sharded dimension, device and both types."""


class Owners:
    """Assign each sharded matrix an owner for its update. A matrix that is whole here is updated
    here.

    Communication: 24 bytes a rank if the matrices differ from those of the last update. For every
    matrix each rank sends its shard to the owner, in the gradient's type, and receives its shard of
    the result, in the type of the iteration.
    Failure: `Mismatch` on all ranks if their matrices differ; `PeerLost` or `PeerStalled` within
    the time-out of the ranks' process group.
    """

    def __init__(self) -> None:
        self._groups: dict[ProcessGroup, Group] = {}
        self._agreed: dict[ProcessGroup, list[str]] = {}

    def update_(self, matrices: Sequence[Matrix]) -> None:
        """Update matrices and their momentum buffers in place."""
        descriptions: dict[ProcessGroup, list[str]] = {}
        by_kind: dict[_Kind, list[Matrix]] = {}
        cuts = [(matrix, matrix.cut()) for matrix in matrices]
        for matrix, cut in cuts:
            if cut is not None:
                descriptions.setdefault(cut[0], []).append(matrix.description(cut[1]))
                kind = *cut, matrix.grad.device, matrix.grad.dtype, matrix.rule.dtype
                by_kind.setdefault(kind, []).append(matrix)
        for ranks, own in descriptions.items():
            if ranks not in self._groups:
                self._groups[ranks] = Group(ranks)
                self._groups[ranks].one_site = True
            if self._agreed.get(ranks) != own:
                purpose = "comparing the matrices that Muon updates"
                cure = "All ranks must have gradients of the same matrices, in the same order"
                facts, cures = {"matrices": own}, {"matrices": cure}
                require_agreement(self._groups[ranks], facts, action=purpose, cures=cures)
                self._agreed[ranks] = own
        for m, cut in cuts:
            if cut is None:
                param, grad, buffer = map(shard_of, (m.param, m.grad, m.momentum_buffer))
                muon_(param, grad, buffer, m.lr, m.rule)
        with state_in_errors("Some matrices may have moved on some ranks"):
            for (ranks, dim, *_), some in by_kind.items():
                _update_(self._groups[ranks], dim, some)


def _update_(group: Group, dim: int, matrices: Sequence[Matrix]) -> None:
    """Update matrices of one type and sharding, as many at once as there are ranks."""
    costs = [products(matrix.param.shape) for matrix in matrices]
    rounds = [
        _round(group, dim, [None if i is None else matrices[i] for i in owned])
        for owned in assign_owners(costs, group.size)
    ]
    try:
        for index in range(len(rounds) + 2):
            # pipeline of three rounds: send the shards of one, orthogonalise the one before, and
            # receive the results of the one before that. All ranks launch in this order, oldest
            # round last
            for one_round in reversed(rounds[max(index - 2, 0) : index + 1]):
                next(one_round, None)
    except BaseException as error:
        group.abandon(str(error))
        raise


def _round(group: Group, dim: int, owned: Sequence[Matrix | None]) -> Iterator[None]:
    """Update one matrix of each owner; yield after its shards, and after the results, are sent."""
    own, some = owned[group.rank], [matrix for matrix in owned if matrix is not None]
    shapes = [[] if matrix is None else matrix.shards(dim, group.size) for matrix in owned]
    numels = [[prod(shape) for shape in row] or [0] * group.size for row in shapes]
    empty = shard_of(some[0].grad).new_empty(0)
    shards = (direction_(shard_of(m.grad), shard_of(m.momentum_buffer), m.rule) for m in some)
    coming = _all_to_all(group, [empty, *shards], list(zip(*numels, strict=True)))
    yield
    results = [empty.to(some[0].rule.dtype)]
    if own is None:
        coming.wait()
    else:
        results += _orthogonal(own.rule, coming.wait(), shapes[group.rank], dim)
    del coming  # free its buffer before the results are sent
    going = _all_to_all(group, results, numels)
    del results
    yield
    for matrix, update, row in zip(owned, going.wait(), shapes, strict=True):
        if matrix is not None:
            part = update.view(row[group.rank])
            descend_(shard_of(matrix.param), part, matrix.param.shape, matrix.lr, matrix.rule)


def _orthogonal(
    rule: MuonRule, shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dim: int
) -> Sequence[Tensor]:
    """Return the shards of the orthogonalised matrix, from the shards of one matrix."""
    whole = torch.cat([shard.view(to) for shard, to in zip(shards, shapes, strict=True)], dim)
    result = newton_schulz(whole.flatten(1), rule).reshape(whole.shape)
    return torch.split(result, [shape[dim] for shape in shapes], dim)


def _all_to_all(
    group: Group, parts: Sequence[Tensor], numels: Sequence[Sequence[int]]
) -> Pending[list[Tensor]]:
    """Launch an all-to-all of parts; `numels` are by sender and then by receiver."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    dtype, lengths = flat.dtype, [[n * flat.itemsize for n in row] for row in numels]
    pending = group.swap(flat.view(torch.uint8), lengths, action="moving matrices of Muon")

    def received() -> list[Tensor]:
        shards = pending.wait().view(dtype)
        progressed()
        return list(torch.split(shards, [row[group.rank] for row in numels]))

    return Pending(received)
