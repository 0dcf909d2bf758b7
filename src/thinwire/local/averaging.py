"""One averaging of parameters: measurement, messages, and application of the result."""

import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from thinwire._devices import copies_pinned, has_float64
from thinwire.comm import Sources
from thinwire.comm.replicate import overwrite_, real_view
from thinwire.compress.dense import DenseMeans, not_finite, send_dense
from thinwire.compress.protocol import (
    RESIDUAL,
    Bucket,
    Compression,
    Computed,
    Context,
    Sending,
    send_checked,
)
from thinwire.core.checksum import bit_sums
from thinwire.core.norms import sketch_of
from thinwire.exchange.nodes import make_common_
from thinwire.exchange.round import Round
from thinwire.kernels.rules import OuterRule
from thinwire.layout.message import SKETCH_NUMEL
from thinwire.local.config import LocalConfig
from thinwire.local.interval import Stage
from thinwire.local.model import differs
from thinwire.local.staging import Staging
from thinwire.wire.bucket import Part, apart, runs, side_by_side, spans

_SKETCH = "sketch of the change"


def widened(tensor: Tensor) -> Tensor:
    """Return real values in float32, or float64 for double precision; copy only if needed."""
    real = real_view(tensor)
    return real if real.dtype == torch.float64 else real.float()


def _part(tensor: Tensor, start: int, end: int) -> Tensor:
    """Return entries of a real view as one dimension: a view if its memory allows."""
    flat = real_view(tensor).reshape(-1)
    return flat if flat.numel() == end - start else flat[start:end]


def _of(tensors: Mapping[str, Tensor], part: Part) -> list[Tensor]:
    return [_part(tensors[name], start, end) for name, start, end in part]


class Changes(Computed):
    """Anchor, as the parameter holds it, minus parameter, plus residual; computed when read."""

    words = "changes", "means of changes"

    def __init__(
        self, averaging: "Averaging", params: Mapping[str, Tensor], compressed: Set[str]
    ) -> None:
        self._anchors, self._errors = averaging.anchors, averaging.errors
        self._devices = averaging.devices
        self._staging = averaging.staging
        self._decay = 1.0 if averaging.changes is None else averaging.changes.decay
        self.params = params
        """The parameters, or copies of them."""
        self.compressed = compressed
        """Parameters whose change is compressed; all others are sent densely."""
        self.weight, self.unsent = 1.0, False
        """Weight of new work; True on a joiner, whose residuals do not count."""
        self.node_means: Mapping[str, Tensor] = {}
        """Means over a node, which are sent instead."""

    def __getitem__(self, name: str) -> Tensor:
        anchor = self._anchors[name]
        if self.unsent and name in self._errors:
            return self._errors[name].to(self._devices[name])
        return self.part(name, 0, anchor.numel()).view_as(anchor)

    def part(self, name: str, start: int, end: int) -> Tensor:
        """See `Computed`."""
        device = self._devices[name]
        if not real_view(self.params[name]).is_contiguous():
            return self.read([(name, start, end)])
        found = self._anchors[name].new_empty(end - start, device=device)
        for one, other in spans(end - start, device):  # so that little else is on the device
            found[one:other] = self.read([(name, start + one, start + other)])
        return found

    def runs(self, *written: Mapping[str, Tensor]) -> list[list[Part]]:
        """See `Computed`; of parts in which the `written` tensors can be written too."""
        kinds: dict[str, object] = {}
        for name, param in self.params.items():
            others = [tensors[name] for tensors in (self.params, *written) if name in tensors]
            plain = all(real_view(tensor).is_contiguous() for tensor in others)
            kind = param.dtype, self._anchors[name].dtype, param.device, name in self.compressed
            kinds[name] = kind if plain else None
        numels = {name: self._anchors[name].numel() for name in kinds}
        first = next(iter(kinds), None)
        return [] if first is None else runs(numels, self._devices[first], kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def only(self, names: Iterable[str], means: Mapping[str, Tensor] | None = None) -> "Changes":
        """Return the changes of these parameters alone, in this order."""
        found = copy.copy(self)
        found.params = {name: self.params[name] for name in names}
        found.node_means = means or {}
        return found

    def read(self, part: Part) -> Tensor:
        """See `Computed`."""
        return self.computed(part, *self.state(part))

    def state(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """Return the anchors and the residuals of a part, None of what is not compressed."""
        device = self._devices[part[0][0]]
        anchor = self._staging.read(_of(self._anchors, part), device)
        if part[0][0] not in self.compressed:
            return anchor, None
        return anchor, self._staging.read(_of(self._errors, part), device)

    def computed(self, part: Part, anchor: Tensor, error: Tensor | None) -> Tensor:
        """Return a part from its `state`."""
        if self.node_means:
            return side_by_side(_of(self.node_means, part)).to(anchor.device)
        value = side_by_side(_of(self.params, part)).to(anchor.device)
        change = anchor.to(value.dtype).to(anchor.dtype) - value
        if self.weight != 1:
            change.mul_(self.weight)
        # after weighting, since the weight is for new work alone
        return change if error is None else change.add_(error, alpha=self._decay)


@dataclass(slots=True)
class PendingAveraging:
    """Part of this rank in one averaging, and what arrives of the others."""

    step: int
    """Local step after which it was measured."""
    moved: Changes
    """Value to send for each parameter."""
    extras: dict[str, Tensor]
    """Buffers and optimizer state, averaged without compression."""
    sketch: Tensor | None = None
    """Sketch of this rank's change without residuals; None if all of it is applied in time."""
    delayed: bool = False
    """True if local steps continue before the result is applied: `moved` has copies."""
    share: float = 1.0
    """Mean weight of the ranks that took part; sums are divided by it."""
    round: Round = field(init=False)
    """Exchange, once it is launched."""

    def mean_of(self, name: str, like: Tensor) -> Tensor:
        """Return the mean over the ranks of a dense tensor, by name."""
        arrived = self.round.arrived[name]
        assert isinstance(arrived, DenseMeans), "not compressed"
        mean = arrived.mean(name, like).to(like.device)
        return mean if self.share == 1 else mean / mean.new_full((), self.share)

    def first_not_finite(self, buffers: Mapping[str, bool]) -> str | None:
        """Return the name of the first tensor that is not finite, of buffers with a true flag."""
        tensors = {f"parameter {name}": value for name, value in self.moved.params.items()}
        for key, value in self.extras.items():
            if buffers.get(key, key.startswith("state ")):
                tensors[key] = value
        return next(iter(not_finite(tensors)), None)


class OneAveraging:
    """Averaging in flight: this rank's part, its stage, and the stages that are left."""

    def __init__(
        self, measured: PendingAveraging, stages: Iterator[Stage], stage: Stage = Stage.PROPOSED
    ) -> None:
        self.measured = measured
        self.stage = stage
        # no reference back to this object: a dropped averaging frees its tensors at once
        self._stages = stages

    def advance(self, to: Stage) -> None:
        """Work until this stage is reached. Where members leave, it goes back to `SENT` first."""
        while self.stage < to:
            self.stage = next(self._stages, Stage.APPLIED)


class Averaging:
    """State of averaging by name: anchors, outer momentum and residuals; `commit_` changes it."""

    # an anchor is a parameter's exact value after an averaging, equal on all ranks like momentum

    def __init__(
        self,
        sources: Sources,
        params: Mapping[str, Tensor],
        config: LocalConfig,
        changes: Compression | None,
    ) -> None:
        self.sources = sources
        self._common = True
        self._params = params
        self._outer = OuterRule(config.outer_lr, config.outer_momentum, config.outer_nesterov)
        self.changes = changes
        self.staging = Staging()
        self._keys = {name: key for key, name in enumerate(params)}
        self.devices = {name: p.device for name, p in params.items()}
        self._host = config.state_device is not None
        self._pinned = self._host and any(copies_pinned(p.device) for p in params.values())
        self.anchors = {n: self._own(widened(p).contiguous()) for n, p in params.items()}
        momentum = self.anchors if self._outer.momentum else {}
        self.momentum = {n: self._own(torch.zeros_like(a)) for n, a in momentum.items()}
        kinds = [RESIDUAL] if changes is None else changes.kinds
        self.kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        """State of the compression, by kind and name."""
        for name, p in params.items():
            # a shard may be empty
            if changes is not None and p.numel() and changes.compresses(p):
                zeros = torch.zeros_like(self.anchors[name])
                self.kept[RESIDUAL][name] = self._own(zeros)
                for kind, tensor in changes.begin(zeros).items():
                    self.kept[kind][name] = tensor.to(p.device)
        self.sketches = torch.zeros(2, SKETCH_NUMEL, dtype=torch.float64, device="cpu")
        """Sketches of the ranks' mean change so far, and of the applied part of it."""
        self._squares: Tensor | None = None
        """Of what this rank sent in the last averaging, and of the mean: shape (2,)."""

    def _own(self, tensor: Tensor) -> Tensor:
        """Return a copy where state is kept."""
        if self._pinned:
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        return tensor.to("cpu" if self._host else tensor.device, copy=True)

    def _home(self, tensor: Tensor) -> Tensor:
        """Return a tensor where state is kept; a copy only if needed."""
        return tensor.cpu() if self._host else tensor

    @property
    def errors(self) -> dict[str, Tensor]:
        """Residual of each parameter: the unsent part of its change, of this rank alone."""
        return self.kept[RESIDUAL]

    def _single_rank(self, pending: PendingAveraging) -> bool:
        """Return True if nobody else averages; a joiner that repeats the averaging counts."""
        recorded = pending.round.received is not None
        return self.sources.size * self.sources.node_size == 1 and not recorded

    @torch.no_grad()
    def make_common(self) -> None:
        """Average loaded residuals inside each node, where they may differ."""
        if not self._common:
            # not an exchange of updates
            with self.sources.all_ranks.uncounted(), self.sources.node.uncounted():
                make_common_(self.kept, self.sources)
        self._common = True

    def state_loaded(self) -> None:
        """Note that residuals were loaded and may differ inside a node."""
        self._common = False

    @property
    def plain(self) -> bool:
        """True if a parameter becomes the mean of the ranks' values, whatever its anchor is."""
        exact = all(a.dtype == real_view(self._params[n]).dtype for n, a in self.anchors.items())
        return exact and self.changes is None and self._outer.plain

    @torch.no_grad()
    def written(self) -> str | None:
        """Return a digest of the parameters if one of them differs from its anchor, else None."""
        moved = Changes(self, self._params, frozenset())
        flags = []
        for part in (part for run in moved.runs() for part in run):
            now = side_by_side(_of(self._params, part))
            anchor = self.staging.read(_of(self.anchors, part), now.device)
            flags.append(differs(now, anchor.to(now.dtype)))
        if not flags or not bool(torch.stack([f.to(flags[0].device) for f in flags]).any()):
            return None
        sums = [int(total) for p in self._params.values() for total in bit_sums([widened(p)])]
        return hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()

    @torch.no_grad()
    def anchor_(self) -> None:
        """Set the anchors to the current parameters, where these hold other values."""
        for name, anchor in self.anchors.items():
            now = real_view(self._params[name]).to(anchor.device)
            anchor.copy_(torch.where(now == anchor.to(now.dtype), anchor, now))

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
    ) -> PendingAveraging:
        """Measure this rank's part; `keep` copies it for later."""
        params = {n: self._own(value.detach()) if keep else value for n, value in values.items()}
        moved = Changes(self, params, self._compressed(step, params))
        changes = self.changes
        own = None
        if changes is not None and moved.compressed and not changes.conserves:
            own = self._sketch_of(Changes(self, params, frozenset()), params)
        wide = {key: widened(value) for key, value in extras.items()}
        wide = {key: self._own(value) for key, value in wide.items()} if keep else wide
        return PendingAveraging(step, moved, wide, own, delayed=keep)

    @torch.no_grad()
    def weigh_(self, pending: PendingAveraging, weight: float) -> None:
        """Multiply this rank's new change by its weight."""
        # all else is weighted when it is sent, so that a saved averaging is weighted once
        pending.moved.weight = weight
        # the sketch is linear, so it is weighted like the change
        if weight != 1 and pending.sketch is not None:
            pending.sketch = pending.sketch * weight

    def _compressed(self, step: int, names: Iterable[str]) -> frozenset[str]:
        """Return the parameters whose change is compressed at this step."""
        # timed rounds count from 0; a compression without a begin step compresses at step 0 too
        if self.changes is None or step <= self.changes.last_dense_step:
            return frozenset()
        return frozenset(names).intersection(self.errors)

    def launch(self, pending: PendingAveraging, *, record: bool = False) -> None:
        """Start the exchange without waiting, but for sums inside nodes; `record` for `replay`."""
        one_round, names, sending = self._prepared(pending)
        # a joiner repeats the averaging from these answers
        one_round.received = [] if record else None
        one_round.launch(names, sending)
        one_round.leave_nodes()

    def replay(self, pending: PendingAveraging, received: Sequence[Sequence[Tensor]]) -> None:
        """Run an averaging from the messages that another rank recorded."""
        one_round, names, sending = self._prepared(pending)
        one_round.received = list(map(list, received))
        one_round.replay(names, sending, received)
        one_round.finish()

    def _prepared(self, pending: PendingAveraging) -> tuple[Round, Set[str], Bucket]:
        """Return an averaging's round, its tensors, and the plan by which they are sent."""
        # a loaded averaging may list its tensors in another order: all ranks sort alike
        names = sorted(pending.moved, key=self._keys.__getitem__)
        compressed = pending.moved.compressed
        taken = [name for name in names if name in compressed]
        # names distinct from those of parameters
        weight = pending.moved.weight
        others = {
            f"extra {key}": self._home(value if weight == 1 else value * weight)
            for key, value in pending.extras.items()
        }
        if pending.sketch is not None:
            others[_SKETCH] = pending.sketch.float()
        dense = [name for name in names if name not in compressed]
        shapes = {name: self.anchors[name] for name in dense} | others
        pending.round = one_round = Round(self.sources, pending.step)

        def sendings(context: Context, means: Mapping[str, Tensor]) -> list[Sending]:
            given = means or pending.moved.only(dense)
            found = [send_dense(context, shapes, computed=given)] if shapes else []
            if taken:
                assert self.changes is not None, "something is compressed"
                folded = pending.moved.only(taken, means)
                context = replace(context, update=pending.step - 1)
                found.insert(0, send_checked(self.changes, context, folded, self.kept))
            return found

        moved = ((name, self._home(pending.moved[name])) for name in names)
        sending = one_round.bucket(0, chain(moved, others.items()), sendings)
        return one_round, {*names, *others}, sending

    def _sketch_of(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
        """Return the sketch of some of these tensors as one long vector, on the CPU."""
        return sketch_of((tensors[name], self._keys[name]) for name in names)

    @property
    def drift(self) -> float:
        """Norm of what this rank sent in the last averaging over that of the mean; 0 if unknown."""
        own, mean = [0.0, 0.0] if self._squares is None else self._squares.tolist()
        return math.sqrt(own / mean) if mean else 0.0

    def _note(self, sent: Tensor, mean: Tensor) -> None:
        norms = torch.stack([sent.norm(), mean.norm()])
        squares = (norms.double() if has_float64(norms.device) else norms).square()
        known = self._squares
        self._squares = squares if known is None else known.to(squares.device) + squares

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
        copies: Mapping[str, Tensor] = {},
    ) -> None:
        """Apply a pending averaging whose round has finished, with the optimizer's `copies`.

        S <- S - step, p <- S rounded to the type of p. If local steps continued after the
        measurement: p <- p + (S_new rounded - p_measured).
        """
        anchors = self.anchors
        moved = pending.moved
        single = self._single_rank(pending)
        before = None if pending.sketch is None else self._sketch_of(anchors, moved)
        self._squares = None
        for run in moved.runs(self._params, copies):
            for part, found in zip(run, self._mean_changes(run, pending), strict=True):
                self._apply(part, *found, pending, copies)
        self.staging.finish()
        for key, value in pending.extras.items():
            mean = pending.mean_of(f"extra {key}", value)
            if not (single and torch.equal(mean, value)):  # do not undo later changes
                overwrite_(real_view(extras[key]), mean)
        if any(key.startswith("parameter ") for key in pending.extras):
            self.anchor_()
        if before is not None:
            applied = before - self._sketch_of(anchors, moved)
            assert pending.sketch is not None, "there was one before"
            mean = pending.mean_of(_SKETCH, pending.sketch)
            self.sketches += torch.stack([mean.cpu().double(), applied])

    def _apply(
        self,
        part: Part,
        s: Tensor,
        total: Tensor,
        pending: PendingAveraging,
        copies: Mapping[str, Tensor],
    ) -> None:
        """Move a part of parameters, anchors `s` and the optimizer's copies, in the cache."""
        single = self._single_rank(pending)
        device = total.device
        # by a tensor: on a GPU torch divides by a number through its reciprocal
        change = total if pending.share == 1 else total / total.new_full((), pending.share)
        buffer = None
        if self.momentum:
            buffer = self.staging.read(_of(self.momentum, part), device)
        step = outer_step_(change, buffer, self._outer)
        if buffer is not None:
            self.staging.write_(_of(self.momentum, part), buffer)
        target = s - step if single or pending.delayed else s.sub_(step)
        if single or pending.delayed:
            old = side_by_side(_of(pending.moved.params, part)).to(device)
            before, held = widened(old), widened(s.to(old.dtype))
        if single:
            # S - (S - p) is p except for rounding. A single rank must keep p bit for bit
            # where its whole change, without a residual, is applied
            target = torch.where((step == held - before) & (s == held), before, target)
        # the anchor first: it is equal on all ranks, also where p keeps local steps
        s.copy_(target)
        self.staging.write_(_of(self.anchors, part), s)
        if pending.delayed:  # keep the local steps made while the result travelled
            now = side_by_side([widened(t) for t in _of({**self._params, **copies}, part)])
            target = now + (widened(s.to(old.dtype)) - before)
        numels = [end - start for _, start, end in part]
        reals = []
        values = []
        for (name, start, end), found in zip(part, apart(target, numels), strict=True):
            for tensor in (self._params[name], copies.get(name)):
                if tensor is not None:
                    real = real_view(tensor)
                    reals.append(_part(real, start, end) if real.is_contiguous() else real)
                    values.append(found.view_as(reals[-1]))
        torch._foreach_copy_(reals, values)

    def _mean_changes(
        self, run: Sequence[Part], pending: PendingAveraging
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield anchors and mean change of each part; what is not sent stays as residual."""
        names = list(dict.fromkeys(name for part in run for name, *_ in part))
        moved = pending.moved
        arrived = pending.round.arrived[names[0]]
        device = self.devices[names[0]]
        folded = moved.only(names, arrived.node_means)
        if names[0] in moved.compressed and arrived.has_parts:
            for part in run:
                anchor, error = folded.state(part)
                assert error is not None, "it is compressed"
                own = folded.computed(part, anchor, error)
                mean = arrived.take_part_(part, own, error)
                self._note(own.sub_(error), mean)
                self.staging.write_(_of(self.errors, part), error)
                yield anchor, mean
            return
        found = []
        for name in names:
            got = pending.round.arrived[name]
            if isinstance(got, DenseMeans):
                found.append(got.mean(name, self.anchors[name]).reshape(-1))
            else:
                found.append(got.take_(name, folded, self.kept).reshape(-1))
        for part in run:
            whole = len(part) > 1 or len(run) == 1
            mean = (side_by_side(found) if whole else found[0][slice(*part[0][1:])]).to(device)
            if isinstance(arrived, DenseMeans):
                self._note(moved.read(part), mean)
            yield self.staging.read(_of(self.anchors, part), device), mean


def outer_step_(change: Tensor, buffer: Tensor | None, rule: OuterRule) -> Tensor:
    """Return the step of the outer optimizer, to be subtracted from the anchor; b is `buffer`.

    b <- momentum * b + change, in place; step = lr * (change + momentum * b) with Nesterov, else
    lr * b. Without momentum b is None; then the result may be `change` itself.

    >>> import torch
    >>> outer_step_(torch.tensor([2.0]), None, OuterRule(lr=0.5))
    tensor([1.])

    Source: Douillard et al., 2023, arXiv 2311.08105, algorithm 1.
    """
    step = change
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(change)
        # not add(..., alpha): that rounds once or twice, depending on the processor
        step = change + rule.momentum * buffer if rule.nesterov else buffer
    return step if rule.lr == 1 else step * rule.lr
