"""Local updates: ranks train on their own and average their parameters now and then."""

import datetime
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire.comm import (
    Regrouped,
    long_waits_logged,
    own_deadlines,
)
from thinwire.comm.private import forget_ended
from thinwire.compress import COMPRESSIONS, compression_of, field_of
from thinwire.compress.dgc import DGC
from thinwire.compress.figures import left_out, loops_of, tell_coverage
from thinwire.compress.low_rank import LowRank
from thinwire.core.arithmetic import arithmetic
from thinwire.core.origin import ORIGIN, Origin, without_origin
from thinwire.core.outer import OuterRule
from thinwire.core.stats import Pace, numbers, planned_row
from thinwire.errors import PeerLost
from thinwire.exchange.digest import DIGEST_EVERY
from thinwire.exchange.synchronizer import NO_TRAFFIC, Ranks
from thinwire.kernels.rules import Need, needs_of
from thinwire.local import saving
from thinwire.local.averager import Averager, Counters, OwnScale
from thinwire.local.averaging import Averaging, PendingAveraging
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig, LocalSGD
from thinwire.local.fragments import fragments_of
from thinwire.local.interval import Interval
from thinwire.local.model import (
    LocalModel,
    given_optimizer,
    warn_of_averages,
    warn_of_others,
)
from thinwire.local.newcomers import NewcomersWork
from thinwire.local.steps import FollowedSteps
from thinwire.local.work import require_tokens
from thinwire.members.members import Members
from thinwire.wire.message import WIRE_VERSION

__all__ = ["LocalUpdates", "local_sgd"]

_log = logging.getLogger("thinwire")
_open: "list[LocalUpdates]" = []
"""The blocks that have been entered and not been left, in this process."""


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
) -> "LocalUpdates":
    """Training on every rank alone, with an averaging of the parameters now and then, as a context
    manager.

    `with local_sgd(model, optimizer, LocalSGD(16)) as sync:` stands around an ordinary training
    loop.

    Args:
        model: The bare model, the same on all ranks; not wrapped in DistributedDataParallel.
        optimizer: Any optimizer of its parameters that does not exchange by itself. Every call of
            its `step` counts. Or a sequence of several, of different parameters: a local step is
            over when each has stepped once, in any order. One that Accelerate, the Trainer of
            transformers or Lightning has wrapped is taken out of its wrapper.
        config: `LocalSGD` or `AdaptiveLocalSGD`.
        process_group: The ranks that average; None for all of them. One process alone works too.
        digest_every: Steps within which a difference between the ranks' anchors, outer momentum or
            frozen parameters is found, at an averaging: at every one where averagings are farther
            apart. 0 compares nothing.
        timeout: For how long a rank waits for others in one call, in seconds or as a timedelta;
            None: as long as the process group itself would. The same on all ranks.
        members: What `thinwire.join` returned: the ranks that average are the members of that run,
            and may come and go; instead of `process_group` and `timeout`. A member that dies costs
            the others a part of one averaging. A newcomer gets all that the others hold alike when
            it enters the block, and goes on from their step.
        plan: What `thinwire.plan` returned, or a row of it: rank 0 warns once where 20 rounds in a
            row, each the local steps up to an averaging, take less or more time than it expected.
        mesh: Of sites and shards, with the dimensions "replicate" and "shard", over all ranks,
            where the model was sharded by `fully_shard(model, mesh=mesh["shard"])`: sites train on
            their own, and each rank averages its own shards with those that hold the same ones; all
            vote together. Instead of `process_group` and `node_size`. With members: the mesh that
            `thinwire.join` was given, of this site alone.

    Returns:
        A context manager. Entering it compares the model over the ranks by name and copies rank 0's
        parameters and floating-point buffers to all; leaving it normally averages once more, and
        always takes its hooks off.

    Raises:
        TypeError: An argument of another kind; a model or an optimizer that exchanges gradients
            itself.
        ValueError: More fragments than parameters, an optimizer of something else, or a parameter
            in two optimizers.
    """
    return LocalUpdates(
        model,
        optimizer,
        config,
        process_group=process_group,
        digest_every=digest_every,
        timeout=timeout,
        members=members,
        plan=plan,
        mesh=mesh,
    )


class LocalUpdates:
    """What `local_sgd` returns: follows the optimizer's steps and averages when their turn has
    come.

    Two arguments are for those who combine methods. `compression`, one of gradients, says what is
    sent of the averaged change, in place of `config.compression`: what it does in update s - 1 at
    local step s (from 1), and all of the rest is kept; where it compresses nothing, the change
    travels densely. `scaler` is this rank's own loss scale: at every averaging all ranks take the
    smallest one, which travels with the agreement; a rank adapts its scale before the step, so that
    it counts.

    **State** in `state_dict`: counters, interval, first loss and rate, anchors, outer momentum,
    kept errors, a result that is on its way, and this rank's own parameters between two averagings.
    Every rank saves its own. On another number of ranks each may load the mean of the old ranks'
    tensors without its `origin`, which says whose it was. **Communication** per averaging: 24 bytes
    a rank of agreement before and after (more where losses or scales differ), one all-reduce per
    dtype, and for what is compressed one all-gather of equally long messages; where ranks share
    nodes, one all-reduce per dtype inside each before, and only its first rank sends. Between two
    averagings nothing, but for the first loss and rate of an adaptive interval. **Failure**: an
    averaging that fails, on whichever rank, changes nothing on any rank but the step counter.

    Raises:
        TypeError, ValueError: As `local_sgd`; `compression` together with one of the config, or
            with state in bfloat16.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        config: LocalConfig,
        *,
        process_group: dist.ProcessGroup | None = None,
        compression: DGC | LowRank | None = None,
        scaler: OwnScale | None = None,
        digest_every: int = DIGEST_EVERY,
        timeout: float | datetime.timedelta | None = None,
        members: Members | None = None,
        plan: Any = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._planned = planned_row(plan)
        self.digest_every = check.integer("digest_every", digest_every, at_least=0)
        check.instance("config", config, (LocalSGD, AdaptiveLocalSGD))
        if members is not None:
            _require_alone(members, mesh, process_group, timeout, config.node_size)
        self._ranks = Ranks(
            process_group, timeout=timeout, mesh=mesh, members=members, node_size=config.node_size
        )
        self._members = members
        if compression is not None:
            check.instance("compression", compression, tuple(COMPRESSIONS.values()))
            if config.compression is not None:
                field = field_of(compression)
                raise ValueError(
                    f"{field} and compression={config.compression} both say what an averaging "
                    "sends: give one of them"
                )
        self._of_gradients = compression
        self._changes = compression_of(config.compression, compression)
        optimizer = given_optimizer(optimizer, model)
        self._tensors = LocalModel(model, optimizer, self._ranks.shards)
        fragments_of(self._tensors.trained, config)  # refuses more fragments than parameters
        warn_of_others(model, optimizer, own_state=not config.average_state)
        self.config = config
        """What it was made with."""
        self._scaler = scaler
        self._interval = Interval(config, optimizer)
        self._counters = Counters(last=config.begin_step)
        self._skipped = self._paced_step = 0
        self._looked = False
        self._averager: Averager | None = None
        self._hooks: list[Any] = []
        self._entered_once = False

    def __enter__(self) -> "LocalUpdates":
        if self._entered_once:
            raise RuntimeError(
                "this local_sgd block was entered before: make a new one with local_sgd(...)"
            )
        mine = set(map(id, self._tensors.model.parameters()))
        if any(mine & set(map(id, other._tensors.model.parameters())) for other in _open):
            raise RuntimeError(
                "this model is in a local_sgd block already: leave that one first, they cannot be "
                "nested (an engine that averages parameters leaves it with engine.close())"
            )
        with self._ranks.deadline():
            try:
                return self._entered()
            except Regrouped:
                raise PeerLost(
                    "a member was lost while local updates were being set up, before there was "
                    "anything to go on from: start again"
                ) from None

    def _entered(self) -> "LocalUpdates":
        members, ranks = self._members, self._ranks
        self._entered_once = True
        group = ranks.group
        facts: dict[str, Any] = {"wire": WIRE_VERSION, "config": type(self.config).__name__}
        facts["compression"] = type(self.config.compression).__name__
        facts["settings"] = asdict(self.config)
        if self._of_gradients is not None:
            facts[field_of(self._of_gradients)] = asdict(self._of_gradients)
        facts |= {"digest_every": self.digest_every, "timeout in seconds": group.timeout_s}
        facts |= arithmetic(self._tensors.device)
        facts |= {"misuse": self._tensors.difference(), **self._tensors.facts()}
        if members is not None:
            members.begin("local", facts)
            members.follow(lambda: self.step)
        ranks.compare(facts, "setting up local updates")
        if (problem := self._tensors.difference()) is not None:
            raise RuntimeError(problem)
        dense = self.config.node_size is None and self._changes is None
        apart = ranks.sites is None and (dense or self.config.by_time)
        sources = group if apart else ranks.sources(self.config.node_size)
        ranks.compile(self._needs())
        self._tensors.copy_from_first(group)
        outer = OuterRule(
            self.config.outer_lr, self.config.outer_momentum, self.config.outer_nesterov
        )
        self._averager = averager = Averager(
            group,
            self._tensors,
            self.config,
            interval=self._interval,
            averaging=Averaging(sources, self._tensors.params, outer=outer, changes=self._changes),
            counters=self._counters,
            scaler=self._scaler,
            identity=ranks.identity("local updates"),
            digest_every=self.digest_every,
            roll=members,
            after_averaging=self._after_averaging,
        )
        if members is not None and members.newcomer:
            with own_deadlines():
                members.fetch(NewcomersWork(averager, members.group))
                for each in self._tensors.optimizers:
                    begin_at = getattr(each, "begin_at", None)
                    if begin_at is not None:  # schedules of the others are at this step
                        begin_at(self.step)
                averager.average_if_due()
        averager.start_counting()  # what it takes to start is not an exchange of updates
        first = ranks.place[0] == 0
        if first and self._changes is not None:
            tell_coverage(self._changes, self._tensors.params.values())
        averager.pace = Pace(self._planned if first else None)
        self._paced_step = self.step
        self._steps = FollowedSteps(
            self._tensors.optimizers,
            before=self._before_step,
            observed=self._observed,
            after=self._after_step,
        )
        self._hooks = [
            self._steps,
            self._tensors.model.register_forward_pre_hook(_tell_of_evaluation),
        ]
        _open.append(self)
        for each in self._tensors.optimizers:
            call_params = getattr(each, "call_params", None)  # of an optimizer of this library
            if call_params is not None:
                call_params({p: name for name, p in named_parameters(self._tensors.model)})
        return self

    @property
    def _compressed(self) -> list[Tensor]:
        """The parameters whose changes are ever compressed."""
        changes, params = self._changes, self._tensors.params.values()
        return [] if changes is None else [p for p in params if changes.compresses(p)]

    def _needs(self) -> frozenset[Need]:
        """The compiled loops that an averaging calls."""
        loops = loops_of(self._changes, self._compressed, of_gradients=False)
        return loops | needs_of("outer", list(self._tensors.params.values()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._hooks:
                self.flush()
        finally:
            self.close()

    def _before_step(self) -> None:
        self._open_averager().before_step()

    def _observed(self) -> None:
        self._interval.before_step(self.step + 1)

    def _after_step(self) -> None:
        self._follow(self._open_averager().after_step)

    def _follow(self, move: Callable[[], None]) -> None:
        """What the averager does after a step, or in place of one."""
        averager = self._open_averager()
        k_steps = self.k_steps
        members = self._members
        # the ranks of a site do so at averagings, together; and all who have agreed on a change
        if members is not None and members.site is None and members.group.over is None:
            members.group.take_up()
        with (
            averager.group.one_deadline(),
            long_waits_logged(f"local step {self.step + 1}", lambda: averager.wait_s),
        ):
            move()
        if averager.likeness.averaged_before:
            averager.bytes_of_others += sum(
                p.numel() * p.element_size() for p in self._tensors.params.values()
            )
        if self.synced:
            _log.debug("averaged after local step %d", self.step)
            self._round_over(averager)
        if self.k_steps != k_steps:
            _log.info(
                "ranks average every %d steps from now on, not every %d", self.k_steps, k_steps
            )

    def _after_averaging(self, goes_on: bool) -> bool:
        """Between two averagings, with none on its way: members come and go. Whether this one goes
        on.
        """
        members, averager = self._members, self._averager
        if members is not None and averager is not None:
            members.end_round(NewcomersWork(averager, members.group), goes_on=goes_on)
            averager.last = None
            if members.left:
                self.close()
                return False
        return True

    def _round_over(self, averager: Averager) -> None:
        steps, self._paced_step = self.step - self._paced_step, self.step
        if not steps:  # a round by time in which no rank made one
            return
        told = averager.pace.round(
            steps,
            time.perf_counter(),
            averager.wait_s,
            averager.sources.rate_bit_s,
            compare=self.step > self.config.begin_step,
        )
        if told is not None:
            warnings.warn(told, UserWarning, stacklevel=6)

    def close(self) -> None:
        """Take the hooks off, without an averaging; may be called twice.

        Leaving the block does it.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._averager is not None:
            self._averager.pending = None
            forget_ended()
        _open[:] = [other for other in _open if other is not self]

    @property
    def steps_made(self) -> int:
        """Local steps of this rank inside the block, dropped ones too."""
        return 0 if self._averager is None else self._averager.steps_made

    @property
    def k_steps(self) -> int:
        """The interval in force, in steps."""
        return self._interval.k_steps

    @property
    def step(self) -> int:
        """Local steps taken; with `round_seconds` up to the last averaging, by whoever made most,
        and so the same on all ranks.
        """
        return self._counters.step

    @property
    def synced(self) -> bool:
        """Whether the last step took part in an averaging; with a delay, measured one."""
        return self._averager is not None and self._averager.synced

    @property
    def apart(self) -> bool:
        """Whether this rank made steps since all ranks were equal in everything."""
        return self._averager is not None and self._averager.apart

    @property
    def left(self) -> bool:
        """Whether this one was a member of those that average, and has left."""
        return self._members is not None and self._members.left

    @property
    def pending(self) -> PendingAveraging | None:
        """The averaging that is on its way, if there is one."""
        return None if self._averager is None else self._averager.pending

    def observe(self, loss: float | Tensor, *, tokens: int | None = None) -> None:
        """Tell the loss of this step: `AdaptiveLocalSGD` needs it before every `optimizer.step()`,
        `LocalSGD` does not.

        Args:
            loss: This rank's mean loss, unscaled: a number or a tensor of one element, which is not
                read before it is needed. Several before one step are averaged.
            tokens: Of this rank in this step, >= 1, or samples, whatever changes shall count by;
                for `round_seconds`, before every step on all ranks or never. Several before one
                step are added.

        Raises:
            TypeError: No number.
            ValueError: A tensor of more than one element; tokens where nothing is weighed.
        """
        self._interval.observe(loss)
        if tokens is not None:
            self.count_tokens(tokens)

    def count_tokens(self, tokens: int) -> None:
        """The part of `observe` that is about tokens."""
        require_tokens(tokens, self.config)
        work = self._open_averager().work
        assert work is not None, "it ends by time"
        work.observe(tokens)

    def skip_step(self) -> None:
        """Count a step whose update this rank drops, for instance because of an overflow; call it
        instead of `step`.

        Ranks must average at the same step, so a dropped one counts. A loss that is not finite is
        left out of the mean.
        """
        averager = self._open_averager()
        averager.before_step()
        self._interval.before_step(self.step + 1, dropped=True)
        self._skipped += 1
        self._follow(averager.after_step)

    def give_up(self, why: str | None) -> None:
        """Raise `NonFinite` on all ranks at the next averaging, with these words; not with None."""
        self._open_averager().given_up = why

    def end_round(self) -> None:
        """Take part in the averaging of a round that ends by time, with the steps made so far, be
        they none: for a rank that has nothing more to do while others have.

        It waits for the others until their round is over.

        Raises:
            ValueError: Rounds that are counted in steps, where `skip_step` does it.
        """
        if not self.config.by_time:
            raise ValueError(
                "end_round is for LocalSGD(round_seconds=...): where steps are counted, call "
                "skip_step instead of step"
            )
        self._follow(self._open_averager().end_round)

    @contextmanager
    def counting_only(self) -> Iterator[None]:
        """Steps inside are counted, and end no round by time: for those that ranks make before
        they flush, each a number of its own.
        """
        averager = self._open_averager()
        averager.counting_only = True
        try:
            yield
        finally:
            averager.counting_only = False

    def flush(self) -> None:
        """Apply a result that is on its way, and average everything if there were steps since all
        ranks were equal, or a parameter has moved otherwise; without either, floating-point buffers
        that changed since, as in `update_bn`.

        All ranks must call it after the same step. Leaving the block does it.

        Raises:
            Mismatch: Ranks are at different steps.
            ThinwireError: As in any averaging.
        """
        averager = self._open_averager()
        self._steps.finish()
        group = averager.group
        with group.one_deadline():
            averager.flush()
        if group.size > 1 and not self._looked:
            self._looked = True
            warn_of_averages(self._tensors.model, self._counters.averagings)

    def require_equal(self) -> None:
        """Compare all that ranks must hold alike; on all ranks.

        Raises:
            Diverged: On every rank.
        """
        self._entered_averager().require_equal()

    @property
    def _applied_share(self) -> float:
        if self._averager is None:
            return 1.0
        parts = self._averager.parts  # each has an outer optimizer of its own
        return self._averager.averaging.applied_share(-(-self._counters.averagings // parts))

    def traffic(self) -> dict[str, Any]:
        """See `Synchronizer.traffic`."""
        return NO_TRAFFIC if self._averager is None else self._averager.traffic()

    def lose(self, seconds: float) -> None:
        """Count time that went to something else than steps, such as saving; see `stats`."""
        if self._averager is not None:
            self._averager.pace.lose(seconds)

    def _goodput(self) -> float:
        if self._averager is None:
            return 1.0
        return self._averager.pace.goodput(self.step - self._skipped, self._skipped)

    def counts(self) -> dict[str, Any]:
        """`traffic`, and further numbers of `thinwire.core.stats`."""
        changes = self._changes
        return {
            "averagings": self._counters.averagings,
            "sparsity": left_out(changes, self.step) if self._compressed else 0.0,
            "applied_share": self._applied_share,
            "goodput": self._goodput(),
            **self.traffic(),
        }

    def stats(self) -> dict[str, float]:
        """This rank so far, flat and in numbers only; the names are those of
        `thinwire.core.stats.numbers`.

        `bytes_sent` counts the messages of averagings with their headers and agreements, not the
        copy of the model at the start; `bytes_dense` 4 bytes per trainable element and step;
        `dropped_steps` the calls of `skip_step`.

        `applied_share` estimates <applied, change> / <change, change>: `change` is the sum, over
        the averagings so far, of the mean over the ranks of what local steps changed, and `applied`
        that of what the anchors moved by, outer optimizer included. At 1 the anchors have moved as
        far as the ranks' steps on the mean; below 1 a part is lost to decay, or still kept; above 1
        what was sent counts more than once (`mean_over="senders"`). It comes from 64 sums of
        entries with random signs (`local.sketch`), 256 bytes beside every compressed averaging, so
        its standard error is about an eighth of what was applied across the change, relative to the
        change. Equal on all ranks. Where all is applied in time (without compression, with one of
        gradients, and at decay 1 with a mean over all ranks) no byte is sent for it: it is what the
        outer optimizer makes of changes of one size, 1 for plain averaging and outer_lr without
        outer momentum.
        """
        return numbers(
            step=self.step,
            dropped_steps=self._skipped,
            k_steps=self.k_steps,
            loss_scale=1.0 if self._scaler is None else self._scaler.scale,
            bytes_dense=4 * self._tensors.numel * self.step,
            **self.counts(),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on, of this rank, as plain values and copies of tensors.

        Between two averagings it holds this rank's own parameters and buffers too, since those of
        rank 0 are copied on entry; `load_state_dict` puts them back. The optimizer's state is the
        optimizer's. No communication.
        """
        state = self.plain_state_dict()
        return {
            **state,
            ORIGIN: Origin(*self._ranks.place, self.step, saving.own_checksum(state)).packed(),
        }

    def plain_state_dict(self) -> dict[str, Any]:
        """`state_dict` without the origin, for callers that keep ranks apart by other means."""
        return saving.saved(self._entered_averager())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same rank, bit for bit; inside the block, on all
        ranks. No communication.

        Warns:
            UserWarning: It is another rank's, and has what is its own: parameters between
            averagings, kept errors.

        Raises:
            RuntimeError: The block has not been entered.
            TypeError, ValueError: The state is of another model or config; nothing has changed.
        """
        origin = Origin.read(state.get(ORIGIN)) if isinstance(state, Mapping) else None
        state = without_origin(state)
        saving.load(state, self._open_averager())
        own = saving.own_checksum(state)
        if origin is not None and (origin.checksum or own):
            problem = origin.problem(*self._ranks.place, own)
            if problem is not None:
                warnings.warn(f"thinwire.local_sgd: {problem}", UserWarning, stacklevel=2)
        self._paced_step = self.step

    def start_anew(self) -> None:
        """Go on from the parameters and buffers as they are, which must be equal on all ranks: the
        next averaging is measured from them, and what was kept of earlier changes, outer momentum
        too, is gone. For weights that were put back in the middle of a run, after `flush()`.

        Raises:
            RuntimeError: The block is not open, or a result is on its way.
        """
        averager = self._open_averager()
        if averager.pending is not None:
            raise RuntimeError(
                "an averaging of the parameters before is on its way: call flush() before the "
                "weights are loaded, and start_anew() after it"
            )
        averager.start_anew()

    def buffers_loaded(self) -> None:
        """The buffers of what was loaded were written as well."""
        self._open_averager().tensors.buffers_are_back()

    def _entered_averager(self) -> Averager:
        """Also after the block, for who saves what it ended with."""
        return self._open_averager() if self._averager is None else self._averager

    def _open_averager(self) -> Averager:
        if not self._hooks or self._averager is None:
            raise RuntimeError(
                "this needs an open local_sgd block: call it inside `with local_sgd(...) as sync:`"
            )
        return self._averager


def _tell_of_evaluation(model: nn.Module, _: object) -> None:
    """Before a forward pass of a block's model, or of a copy, which brings this along; once."""
    if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for block in _open:
        own = block._tensors.model is model and block.apart and not block.synced
        if own and block._open_averager().group.size > 1:
            block._hooks.pop().remove()  # it is the last one
            warnings.warn(
                "the model is evaluated between two averagings, where its parameters are this "
                "rank's own and not the mean of all ranks: evaluate where sync.synced is true, or "
                "call sync.flush() (engine.flush()) on all ranks before",
                UserWarning,
                stacklevel=5,
            )


def _require_alone(
    members: object,
    mesh: DeviceMesh | None,
    process_group: object,
    timeout: object,
    node_size: int | None,
) -> None:
    """Refuse what says who averages, beside members."""
    check.instance("members", members, Members)
    assert isinstance(members, Members)
    for name, value in {"process_group": process_group, "timeout": timeout}.items():
        if value is not None:
            raise ValueError(
                f"{name} and members were both given: members exchange among themselves, "
                "within the time-out that join was given; leave it out"
            )
    if node_size not in (None, 1):
        raise ValueError(
            f"node_size={node_size} and members were both given: members come and "
            "go one by one, so that each counts for itself; leave node_size out"
        )
    members.require_mesh(mesh)
