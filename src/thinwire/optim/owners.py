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
from thinwire.core.muon import MuonRule, descend_, direction, muon_, newton_schulz, products
from thinwire.core.sharded import is_sharded, shard_of
from thinwire.errors import PayloadCorrupt
from thinwire.layout.shares import assign_owners, shard_lengths


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
        """Return the ranks and the dimension over which it is sharded; None if it is whole here."""
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

    def here(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's parts of the parameter, the gradient and the buffer."""
        return shard_of(self.param), shard_of(self.grad), shard_of(self.momentum_buffer)

    def shards(self, dim: int, ranks: int) -> list[tuple[int, ...]]:
        """Return the shape of each rank's shard."""
        before, after = self.param.shape[:dim], self.param.shape[dim + 1 :]
        return [(*before, n, *after) for n in shard_lengths(self.param.shape[dim], ranks)]

    def description(self, dim: int) -> str:
        """Return a description that must be equal on all ranks that exchange it."""
        return (
            f"{self.label}, {tuple(self.param.shape)} cut along {dim}, {self.grad.dtype} iterated "
            f"in {self.rule.dtype}"
        )


_BATCH_NUMEL = 1 << 24
"""Most entries of matrices in one batch, which limits its copies in memory."""
_Kind = tuple[ProcessGroup, int, torch.device, torch.dtype, torch.dtype]
"""Key of matrices that travel together: ranks, sharded dimension, device and both types."""
_Move = tuple[Matrix, Tensor]
"""A matrix and this rank's part of its orthogonal update."""


class Owners:
    """Assign each sharded matrix an owner for its update; see `Muon`. A matrix that is whole here
    is updated here.

    Communication: 24 bytes a rank if the matrices differ from those of the last update.
    """

    def __init__(self) -> None:
        self._groups: dict[ProcessGroup, Group] = {}
        self._agreed: dict[ProcessGroup, list[str]] = {}

    def update_(self, matrices: Sequence[Matrix]) -> None:
        """Update matrices and their momentum buffers in place."""
        descriptions: dict[ProcessGroup, list[str]] = {}
        by_kind: dict[_Kind, list[Matrix]] = {}
        batches: dict[Any, list[Any]] = {}
        for matrix in matrices:
            cut = matrix.cut()
            if cut is None:
                alike = matrix.param.device, matrix.param.shape, matrix.lr, matrix.rule
                batches.setdefault(alike, []).append(matrix.here())
            else:
                descriptions.setdefault(cut[0], []).append(matrix.description(cut[1]))
                kind = *cut, matrix.grad.device, matrix.grad.dtype, matrix.rule.dtype
                by_kind.setdefault(kind, []).append(matrix)
        for ranks, own in descriptions.items():
            if ranks not in self._groups:
                self._groups[ranks] = Group(ranks)
                self._groups[ranks].one_site = True
            if self._agreed.get(ranks) != own:
                require_agreement(
                    self._groups[ranks],
                    {"matrices": own},
                    action="comparing the matrices that Muon updates",
                    cures={
                        "matrices": "All ranks must have gradients of the same matrices, in the "
                        "same order"
                    },
                )
                self._agreed[ranks] = own
        parts = {ranks: _Parts(self._groups[ranks]) for ranks in descriptions}
        moves: list[_Move] = []
        for (ranks, dim, *_), some in by_kind.items():
            moves += _updates(parts[ranks], dim, some)
        # nothing changes on any rank before all have verified what they received
        for exchanged in parts.values():
            exchanged.require_intact()
        for m, part in moves:
            param, grad, buffer = m.here()
            descend_([param], [grad], [buffer], [part], m.param.shape, m.lr, m.rule)
        for (device, shape, lr, rule), some in batches.items():
            # on a CPU the bits of products depend on the batch
            most = 1 if device.type == "cpu" else _BATCH_NUMEL // (1 + prod(shape)) or 1
            for i in range(0, len(some), most):
                params, grads, buffers = zip(*some[i : i + most], strict=True)
                muon_(params, grads, buffers, lr, rule)


class _Parts:
    """Parts of matrices that these ranks send each other in an update."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sums: list[Tensor] = []
        """Sums of the bits sent to each rank and received from each, shape (2, ranks)."""

    def swap(
        self, parts: Sequence[Tensor], numels: Sequence[Sequence[int]]
    ) -> Pending[list[Tensor]]:
        """Launch an all-to-all of parts; `numels` are by sender and then by receiver."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        rank = self.group.rank
        sent = bit_sums(torch.split(flat, list(numels[rank])))
        dtype = flat.dtype
        lengths = [[n * flat.itemsize for n in row] for row in numels]
        pending = self.group.swap(flat.view(torch.uint8), lengths, action="moving matrices of Muon")

        def received() -> list[Tensor]:
            shards = torch.split(pending.wait().view(dtype), [row[rank] for row in numels])
            progressed()
            self._sums.append(torch.stack([*sent, *bit_sums(shards)]).view(2, -1))
            return list(shards)

        return Pending(received)

    def require_intact(self) -> None:
        """Raise on all ranks unless each has received what the others have sent."""
        own = torch.stack(self._sums).sum(0).cpu()
        rows = self.group.gather_now(own.numpy().tobytes(), "comparing matrices that Muon moved")
        tables = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int64)
        sent, received = tables.view(-1, *own.shape).unbind(1)
        for source, rank in (sent != received.T).nonzero().tolist():
            raise PayloadCorrupt(
                f"rank {rank} refused parts of matrices from rank {source} that Muon updates: bits "
                "were damaged on their way. No rank that has shards of these matrices has updated "
                "a parameter; restart from the last checkpoint"
            )


def _updates(parts: _Parts, dim: int, matrices: Sequence[Matrix]) -> list[_Move]:
    """Compute the updates of matrices of one type and sharding, as many at once as ranks."""
    costs = [products(matrix.param.shape) for matrix in matrices]
    moves = list[_Move]()
    rounds = [
        _round(parts, dim, [None if i is None else matrices[i] for i in owned])
        for owned in assign_owners(costs, parts.group.size)
    ]
    try:
        for index in range(len(rounds) + 2):
            # pipeline of three rounds: send the shards of one, orthogonalise the one before, and
            # receive the results of the one before that. All ranks launch in this order, oldest
            # round last
            for one_round in reversed(rounds[max(index - 2, 0) : index + 1]):
                moves += next(one_round)
    except BaseException as error:
        parts.group.abandon(str(error))
        raise
    return moves


def _round(parts: _Parts, dim: int, owned: Sequence[Matrix | None]) -> Iterator[list[_Move]]:
    """Send the shards of a matrix of each owner; then the results; then yield their updates."""
    rank, size = parts.group.rank, parts.group.size
    own = owned[rank]
    some = [matrix for matrix in owned if matrix is not None]
    shapes = [[] if matrix is None else matrix.shards(dim, size) for matrix in owned]
    numels = [[prod(shape) for shape in row] or [0] * size for row in shapes]
    empty = shard_of(some[0].grad).new_empty(0)
    shards = (direction([shard_of(m.grad)], [shard_of(m.momentum_buffer)], m.rule)[0] for m in some)
    coming = parts.swap([empty, *shards], list(zip(*numels, strict=True)))
    yield []
    results = [empty.to(some[0].rule.dtype)]
    if own is None:
        coming.wait()
    else:
        results += _orthogonal(own.rule, coming.wait(), shapes[rank], dim)
    del coming  # free its buffer before the results are sent
    going = parts.swap(results, numels)
    del results
    yield []
    yield [
        (matrix, update.view(row[rank]))
        for matrix, update, row in zip(owned, going.wait(), shapes, strict=True)
        if matrix is not None
    ]


def _orthogonal(
    rule: MuonRule, shards: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dim: int
) -> Sequence[Tensor]:
    """Return the shards of the orthogonalised matrix, from the shards of one matrix."""
    whole = torch.cat([shard.view(to) for shard, to in zip(shards, shapes, strict=True)], dim)
    result = newton_schulz(whole.flatten(1), rule).reshape(whole.shape)
    return torch.split(result, [shape[dim] for shape in shapes], dim)
