"""The sequence of one gradient exchange: propose, agree, send, verify, vote. Only then may anybody change anything."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm import Group, Nodes, Sources
from thinwire.errors import PayloadCorrupt, ThinwireError
from thinwire.sync.agreement import ABSENT, COMPARING, DENSE, ROW_SPARSE, Drops, Report, agree_on_step
from thinwire.sync.digest import RollingDigest
from thinwire.sync.flags import Flags, dense_flag, read_flags
from thinwire.sync.likeness import Likeness
from thinwire.sync.own_state import OwnState
from thinwire.sync.round import Round, SparseGradient
from thinwire.sync.settings import Settings
from thinwire.sync.steady import Steady
from thinwire.sync.traffic import GATHER

__all__ = ["GradientExchange", "Proposer", "Verdict", "all_finite", "not_finite"]

_Key = TypeVar("_Key", int, str)

Proposer = Callable[[Mapping[int, Tensor]], dict[int, SparseGradient]]
"""From gradients by key to what they would send; without those that are exchanged densely."""


class Verdict(Enum):
    """What all ranks make of messages that were sent early."""

    APPLY = "apply"
    """They are what `exchange` returns next."""
    DROP = "drop"
    """A gradient is not finite somewhere."""
    OVERFLOW = "overflow"
    """A loss scaler found an overflow somewhere."""
    AGAIN = "again"
    """They do not stand for the gradients of some rank: `exchange` sends anew."""


class GradientExchange:
    """Brings every rank the mean of all ranks' gradients, sparse or dense, or drops the step on all of them.

    Three ways of use: `exchange` alone; `launch_bucket` during the backward pass and `exchange` after it; or, where
    ranks may turn out to have different gradients, `launch_bucket` for all tensors in `steady.keys`, then `settle`,
    then `exchange` if the verdict is APPLY or AGAIN.

    `check_dense=False` lets dense gradients through that are not finite; compressed ones never.

    Where `sources` are `Nodes`, the ranks of a node first average their gradients and then propose the same: they must
    hold the same state. A bucket launched early is averaged in its node at once, and goes on to other nodes when the
    next one is launched, or in `exchange`.

    Communication: per step one small agreement before and one after the messages; with buckets launched early only the
    one after. See `Round` for the messages; among nodes, one all-reduce per dtype inside each before them.
    Failure: an error leaves nothing applied on this rank; `drops` counts dropped steps.
    """

    def __init__(
        self,
        group: Group,
        names: Sequence[str],
        *,
        value_bits: int,
        propose: Proposer,
        check_dense: bool = True,
        sources: Sources | None = None,
        exchange: str = GATHER,
    ) -> None:
        self.group = group
        self.sources: Sources = group if sources is None else sources
        self.drops = Drops()
        self.names = list(names)
        self._value_bits = value_bits
        self._propose = propose
        self._check_dense = check_dense
        self._exchange = exchange
        self._flying: Round | None = None
        self._in_node: _InNode | None = None
        self._settled: Round | None = None
        self._finite: dict[int, bool | Tensor] = {}
        self._abandoned: str | None = None
        self.buckets: Sequence[Sequence[int]] = ()
        """Keys of the tensors that travel together; what is in none of them travels in one more."""
        self.optimizer: torch.optim.Optimizer | None = None
        """Who updates from what arrives, if its rates and hyper-parameters are to be compared."""
        self.identity = ""
        """Which of the engines and optimizers over these ranks this is."""
        self.digest: RollingDigest | None = None
        """Of what all ranks must hold alike before every step, if that is to be compared."""
        self.spoiled: str | None = None
        """Why this rank did not finish its last update, for the error that all ranks raise in the next one."""
        self.own: OwnState | None = None
        """What only this rank holds, if its memory is to be watched; whoever writes it seals it."""
        self.likeness = Likeness("gradients")
        self.bytes_before = 0
        """What a DistributedDataParallel model that averages besides has sent, since it was found."""
        self._settings = Settings()
        self.steady = Steady()
        """Which tensors have a dense gradient on every rank, step after step."""

    @property
    def in_flight(self) -> bool:
        """Whether buckets have been launched and not yet been taken by `exchange`."""
        return self._flying is not None

    def launch_bucket(self, step: int, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """Send this rank's part of one bucket, without waiting.

        Raises:
            ThinwireError: One of the tensors has been launched since the last `exchange`.
        """
        self._require_intact()
        if self._flying is None:
            self._flying = self._round(step)
        known = self._flying.keys | (set() if self._in_node is None else set(self._in_node.keys))
        twice = known & grads.keys()
        if twice:
            raise ThinwireError(
                f"the gradient of {self.names[min(twice)]} was exchanged already and step() not called since: "
                "run the backward passes of an accumulated gradient, but the last, under ddp.no_sync()"
            )
        if not isinstance(self.sources, Nodes):
            self._send(self._flying, bucket, grads)
            return
        before, self._in_node = self._in_node, _InNode(self.sources, step, bucket, grads)
        if before is not None:
            self._send_mean(self._flying, before)

    def discard(self) -> None:
        """Wait for what was launched and forget it."""
        flying, in_node = self._flying, self._in_node
        self._flying, self._in_node, self._finite = None, None, {}
        if in_node is not None:
            in_node.means(self._round(0))
        if flying is not None:
            with contextlib.suppress(PayloadCorrupt):  # nothing of it is used
                flying.finish()

    def settle(
        self,
        step: int,
        grads: Mapping[int, Tensor],
        *,
        overflow: bool = False,
        misuse: str | None = None,
        unusable: str | None = None,
    ) -> Verdict:
        """Wait for what was launched early, check it, and agree with all ranks what becomes of it.

        Args:
            step: As in `exchange`.
            grads: As in `exchange`; only looked at to say whose gradient is not finite.
            overflow: Whether a loss scaler found an overflow on this rank.
            misuse: As in `exchange`.
            unusable: Why what this rank launched does not stand for its gradients.

        Raises:
            As `exchange` does.
        """
        self._require_intact()
        flying, in_node = self._flying or self._round(step), self._in_node
        self._flying, self._in_node = None, None
        if in_node is not None:
            self._send_mean(flying, in_node)
        finite, self._finite = self._finite, {}
        report = Report(step, "early", overflow=overflow or None, misuse=misuse, unusable=unusable)
        reports = self._vote(flying, report, grads, finite)
        if any(each.unusable for each in reports):
            self.steady.lose()
            return Verdict.AGAIN
        if any(each.overflow for each in reports):
            return Verdict.OVERFLOW
        if self._dropped(reports):
            return Verdict.DROP
        self._settled = flying
        return Verdict.APPLY

    def require_equal(self, step: int) -> None:
        """Compare everything that all ranks must hold alike, and the memory of what is this rank's own.

        Raises:
            Diverged: On every rank.
            Mismatch: Ranks are at different places.

        Communication: 24 bytes a rank, twice.
        """
        self._require_intact()
        if self.digest is None:
            return
        damage = None if self.own is None else self.own.damage(step, everything=True)
        sent = self.group.bytes_sent
        self._agree(Report(step, COMPARING, damaged=damage))
        if self.group.size > 1:
            self.digest.require_equal(self.group, step)
        self.group.bytes_sent = sent  # no exchange of an update

    def release(self) -> None:
        """Forget a settled exchange that was not asked for."""
        self._settled = None

    def abandon(self, reason: str) -> None:
        """Leave what is on its way to itself; ranks are at different places then, and nothing can be exchanged."""
        self._flying, self._in_node, self._settled, self._finite = None, None, None, {}
        self._abandoned = reason
        self.group.abandon(reason)
        self.sources.abandon(reason)

    def _require_intact(self) -> None:
        if self._abandoned is not None:
            raise ThinwireError(
                f"an exchange was left half-way, so ranks are at different places ({self._abandoned}): "
                "start again from the last checkpoint"
            )

    def exchange(
        self,
        step: int,
        grads: Mapping[int, Tensor],
        *,
        overflow: bool | None = None,
        misuse: str | None = None,
        unchanged: Flags | None = None,
    ) -> Round | None:
        """The checked exchange of this step, or None where all ranks drop it.

        Args:
            step: Completed updates, from 0.
            grads: This rank's gradients by key; only names what is there if the buckets were launched before.
            overflow: Whether a loss scaler found an overflow on this rank; None without a scaler.
            misuse: What makes this rank unable to go on, for the error that all ranks raise.
            unchanged: Whether gradients are still what was launched before; one that is not is such a misuse.

        Raises:
            PayloadCorrupt: A rank refused a message.
            ThinwireError: A rank was misused.
            Mismatch: Ranks are at different places, or have gradients for different parameters.
            NonFinite: Too many dropped steps in a row.
            PeerLost, PeerStalled: A rank died or does not answer.
        """
        self._require_intact()
        settled, self._settled = self._settled, None
        if settled is not None:
            return settled
        if self._flying is not None:
            return self._exchange_launched(step, grads, overflow, misuse, unchanged or {})
        if isinstance(self.sources, Nodes):
            return self._exchange_in_nodes(self.sources, step, grads, overflow, misuse)
        sparse, dense, finite = self._split(grads)
        [bad], _ = read_flags([finite])
        report = Report(step, "proposed", kinds=self._kinds(grads), non_finite=bad, overflow=overflow, misuse=misuse)
        reports = self._agree_and_compare(report, grads)
        self.steady.see([each.kinds for each in reports])
        if self._dropped(reports, last=False):
            return None
        fresh = self._round(step, reports, grads)
        _launch_all(fresh, self._buckets_of(grads), grads, sparse, dense)
        return self._settle(fresh, Report(step, "exchanged"), grads)

    def _exchange_launched(
        self, step: int, grads: Mapping[int, Tensor], overflow: bool | None, misuse: str | None, unchanged: Flags
    ) -> Round | None:
        flying, in_node = self._flying, self._in_node
        self._flying, self._in_node = None, None
        assert flying is not None
        try:
            misuse = misuse or self._stray(flying.keys | (set() if in_node is None else set(in_node.keys)), grads)
            if in_node is not None:
                self._send_mean(flying, in_node)
            report = Report(step, "attached", overflow=overflow, misuse=misuse)
            return self._settle(flying, report, grads, self._finite, unchanged)
        finally:
            self._finite = {}

    def _exchange_in_nodes(
        self, nodes: Nodes, step: int, grads: Mapping[int, Tensor], overflow: bool | None, misuse: str | None
    ) -> Round | None:
        """As flat, but only the mean over a node shows what it would send; the vote tells if it is not finite."""
        report = Report(step, "proposed", kinds=self._kinds(grads), overflow=overflow, misuse=misuse)
        reports = self._agree_and_compare(report, grads)
        self.steady.see([each.kinds for each in reports])
        if self._dropped(reports, last=False):
            return None
        fresh, buckets = self._round(step, reports, grads), self._buckets_of(grads)
        in_node = [_InNode(nodes, step, number, {k: grads[k] for k in keys}) for number, keys in buckets]
        means = {key: mean for each in in_node for key, mean in each.means(fresh).items()}
        fresh.node_means.update(means)
        sparse, dense, finite = self._split(means)
        _launch_all(fresh, buckets, means, sparse, dense)
        return self._settle(fresh, Report(step, "exchanged"), grads, finite)

    def _blaming(self, report: Report, bad: int | None, grads: Mapping[int, Tensor]) -> Report:
        """The report with what is not finite, as this rank's own or as that of the mean over its node."""
        if bad is None or bad not in grads or not isinstance(self.sources, Nodes):
            return replace(report, non_finite=bad)
        own = grads[bad].coalesce().values() if grads[bad].is_sparse else grads[bad]
        return replace(report, sum_non_finite=bad) if all_finite(own) else replace(report, non_finite=bad)

    def _blaming_sum(self, report: Report, bad: int | None, grads: Mapping[int, Tensor]) -> Report:
        """The report with a dense mean that is not finite: for this rank's own gradient, or only added to others."""
        if bad is None or bad not in grads or isinstance(self.sources, Nodes):
            return replace(report, sum_non_finite=bad)
        return replace(report, sum_non_finite=bad) if all_finite(grads[bad]) else replace(report, non_finite=bad)

    def _round(self, step: int, reports: Sequence[Report] = (), keys: Iterable[int] = ()) -> Round:
        sparse = {key: [report.kinds[key] == ROW_SPARSE for report in reports] for key in keys}
        return Round(
            self.sources,
            step=step,
            value_bits=self._value_bits,
            row_sparse={key for key, ranks in sparse.items() if any(ranks)},
            rows_only={key for key, ranks in sparse.items() if all(ranks)},
            exchange=self._exchange,
            read_sums=self.digest is not None,
        )

    def _send(self, flying: Round, bucket: int, grads: Mapping[int, Tensor]) -> None:
        # what is not finite shows in the sum, which is looked at anyway
        sparse, dense, finite = self._split(grads, look=self.sources.size == 1 or isinstance(self.sources, Nodes))
        self._finite.update(finite)
        flying.launch(bucket, sparse, dense)

    def _send_mean(self, flying: Round, in_node: "_InNode") -> None:
        """Wait for the mean over the node, which began a bucket ago, and send it to the other nodes."""
        means = in_node.means(flying)
        flying.node_means.update(means)
        self._send(flying, in_node.bucket, means)

    def _settle(
        self,
        one_round: Round,
        report: Report,
        grads: Mapping[int, Tensor],
        finite: Flags | None = None,
        unchanged: Flags | None = None,
    ) -> Round | None:
        reports = self._vote(one_round, report, grads, finite, unchanged)
        return None if self._dropped(reports) else one_round

    def _vote(
        self,
        one_round: Round,
        report: Report,
        grads: Mapping[int, Tensor],
        finite: Flags | None = None,
        unchanged: Flags | None = None,
    ) -> list[Report]:
        """Wait for the messages and check them, then hear what all ranks say."""
        digest = self.digest if self.group.size > 1 else None
        if digest is not None:  # while the messages are on their way
            report = replace(report, digest=digest.at(report.step))
        if self.own is not None:
            report = replace(report, damaged=self.own.damage(report.step))
        try:
            bad, changed = one_round.finish(finite or {}, unchanged or {})
            misuse = report.misuse or self._changed_since_launch(changed)
            report = self._blaming(replace(report, misuse=misuse), bad, grads)
        except PayloadCorrupt as refusal:
            report = replace(report, corrupt=str(refusal))
        if report.sum_non_finite is None:
            report = replace(report, sum_non_finite=one_round.sum_non_finite)
        if self._check_dense and report.sum_non_finite is None and report.non_finite is None:
            report = self._blaming_sum(report, one_round.dense_non_finite, grads)
        if digest is not None:
            report = replace(report, sums=one_round.dense_digest)
        rates = [] if self.optimizer is None else _rates_of(self.optimizer)
        return self._agree(replace(report, rates=rates))

    def _agree_and_compare(self, report: Report, grads: Mapping[int, Tensor]) -> list[Report]:
        """Also whether all ranks bring the same, which would make the exchange useless."""
        reports = self._agree(replace(report, likeness=self.likeness.of(grads.values(), self.group.size)))
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        self.likeness.hear([each.likeness for each in reports], (p for group in groups for p in group["params"]))
        if self.likeness.averaged_before:
            self.bytes_before += sum(grad.numel() * grad.element_size() for grad in grads.values())
        return reports

    def _agree(self, report: Report) -> list[Report]:
        settings = [] if self.optimizer is None else self._settings.of(self.optimizer)
        report = replace(report, engine=self.identity, settings=settings, misuse=report.misuse or self.spoiled)
        return agree_on_step(self.group, report, self.names, self.digest)

    def _dropped(self, reports: Sequence[Report], *, last: bool = True) -> bool:
        """Whether this step is dropped; what made a gradient overflow may be damage on one rank: all is compared."""
        bad = any(r.overflow or r.non_finite is not None or r.sum_non_finite is not None for r in reports)
        if bad:
            self.require_equal(reports[0].step)
        return self.drops.needed(reports, self.names, last=last)

    def _split(
        self, grads: Mapping[int, Tensor], *, look: bool = True
    ) -> tuple[dict[int, SparseGradient], dict[int, Tensor], dict[int, bool | Tensor]]:
        """What is sent sparsely, what densely, and whether each is finite; dense ones only where they are looked at."""
        sparse = self._propose({key: grad for key, grad in grads.items() if not grad.is_sparse})
        dense = {key: g.to_dense() if g.is_sparse else g for key, g in grads.items() if key not in sparse}
        finite = {key: item.proposal.finite for key, item in sparse.items()}
        if self._check_dense and look:
            waiting = {key: flag for key, grad in dense.items() if (flag := dense_flag(grad)) is not None}
            known = {key: grad for key, grad in dense.items() if key not in waiting}
            finite |= waiting | dict.fromkeys(not_finite(known), False)
        return sparse, dense, finite

    def _buckets_of(self, grads: Mapping[int, Tensor]) -> list[tuple[int, list[int]]]:
        """Number and keys of each bucket, as far as there are gradients."""
        others = sorted(set(grads).difference(*self.buckets))
        there = [(number, [k for k in keys if k in grads]) for number, keys in enumerate([*self.buckets, others])]
        return [(number, keys) for number, keys in there if keys]

    def _kinds(self, grads: Mapping[int, Tensor]) -> str:
        kinds = [ABSENT] * len(self.names)
        for key, grad in grads.items():
            kinds[key] = ROW_SPARSE if grad.is_sparse else DENSE
        return "".join(kinds)

    def _changed_since_launch(self, key: int | None) -> str | None:
        """What to tell a user who clips or scales `p.grad` after its exchange has begun."""
        if key is None:
            return None
        return (
            f"the gradient of {self.names[key]} was changed between backward() and step(), but an "
            "attached optimizer has sent it by then: use local_grad_clip_norm or grad_clip to clip and "
            "torch.amp.GradScaler to scale, or do not attach"
        )

    def _stray(self, launched: Collection[int], grads: Mapping[int, Tensor]) -> str | None:
        for key in grads:
            if key not in launched:
                return (
                    f"parameter {self.names[key]} has a gradient that did not come from the attached model's backward: "
                    "call step() after every synchronising backward pass of that model, and use no other"
                )
        return None


class _InNode:
    """Gradients on their way to their mean over a node, in the dtype in which dense ones are averaged."""

    def __init__(self, nodes: Nodes, step: int, bucket: int, grads: Mapping[int, Tensor]) -> None:
        self.bucket = bucket
        self.keys = list(grads)
        self._node = nodes.rank
        self._round = Round(nodes.inner, step=step, value_bits=32, read_sums=False)
        self._round.launch(bucket, {}, {key: g.to_dense() if g.is_sparse else g for key, g in grads.items()})

    def means(self, onward: Round) -> dict[int, Tensor]:
        """Wait for it; the same bits on all ranks of the node. What is damaged `onward` refuses, in its vote."""
        try:
            self._round.finish()
        except PayloadCorrupt as refusal:
            onward.refused = f"inside node {self._node}, whose ranks count from 0: {refusal}"
        return {key: self._round.dense_mean(key) for key in self.keys}


def _launch_all(
    fresh: Round,
    buckets: Sequence[tuple[int, Sequence[int]]],
    grads: Mapping[int, Tensor],
    sparse: dict[int, SparseGradient],
    dense: dict[int, Tensor],
) -> None:
    """One bucket after the other; what is row-sparse on any rank goes densely."""
    for key in sorted(set(fresh.row_sparse) & sparse.keys()):
        del sparse[key]
        dense[key] = grads[key]
    for number, keys in buckets:
        fresh.launch(
            number,
            {key: sparse[key] for key in keys if key in sparse},
            {key: dense[key] for key in keys if key in dense},
        )


def all_finite(tensor: Tensor) -> bool:
    """One cheap pass: a sum is finite only if all terms are; a finite tensor whose sum overflows is looked at again."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def not_finite(tensors: Mapping[_Key, Tensor]) -> list[_Key]:
    """The keys of dense tensors that are not `all_finite`; one host synchronization where all of them are."""
    flags = [tensor.sum().isfinite() for tensor in tensors.values()]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return []
    return [key for key, tensor in tensors.items() if not all_finite(tensor)]


def _rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Of the groups that have one: there are methods without a learning rate."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
