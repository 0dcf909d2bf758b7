"""Muon on sharded matrices: one rank, the owner, holds each matrix whole to orthogonalise it."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.comm import Group, Pending, require_agreement
from thinwire.comm.waiting import progressed
from thinwire.core.checksum import bit_sums
from thinwire.core.muon import (
    MuonRule,
    accumulate_,
    descend_,
    direction,
    muon_,
    newton_schulz,
    products,
)
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.errors import PayloadCorrupt
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
    the result, in the type of the iteration. In the end sums of all bits.
    Failure: `Mismatch` on all ranks if their matrices differ, `PayloadCorrupt` if a part arrives
    damaged; `PeerLost` or `PeerStalled` within the time-out of the ranks' process group.
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
        moves: list[tuple[Matrix, Tensor]] = []
        sums: dict[ProcessGroup, list[Tensor]] = {ranks: [] for ranks in descriptions}
        for (ranks, dim, *_), some in by_kind.items():
            moves += _updates(self._groups[ranks], dim, some, sums[ranks])
        for ranks, some_sums in sums.items():
            _require_intact(self._groups[ranks], some_sums)
        # all ranks have verified all parts: only now does any state change
        for m, part in moves:
            accumulate_(shard_of(m.momentum_buffer), shard_of(m.grad), m.rule)
            descend_(shard_of(m.param), part, m.param.shape, m.lr, m.rule)
        for m, cut in cuts:
            if cut is None:
                param, grad, buffer = map(shard_of, (m.param, m.grad, m.momentum_buffer))
                muon_(param, grad, buffer, m.lr, m.rule)


def _updates(
    group: Group, dim: int, matrices: Sequence[Matrix], sums: list[Tensor]
) -> list[tuple[Matrix, Tensor]]:
    """Return matrices of one type and sharding, each with this rank's part of its update; add the
    sums of the bits that have travelled.
    """
    costs = [products(matrix.param.shape) for matrix in matrices]
    moves: list[tuple[Matrix, Tensor]] = []
    rounds = [
        _round(group, dim, [None if i is None else matrices[i] for i in owned], moves, sums)
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
    return moves


def _require_intact(group: Group, sums: Sequence[Tensor]) -> None:
    """Raise on all ranks unless each has received what the others have sent.

    Communication: 16 bytes for each rank, gathered from all.
    """
    own = torch.stack(list(sums)).sum(0).cpu()
    rows = group.gather_now(own.numpy().tobytes(), "comparing matrices that Muon moved")
    tables = [torch.frombuffer(bytearray(row), dtype=torch.int64).view_as(own) for row in rows]
    sent, received = torch.stack(tables).unbind(1)
    for source, rank in (sent != received.T).nonzero().tolist():
        raise PayloadCorrupt(
            f"rank {rank} refused parts of matrices from rank {source} that Muon updates: "
            "bits were damaged on their way. None of the ranks that share these matrices has "
            "updated a parameter; restart from the last checkpoint"
        )


def _round(
    group: Group,
    dim: int,
    owned: Sequence[Matrix | None],
    moves: list[tuple[Matrix, Tensor]],
    sums: list[Tensor],
) -> Iterator[None]:
    """Compute one update of each owner; yield after its shards, and after the results, are sent."""
    own, some = owned[group.rank], [matrix for matrix in owned if matrix is not None]
    shapes = [[] if matrix is None else matrix.shards(dim, group.size) for matrix in owned]
    numels = [[prod(shape) for shape in row] or [0] * group.size for row in shapes]
    empty = shard_of(some[0].grad).new_empty(0)
    shards = (_direction(shard_of(m.grad), shard_of(m.momentum_buffer), m.rule) for m in some)
    coming = _all_to_all(group, [empty, *shards], list(zip(*numels, strict=True)), sums)
    yield
    results = [empty.to(some[0].rule.dtype)]
    if own is None:
        coming.wait()
    else:
        results += _orthogonal(own.rule, coming.wait(), shapes[group.rank], dim)
    del coming  # free its buffer before the results are sent
    going = _all_to_all(group, results, numels, sums)
    del results
    yield
    for matrix, update, row in zip(owned, going.wait(), shapes, strict=True):
        if matrix is not None:
            moves.append((matrix, update.view(row[group.rank])))


def _direction(grad: Tensor, momentum_buffer: Tensor, rule: MuonRule) -> Tensor:
    return direction(grad, accumulate_(momentum_buffer.clone(), grad, rule), rule)


def _orthogonal(
    rule: MuonRule, shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dim: int
) -> Sequence[Tensor]:
    """Return the shards of the orthogonalised matrix, from the shards of one matrix."""
    whole = torch.cat([shard.view(to) for shard, to in zip(shards, shapes, strict=True)], dim)
    result = newton_schulz(whole.flatten(1), rule).reshape(whole.shape)
    return torch.split(result, [shape[dim] for shape in shapes], dim)


def _all_to_all(
    group: Group, parts: Sequence[Tensor], numels: Sequence[Sequence[int]], sums: list[Tensor]
) -> Pending[list[Tensor]]:
    """Launch an all-to-all of parts; `numels` are by sender and then by receiver.

    Appends to `sums` those of the bits sent to each rank and received from each, (2, ranks).
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    sent = torch.stack(bit_sums(torch.split(flat, list(numels[group.rank]))))
    dtype, lengths = flat.dtype, [[n * flat.itemsize for n in row] for row in numels]
    pending = group.swap(flat.view(torch.uint8), lengths, action="moving matrices of Muon")

    def received() -> list[Tensor]:
        shards = pending.wait().view(dtype)
        progressed()
        split = list(torch.split(shards, [row[group.rank] for row in numels]))
        sums.append(torch.stack([sent, torch.stack(bit_sums(split))]))
        return split

    return Pending(received)
