"""One averaging of parameters: what is measured, what travels, and what it changes once it is
there.
"""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm import Nodes, Sources
from thinwire.comm.replicate import overwrite_
from thinwire.compress.dense import not_finite, send_dense
from thinwire.compress.figures import conserves, decay_of
from thinwire.compress.protocol import (
    ERRORS,
    Bucket,
    ChangeCompression,
    MeanChange,
    Sending,
    together,
)
from thinwire.core.checksum import bit_sums
from thinwire.core.outer import OuterRule, outer_list_, outer_step_
from thinwire.exchange.nodes import in_nodes, make_common_
from thinwire.exchange.round import Round
from thinwire.layout.message import SKETCH_NUMEL
from thinwire.layout.traffic import begin_step
from thinwire.local.model import changed_since
from thinwire.local.sketch import sketch

__all__ = ["Averaging", "PendingAveraging", "real_view", "widened"]

_SKETCH = "sketch of the change"


def real_view(tensor: Tensor) -> Tensor:
    """The tensor itself, or a view of a complex one with real and imaginary parts as a last
    axis.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def widened(tensor: Tensor) -> Tensor:
    """The values in which averages are computed: float32, float64 for double precision; real; a
    copy if it must.
    """
    real = real_view(tensor.detach())
    return real if real.dtype == torch.float64 else real.float()


@dataclass(slots=True)
class PendingAveraging:
    """One averaging between its measurement and its application."""

    step: int
    """Step after which it was measured."""
    moved: dict[str, Tensor]
    """Per parameter what is to be sent: anchor minus parameter, with the kept error where it is
    compressed."""
    extras: dict[str, Tensor]
    """Buffers and optimizer state, averaged plainly."""
    compressed: frozenset[str]
    """The parameters whose change is compressed; the others travel densely."""
    sketch: Tensor | None = None
    """Of this rank's change, before anything that was kept; None where all of it is applied in
    time."""
    mixing: float = 0.0
    """The part of its local value that a parameter keeps."""
    measured: dict[str, Tensor] | None = None
    """The parameters as they were, where local steps go on before the result is applied."""
    round: Round | None = None
    """What travels densely."""
    refused: str | None = None
    """Why this rank could not take what other shards gave it before; the vote tells the others."""
    share: float = 1.0
    """The mean weight of those who took part: what they sent is divided by it."""

    def finish(self) -> None:
        """Wait for everything and check it.

        Raises:
            PayloadCorrupt: A message is damaged or belongs elsewhere.
            PeerLost, PeerStalled: See `Group`.
        """
        assert self.round is not None, "launched"
        self.round.finish()

    def mean_of(self, name: str, like: Tensor) -> Tensor:
        """The mean over the ranks of what travelled densely under a name."""
        assert self.round is not None, "launched"
        mean = self.round.arrived[name].mean(name, like)
        return mean if self.share == 1 else mean / self.share

    @property
    def digest(self) -> int:
        """Of all sums that have arrived, which are the same on all ranks: a pass over them, so ask
        once.
        """
        assert self.round is not None, "launched"
        return self.round.sums_digest

    def first_not_finite(self, buffers: Mapping[str, bool]) -> str | None:
        """The first tensor that must not be given to others; of buffers those that hold."""
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
    """Anchors, outer momentum and what compression keeps of all parameters by name, and how an
    averaging changes them.

    An anchor S is a parameter's value after its last averaging, in float32 or wider, equal on all
    ranks; outer momentum is equal too; kept errors are this rank's own, or its node's. Nothing
    changes before `commit_`.

    Where `sources` are `Nodes`, the ranks of a node first average what they have to send, and then
    send the same: what they keep of it is the same too.
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
        """What the compression keeps, by kind and name."""
        for name, p in params.items():
            # a shard may be empty
            if changes is not None and p.numel() and changes.compresses(p):
                for kind, tensor in changes.begin(self.anchors[name]).items():
                    self.kept[kind][name] = tensor
        self.sketches = torch.zeros(2, SKETCH_NUMEL, dtype=torch.float64, device="cpu")
        """Of all that the mean of the ranks has changed so far, and of all that was applied of it.
        """

    @property
    def errors(self) -> dict[str, Tensor]:
        """What of each parameter's change was not sent, of this rank alone."""
        return self.kept[ERRORS]

    @property
    def _alone(self) -> bool:
        return self.sources.size * self.sources.node_size == 1

    @torch.no_grad()
    def make_common(self) -> None:
        """Give the ranks of each node the mean of what they keep, where it was loaded and may
        differ.
        """
        sources = self.sources
        if isinstance(sources, Nodes) and not self._common:
            counted = sources.all_ranks, sources.node
            sent = [group.bytes_sent for group in counted]
            kept = {
                f"{kind} of {name}": tensor
                for kind, tensors in self.kept.items()
                for name, tensor in tensors.items()
            }
            make_common_(kept, sources)
            for group, nbytes in zip(counted, sent, strict=True):  # no exchange of an update
                group.bytes_sent = nbytes
        self._common = True

    def state_loaded(self) -> None:
        """What is kept was put in from elsewhere: it may differ inside a node."""
        self._common = False

    @property
    def plain(self) -> bool:
        """Whether a change is applied as it is."""
        return self.changes is None and self._outer.plain

    @torch.no_grad()
    def written(self) -> str | None:
        """Digest of the parameters, for where each should be its anchor and one is not."""
        now = {name: widened(p) for name, p in self._params.items()}
        if not changed_since(self.anchors, now):
            return None
        sums = [int(total) for total in bit_sums(list(now.values()))]
        return hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()

    @torch.no_grad()
    def anchor_(self) -> None:
        """Take the parameters as they are for anchors."""
        for name, anchor in self.anchors.items():
            anchor.copy_(widened(self._params[name]))

    @torch.no_grad()
    def forget_(self) -> None:
        """Nothing was kept of earlier changes, and there is no outer momentum yet."""
        for tensor in [*self.errors.values(), *self.momentum.values()]:
            tensor.zero_()

    def measure(
        self,
        step: int,
        values: Mapping[str, Tensor],
        extras: Mapping[str, Tensor],
        *,
        mixing: float = 0.0,
        keep: bool = False,
        fold: bool = True,
    ) -> PendingAveraging:
        """This rank's part of an averaging; `keep` copies what is measured, for a result that is
        applied later. Without `fold` what was kept is missing until `weigh_`.
        """
        moved = {
            name: (self.anchors[name] - widened(value)).contiguous()
            for name, value in values.items()
        }
        taken, changes = self._taken(step, moved), self.changes
        own = None if changes is None or conserves(changes) or not taken else self.sketch_of(moved)
        if fold:
            self._fold_(moved, taken)
        measured = (
            {name: value.detach().clone() for name, value in values.items()} if keep else None
        )
        wide = {
            key: widened(value).clone() if keep else widened(value) for key, value in extras.items()
        }
        return PendingAveraging(step, moved, wide, taken, own, mixing, measured)

    def _fold_(self, moved: Mapping[str, Tensor], taken: Set[str]) -> None:
        """Add what was kept of earlier changes."""
        for name in taken:
            assert self.changes is not None, "something is compressed"
            moved[name].add_(self.errors[name], alpha=decay_of(self.changes))

    @torch.no_grad()
    def weigh_(self, pending: PendingAveraging, weight: float) -> None:
        """Let the change of this rank count so much, and fold in what was kept, which counts as it
        did.
        """
        if weight != 1:
            pending.extras = {key: value * weight for key, value in pending.extras.items()}
            for change in pending.moved.values():
                change.mul_(weight)
            if pending.sketch is not None:
                pending.sketch = pending.sketch * weight
        self._fold_(pending.moved, pending.compressed)

    def _taken(self, step: int, moved: Mapping[str, Tensor]) -> frozenset[str]:
        """The parameters whose change is compressed at this step."""
        # rounds that end by time count from 0, and what has no such step compresses there too
        if self.changes is None or step <= begin_step(self.changes, -1):
            return frozenset()
        return frozenset(name for name in moved if name in self.errors)

    def launch(self, pending: PendingAveraging, *, heard: bool = False) -> None:
        """Put it on the wire without waiting: what the compression asks for, and one buffer per
        dtype of the rest.

        Args:
            pending: What is sent.
            heard: Whether to keep what is heard, for `replay` elsewhere.

        Communication: sum_ per dtype; the collectives of the compression. Among nodes one
        all-reduce per dtype inside each before them, which is waited for.
        """
        one_round, names, sending = self._prepared(pending)
        one_round.heard = [] if heard else None
        pending.round = one_round
        one_round.launch(names, sending)
        one_round.leave_nodes()

    def replay(self, pending: PendingAveraging, heard: Sequence[Sequence[Tensor]]) -> None:
        """Instead of `launch` and waiting: go through it with what another rank has heard, while
        the group stands in its place.
        """
        one_round, names, sending = self._prepared(pending)
        pending.round = one_round
        one_round.replay(names, sending, heard)
        one_round.finish()

    def _prepared(self, pending: PendingAveraging) -> tuple[Round, Set[str], Bucket]:
        """An averaging's round, what it carries, and how that is sent."""
        # a pending that was loaded may hold its tensors in another order than the ranks' own
        names = sorted(pending.moved, key=self._keys.__getitem__)
        given = {name: pending.moved[name] for name in names}
        given |= {_extra(key): value for key, value in pending.extras.items()}
        if pending.sketch is not None:
            given[_SKETCH] = pending.sketch.float()
        one_round = Round(self.sources, pending.step)
        context = one_round.context(0)

        def sendings(those: Mapping[str, Tensor]) -> list[Sending]:
            folded = {name: those[name] for name in those if name in pending.compressed}
            dense = {name: those[name] for name in those if name not in pending.compressed}
            found = [send_dense(context, dense)] if dense else []
            if folded:
                assert self.changes is not None, "something is compressed"
                found.insert(0, self.changes.send(context, folded, self.kept))
            return found

        nodes = isinstance(self.sources, Nodes)
        sending = in_nodes(context, given, sendings) if nodes else together(sendings(given))
        return one_round, given.keys(), sending

    def sketch_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The sketch of these parts of the model, one long vector, on the CPU."""
        return torch.stack(
            [sketch(tensor, self._keys[name]).cpu() for name, tensor in tensors.items()]
        ).sum(0)

    def applied_share(self, averagings: int) -> float:
        """See `LocalUpdates.stats`."""
        change, applied = self.sketches
        square = float(change @ change)
        return float(applied @ change) / square if square else self._outer.gain(averagings)

    @torch.no_grad()
    def commit_(self, pending: PendingAveraging, extras: Mapping[str, Tensor]) -> None:
        """Apply a pending whose round has finished: parameters, anchors, momentum, errors and
        `extras` change.

        p <- S - step, S <- p. Where local steps went on after the measurement: p <- p + (S_new -
        p_measured). Of a mixing m: p <- p + (1 - m) (S_new - p_measured).
        """
        assert pending.round is not None, "launched"
        before = (
            None
            if pending.sketch is None
            else self.sketch_of({n: self.anchors[n] for n in pending.moved})
        )
        for names in self._batches(pending):
            changes = [self._mean_change(name, pending) for name in names]
            if self._is_plain(names[0], pending):
                self._move_together(names, changes)
                continue
            for name, change in zip(names, changes, strict=True):
                step = outer_step_(change, self.momentum.get(name), self._outer)
                self._move(name, pending, step)
        for key, value in pending.extras.items():
            mean = pending.mean_of(_extra(key), value)
            if not (self._alone and torch.equal(mean, value)):  # what came since would be lost
                overwrite_(real_view(extras[key]), mean)
        if before is not None:
            applied = before - self.sketch_of({n: self.anchors[n] for n in pending.moved})
            assert pending.sketch is not None, "there was one before"
            mean = pending.mean_of(_SKETCH, pending.sketch)
            self.sketches += torch.stack([mean.cpu().double(), applied])

    def _mean_change(self, name: str, pending: PendingAveraging) -> Tensor:
        """The mean of what all ranks sent; what this one did not send stays in its error."""
        if name not in pending.compressed:
            return pending.mean_of(name, pending.moved[name])
        assert pending.round is not None, "launched"
        arrived = pending.round.arrived[name]
        assert isinstance(arrived, MeanChange), "compressed"
        folded = arrived.node_means.get(name, pending.moved[name])
        mean = arrived.take_mean_(name, folded, self.kept)
        return mean if pending.share == 1 else mean / pending.share

    def _batches(self, pending: PendingAveraging) -> list[list[str]]:
        """All means that are there already in one, each of the others on its own, since it needs a
        buffer.
        """
        together = [
            n for n in pending.moved if self._is_plain(n, pending) and n not in pending.compressed
        ]
        alone = pending.moved.keys() - set(together)
        return ([together] if together else []) + [
            [name] for name in pending.moved if name in alone
        ]

    def _is_plain(self, name: str, pending: PendingAveraging) -> bool:
        """Whether the parameter becomes its anchor, bit for bit, which is only moved by the
        step.
        """
        same_type = real_view(self._params[name]).dtype == self.anchors[name].dtype
        return not self._alone and pending.measured is None and not pending.mixing and same_type

    def _move_together(self, names: list[str], changes: list[Tensor]) -> None:
        anchors = [self.anchors[name] for name in names]
        buffers = [self.momentum[name] for name in names] if self.momentum else None
        outer_list_(anchors, changes, buffers, self._outer)
        torch._foreach_copy_([real_view(self._params[name]) for name in names], anchors)

    def _move(self, name: str, pending: PendingAveraging, step: Tensor) -> None:
        param, anchor = self._params[name], self.anchors[name]
        before = widened(param if pending.measured is None else pending.measured[name])
        target = anchor - step
        if self._alone:
            # S - (S - p) is p but for rounding; alone, averaging must not change a bit of p where
            # all of its change, and nothing that was kept, is applied
            target = torch.where(step == anchor - before, before, target)
        place = real_view(param)
        target = target.to(place.dtype)
        anchor.copy_(target)
        if pending.measured is None and not pending.mixing:
            place.copy_(target)
        else:
            place.copy_(widened(param) + (anchor - before) * (1 - pending.mixing))


def _extra(key: str) -> str:
    """What a buffer or state is called in the exchange, where parameters have their own names."""
    return f"extra {key}"
