"""Detection of ranks whose replicated state differs.

A digest rides in the agreements and covers one slice of the model at a time.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Group, mapping_of
from thinwire.core.checksum import checksum, unread_checksum
from thinwire.core.several import all_of
from thinwire.core.sharded import Shards, shard_of
from thinwire.errors import Diverged
from thinwire.exchange.agreement import Agreement, Report

DIGEST_EVERY = 64
_FADING_EVERY = 8
"""Number of updates within which all moments are read. Reading all of them in each update took 8 %
of a dense step of 3 million parameters on a CPU.
"""
_LAYOUT_EVERY = 8
"""Number of updates after which tensors that were added or replaced are compared too."""
_UNCUT_BYTES = 1 << 16
"""Size in bytes below which a tensor is never cut."""

FORWARD = (
    "a forward pass that writes into parameters, as that of Embedding(max_norm=...) does: limit "
    "the norm after each update instead, on all ranks alike"
)
"""A reason for which ranks part, in errors."""
Watched = Mapping[str, Tensor]
"""Tensors by their names in errors, such as "parameter 0.weight"; the same order on all ranks."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of one tensor, or all of it if `stop` is None."""

    name: str
    start: int = 0
    stop: int | None = None

    def __str__(self) -> str:
        return self.name if self.stop is None else f"{self.name}[{self.start}:{self.stop}]"

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.stop is None else tensor[self.start : self.stop]


class _Rolling:
    """Tensors read one slice per turn, all within `every` turns; cut between first rows."""

    def __init__(self, tensors: Watched, every: int) -> None:
        self._tensors = tensors
        self._every = every
        self._layout: list[tuple[str, torch.Size]] = []
        self._slices: list[list[_Piece]] = [[]] * every
        self._reads = 0
        self.pieces: Sequence[_Piece] = ()
        """Pieces of the last turn."""

    def read(self, index: int) -> list[Tensor]:
        """Return the slice of this turn."""
        # all tensors are looked at in some turns only, the same ones on all ranks
        # in the first turns, an optimizer makes its state
        self._reads += 1
        known = self._reads > _LAYOUT_EVERY and index % _LAYOUT_EVERY
        tensors = self._tensors if known else self.dense()
        self.pieces = self._slices[index % self._every]
        try:
            return [piece.of(tensors[piece.name]) for piece in self.pieces]
        except (KeyError, IndexError):  # removed since
            tensors = self.dense()
            self.pieces = self._slices[index % self._every]
            return [piece.of(tensors[piece.name]) for piece in self.pieces]

    def everything(self) -> Iterator[tuple[_Piece, Tensor]]:
        """Yield all pieces with their tensors."""
        tensors = self.dense()
        return ((p, p.of(tensors[p.name])) for pieces in self._slices for p in pieces)

    def dense(self) -> dict[str, Tensor]:
        """Return the tensors that are dense and not empty."""
        tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if tensor.layout is torch.strided and tensor.numel()
        }
        layout = [(name, tensor.shape) for name, tensor in tensors.items()]
        # parameters were added or replaced: cut again, on all ranks
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
                # the last slice also takes what rounding leaves
                self._slices[min(at // length, self._every - 1)].append(piece)
                at += nbytes


class RollingDigest:
    """Compares the replicated state of all ranks, a slice per update.

    `lasting` tensors keep a difference, as parameters do, and are read within `every` updates;
    `fading` ones, such as moments, within 8. Which tensor differs is looked for afterwards.

    >>> param = torch.zeros(4)
    >>> digest = RollingDigest({"weight": param}, {}, every=1)
    >>> digest.read(0)
    >>> before = digest.report()
    >>> _ = param.add_(1)
    >>> digest.read(1)
    >>> digest.report() == before
    False
    """

    def __init__(self, lasting: Watched, fading: Watched, *, every: int, since: int = 0) -> None:
        # moments forget a difference, so they are read more often
        self._parts = _Rolling(lasting, every), _Rolling(fading, min(every, _FADING_EVERY))
        self._good: dict[str, int] = {}
        self._since = since
        self.sums = 0
        """Digest of the dense sums that have arrived."""
        self.unread: Tensor | None = None
        """Digest that `report` will read, int64, shape (); on any device."""
        self._read, self._reported = dict[str, int](), dict[str, int]()
        """Pieces of the last digest and of the last report with their updates."""

    def read(self, step: int, index: int | None = None) -> None:
        """Compute the digest of update `step`, or number `index`, that `report` has from now on."""
        index = step if index is None else index
        tensors = [piece for part in self._parts for piece in part.read(index)]
        self._read = {str(piece): step for part in self._parts for piece in part.pieces}
        self.unread = unread_checksum(tensors)

    def report(self) -> Report:
        """Return what this rank has read last."""
        # the next slice is read before the answers arrive
        self._reported = self._read
        digest = "" if self.unread is None else f"{int(self.unread) % (1 << 64):016x}"
        return {"digest": digest, "sums": self.sums}

    def agreed(self) -> None:
        """Record that all ranks gave the same report: errors name the update since which."""
        self._good.update(self._reported)

    def start_from(self, step: int) -> None:
        """Treat all ranks as equal after this update: everything was compared, or loaded."""
        self._good.clear()
        self._since = step

    def require_equal(self, agreement: Agreement, step: int) -> None:
        """Compare everything at once; raise `Diverged` on every rank."""
        # one checksum first: piece by piece only if it differs
        everything = [tensor for part in self._parts for tensor in part.dense().values()]
        own = f"{checksum(everything):016x}".encode()
        if not agreement.all_equal(own, f"comparing replicas at step {step}"):
            self.explain(agreement.group, step)
        self.start_from(step)

    def explain(self, group: Group, step: int) -> None:
        """Find the tensors that differ; raise `Diverged` on every rank with the same text."""
        # collective: every rank comes here, since all saw the same digests
        text = self._difference(group, group.replicas, step)
        if group.replicas is not None:
            # each part compared its own replicas; all ranks must raise the same text
            found = group.gather_bytes(text.encode(), action=f"telling what differs at step {step}")
            rank, text = next(((r, t.decode()) for r, t in enumerate(found) if t), (0, ""))
            part = "stage" if group.shards is None else "shard"
            text = text and f"in the {part} of rank {rank}: {text}"
        if text:
            raise Diverged(text)
        raise Diverged(
            f"step {step}: the digests of the ranks differ but no tensor does: memory changed "
            "during the comparison. Nothing of this update was applied; restart from the last "
            "checkpoint"
        )

    def _difference(self, ranks: Group, sites: Group | None, step: int) -> str:
        """Describe the difference between these ranks, or sites; empty if there is none."""
        # replicas are compared where there are shards or stages: other ranks hold other tensors
        group = ranks if sites is None else sites
        pieces = [piece for part in self._parts for piece in part.everything()]
        own = {str(piece): f"{checksum([tensor]):016x}" for piece, tensor in pieces}
        answers = group.gather_bytes(
            json.dumps(own).encode(), action=f"looking for what differs at step {step}"
        )
        rows = [mapping_of(answer) for answer in answers]
        tensor_names = {str(piece): piece.name for piece, _ in pieces}
        for piece_name in dict.fromkeys(key for row in rows for key in row):
            held = [row.get(piece_name) for row in rows]
            # the first one in the common order, so that all ranks name the same tensor
            if len(set(held)) > 1:
                kind = "rank" if sites is None else "replica" if ranks.shards is None else "site"
                since = self._good.get(piece_name, self._since)
                return _text(tensor_names.get(piece_name, piece_name), held, since, step, kind)
        return ""


class OptimizerState(Mapping[str, Tensor]):
    """The tensors of an optimizer that updates every replica alike, by key and parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Watched) -> None:
        known = ("torch.optim.", "thinwire.")
        # state of other classes may be each rank's own by design
        self._every = [opt for opt in all_of(optimizer) if type(opt).__module__.startswith(known)]
        self._params = params
        self._found: dict[str, tuple[torch.optim.Optimizer, Tensor, str]] = {}

    def __iter__(self) -> Iterator[str]:
        self._found = {
            f"{key} of {name}": (opt, param, key)
            for name, param in self._params.items()
            for opt in self._every
            for key, value in opt.state.get(param, {}).items()
            if isinstance(value, Tensor) and key != "step" and "residual" not in opt.state[param]
        }
        return iter(self._found)

    def __getitem__(self, name: str) -> Tensor:
        opt, param, key = self._found[name]
        return shard_of(opt.state[param][key])

    def __len__(self) -> int:
        return len(list(iter(self)))


def digest_of(
    optimizer: torch.optim.Optimizer, params: Watched, every: int, *, since: int = 0
) -> RollingDigest | None:
    """Return the digest of parameters and of their state in the optimizer; None for 0 updates."""
    if not every:
        return None
    watched = Shards({f"parameter {name}": param for name, param in params.items()})
    return RollingDigest(watched, OptimizerState(optimizer, params), every=every, since=since)


def _pieces(name: str, tensor: Tensor, length: int) -> Iterator[tuple[_Piece, int]]:
    """Yield runs of rows of about `length` bytes each, with their sizes in bytes."""
    rows = tensor.shape[0] if tensor.dim() else 1
    row_bytes = tensor.nbytes // max(rows, 1)
    # a multiple of 8 rows, so that a piece can be read as 64-bit words if its tensor can
    step = max(8, length // max(row_bytes, 1) // 8 * 8)
    if tensor.nbytes <= max(_UNCUT_BYTES, length) or step >= rows:
        yield _Piece(name), tensor.nbytes
        return
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield _Piece(name, start, stop), (stop - start) * row_bytes


def _text(name: str, held: Sequence[object], since: int, step: int, kind: str) -> str:
    """Describe a tensor from the checksum of each rank, or site. None stands for no such tensor."""
    (most, count), *_ = Counter(held).most_common()
    odd = [rank for rank, value in enumerate(held) if value != most]
    # blame a minority only; with two ranks nobody can tell which is wrong
    if 2 * count > len(held):
        names = ", ".join(map(str, odd))
        subject = f"{kind} {names} differ{'s' if len(odd) == 1 else ''} from the others"
    else:
        every = " and ".join(map(str, range(len(held))))
        subject = f"{kind}s {every} hold different values"
    return (
        f"step {step}: {name}: {subject}. It happened between update {since} and update {step}. "
        "State that must be equal on all ranks was changed on some: by the script, a memory or "
        f"processor fault, or {FORWARD}. Nothing of update {step + 1} was applied; restart from "
        "the last checkpoint"
    )
