"""Local updates: ranks train independently and average their parameters every few steps."""

import datetime
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire._wording import warn_user
from thinwire.comm import Regrouped, long_waits_logged, own_deadlines
from thinwire.comm.private import forget_ended
from thinwire.comm.stats import Pace, numbers, planned_row
from thinwire.compress import tag_of
from thinwire.compress.protocol import Compression, report_coverage
from thinwire.core.arithmetic import arithmetic
from thinwire.core.norms import grad_norm
from thinwire.errors import PeerLost, ThinwireError
from thinwire.exchange.digest import DIGEST_EVERY
from thinwire.exchange.provenance import PROVENANCE, Provenance, without_provenance
from thinwire.exchange.synchronizer import NO_TRAFFIC, Ranks
from thinwire.local import saving
from thinwire.local.averager import Averager, OwnScale
from thinwire.local.averaging import Averaging, OneAveraging
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig, LocalSGD, fragments_of
from thinwire.local.interval import Timetable
from thinwire.local.joiners import JoinerState, receive_state
from thinwire.local.model import (
    LocalModel,
    given_optimizer,
    warn_of_averages,
    warn_of_misplaced,
    warn_of_others,
)
from thinwire.local.steps import FollowedSteps, require_tokens
from thinwire.members.closing import Late
from thinwire.members.group import AWAY
from thinwire.members.members import Member, Members, member_of
from thinwire.wire.message import WIRE_VERSION

_log = logging.getLogger("thinwire")
_open: "list[LocalUpdates]" = []
"""Blocks of this process that have been entered and not left."""


@check.by_name
def local_sgd(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: LocalConfig,
    *,
    process_group: dist.ProcessGroup | None = None,
    digest_every: int = DIGEST_EVERY,
    timeout: float | datetime.timedelta | None = None,
    members: Members | None = None,
    plan: Any = None,
    mesh: DeviceMesh | None = None,
    streams: int | None = None,
) -> "LocalUpdates":
    """Train every rank on its own and average the parameters every few steps; a context manager.

    Example, on every rank::

        with local_sgd(model, optimizer, LocalSGD(k_steps=16)):
            for x, y in batches:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()  # every 16th step averages

    `as sync` gives the block's `LocalUpdates`.

    Args:
        model: The bare model, the same on all ranks; not wrapped in DistributedDataParallel.
        optimizer: Any optimizer of its parameters that does not exchange by itself. Every call of
            its `step` counts. A sequence of optimizers of different parameters is accepted too: a
            local step ends when each has stepped once, in any order, or one a second time. Wrappers
            of Accelerate, transformers' Trainer and Lightning are removed.
        config: `LocalSGD` or `AdaptiveLocalSGD`.
        process_group: The ranks that average; None for all of them. One process alone works too.
        digest_every: Steps within which averagings find a difference between ranks; 0: never.
        timeout: Longest wait for other ranks in one call, as in `DistributedStrategy.prepare`.
        members: The result of `thinwire.join`, whose members average, instead of `process_group`
            and `timeout`. A joiner receives the shared state when it enters the block.
        plan: The result of `thinwire.plan`, or a row, as in `DistributedStrategy.prepare`.
        mesh: Of sites and shards, with the dimensions "replicate" and "shard", over all ranks,
            after `fully_shard(model, mesh=mesh["shard"])`: sites train independently. Instead of
            `process_group` and `node_size`. With members: the mesh given to `thinwire.join`.
        streams: Connections to each other rank for large messages, as in `prepare`.

    Returns:
        A context manager. Entering it compares the model over the ranks by name and copies rank 0's
        parameters and buffers to all. Floating-point buffers are averaged with the parameters.
        Leaving the block removes its hooks, and without an error averages once more.

    Raises:
        TypeError: An argument of another kind; a model or optimizer that exchanges gradients.
        ValueError: More fragments than parameters, or an optimizer of other parameters.
    """
    found = LocalUpdates(
        model,
        optimizer,
        config,
        process_group=process_group,
        digest_every=digest_every,
        timeout=timeout,
        members=members,
        plan=plan,
        mesh=mesh,
        streams=streams,
    )
    warn_of_misplaced(model, found._tensors.optimizer)
    return found


class LocalUpdates:
    """Hook the optimizer and average every `k_steps` steps; `local_sgd` returns it.

    Example::

        with local_sgd(model, optimizer, LocalSGD(k_steps=16)) as sync:
            train(model, optimizer)
            sync.flush()  # all ranks are equal now
            torch.save(sync.state_dict(), f"sync-{rank}.pt")

    Two arguments serve an engine. `compression`, one of gradients, replaces `config.compression`:
    local step s (from 1) compresses the averaged change as update s - 1 would. `scaler` is this
    rank's own loss scale; at every averaging all ranks take the smallest.

    **State** in `state_dict`: counters, interval, first loss and rate, anchors, outer momentum,
    residuals, a result in flight, and this rank's own parameters between two averagings. On another
    number of ranks, each may load the mean of the old ranks' tensors without `provenance`.
    **Communication** per averaging: 24 bytes a rank of agreement before and after (more where
    losses or scales differ), one all-reduce per dtype, and for what is compressed one all-gather of
    equally long messages; where ranks share nodes, one all-reduce per dtype inside each before, and
    only its first rank sends. **Failure**: an averaging that fails on any rank changes only the
    step counter, on all ranks.

    Raises:
        TypeError, ValueError: As `local_sgd`; `compression` beside one of the config.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        config: LocalConfig,
        *,
        process_group: dist.ProcessGroup | None = None,
        compression: Compression | None = None,
        scaler: OwnScale | None = None,
        digest_every: int = DIGEST_EVERY,
        timeout: float | datetime.timedelta | None = None,
        members: Members | None = None,
        plan: Any = None,
        mesh: DeviceMesh | None = None,
        streams: int | None = None,
    ) -> None:
        self._planned = planned_row(plan)
        self._digest_every = check.integer("digest_every", digest_every, at_least=0)
        check.instance("config", config, (LocalSGD, AdaptiveLocalSGD))
        self._member = member = member_of(members)
        if member is not None:
            _require_alone(
                member,
                mesh,
                streams=streams,
                process_group=process_group,
                timeout=timeout,
                node_size=None if config.node_size == 1 else config.node_size,
            )
        self._ranks = Ranks(
            process_group,
            timeout=timeout,
            mesh=mesh,
            member=member,
            node_size=config.node_size,
            streams=streams,
            between_sites=True,
        )
        if compression is not None and config.compression is not None:
            raise ValueError(
                f"{tag_of(compression)} and compression={config.compression} both set the "
                "compression of averagings: give only one"
            )
        self._of_gradients = compression
        self._changes = config.compression or compression
        optimizer = given_optimizer(optimizer, model)
        self._tensors = LocalModel(model, optimizer, self._ranks.shards)
        compresses = (lambda _: False) if self._changes is None else self._changes.compresses
        self._compressed = [*filter(compresses, self._tensors.params.values())]
        fragments_of(self._tensors.trained, config)  # refuses more fragments than parameters
        warn_of_others(model, optimizer, own_state=not config.average_state)
        self.config = config
        """Config passed to the constructor."""
        self._scaler = scaler
        self._when = Timetable(config, optimizer)
        self._when.keep_batch = member is not None and member.terms.keep_batch
        self._skipped = 0
        self._looked = self._was_late = False
        self._averager: Averager | None = None
        self._start: Mapping[str, Any] | None = None
        self._hooks: list[Any] = []
        self._entered_once = False
        self.on_return: Callable[[], None] = lambda: None
        """Called after this member, which was away, has entered the run again."""

    def __enter__(self) -> "LocalUpdates":
        enter(self)
        return self

    def _entered(self, *, follow: bool) -> Averager:
        member, ranks, tensors, config = self._member, self._ranks, self._tensors, self.config
        self._entered_once = True
        group = ranks.group
        facts = _facts(config, self._of_gradients) | {"digest_every": self._digest_every}
        # every rank decodes products of matrices by itself, which processors round differently
        facts |= arithmetic(
            tensors.device, elementwise=self._changes is None or self._changes.elementwise
        )
        _compare(facts, tensors, ranks, member)
        dense = config.node_size is None and self._changes is None
        separate = ranks.mesh is None and (dense or config.by_time)
        sources = group if separate else ranks.sources(config.node_size)
        if self._changes and (loops := self._changes.loops(self._compressed)):
            ranks.compile(loops)
        tensors.copy_from_first(group)
        self._averager = averager = Averager(
            group,
            tensors,
            self._when,
            Averaging(sources, tensors.params, config, self._changes),
            scaler=self._scaler,
            identity=ranks.identity("local updates"),
            digest_every=self._digest_every,
            member=member,
            after_averaging=self._after_averaging,
        )
        joining_s = 0.0
        if member is not None:
            member.step = lambda: self.step
            if self._start is not None:
                saving.load(self._start, averager)
                self._start = None
            if member.joiner:
                joining_s = receive_state(averager, member)
        first = ranks.rank_and_size[0] == 0
        averager.pace = Pace(self._planned if first else None)
        averager.pace.exclude(joining_s, "joining")
        averager.start_counting()  # traffic of the start is not counted as exchange of updates
        if first and self._changes is not None:
            report_coverage(self._changes, tensors.params.values())
        group.take_regroup_s()  # the start does not count
        self._when.paced_step = self.step
        self._steps = FollowedSteps(
            tensors.optimizers if follow else [],
            before=averager.before_step,
            observed=lambda: self._when.interval.before_step(self.step + 1),
            after=lambda: self._follow(averager.after_step),
        )
        warner = tensors.model.register_forward_pre_hook(_warn_of_evaluation)
        self._hooks = [self._steps, warner]
        if member is not None:
            member.group.come_back = partial(self._come_back, member)
        _open.append(self)
        for optimizer in tensors.optimizers:
            if call_params := getattr(optimizer, "call_params", None):  # of this library
                call_params({p: name for name, p in named_parameters(tensors.model)})
        return averager

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._hooks:
                self.flush()
        finally:
            self.close()

    def _follow(self, move: Callable[[], None]) -> None:
        """Run the averager's work after a step, or in place of one."""
        averager = open_averager(self)
        k_steps = self.k_steps
        member = self._member
        # take up a change of membership here; ranks of a site, and ranks that have already agreed
        # on a change, do so at the averaging instead
        shared = None if member is None or member.site.mesh is not None else member.group
        with (
            averager.group.one_deadline(),
            long_waits_logged(f"local step {self.step + 1}", lambda: averager.waited_s),
        ):
            if shared is not None and shared.pending_after is None:
                shared.bind_latest()
            move()
        if averager.duplicates.averaged_before:
            averager.bytes_of_others += sum(p.nbytes for p in self._tensors.params.values())
        if self.synced:
            _log.debug("averaged after local step %d", self.step)
            self._end_round(averager)
        if self.k_steps != k_steps:
            _log.info("ranks average every %d steps from now on, not %d", self.k_steps, k_steps)

    def _come_back(self, member: Member, error: ThinwireError) -> None:
        """Enter the run again, in which the others continued without this member."""
        averager = open_averager(self, or_left=True)
        if not member.may_rejoin(error):
            raise error
        self._when.synced = False
        try:
            averager.pace.exclude(receive_state(averager, member, error), "joining")
        except AWAY as another:
            self._come_back(member, another)
        else:
            averager.group.take_regroup_s()
            self._was_late = isinstance(error, Late)
            self.on_return()

    def _after_averaging(self, goes_on: bool) -> bool:
        """Admit joiners and release leaving members; return True if this rank continues."""
        member, averager = self._member, self._averager
        if member is not None and averager is not None:
            member.end_round(JoinerState(averager, member.group), goes_on=goes_on)
            averager.last = None
            if member.left:
                self.close()
                return False
        return True

    def _end_round(self, averager: Averager) -> None:
        steps = self.step - self._when.paced_step
        self._when.paced_step = self.step
        pace = averager.pace
        rate = averager.sources.rate_bit_s
        pace.exclude(averager.group.take_regroup_s(), "regrouping")
        if not steps:  # a timed round in which no rank made a step
            return
        compare = self.step > self.config.begin_step
        now = time.perf_counter()
        if warning := pace.round(steps, now, averager.waited_s, rate, compare=compare):
            warn_user(warning)
        if self._member is not None:
            self._member.show({"step": self.step, **counts(self)}, self._when.interval.last)

    def close(self) -> None:
        """Remove the hooks without an averaging; may be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._averager is not None:
            self._averager.pending = None
            forget_ended()
        _open[:] = [other for other in _open if other is not self]

    @property
    def k_steps(self) -> int:
        """Current interval, in steps."""
        return self._when.interval.k_steps

    @property
    def step(self) -> int:
        """Local steps made; with `round_seconds` the most of any rank up to the last averaging."""
        return self._when.counters.step

    @property
    def synced(self) -> bool:
        """True if the last step took part in an averaging; with a delay, was measured for one."""
        return self._when.synced

    @property
    def left(self) -> bool:
        """True if this rank was a member of the run and has left."""
        return self._member is not None and self._member.left

    @property
    def pending(self) -> OneAveraging | None:
        """Averaging in flight, or None."""
        return None if self._averager is None else self._averager.pending

    def observe(self, loss: float | Tensor, *, tokens: int | None = None) -> None:
        """Report the loss of this step, which `AdaptiveLocalSGD` needs before every step.

        Example::

            sync.observe(loss, tokens=batch.numel())
            optimizer.step()

        Args:
            loss: This rank's mean loss, unscaled: a number or a tensor of one element. Several
                before one step are averaged.
            tokens: Weight of this rank's step in timed rounds, >= 1: its tokens or samples. Before
                every step on all ranks or never. Several before one step are added.

        Raises:
            TypeError: Not a number.
            ValueError: A tensor of more than one element; tokens without `round_seconds`.
        """
        self._when.interval.observe(loss)
        if tokens is not None:
            count_tokens(self, tokens)

    def skip_step(self) -> None:
        """Count a step that this rank drops, for instance after an overflow; instead of `step`."""
        make_step(self, None)

    def end_round(self) -> None:
        """Join the averaging of a timed round with the steps made so far, even none."""
        if not self.config.by_time:
            raise ValueError(
                "end_round is for LocalSGD(round_seconds=...): where steps are counted, call "
                "skip_step instead of step"
            )
        self._follow(open_averager(self).end_round)

    def flush(self) -> None:
        """Apply a result in flight; average everything if ranks made steps since the last full
        sync, else, uncompressed, what other code has changed: buffers (`update_bn`), parameters.

        All ranks must call it after the same step; a member that is at an earlier one takes part in
        the next averaging of the others, and leaves the run. With `round_seconds`, a rank takes
        part in the rounds of the others until all have called it. Leaving the block calls it.

        Raises:
            Mismatch: Ranks, unless members, are at different steps.
            ThinwireError: As in any averaging.
        """
        averager = open_averager(self)
        self._steps.finish()
        group = averager.group

        def flush() -> None:
            averager.all_flush, averager.flushing = False, True
            with group.one_deadline():
                try:
                    with own_deadlines():
                        while self.config.by_time and not averager.all_flush and not self.left:
                            self._follow(averager.end_round)
                finally:
                    averager.flushing = False
                if not self.left:
                    averager.flush()

        self._with_others(flush)
        if self.left:
            return
        if group.size > 1 and not self._looked:
            self._looked = True
            warn_of_averages(self._tensors.model, self._when.counters.averagings)

    def _with_others(self, call: Callable[[], None]) -> None:
        """Make a call that all wait in; again after an averaging for which this member was late."""
        self._was_late = True
        while self._was_late:
            self._was_late = False
            call()

    def require_equal(self) -> None:
        """Raise `Diverged` on all ranks if values that must be equal differ; call it on all."""
        self._with_others(open_averager(self, or_left=True).require_equal)

    def stats(self) -> dict[str, float]:
        """Return flat numbers about this rank so far; names as in `thinwire.Engine.stats`.

        `bytes_sent` leaves out the copy of the model at the start; `dropped_steps` counts the calls
        of `skip_step`. `applied_share`: <applied, change> / <change, change> of the summed moves of
        anchors and of mean changes, to about an eighth; all in time: the outer step's factor.
        """
        numel = sum(p.numel() for p in self._tensors.params.values())
        return numbers(
            step=self.step,
            dropped_steps=self._skipped,
            k_steps=self.k_steps,
            loss_scale=1.0 if self._scaler is None else self._scaler.scale,
            bytes_dense=4 * numel * self.step,
            grad_norm=grad_norm(self._tensors.trained.values()),
            **counts(self),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state without the optimizer's; communicates nothing."""
        state = saving.saved(open_averager(self, or_left=True))
        return {
            **state,
            PROVENANCE: Provenance(
                *self._ranks.rank_and_size, self.step, saving.own_checksum(state)
            ).packed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit from a `state_dict` of the same rank; inside the block, on all
        ranks. No communication. With members also before it: a joiner then receives what differs.

        Warns:
            UserWarning: It holds the own parameters or residuals of another rank.

        Raises:
            RuntimeError: The block has not been entered.
            TypeError, ValueError: The state is of another model or config; nothing was changed.
        """
        provenance = Provenance.read(state.get(PROVENANCE)) if isinstance(state, Mapping) else None
        state = without_provenance(state)
        if self._member is not None and not self._entered_once:
            self._start = state
            return
        saving.load(state, open_averager(self))
        own = saving.own_checksum(state)
        if provenance is not None and (provenance.checksum or own):
            problem = provenance.problem(*self._ranks.rank_and_size, own)
            if problem is not None:
                warn_user(f"thinwire.local_sgd: {problem}")

    def start_anew(self) -> None:
        """Continue from the current parameters and buffers, equal on all ranks, without residuals
        and outer momentum: for weights restored in the middle of a run, after `flush()`.
        """
        averager = open_averager(self)
        if averager.pending is not None:
            raise RuntimeError(
                "an averaging of the old parameters is still in flight: call flush() before "
                "loading weights, and start_anew() after it"
            )
        averager.start_anew()


def enter(sync: LocalUpdates, *, merge_steps: int | None = None) -> Averager:
    """Enter the block. With `merge_steps` it is an engine's, which calls `make_step`."""
    if merge_steps is not None:
        sync._when.merge_steps = merge_steps
    follow = merge_steps is None
    if sync._entered_once:
        raise RuntimeError(
            "this local_sgd block was entered before: create a new one with local_sgd(...)"
        )
    if follow and sync._member is not None and sync._member.terms.keep_batch:
        raise ValueError(
            "keep_batch=True needs an engine, which merges microbatches: use "
            "DistributedStrategy(localsgd=...).prepare(..., members=members)"
        )
    own = set(map(id, sync._tensors.model.parameters()))
    if any(own & set(map(id, other._tensors.model.parameters())) for other in _open):
        raise RuntimeError(
            "this model is already in a local_sgd block, and blocks cannot be nested: leave "
            "the other block first, or call engine.close() if an engine opened it"
        )
    with sync._ranks.deadline():
        try:
            return sync._entered(follow=follow)
        except Regrouped:
            raise PeerLost(
                "a member was lost while local updates were set up, so there is no state to "
                "continue from: start again"
            ) from None


def open_averager(sync: LocalUpdates, *, or_left: bool = False) -> Averager:
    """Return the averager of the open block; with `or_left` also after it."""
    if sync._averager is None or not (sync._hooks or or_left):
        raise RuntimeError(
            "this needs an open local_sgd block: call it inside `with local_sgd(...) as sync:`"
        )
    return sync._averager


def make_step(sync: LocalUpdates, step: Callable[[], None] | None) -> None:
    """Make a local step by calling `step`, or drop it; average if that is due."""
    averager = open_averager(sync)
    averager.before_step()
    sync._when.interval.before_step(sync.step + 1, dropped=step is None)
    if step is None:
        sync._skipped += 1
    else:
        step()
    sync._follow(averager.after_step)


def count_tokens(sync: LocalUpdates, tokens: int) -> None:
    """Count the tokens of this step; see `LocalUpdates.observe`."""
    require_tokens(tokens, sync.config)
    work = open_averager(sync).work
    assert work is not None, "it ends by time"
    work.observe(tokens)


def counts(sync: LocalUpdates) -> dict[str, Any]:
    """Return the traffic and further numbers of `thinwire.comm.stats`."""
    averagings = sync._when.counters.averagings
    averager = sync._averager
    found: dict[str, Any] = {"averagings": averagings, "sparsity": 0.0}
    found |= {"merge_steps": sync._when.microbatches, "batch_share": sync._when.batch_share}
    if sync._changes is not None and sync._compressed:
        found["sparsity"] = sync._changes.unsent_share(sync.step)
    if averager is None:
        return found | NO_TRAFFIC
    download = None if sync._member is None else sync._member.download
    found |= {} if download is None else download.stats
    # each fragment has an outer optimizer of its own
    averagings = -(-averagings // sync.config.fragments)
    averaging = averager.averaging
    made = sync.step - sync._skipped
    found["applied_share"] = averaging.applied_share(averagings)
    found["drift"] = averaging.drift
    return found | averager.traffic() | averager.pace.goodput(made, sync._skipped)


def _warn_of_evaluation(model: nn.Module, _: object) -> None:
    """Warn once before an evaluation between two averagings; a hook on the block's model."""
    if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for block in _open:
        own = block._tensors.model is model and block._when.unsynced and not block.synced
        if own and open_averager(block).group.size > 1:
            block._hooks.pop().remove()  # it was appended last
            warn_user(
                "the model is evaluated between two averagings, with this rank's own parameters "
                "instead of the mean of all ranks: evaluate where sync.synced is true, or first "
                "call sync.flush() (engine.flush()) on all ranks"
            )


def _facts(config: LocalConfig, of_gradients: Compression | None) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, by name."""
    facts = {
        "wire": WIRE_VERSION,
        "config": type(config).__name__,
        "compression": type(config.compression).__name__,
        "settings": asdict(replace(config, state_device=None)),
    }
    return facts | ({} if of_gradients is None else {tag_of(of_gradients): asdict(of_gradients)})


def _compare(
    facts: Mapping[str, Any], tensors: LocalModel, ranks: Ranks, member: Member | None
) -> None:
    """Compare the setup over the ranks, and with the run of members; raise where it differs."""
    problem = tensors.difference()
    facts = {**facts, **ranks.facts, "user error": problem, **tensors.facts()}
    if member is not None:
        member.require_same_setup("local", facts)
    ranks.compare(facts, "setting up local updates")
    if problem is not None:
        raise RuntimeError(problem)


def _require_alone(member: Member, mesh: DeviceMesh | None, **given: object) -> None:
    """Raise if arguments that choose the ranks are given beside members."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} and members were both given: members form their own group, in which each "
                f"counts on its own, and use what join was given; omit {name}"
            )
    member.require_mesh(mesh)
