"""The sequence of one gradient exchange: agree, send, verify, agree again.

Only after the second agreement may a rank change anything. Where facts ride on dense sums, what
exists only after a sum is compared in the next exchange.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.comm import Group, Sources
from thinwire.compress.dense import DenseMeans, all_finite, not_finite, send_dense
from thinwire.compress.entries import ArrivedEntries
from thinwire.compress.protocol import (
    Arrived,
    Compression,
    Context,
    Flags,
    Sending,
    send_checked,
)
from thinwire.compress.residuals import Dense, Folded, Grads, Received, Residuals
from thinwire.core.tensors import narrowed, sparse_rows, with_own_storage
from thinwire.errors import PayloadCorrupt, ThinwireError
from thinwire.exchange.agreement import Answers, Participants, StepDecision, verdict_of
from thinwire.exchange.checks import Presence
from thinwire.exchange.nodes import make_common_, make_mean_
from thinwire.exchange.replica import layout_change
from thinwire.exchange.round import Round
from thinwire.exchange.synchronizer import Synchronizer, agreed_sources
from thinwire.exchange.update import DenseUpdate

_NO_OTHERS = Participants()
_NONE: Grads = {}


Apply = Callable[[dict[str, Tensor], Grads, Sequence[float]], torch.optim.Optimizer | None]
"""Updates from means by name. The next arguments are this rank's gradients of parameters that a
compression has updated, and what `measure` returned on the ranks of this replica. It returns an
optimizer that made collective calls by itself, if any.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a step, the same decision on all ranks."""

    verdict: StepDecision
    answers: Answers
    """Reports of all ranks in the last agreement."""
    grads: Grads = field(default_factory=dict)
    """This rank's gradients that count, with zeros for those that it lacked."""
    received: Round | DenseUpdate | None = None
    """The messages that arrived, if the update is made."""


class Compressed:
    """The tensors of an exchange: those that a method compresses, and all others, sent densely."""

    def __init__(
        self,
        accumulation: Residuals,
        params: Mapping[str, Tensor],
        sources: Sources,
        *,
        check_dense: bool,
    ) -> None:
        self._accumulation = accumulation
        self._params = params
        self._sources = sources
        self.keys = {name: key for key, name in enumerate(params)}
        """Position of each tensor in the model's order, which all ranks share."""
        self._check_dense = check_dense
        self._nodes_compared = False
        # tensors whose momentum may differ between ranks, since they were compressed or loaded
        self._apart: frozenset[str] = frozenset()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that only this rank, or its node, holds: live, by kind and name."""
        found: dict[str, dict[str, Tensor]] = {}
        at = self._accumulation
        for name, param in self._params.items():
            method = at.method(name)
            if method.compresses(param) and not param.is_complex():
                for kind, entry in at.saved(name).items():
                    if kind in method.kinds:
                        found.setdefault(kind, {})[name] = entry
        return found

    def state_loaded(self) -> None:
        """Record that state was loaded from outside, on all ranks; it may differ inside a node."""
        self._nodes_compared, self._apart = False, frozenset(self._params)

    def make_common(self) -> None:
        """Give the ranks of each node, which send the same message, the same state, once."""
        # elsewhere nothing is compared, and no state needs to exist before something is sent
        if self._sources.node_size > 1 and not self._nodes_compared:
            make_common_(self.state(), self._sources)
            self._nodes_compared = True

    def sendings(
        self, row_sparse: Collection[str], grads: Grads, context: Context, means: Grads
    ) -> list[Sending]:
        """Return the sendings of gradients, or of their means over a node.

        A gradient that is row-sparse on any rank travels densely.
        """
        at = self._accumulation
        taken = dict[Compression, dict[str, Tensor]]()
        rest = {}
        context = replace(context, update=at.position(context.step))
        for name, grad in {**grads, **means}.items():
            method = at.method(name)
            able = name not in row_sparse and not grad.is_sparse and grad.is_floating_point()
            begun = context.update >= method.last_dense_step
            if able and begun and method.compresses(self._params[name]):
                taken.setdefault(method, {})[name] = grad
            else:
                rest[name] = grad.to_dense() if grad.is_sparse else grad
        found = [self._sending(method, context, its) for method, its in taken.items()]
        if rest:
            found.append(send_dense(context, rest, check_finite=self._check_dense))
        return found

    def _sending(self, method: Compression, context: Context, grads: Grads) -> Sending:
        # zeros in place of numbers that no message can hold: all ranks will drop the step
        bad = [] if method.reports_finite else not_finite(grads)
        sent = {n: torch.zeros_like(grad) if n in bad else grad for n, grad in grads.items()}
        folded = Folded(sent, self._accumulation, method, context, self.keys, keep=False)
        arrived = yield from send_checked(method, context, folded, folded.kept)
        arrived.finite = {**arrived.finite, **dict.fromkeys(bad, False)}
        return arrived

    @torch.no_grad()
    def commit_(
        self, grads: Grads, received: Received, row_sparse: Collection[str]
    ) -> tuple[Collection[str], dict[str, Tensor]]:
        """Change the state after a vote; return the parameters that were updated, with momentum,
        and the means of all others.

        The gradients are unchanged since they were sent; `row_sparse` ones travelled densely.
        """
        self._make_momentum_common_(received)

        def leave_(name: str) -> None:
            got = received[name]
            assert isinstance(got, ArrivedEntries), "momentum is kept beside entries only"
            folded = self._taken(name, grads, got)
            got.leave_(name, folded, folded.kept)

        updated = set(self._accumulation.step_(received, row_sparse, leave_))
        rest = [name for name in grads if name not in updated]
        # the means reuse buffers of gradients that nothing else refers to
        owned = with_own_storage(grads) if rest else ()
        means = {
            name: self._mean(name, grads, received, grads[name] if name in owned else None)
            for name in rest
        }
        return updated, means

    @torch.no_grad()
    def means(self, grads: Grads, received: Received) -> dict[str, Tensor]:
        """Return all means before the vote; nothing changes."""
        return {name: self._mean(name, grads, received, copies=True) for name in grads}

    def _mean(
        self,
        name: str,
        grads: Grads,
        received: Received,
        into: Tensor | None = None,
        *,
        copies: bool = False,
    ) -> Tensor:
        got = received[name]
        if isinstance(got, DenseMeans):
            return got.mean(name, self._params[name])
        folded = self._taken(name, grads, got)
        for held in folded.kept.values() if copies else ():
            held.update({name: entry.clone() for name, entry in held.items()})
        return got.take_(name, folded, folded.kept, into)

    def _taken(self, name: str, grads: Grads, got: Arrived) -> Folded:
        at = self._accumulation
        own = {name: got.node_means.get(name, grads[name])}
        return Folded(own, at, at.method(name), got.context, self.keys, keep=True)

    def _make_momentum_common_(self, received: Received) -> None:
        """Give all ranks the mean of each momentum that a dense mean is about to enter."""
        dense = {name for name, got in received.items() if isinstance(got, DenseMeans)}
        if late := dense & self._apart:
            kept = self.state().get("momentum_buffer", {})
            held = [kept[name] for name in received if name in late & kept.keys()]
            make_mean_(held, self._sources.all_ranks, action="making momentum common")
        self._apart = self._apart.union(received) - dense


class GradientExchange(Synchronizer):
    """Gives every rank the mean of all ranks' gradients, compressed or dense.

    If a gradient is not finite, all ranks drop the step. `update` may follow `launch` calls of the
    backward pass; it sends again if what was launched does not match the gradients of some rank.

    `check_dense`: drop the step if a dense gradient is not finite; a compressed one always drops
    it, because it would corrupt the residual permanently.

    Communication: one small agreement before the messages and one after. With buckets launched
    early only the second, unless they are sent again; none if it `rides`. Among nodes, one
    all-reduce per dtype inside each node before them. Failure: after an error or a dropped step
    nothing has been applied.
    """

    def __init__(
        self,
        group: Group,
        params: Mapping[str, Tensor],
        accumulation: Residuals,
        *,
        sources: Sources | None = None,
        check_dense: bool = True,
        participants: Participants = _NO_OTHERS,
        rides: bool = False,
    ) -> None:
        group = participants.job or group
        self.rides = rides and group.size > 1
        """True if the facts of ranks ride on the last bucket of a steady step."""
        self.presence = Presence()
        sources = group if sources is None else sources
        super().__init__(group, sources, kind="gradients", after=[self.presence])
        self._check_dense = check_dense
        self._launched: Round | DenseUpdate | None = None
        self.params: Mapping[str, Tensor] = {}
        self._cut_for: frozenset[str] | None = None
        self._steady_buckets: list[tuple[int, list[str]]] = []
        self.buckets: Sequence[Sequence[str]] = ()
        """Names of the tensors that travel together. Tensors in no bucket travel in one more."""
        self._of_stages = participants.job is not None
        self.measure: Callable[[Grads], float] | None = None
        """Returns a number from the means, which all ranks receive in the last agreement."""
        self.poisoned: str | None = None
        """Reason for which this rank did not finish its last update, or None. All ranks raise it as
        an error in the next update.
        """
        self.restart(params, accumulation)
        for extra in participants.checks:
            self.add_check(extra)
        self.presence.names_of_parts = participants.names_of_stages

    def restart(self, params: Mapping[str, Tensor], accumulation: Residuals) -> None:
        """Continue with other parameters, or another order; learn steady gradients again."""
        self.compressed = Compressed(
            accumulation, params, self.sources, check_dense=self._check_dense
        )
        self.params = params
        self._layouts = {name: (p.shape, p.dtype) for name, p in params.items()}
        self.presence.restart(params)

    def state_dict(self) -> dict[str, Any]:
        """Return the live state of the compression by kind and name, and the counters."""
        return {
            "residuals": {},
            **{f"{kind}s": held for kind, held in self.compressed.state().items()},
            "dropped_steps": self.drops.total,
            "drops_in_a_row": self.drops.in_a_row,
            "traffic": self.counted(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`; values are copied. No communication."""
        here = self.state_dict()
        if state.keys() != here.keys():
            raise ValueError(
                f"the state of a mean gradient has the keys {list(here)}, got {list(state)}"
            )
        counters = ("dropped_steps", "drops_in_a_row")
        total, in_a_row = (check.integer(key, state[key], at_least=0) for key in counters)
        kinds = [key for key in here if key not in (*counters, "traffic")]
        advice = "Load a state of the same parameters and the same compression"
        for kind in kinds:
            own = kind.removesuffix("s")
            check.same_shapes(own, state[kind], here[kind], advice=advice)
        # all shapes fit: only now may anything change
        for kind in kinds:
            for name, entry in here[kind].items():
                entry.copy_(narrowed(state[kind][name], entry.dtype))
        self.state_loaded()
        # it trained before, so its batches were compared then
        if state["traffic"].get("bytes_sent"):
            self.duplicates.skip()
        self.drops.total = total
        self.drops.in_a_row = in_a_row
        self.count_from(state["traffic"])

    def _residuals(self) -> Iterable[Tensor]:
        return self.compressed.state().get("residual", {}).values()

    def state_loaded(self) -> None:
        """Record that the state of the compression was loaded; earlier failures no longer count."""
        self.compressed.state_loaded()
        self.poisoned = None

    @property
    def in_flight(self) -> bool:
        """True if buckets have been launched and not yet been waited for."""
        return self._launched is not None

    @property
    def steady(self) -> frozenset[str] | None:
        """Tensors that `launch` may send, all of them. None while ranks must agree first."""
        return self.presence.pattern.names

    @property
    def steady_buckets(self) -> list[tuple[int, list[str]]]:
        """Number and names of each bucket of steady tensors, in the order of their launch."""
        if self._cut_for is not self.steady:
            self._cut_for = self.steady
            self._steady_buckets = self._buckets_of(self.steady or ())
        return self._steady_buckets

    @torch.no_grad()
    def launch(self, step: int, bucket: int, grads: Grads) -> None:
        """Send this rank's part of one bucket, without waiting; in the same order on all ranks."""
        self.compressed.make_common()
        if self._launched is None:
            self._launched = self._begun(step)
        twice = self._launched.names & grads.keys()
        if twice:
            name = min(twice, key=self.compressed.keys.__getitem__)
            raise ThinwireError(
                f"the gradient of {name} was exchanged twice without a step() between: when you "
                "accumulate gradients, run all backward passes but the last under ddp.no_sync()"
            )
        self._send(self._launched, bucket, grads)

    def _begun(self, step: int) -> Round | DenseUpdate:
        if self.rides and self.steady:
            return DenseUpdate(self.group, step, last=self.steady_buckets[-1][0])
        return self._round(step)

    def discard(self) -> None:
        """Wait for the launched buckets and discard them."""
        # wait even for messages that nobody needs: the other ranks have launched them too
        launched = self._launched
        self._launched = None
        if launched is not None:
            with contextlib.suppress(PayloadCorrupt):  # its result is discarded
                launched.finish()
        self.forget()

    @torch.no_grad()
    def exchange(
        self,
        step: int,
        grads: Grads,
        *,
        overflow: bool | None = None,
        user_error: str | None = None,
        unchanged: Flags | None = None,
        at_once: bool = False,
        unusable: str | None = None,
        complete: bool = False,
    ) -> Outcome:
        """Exchange gradients of the same parameters on all ranks, or drop the step on all of them.

        `grads` are dense or row-sparse, read only; of buckets that were launched only the names
        count. `overflow`: what a loss scaler found here; None without one. `unchanged`: flags that
        gradients are still those that were launched; else it is a user error. `at_once`: all ranks
        launch the steady buckets before they agree. `unusable`: why what was launched so does not
        match; all is then sent once more. `complete`: a gradient that this rank lacks, and another
        has, counts as zero.
        """
        self.compressed.make_common()
        # hand-over: from here on this call owns the launched round
        begun = self._launched
        self._launched = None
        invalid = None if at_once and begun else self._invalid_gradient(grads)
        user_error = user_error or invalid or self.poisoned
        # vote without gradients: the other ranks wait for this rank, and all raise its error
        grads = {} if user_error else grads
        # stages have no overlap, and send with the pattern of the last step
        stages_steady = self._of_stages and begun is None and self.presence.all_ready
        if at_once or stages_steady or (self.rides and self.steady):
            begun = begun or self._begun(step)
            phase = "early"
            grads, other = self._launch_rest(begun, grads, complete=complete)
            unusable = unusable or other
        elif begun is not None:
            user_error = user_error or _not_launched(begun.names, grads)
            phase = "attached"
        self.presence.begin(grads, complete=complete)
        # the vote: before anything is sent, or after the launched messages have arrived
        facts: dict[str, Any] = {"overflow": overflow, "user_error": user_error}
        facts["unusable"] = unusable
        # from here on all ranks decide from the same answers alone: a decision from local state
        # could send one rank into a collective that the others never enter
        if begun is None:
            params = self.params.values()
            self.duplicates.sample(grads.values(), params, self.group.replica_count)
            # no messages yet: lengths depend on what all ranks have
            answers = self.agreement(step, "proposed", **facts)
        elif isinstance(begun, DenseUpdate):
            answers = self._ridden(begun, **facts)
        else:
            answers = self._verified(begun, phase, grads, unchanged, **facts)
        if self.duplicates.averaged_before:  # a DDP model around this one has sent as many
            self.bytes_of_others += sum(g.numel() * g.element_size() for g in grads.values())
        if any(True for _ in answers.of("dropped")):
            self.require_equal(step)  # damaged state on one rank may have been the cause
        if (verdict := verdict_of(answers)) is not StepDecision.APPLY:
            return self._dropped(verdict, step, answers)
        # the vote above carried no messages, or some rank's launched messages were wrong
        if begun is None or any(True for _ in answers.of("unusable")):
            if begun is not None:
                self.presence.reset()  # the prediction was wrong: learn the pattern again
            return self._exchanged(step, grads, overflow=overflow)
        if isinstance(begun, DenseUpdate) and self._check_dense:
            bad = begun.bad_mean(self.compressed.keys)
            if bad is not None:
                return self._dropped_untold(begun, bad, grads)
        # both votes passed: the caller may change parameters now
        self.drops.applied()
        return Outcome(verdict, answers, grads, begun)

    def _launch_rest(
        self, begun: Round | DenseUpdate, grads: Grads, *, complete: bool
    ) -> tuple[Grads, str | None]:
        """Launch the steady buckets that no hook has launched, with zeros for what is missing.

        Return the gradients that count, and why they do not match what all ranks launch, if so.
        """
        steady = self.steady or frozenset()
        fit = {name: grad for name, grad in grads.items() if self.presence.fits(name, grad)}
        # always all steady tensors: the others launch the same buckets before any vote
        whole = {n: fit[n] if n in fit else self.presence.zeros(n) for n in steady}
        for number, names in self.steady_buckets:
            if begun.names.isdisjoint(names):
                self._send(begun, number, {name: whole[name] for name in names})
        if complete and not grads:  # a rank without a batch
            return whole, None
        other = next(iter(fit.keys() ^ steady | grads.keys() - fit.keys()), None)
        return grads, other and f"parameter {other} has other gradients than in the last step"

    def _exchanged(self, step: int, grads: Grads, *, overflow: bool | None) -> Outcome:
        """Send what all ranks have agreed on, and agree on what arrived."""
        grads = self.presence.completed(grads)  # decides the lengths of messages
        sent = self._sent(step, grads)
        answers = self._verified(sent, "exchanged", grads, first=False, overflow=overflow)
        if (verdict := verdict_of(answers)) is not StepDecision.APPLY:
            return self._dropped(verdict, step, answers)
        self.drops.applied()
        return Outcome(verdict, answers, grads, sent)

    def _ridden(self, update: DenseUpdate, **facts: Any) -> Answers:
        """Return the answers of all ranks, which ride on the last bucket."""
        step = update.step
        near = self.group.seems_near
        riding = self.agreement.riding(step, "early", near=near, **facts)
        update.launch_last(riding.slot)
        if self.same is not None:  # while the messages are on their way
            self.same.read(step)
        answers = riding.judged(update.finish(self.same))
        for group in self._groups:
            group.near = riding.near
        return answers

    def _dropped_untold(self, update: DenseUpdate, bad: str, grads: Grads) -> Outcome:
        """Drop a step whose mean is not finite: no vote, since one rank's sum may be damaged."""
        found: dict[str, Any] = self._non_finite_report(bad, grads, own=False)
        if self.drops.last:
            answers = self.agreement(update.step, "dropped", **found)
            return self._dropped(StepDecision.DROP, update.step, answers)
        self.drops.dropped_untold(update.step, found)
        return Outcome(StepDecision.DROP, Answers([], (), 0))

    def update(self, step: int, grads: Grads, apply: Apply | None, **how: Any) -> StepDecision:
        """Exchange the gradients of this step and `apply` their means, or drop it on all ranks.

        What is kept changes, and parameters whose momentum is kept with it, before `apply`. If
        it raises, all ranks get an error in the next update. `how`: see `exchange`.
        """
        outcome = self.exchange(step, grads, **how)
        if outcome.received is None:
            return outcome.verdict
        done, grads = outcome.received, outcome.grads
        try:
            if isinstance(done, DenseUpdate):
                means = done.means_of(grads)
                own = _NONE
            else:
                means, own = self._committed(done, grads)
            self.forget()
            if apply is not None:
                exchanging = apply(means, own, outcome.answers.of_my_replica("measured"))
                if exchanging is not None and self.group.size > 1:
                    self.duplicates.step_exchanged(exchanging)
        except Exception as error:
            alone = self.group.size == 1
            self.poisoned = _failure_text(step, error, alone=alone)
            error.add_note(self.poisoned if alone else _FAILED_HERE)
            raise
        return outcome.verdict

    def _committed(self, done: Round, grads: Grads) -> tuple[dict[str, Tensor], Grads]:
        """Return the means, and this rank's gradients of parameters that are updated already."""
        # a launched tensor that is not among these gradients changes nothing
        received = {name: done.arrived[name] for name in grads}
        updated, means = self.compressed.commit_(grads, received, done.row_sparse)
        # row-sparse on all ranks: an optimizer may update the present rows only. A gradient that is
        # dense on any rank is dense on all, as in torch's sum of a dense and a row-sparse one
        for name in done.rows_only & means.keys():
            dense = means[name]
            present = dense.reshape(dense.shape[0], -1).any(dim=1).nonzero().view(-1)
            means[name] = sparse_rows(present.unsqueeze(0), dense[present], dense.shape)
        return means, {name: grads[name] for name in updated}

    def forget(self) -> None:
        """End a step, applied or not."""
        self.presence.begin({}, complete=False)

    def abandon(self, reason: str) -> None:
        """Abandon the messages in flight: no further exchange over these groups is possible."""
        # do not wait: a collective may never end after an error inside it
        self._launched = None
        for group in self._groups:
            group.abandon(reason)
        self.forget()

    def _dropped(self, verdict: StepDecision, step: int, answers: Answers) -> Outcome:
        scaled = any(True for _ in answers.of("overflow"))
        if verdict is not StepDecision.END and scaled:
            self.drops.overflowed()
        elif verdict is StepDecision.DROP:
            self.require_equal(step)  # damaged state on one rank may be the cause
            self.drops.dropped(step, answers)
        return Outcome(verdict, answers)

    def _sent(self, step: int, grads: Grads) -> Round:
        """Send all buckets, after ranks have agreed on their contents."""
        fresh = self._round(step)
        # row-sparse on one rank means dense on all: layouts must agree before anything is sent
        kinds = {name: self.presence.row_sparse(name) for name in grads}
        fresh.row_sparse = {name for name, (somewhere, _) in kinds.items() if somewhere}
        fresh.rows_only = {name for name, (_, everywhere) in kinds.items() if everywhere}
        for number, names in self._buckets_of(grads):
            self._send(fresh, number, {name: grads[name] for name in names})
        return fresh

    def _round(self, step: int) -> Round:
        return Round(self.sources, step, read_sums=self.same is not None)

    def _send(self, begun: Round | DenseUpdate, bucket: int, grads: Grads) -> None:
        if isinstance(begun, DenseUpdate):
            begun.launch(bucket, grads)
            return
        send = partial(self.compressed.sendings, begun.row_sparse, grads)
        begun.launch(grads.keys(), begun.bucket(bucket, grads.items(), send))

    def _verified(
        self,
        one_round: Round,
        phase: str,
        grads: Grads,
        unchanged: Flags | None = None,
        *,
        first: bool = True,
        **facts: Any,
    ) -> Answers:
        """Return the answers of all ranks after their messages have arrived and been checked."""
        step = one_round.step
        if self.same is not None:  # while the messages are on their way
            self.same.read(step)
        # report a problem here instead of raising: the other ranks wait for this one's vote
        try:
            found = one_round.finish(unchanged, self.compressed.keys)
            if found.changed is not None and facts.get("user_error") is None:
                facts["user_error"] = (
                    f"the gradient of {found.changed} changed between backward() and step(), after "
                    "the attached optimizer had sent it: clip with local_grad_clip_norm or "
                    "grad_clip, scale with torch.amp.GradScaler, or do not attach"
                )
            if found.not_finite is not None:
                facts |= self._non_finite_report(found.not_finite, grads, own=True)
            elif found.sum_not_finite is not None:
                facts |= self._non_finite_report(found.sum_not_finite, grads, own=False)
            # after the checks: a norm of gradients that are not finite would be useless
            elif self.measure is not None and not facts.get("unusable"):
                received = one_round.arrived
                facts["measured"] = self.measure(self.compressed.means(grads, received))
            if self.same is not None:
                # sums are equal on all ranks unless one of them received damaged data
                self.same.sums = one_round.sums_digest
        except PayloadCorrupt as refusal:
            facts["corrupt"] = str(refusal)
        return self.agreement(step, phase, first=first, last=True, **facts)

    def _non_finite_report(self, name: str, grads: Grads, *, own: bool) -> dict[str, str]:
        """Return the report about a gradient that is not finite: this rank's own, or the sum."""
        grad = grads.get(name)
        # inside a node only means were checked, so look at this rank's own gradient again
        if grad is not None and (self.sources.node_size > 1 or not own):
            values = grad.coalesce().values() if grad.is_sparse else grad
            own = not all_finite(values)
        return {"non_finite" if own else "sum_non_finite": name}

    def _buckets_of(self, grads: Collection[str]) -> list[tuple[int, list[str]]]:
        """Return the number and the names of each bucket that has gradients."""
        # the same order on all ranks, whatever the order of their dicts
        others = sorted(set(grads).difference(*self.buckets), key=self.compressed.keys.__getitem__)
        there = [
            (number, [n for n in names if n in grads])
            for number, names in enumerate([*self.buckets, others])
        ]
        return [(number, names) for number, names in there if names]

    def _invalid_gradient(self, grads: Grads) -> str | None:
        """Describe a gradient that cannot be used: an unknown parameter, or another shape."""
        for name, grad in grads.items():
            if name not in self._layouts:
                return f"a gradient was passed for {name!r}, which is not an exchanged parameter"
            param = self.params[name]
            layout = self._layouts[name]
            if (param.shape, param.dtype) != layout:
                return layout_change(name, layout, param)
            if grad.shape != param.shape:
                shapes = f"{tuple(grad.shape)}, and the parameter {tuple(param.shape)}"
                return f"the gradient of {name} has shape {shapes}"
        return None


def gradients_of(
    group: Group,
    params: Mapping[str, Tensor],
    compression: Compression | None = None,
    *,
    momentum: Residuals | None = None,
    check_finite: bool = True,
    sources: Sources | None = None,
    participants: Participants = _NO_OTHERS,
    rides: bool = False,
) -> GradientExchange:
    """Build the exchange of gradients for an optimizer that does not exchange.

    `momentum`: accumulation with the momentum of an SGD. All ranks must have compared the settings.
    `sources`: None to look for nodes among the ranks, by one comparison of their size.
    """
    accumulation = momentum or Residuals(compression or Dense(), params)
    if compression is not None:
        check_finite = True
        if sources is None:
            sources = agreed_sources(group, compression.node_size)
    exchange = GradientExchange(
        group,
        params,
        accumulation,
        sources=group if sources is None else sources,
        check_dense=check_finite,
        participants=participants,
        rides=rides,
    )
    exchange.start_counting()  # the comparisons of the start are not counted
    return exchange


_FAILED_HERE = (
    "This error came after the exchange: other ranks have made the update, but this rank has not, "
    "or only in part. They will get an error in the next update; restart all ranks from the last "
    "checkpoint"
)


def _failure_text(step: int, error: Exception, *, alone: bool) -> str:
    """Return the error that all ranks get after an update that this rank could not finish."""
    state = "That update may be made in part" if alone else "Other ranks have made that update"
    return (
        f"the optimizer, or a hook of it, failed after the exchange of update {step + 1} with "
        f"{type(error).__name__}: {error}. {state}: restart {'' if alone else 'all ranks '}"
        "from the last checkpoint"
    )


def _not_launched(launched: Collection[str], grads: Iterable[str]) -> str | None:
    for name in grads:
        if name not in launched:
            return (
                f"parameter {name} has a gradient that did not come from the attached model's "
                "backward pass: call step() after every synchronizing backward pass of that "
                "model, and use only that model"
            )
    return None
