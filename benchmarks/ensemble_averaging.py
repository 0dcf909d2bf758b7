"""Averagings of stacked models: whole changes, signs, largest entries, factors, pairs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gaps import Cell
from thinwire.layout.message import WholeLayout
from thinwire.layout.shares import Piece
from thinwire.layout.traffic import EXCHANGES, GATHER, SPLIT, chosen_split

MATRICES = ("qkv", "merge", "widen", "narrow")
_FEWEST = 1024
"""Entries of a tensor that is not sent whole."""


@dataclass(frozen=True)
class Run:
    """One training."""

    cell: Cell
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def way(self) -> str:
        """Runs of one way are averaged together."""
        shown = {k: v for k, v in self.options.items() if not k.startswith(("adam", "rows"))}
        return json.dumps([self.cell.interval, self.cell.bits, shown], sort_keys=True)


class Stacked(Protocol):
    """Models whose weights are stacked."""

    params: dict[str, Tensor]
    moments: dict[str, Tensor]
    summed: dict[str, Tensor]
    corrections: dict[str, Tensor]
    done: int


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns, in their order, by Cholesky in float64: fast in batches."""
    columns = matrix.double()
    columns = columns / columns.norm(dim=-2, keepdim=True).clamp(min=1e-30)
    gram = columns.mT @ columns
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-10)
    factor = torch.linalg.cholesky_ex(gram)[0]
    return torch.linalg.solve_triangular(factor, columns.mT, upper=False).mT.float()


class Way:
    """Averaging of runs with one interval, code and outer step."""

    def __init__(self, ensemble: Stacked, runs: Sequence[Run], begin: int) -> None:
        self.runs, self.ensemble, self.options = runs, ensemble, runs[0].options
        cell = runs[0].cell
        self.interval, self.bits, self.workers = cell.interval, cell.bits, cell.workers
        self.models = slice(begin * self.workers, (begin + len(runs)) * self.workers)
        self.rounds = self.last = 0
        coded = self.bits < 32 or {"top", "group", "rank"} & self.options.keys()
        values = {name: self._own(p) for name, p in ensemble.params.items()}
        self.anchors = {name: value[:, :, 0].clone() for name, value in values.items()}
        self.errors = {n: torch.zeros_like(v) for n, v in values.items()} if coded else {}
        usual = EXCHANGES[0] if self.bits == 1 else GATHER
        exchange = usual
        if "split" in self.options:
            exchange = SPLIT if self.options["split"] else GATHER
        numels = tuple(v.shape[-1] for v in values.values() for _ in range(v.shape[0]))
        whole = coded and self.bits < 32
        self.plan = (
            chosen_split(exchange, WholeLayout(numels, self.bits), self.workers) if whole else None
        )
        self.outer = self.options.get("outer")
        self.momentum = {n: torch.zeros_like(a) for n, a in self.anchors.items()}
        self.factors: dict[str, Tensor] = {}
        self.decay = float(self.options.get("decay", 1.0))

    def _own(self, param: Tensor) -> Tensor:
        """Shape (layers, runs, workers, entries)."""
        return param.detach()[:, self.models].flatten(2).unflatten(1, (-1, self.workers))

    @torch.no_grad()
    def average_(self) -> None:
        """One round."""
        self.rounds += 1
        if self.options.get("state"):
            for name in MATRICES:
                moment = self._own(self.ensemble.moments[name])
                moment.copy_(moment.mean(2, keepdim=True).expand_as(moment))
        if self.options.get("correction"):
            for name, summed in self.ensemble.summed.items():
                own = self._own(summed) / (self.ensemble.done - self.last)
                mean = own.mean(2, keepdim=True)
                self._own(self.ensemble.corrections[name]).copy_(mean - own)
                self._own(summed).zero_()
        self.last = self.ensemble.done
        if self.options.get("pairs"):
            self._pairs_()
            return
        first = 0
        for name in self.anchors:
            anchor = self.anchors[name]
            value = self._own(self.ensemble.params[name])
            change = anchor[:, :, None] - value
            if not self.errors:
                mean = change.mean(2)
            else:
                change += self.decay * self.errors[name]
                if self.plan is not None:
                    mean = self._by_shares(name, change, self.plan.pieces, first)
                else:
                    sent = self._code(name, change)
                    self.errors[name] = change - sent
                    mean = sent.mean(2)
                    if self.options.get("mean") == "senders":
                        mean = sent.sum(2) / (sent != 0).sum(2).clamp(min=1)
            first += anchor.shape[0]
            if self.outer:
                rate, momentum = self.outer
                kept = self.momentum[name].mul_(momentum).add_(mean)
                mean = rate * (mean + momentum * kept)
            anchor -= mean
            value.copy_(anchor[:, :, None].expand_as(value))

    def _by_shares(
        self, name: str, change: Tensor, shares: Sequence[Sequence[Piece]], first: int
    ) -> Tensor:
        """Each worker averages a share, and sends the mean in as many bits."""
        mean = torch.empty_like(change[:, :, 0])
        error = torch.empty_like(change)
        for owner, pieces in enumerate(shares):
            for slot, start, numel in pieces:
                layer = slot - first
                if not 0 <= layer < len(change):
                    continue
                part = change[layer, :, :, start : start + numel]
                sent = signs(part, self.bits)
                exact = (sent.sum(1) - sent[:, owner] + part[:, owner]) / self.workers
                told = signs(exact, self.bits)
                kept = part - sent
                kept[:, owner] = (exact - told) * self.workers
                mean[layer, :, start : start + numel] = told
                error[layer, :, :, start : start + numel] = kept
        self.errors[name] = error
        return mean

    def _code(self, name: str, change: Tensor) -> Tensor:
        options = self.options
        if "group" in options and name in MATRICES:
            count = options["group"]
            means = change.unflatten(-1, (-1, count)).mean(-1)
            return signs(means, self.bits).repeat_interleave(count, -1)
        if "rank" in options and name in MATRICES:
            return self._factored(name, change)
        if "top" in options and change.shape[-1] >= _FEWEST:
            count = max(1, round(options["top"] * change.shape[-1]))
            sizes = change.abs()
            bound = sizes.topk(count, -1).values[..., -1:]
            return signs(change, self.bits, sizes >= bound)
        return signs(change, self.bits)

    def _factored(self, name: str, change: Tensor) -> Tensor:
        rows, columns = self.ensemble.params[name].shape[-2:]
        matrix = change.unflatten(-1, (rows, columns))
        count = max(1, round(self.options["rank"] * rows * columns / (rows + columns)))
        if name not in self.factors:
            random = torch.Generator().manual_seed(0)
            drawn = torch.randn(columns, count, generator=random).to(change.device)
            self.factors[name] = drawn.expand(*matrix.shape[:3], -1, -1).contiguous()
        left = signs(orthonormal(matrix @ self.factors[name]).mT, self.bits).mT
        gram = (left.mT @ left).double()
        gram.diagonal(dim1=-2, dim2=-1).add_(1e-9)
        right = torch.linalg.solve(gram, (matrix.mT @ left).double().mT).float()
        known = signs(right, self.bits)
        self.factors[name] = known.mT.contiguous()
        return (left @ known).flatten(-2)

    def _pairs_(self) -> None:
        """Each worker takes the mean with one other; Source: GASLoC, 2026, arXiv 2606.11081."""
        partner = torch.empty(self.workers, dtype=torch.int64)
        order = torch.randperm(
            self.workers, generator=torch.Generator().manual_seed(1000 + self.rounds)
        )
        partner[order[0::2]], partner[order[1::2]] = order[1::2], order[0::2]
        momentum = self.options.get("gamma", 0.0)
        for name, param in self.ensemble.params.items():
            value = self._own(param)
            found = (value + value[:, :, partner.to(value.device)]) / 2
            if momentum:
                before = self.errors.get(name)
                if before is not None:
                    found = found + momentum * (value - before)
                self.errors[name] = found.clone()
            value.copy_(found)


def signs(values: Tensor, bits: int, chosen: Tensor | None = None) -> Tensor:
    """Round to `bits`, by the levels of `thinwire.wire.whole`; zero where not chosen."""
    if bits >= 32:
        return values if chosen is None else values * chosen
    if bits == 1:
        negative = values < 0
        upper = ~negative if chosen is None else chosen & ~negative
        lower = negative if chosen is None else chosen & negative
        high, low = _mean_of(values, upper), _mean_of(values, lower)
        found = torch.where(negative, low, high)
        return found if chosen is None else found * chosen
    sizes = values.abs()
    parts = [torch.ones_like(values, dtype=torch.bool) if chosen is None else chosen]
    for _ in range(bits - 1):
        means = [_mean_of(sizes, part) for part in parts]
        above = [sizes > mean for mean in means]
        parts = [
            half
            for part, over in zip(parts, above, strict=True)
            for half in (part & ~over, part & over)
        ]
    levels = torch.cat([_mean_of(sizes, part) for part in parts], -1)
    found = levels[..., :1].expand_as(sizes)
    for i in range(1, levels.shape[-1]):
        middle = (levels[..., i - 1 : i] + levels[..., i : i + 1]) / 2
        found = torch.where(sizes > middle, levels[..., i : i + 1], found)
    found = torch.copysign(found, values)
    return found if chosen is None else found * chosen


def _mean_of(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
