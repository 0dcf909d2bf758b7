"""One averaging of parameters: measurement, messages, and application of the result."""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Nodes, Pending, Sources
from thinwire.comm.replicate import overwrite_
from thinwire.compress.dense import not_finite, send_dense
from thinwire.compress.figures import conserves, decay_of
from thinwire.compress.protocol import (
    ERRORS,
    Bucket,
    ChangeCompression,
    MeanChange,
    Sending,
    combined,
)
from thinwire.core.checksum import bit_sums
from thinwire.core.outer import outer_list_, outer_step_
from thinwire.exchange.agreement import Answers
from thinwire.exchange.nodes import in_nodes, make_common_
from thinwire.exchange.round import Round
from thinwire.kernels.rules import OuterRule
from thinwire.layout.message import SKETCH_NUMEL
from thinwire.layout.traffic import begin_step
from thinwire.local.model import changed_since
from thinwire.local.sketch import sketch

_SKETCH = "sketch of the change"


def real_view(tensor: Tensor) -> Tensor:
    """Return the tensor, or a view of a complex one with real and imaginary parts as last axis."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def widened(tensor: Tensor) -> Tensor:
    """Return real values in float32, or float64 for double precision; copy only if needed."""
    real = real_view(tensor.detach())
    return real if real.dtype == torch.float64 else real.float()


def as_held(anchor: Tensor, value: Tensor) -> Tensor:
    """Return an anchor rounded to the type of a value."""
    return anchor.to(real_view(value).dtype)


@dataclass(slots=True)
class PendingAveraging:
    """State of one averaging between its measurement and its application."""

    step: int
    """Local step after which it was measured."""
    moved: dict[str, Tensor]
    """Value to send for each parameter: anchor, as the parameter holds it, minus parameter, plus
    the residual if compressed.
    """
    extras: dict[str, Tensor]
    """Buffers and optimizer state, averaged without compression."""
    compressed: frozenset[str]
    """Parameters whose change is compressed; all others are sent densely."""
    sketch: Tensor | None = None
    """Sketch of this rank's change without residuals; None if all of it is applied in time."""
    measured: dict[str, Tensor] | None = None
    """Copies of the measured parameters, if local steps continue before the result is applied."""
    round: Round | None = None
    """Exchange round of the dense tensors."""
    refused: str | None = None
    """Reason why this rank refused data of other shards; the vote reports it to all ranks."""
    share: float = 1.0
    """Mean weight of the ranks that took part; sums are divided by it."""
    agreement: Pending[Answers] | None = None
    """Agreement in flight: to send it, and once everything has arrived that it may be applied."""
    last: int = 0
    """Step of the averaging before it."""

    def finish(self) -> None:
        """Wait for everything and check it; see `Round.finish`."""
        assert self.round is not None, "launched"
        self.round.finish()

    def mean_of(self, name: str, like: Tensor) -> Tensor:
        """Return the mean over the ranks of a dense tensor, by name."""
        assert self.round is not None, "launched"
        mean = self.round.arrived[name].mean(name, like)
        return mean if self.share == 1 else mean / self.share

    def first_not_finite(self, buffers: Mapping[str, bool]) -> str | None:
        """Return the name of the first tensor that is not finite, of buffers with a true flag."""
        extras = {
            key: value
            for key, value in self.extras.items()
            if buffers.get(key, key.startswith("state "))
        }
        for kind, tensors in (("parameter ", self.moved), ("", extras)):
            for name in not_finite(tensors):
                return f"{kind}{name}"
        return None


class Averaging:
    """State of averaging: anchors, outer momentum and residuals by name, and how a result changes
    them.

    An anchor S is the exact value of a parameter after its last averaging, in float32 or wider; the
    parameter holds it rounded to its own type. Anchors and outer momentum are equal on all ranks;
    residuals belong to this rank or its node. Nothing changes before `commit_`.

    If `sources` are `Nodes`, the ranks of a node first average their changes and then send the same
    message, so their residuals are the same too.
    """

    def __init__(
        self,
        sources: Sources,
        params: Mapping[str, Tensor],
        *,
        outer: OuterRule,
        changes: ChangeCompression | None,
    ) -> None:
        self.sources = sources
        self._common = True
        self._params = params
        self._outer = outer
        self.changes = changes
        self._keys = {name: key for key, name in enumerate(params)}
        self.anchors = {
            n: widened(p).clone(memory_format=torch.contiguous_format) for n, p in params.items()
        }
        self.momentum = (
            {n: torch.zeros_like(a) for n, a in self.anchors.items()} if outer.momentum else {}
        )
        self.kept: dict[str, dict[str, Tensor]] = {
            kind: {}
            for kind in ((ERRORS,) if changes is None else changes.begin(torch.zeros(1, 1)))
        }
        """State of the compression, by kind and name."""
        for name, p in params.items():
            # a shard may be empty
            if changes is not None and p.numel() and changes.compresses(p):
                for kind, tensor in changes.begin(self.anchors[name]).items():
                    self.kept[kind][name] = tensor
        self.sketches = torch.zeros(2, SKETCH_NUMEL, dtype=torch.float64, device="cpu")
        """Sketches of the ranks' mean change so far, and of the applied part of it."""

    @property
    def errors(self) -> dict[str, Tensor]:
        """Residual of each parameter: the unsent part of its change, of this rank alone."""
        return self.kept[ERRORS]

    @property
    def _single_rank(self) -> bool:
        return self.sources.size * self.sources.node_size == 1

    @torch.no_grad()
    def make_common(self) -> None:
        """Average loaded residuals inside each node, where they may differ."""
        sources = self.sources
        if isinstance(sources, Nodes) and not self._common:
            kept = {
                f"{kind} of {name}": tensor
                for kind, tensors in self.kept.items()
                for name, tensor in tensors.items()
            }
            # not an exchange of updates
            with sources.all_ranks.uncounted(), sources.node.uncounted():
                make_common_(kept, sources)
        self._common = True

    def state_loaded(self) -> None:
        """Note that residuals were loaded and may differ inside a node."""
        self._common = False

    @property
    def plain(self) -> bool:
        """True if a parameter becomes the mean of the ranks' values, whatever its anchor is."""
        exact = all(as_held(a, self._params[name]) is a for name, a in self.anchors.items())
        return exact and self.changes is None and self._outer.plain

    @torch.no_grad()
    def written(self) -> str | None:
        """Return a digest of the parameters if one of them differs from its anchor, else None."""
        now = {name: real_view(p.detach()) for name, p in self._params.items()}
        if not changed_since({n: as_held(self.anchors[n], p) for n, p in now.items()}, now):
            return None
        sums = [int(total) for total in bit_sums([widened(p) for p in now.values()])]
        return hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()

    @torch.no_grad()
    def anchor_(self) -> None:
        """Set the anchors to the current parameters, where these hold other values."""
        for name, anchor in self.anchors.items():
            now, held = real_view(self._params[name].detach()), as_held(anchor, self._params[name])
            anchor.copy_(torch.where(now == held, anchor, now))

    @torch.no_grad()
    def forget_(self) -> None:
        """Clear residuals and outer momentum."""
        for tensor in [*self.errors.values(), *self.momentum.values()]:
            tensor.zero_()

    def measure(
        self,
        step: int,
        values: Mapping[str, Tensor],
        extras: Mapping[str, Tensor],
        *,
        keep: bool = False,
        fold: bool = True,
    ) -> PendingAveraging:
        """Measure this rank's part; `keep` copies it for later. Without `fold`, `weigh_` folds."""
        moved = {
            name: (widened(as_held(self.anchors[name], value)) - widened(value)).contiguous()
            for name, value in values.items()
        }
        taken, changes = self._taken(step, moved), self.changes
        # before the first fold: the sketch is of this rank's new change
        own = None if changes is None or conserves(changes) or not taken else self.sketch_of(moved)
        # first fold: rounds counted in steps have no weights, so residuals join the change here
        if fold:
            self._fold_(moved, taken)
        measured = (
            {name: value.detach().clone() for name, value in values.items()} if keep else None
        )
        wide = {
            key: widened(value).clone() if keep else widened(value) for key, value in extras.items()
        }
        return PendingAveraging(step, moved, wide, taken, own, measured)

    def _fold_(self, moved: Mapping[str, Tensor], taken: Set[str]) -> None:
        """Add the residuals of earlier changes."""
        for name in taken:
            assert self.changes is not None, "something is compressed"
            moved[name].add_(self.errors[name], alpha=decay_of(self.changes))

    @torch.no_grad()
    def weigh_(self, pending: PendingAveraging, weight: float) -> None:
        """Multiply this rank's change by its weight, then fold in the residual."""
        if weight != 1:
            pending.extras = {key: value * weight for key, value in pending.extras.items()}
            for change in pending.moved.values():
                change.mul_(weight)
            # the sketch is linear, so it is weighted like the change
            if pending.sketch is not None:
                pending.sketch = pending.sketch * weight
        # second fold, for timed rounds: after weighting, since the weight is for new work alone
        self._fold_(pending.moved, pending.compressed)

    def _taken(self, step: int, moved: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the parameters whose change is compressed at this step."""
        # timed rounds count from 0; a compression without a begin step compresses at step 0 too
        if self.changes is None or step <= begin_step(self.changes, -1):
            return frozenset()
        return frozenset(name for name in moved if name in self.errors)

    def launch(self, pending: PendingAveraging, *, record: bool = False) -> None:
        """Start the exchange without waiting, but for sums inside nodes; `record` for `replay`."""
        one_round, names, sending = self._prepared(pending)
        # a joiner repeats the averaging from these answers
        one_round.received = [] if record else None
        pending.round = one_round
        one_round.launch(names, sending)
        one_round.leave_nodes()

    def replay(self, pending: PendingAveraging, received: Sequence[Sequence[Tensor]]) -> None:
        """Run an averaging from the messages that another rank recorded."""
        one_round, names, sending = self._prepared(pending)
        pending.round = one_round
        one_round.replay(names, sending, received)
        one_round.finish()

    def _prepared(self, pending: PendingAveraging) -> tuple[Round, Set[str], Bucket]:
        """Return an averaging's round, its tensors, and the plan by which they are sent."""
        # a loaded averaging may list its tensors in another order: all ranks sort alike
        names = sorted(pending.moved, key=self._keys.__getitem__)
        given = {name: pending.moved[name] for name in names}
        given |= {_extra(key): value for key, value in pending.extras.items()}
        if pending.sketch is not None:
            given[_SKETCH] = pending.sketch.float()
        one_round = Round(self.sources, pending.step)
        context = one_round.context(0)

        def sendings(part: Mapping[str, Tensor]) -> list[Sending]:
            folded = {name: part[name] for name in part if name in pending.compressed}
            dense = {name: part[name] for name in part if name not in pending.compressed}
            found = [send_dense(context, dense)] if dense else []
            if folded:
                assert self.changes is not None, "something is compressed"
                found.insert(0, self.changes.send(context, folded, self.kept))
            return found

        nodes = isinstance(self.sources, Nodes)
        sending = in_nodes(context, given, sendings) if nodes else combined(sendings(given))
        return one_round, given.keys(), sending

    def sketch_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the sketch of these tensors as one long vector, on the CPU."""
        return torch.stack(
            [sketch(tensor, self._keys[name]).cpu() for name, tensor in tensors.items()]
        ).sum(0)

    def applied_share(self, averagings: int) -> float:
        """Return the share that `LocalUpdates.stats` describes."""
        change, applied = self.sketches
        square = float(change @ change)
        return float(applied @ change) / square if square else self._outer.gain(averagings)

    @torch.no_grad()
    def commit_(
        self,
        pending: PendingAveraging,
        extras: Mapping[str, Tensor],
        copies: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Apply a pending averaging whose round has finished: parameters, anchors, momentum,
        residuals, `extras` and the optimizer's `copies` of parameters change.

        S <- S - step, p <- S rounded to the type of p. If local steps continued after the
        measurement: p <- p + (S_new rounded - p_measured).
        """
        assert pending.round is not None, "launched"
        before = (
            None
            if pending.sketch is None
            else self.sketch_of({n: self.anchors[n] for n in pending.moved})
        )
        for names in self._batches(pending):
            changes = [self._mean_change(name, pending) for name in names]
            # these parameters become their anchors bit for bit: one list operation for all
            if self._is_plain(pending):
                self._move_batch(names, changes, copies or {})
                continue
            for name, change in zip(names, changes, strict=True):
                step = outer_step_(change, self.momentum.get(name), self._outer)
                self._move(name, pending, step, copies or {})
        for key, value in pending.extras.items():
            mean = pending.mean_of(_extra(key), value)
            if not (self._single_rank and torch.equal(mean, value)):  # do not undo later changes
                overwrite_(real_view(extras[key]), mean)
        if before is not None:
            applied = before - self.sketch_of({n: self.anchors[n] for n in pending.moved})
            assert pending.sketch is not None, "there was one before"
            mean = pending.mean_of(_SKETCH, pending.sketch)
            self.sketches += torch.stack([mean.cpu().double(), applied])

    def _mean_change(self, name: str, pending: PendingAveraging) -> Tensor:
        """Return the mean of all sent changes; the unsent part stays in the residual."""
        if name not in pending.compressed:
            return pending.mean_of(name, pending.moved[name])
        assert pending.round is not None, "launched"
        arrived = pending.round.arrived[name]
        assert isinstance(arrived, MeanChange), "compressed"
        folded = arrived.node_means.get(name, pending.moved[name])
        mean = arrived.take_mean_(name, folded, self.kept)
        return mean if pending.share == 1 else mean / pending.share

    def _batches(self, pending: PendingAveraging) -> list[list[str]]:
        """Return the names in batches: dense ones in one, each of the others alone."""
        plain = self._is_plain(pending)
        batch = [n for n in pending.moved if plain and n not in pending.compressed]
        single = pending.moved.keys() - set(batch)
        return ([batch] if batch else []) + [[name] for name in pending.moved if name in single]

    def _is_plain(self, pending: PendingAveraging) -> bool:
        """Return True if the parameter becomes its anchor, and the step only moves the anchor."""
        return not self._single_rank and pending.measured is None

    def _move_batch(
        self, names: list[str], changes: list[Tensor], copies: Mapping[str, Tensor]
    ) -> None:
        anchors = [self.anchors[name] for name in names]
        buffers = [self.momentum[name] for name in names] if self.momentum else None
        outer_list_(anchors, changes, buffers, self._outer)
        torch._foreach_copy_([real_view(self._params[name]) for name in names], anchors)
        for name in copies.keys() & set(names):
            real_view(copies[name]).copy_(self.anchors[name])

    def _move(
        self, name: str, pending: PendingAveraging, step: Tensor, copies: Mapping[str, Tensor]
    ) -> None:
        param, anchor = self._params[name], self.anchors[name]
        exact = copies.get(name, param)
        # with a delay the parameter has moved on: compare with its measured value
        measured = exact if pending.measured is None else pending.measured[name]
        before, held = widened(measured), widened(as_held(anchor, measured))
        target = anchor - step
        if self._single_rank:
            # S - (S - p) is p except for rounding. A single rank must keep p bit for bit where its
            # whole change, without a residual, is applied
            target = torch.where((step == held - before) & (anchor == held), before, target)
        # the anchor first: it is equal on all ranks, also where the parameter keeps local steps
        anchor.copy_(target)
        if pending.measured is not None:  # keep the local steps made while the result travelled
            target = widened(exact) + (widened(as_held(anchor, measured)) - before)
        real_view(exact).copy_(target)
        if exact is not param:
            real_view(param).copy_(real_view(exact))


def _extra(key: str) -> str:
    """Return the name of an extra tensor in the exchange, distinct from parameter names."""
    return f"extra {key}"
