"""One averaging of parameters: what is measured, what travels, and what it changes once it is there."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.comm import Group
from thinwire.core.feedback import Proposal
from thinwire.core.outer import OuterRule, outer_list_, outer_step_
from thinwire.core.select import top_k
from thinwire.sync.change_rule import ChangeRule
from thinwire.sync.exchange import not_finite
from thinwire.sync.round import Round, SparseGradient

__all__ = ["Averaging", "Flight", "real_view", "widened"]


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself, or a view of a complex one with real and imaginary parts as a last axis."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def widened(tensor: Tensor) -> Tensor:
    """The values in which averages are computed: float32, float64 for double precision; real; a copy if it must."""
    real = real_view(tensor.detach())
    return real if real.dtype == torch.float64 else real.float()


@dataclass(slots=True)
class Flight:
    """One averaging between its measurement and its application."""

    step: int
    """Step after which it was measured."""
    moved: dict[str, Tensor]
    """Per parameter what is to be sent: anchor minus parameter, with the kept error where it is compressed."""
    extras: dict[str, Tensor]
    """Buffers and optimizer state, averaged plainly."""
    counts: dict[str, int]
    """Entries to be sent, for the parameters that are compressed; the others travel densely."""
    measured: dict[str, Tensor] | None = None
    """The parameters as they were, where local steps go on before the result is applied."""
    round: Round | None = None

    def first_not_finite(self) -> str | None:
        """The first tensor that must not be given to others."""
        for kind, tensors in (("parameter", self.moved), ("buffer or state", self.extras)):
            for name in not_finite(tensors):
                return f"{kind} {name}"
        return None


class Averaging:
    """Anchors, outer momentum and kept errors of all parameters by name, and how an averaging changes them.

    An anchor S is a parameter's value after its last averaging, in float32 or wider, equal on all ranks; outer
    momentum is equal too; kept errors are this rank's own. Nothing changes before `commit_`.
    """

    def __init__(self, group: Group, params: Mapping[str, Parameter], *, outer: OuterRule, changes: ChangeRule) -> None:
        self._group = group
        self._params = params
        self._outer = outer
        self._changes = changes
        self._keys = {name: key for key, name in enumerate(params)}
        self.anchors = {n: widened(p).clone(memory_format=torch.contiguous_format) for n, p in params.items()}
        self.momentum = {n: torch.zeros_like(a) for n, a in self.anchors.items()} if outer.momentum else {}
        self.errors = {n: torch.zeros_like(self.anchors[n]) for n, p in params.items() if changes.compresses(p)}

    @torch.no_grad()
    def anchor_(self) -> None:
        """Take the parameters as they are for anchors."""
        for name, anchor in self.anchors.items():
            anchor.copy_(widened(self._params[name]))

    def measure(
        self, step: int, values: Mapping[str, Tensor], extras: Mapping[str, Tensor], *, keep: bool = False
    ) -> Flight:
        """This rank's part of an averaging; `keep` copies what is measured, for a result that is applied later."""
        moved = {name: (self.anchors[name] - widened(value)).contiguous() for name, value in values.items()}
        counts = {}
        for name, change in moved.items():
            count = self._changes.count_at(step, change.numel()) if name in self.errors else None
            if count is not None:
                counts[name] = count
                change.add_(self.errors[name], alpha=self._changes.decay)
        measured = {name: value.detach().clone() for name, value in values.items()} if keep else None
        wide = {key: widened(value).clone() if keep else widened(value) for key, value in extras.items()}
        return Flight(step, moved, wide, counts, measured)

    def launch(self, flight: Flight) -> None:
        """Put it on the wire without waiting: one message for all that is compressed, one buffer per dtype of the rest.

        Communication: sum_ per dtype; `gather` of the message.
        """
        sparse, dense = {}, {}
        for name, moved in flight.moved.items():
            if name in flight.counts:
                sparse[self._keys[name]] = _proposed(moved, flight.counts[name])
            else:
                dense[self._keys[name]] = moved
        dense |= {len(self._keys) + i: value for i, value in enumerate(flight.extras.values())}
        flight.round = Round(self._group, step=flight.step, value_bits=self._changes.value_bits)
        # a flight that was loaded may hold its tensors in another order than the ranks' own
        flight.round.launch(0, dict(sorted(sparse.items())), dict(sorted(dense.items())))

    @torch.no_grad()
    def commit_(self, flight: Flight, extras: Mapping[str, Tensor]) -> None:
        """Apply a flight whose round has finished: parameters, anchors, momentum, errors and `extras` change.

        p <- S - step, S <- p. Where local steps went on after the measurement: p <- p + (S_new - p_measured).
        """
        assert flight.round is not None
        for names in self._batches(flight, flight.round):
            changes = [self._mean_change(name, flight.moved[name], flight.round) for name in names]
            if self._is_plain(names[0], flight):
                self._move_together(names, changes)
                continue
            for name, change in zip(names, changes, strict=True):
                step = outer_step_(change, self.momentum.get(name), self._outer)
                self._move(name, flight.moved[name], step, None if flight.measured is None else flight.measured[name])
        for i, key in enumerate(flight.extras):
            mean = flight.round.dense_mean(len(self._keys) + i)
            real_view(extras[key]).copy_(mean)

    def _mean_change(self, name: str, moved: Tensor, done: Round) -> Tensor:
        """The mean of what all ranks sent; what this one did not send stays in its error."""
        key = self._keys[name]
        if not done.is_sparse(key):
            return done.dense_mean(key)
        indices, sent = done.sent(key)
        error = self.errors[name].copy_(moved)
        error.view(-1)[indices] -= sent.to(error.dtype)
        indices, mean = done.sparse_mean(key, moved.dtype)
        change = torch.zeros_like(moved)
        change.view(-1)[indices] = mean
        return change

    def _batches(self, flight: Flight, done: Round) -> list[list[str]]:
        """All means that are there already in one, each of the others on its own, since it needs a buffer."""
        together = [n for n in flight.moved if self._is_plain(n, flight) and not done.is_sparse(self._keys[n])]
        alone = flight.moved.keys() - set(together)
        return ([together] if together else []) + [[name] for name in flight.moved if name in alone]

    def _is_plain(self, name: str, flight: Flight) -> bool:
        """Whether the parameter becomes its anchor, bit for bit, which is only moved by the step."""
        same_type = real_view(self._params[name]).dtype == self.anchors[name].dtype
        return self._group.size > 1 and flight.measured is None and same_type

    def _move_together(self, names: list[str], changes: list[Tensor]) -> None:
        anchors = [self.anchors[name] for name in names]
        buffers = [self.momentum[name] for name in names] if self.momentum else None
        outer_list_(anchors, changes, buffers, self._outer)
        torch._foreach_copy_([real_view(self._params[name]) for name in names], anchors)

    def _move(self, name: str, moved: Tensor, step: Tensor, measured: Tensor | None) -> None:
        param, anchor = self._params[name], self.anchors[name]
        before = widened(param if measured is None else measured)
        target = anchor - step
        if self._group.size == 1:  # S - (S - p) is p but for rounding; alone, averaging must not change a bit
            target = torch.where(step == moved, before, target)
        place = real_view(param)
        target = target.to(place.dtype)
        anchor.copy_(target)
        place.copy_(target if measured is None else widened(param) + (anchor - before))


def _proposed(folded: Tensor, k: int) -> SparseGradient:
    flat = folded.view(-1)
    indices = top_k(flat, k)
    return SparseGradient(Proposal(indices, flat[indices], finite=True), flat.numel(), k)
