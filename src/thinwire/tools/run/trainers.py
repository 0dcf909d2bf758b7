"""One training step under each strategy, on every rank: DDP and its hooks, the parts of thinwire by
themselves, and the engine that `prepare` makes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import Group
from thinwire.layout.traffic import settled_step
from thinwire.tools.run.built_in import loss_of, muon_numel
from thinwire.tools.run.config import RunConfig, imported
from thinwire.tools.run.task import Work, called

__all__ = [
    "DDPTrainer",
    "Local",
    "PowerSGD",
    "Prepared",
    "Ramped",
    "Setup",
    "Trainer",
    "bare_step",
    "build_trainer",
    "gradient_bytes",
]

# buckets leave while backward goes on; one bucket of everything would wait for its end
_BUCKET_CAP_MB = 4
_ONE_BUCKET_MB = 10_000
MOMENTUM, BETAS, WEIGHT_DECAY = 0.9, (0.9, 0.95), 0.1
"""Of SGD, AdamW and Muon, the same for every strategy."""
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Setup:
    """Settings that all strategies share.

    Attributes:
        optimizer: "adamw", "muon" or "sgd".
        ramp_steps: Updates during which methods that start gently may do so.
        loss_fn: `loss_fn(model(inputs), targets)` is the mean loss.
        make_optimizer: From parameters to the task's own optimizer; None for that of the command.
    """

    optimizer: str
    ramp_steps: int
    loss_fn: LossFunction = loss_of
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None

    @classmethod
    def of(cls, config: RunConfig, work: Work, ramp_steps: int) -> Self:
        """The settings of a run; the optimizer of the strategy goes before that of the task."""
        own = config.recipe.optimizer
        if own is not None:
            return cls(own, ramp_steps, work.loss_fn)
        return cls(config.optimizer, ramp_steps, work.loss_fn, work.make_optimizer)

    def optimizer_of(self, model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
        """Make the optimizer of all strategies; its learning rate is set before each step."""
        if self.make_optimizer is not None:
            return self.make_optimizer(list(model.parameters()))
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.named_parameters(), lr=lr, momentum=MOMENTUM)
        if self.optimizer == "muon":
            if not muon_numel(model):
                raise ValueError(
                    "Muon trains hidden matrices, and this model has none, so that AdamW alone "
                    "would train: leave what trains with Muon out"
                )
            return tw.optim.Muon(
                tw.optim.muon_groups(model), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY
            )
        return torch.optim.AdamW(
            model.named_parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY
        )

    def forward(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        """This rank's mean loss."""
        return self.loss_fn(called(model, inputs), targets)


class Trainer(Protocol):
    """One strategy at work.

    Attributes:
        module: The bare module, to be evaluated.
        optimizer: Whose `param_groups` take the learning rate before each step.
        steady_from_step: The update from which on every round of steps costs the same.
        round_steps: Steps after which the costs repeat: 1, or the interval of local updates.
        finish_s: Seconds that `finish` is going to take, as far as is known.
        agreed: Whether all ranks hold the same parameters at present.
        settings: What was chosen for this strategy, for the report.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    steady_from_step: int
    round_steps: int
    finish_s: float
    agreed: bool
    settings: Mapping[str, Any]

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """Forward, backward, exchange and update; return this rank's mean loss, detached."""

    def sent_bytes(self) -> float:
        """Bytes that this rank has put on the wire so far, without what TCP and IP add."""

    def finish(self) -> None:
        """Exchange what has not been exchanged yet; afterwards all ranks hold the same
        parameters.
        """

    def close(self) -> None:
        """Take every hook off."""


def build_trainer(
    trainer: str, options: Mapping[str, Any], model: nn.Module, setup: Setup
) -> Trainer:
    """Import a trainer, given as "module:Class", and wrap the model; on every rank at the same
    time.
    """
    built: Trainer = imported(trainer)(model, setup, **options)
    return built


def bare_step(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any
) -> Tensor:
    """Forward, backward and update, without any exchange."""
    loss = setup.forward(model, inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def gradient_bytes(model: nn.Module, width: int | None = None) -> float:
    """Bytes of the gradients of a model, in `width` bytes an entry or else their own."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return float(sum(p.numel() * (width or p.element_size()) for p in trained))


def ring_bytes(message_bytes: float) -> float:
    """Bytes that each rank sends in a ring all-reduce of `message_bytes`: 2(W-1)/W of them."""
    world = dist.get_world_size()
    return 2 * (world - 1) / world * message_bytes


class DDPTrainer:
    """The optimizer on what DDP exchanges: gradients as they are, or by torch's hook in float16."""

    round_steps, finish_s, agreed = 1, 0.0, True

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        *,
        half: bool = False,
        bucket_cap_mb: int = _BUCKET_CAP_MB,
    ) -> None:
        self.module = model
        self.ddp = DistributedDataParallel(
            model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
        self.width = 2 if half else None
        if half:
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        self.setup = setup
        self.optimizer = setup.optimizer_of(model)
        self.steady_from_step = 2  # DDP rebuilds its buckets after the first
        self.settings: Mapping[str, Any] = {"bucket_cap_mb": bucket_cap_mb}
        self.steps = 0

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        self.steps += 1
        return bare_step(self.setup, self.ddp, self.optimizer, inputs, targets)

    def sent_bytes(self) -> float:
        return self.steps * ring_bytes(gradient_bytes(self.module, self.width))

    def finish(self) -> None:
        """Every step has been exchanged."""

    def close(self) -> None:
        """DDP leaves with the process; it offers no way to take its hooks off."""


@final
class PowerSGD(DDPTrainer):
    """Gradients travel as two thin factors, the rest is fed back.

    In a single bucket: with two in flight, torch's hook waits inside a callback, which gloo never
    returns from.
    """

    _RANK, _DENSE_STEPS = 2, 5

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup, bucket_cap_mb=_ONE_BUCKET_MB)
        self.state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._RANK,
            start_powerSGD_iter=self._DENSE_STEPS,
        )
        self.ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        self.steady_from_step = self._DENSE_STEPS + 1
        self.settings = {**self.settings, "rank": self._RANK, "dense_steps": self._DENSE_STEPS}

    def sent_bytes(self) -> float:
        dense_steps = min(self.steps, self._DENSE_STEPS)
        _, _, factors_numel = self.state.compression_stats()  # type: ignore[no-untyped-call]
        dense = gradient_bytes(self.module)
        width = dense / gradient_bytes(self.module, 1)
        return dense_steps * ring_bytes(dense) + ring_bytes(width * factors_numel)


@final
class Local:
    """The optimizer on every rank, with its state kept there, inside `thinwire.local_sgd`.

    Between two averagings no rank's parameters are the model: it is `agreed` right after one, when
    all are equal.
    """

    def __init__(self, model: nn.Module, setup: Setup, **settings: Any) -> None:
        self.module = model
        self.setup = setup
        self.optimizer = setup.optimizer_of(model)
        config = _local_config(settings)
        self.round_steps = (
            config.max_k_steps if isinstance(config, tw.AdaptiveLocalSGD) else config.k_steps
        )
        self.steady_from_step = config.begin_step
        self.settings: Mapping[str, Any] = {**settings, **(settings.get("compression") or {})}
        self.settings = {key: value for key, value in self.settings.items() if key != "compression"}
        self.sync = tw.local_sgd(model, self.optimizer, config).__enter__()
        self.bytes_before = Group.on_the_wire
        self.finish_s = 0.0

    @property
    def agreed(self) -> bool:
        return self.sync.synced

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        loss = self.setup.forward(self.module, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync.observe(loss)
        begin_s = time.perf_counter()
        self.optimizer.step()
        if self.sync.synced:
            self.finish_s = time.perf_counter() - begin_s
        self.optimizer.zero_grad()
        return loss.detach()

    def sent_bytes(self) -> float:
        return Group.on_the_wire - self.bytes_before

    def finish(self) -> None:
        """Average once more, unless the last step ended with one."""
        self.sync.flush()

    def close(self) -> None:
        self.sync.close()


class Prepared:
    """The optimizer, or the one that LARS or LAMB takes over, under any strategy without a
    pipeline.
    """

    def __init__(self, model: nn.Module, setup: Setup, *, document: Mapping[str, Any]) -> None:
        strategy = tw.DistributedStrategy.from_dict(document)
        self.engine = strategy.prepare(model, _optimizer(model, strategy, setup), setup.loss_fn)
        self.bytes_before = Group.on_the_wire
        self.module = self.engine.model
        self.optimizer = self.engine.optimizer
        local = strategy.local
        merged = 1 if strategy.gradient_merge is None else strategy.gradient_merge.k_steps
        self.round_steps = merged * _longest_interval(local)
        settled = settled_step(strategy.compression)
        self.steady_from_step = merged * max(1 if local is None else local.begin_step, settled)
        # parts of the model in turn, or results that come later: ranks are never quite equal before
        # the end, and `agreed` is when nothing is on its way
        self.drifting = local is not None and (local.fragments > 1 or local.delay > 0)
        taken_over = strategy.lars is not None or strategy.lamb is not None
        optimizer = {"optimizer": type(self.optimizer).__name__} if taken_over else {}
        self.settings: Mapping[str, Any] = {**optimizer, **document}
        self.agreed = True
        self.local_step_s = 0.0
        self.finish_s = 0.0

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """See `Trainer`; under a gradient merge only every k-th one updates."""
        begin_s = time.perf_counter()
        loss = self.engine.train_step(inputs, targets)
        step_s = time.perf_counter() - begin_s
        waiting = bool(self.engine.pending)
        if waiting:
            self.local_step_s = step_s
        elif self.local_step_s:
            self.finish_s = max(0.0, step_s - self.local_step_s)
        self.agreed = self._nothing_on_its_way() if self.drifting else not waiting
        return loss

    def _nothing_on_its_way(self) -> bool:
        """Whether no averaging is under way, which would go on while the clock stands still."""
        return self.engine.sync is None or self.engine.sync.pending is None

    def sent_bytes(self) -> float:
        return Group.on_the_wire - self.bytes_before

    def finish(self) -> None:
        """Apply the leftovers of a merge and the last averaging."""
        self.engine.flush()

    def close(self) -> None:
        self.engine.close()


@final
class Ramped(Prepared):
    """One field, whose setting `ramp` gets the updates during which it may start gently."""

    def __init__(
        self, model: nn.Module, setup: Setup, *, field: str, ramp: str, **settings: Any
    ) -> None:
        own = {**settings, ramp: setup.ramp_steps}
        super().__init__(model, setup, document={field: own})
        self.settings = own


def _optimizer(
    model: nn.Module, strategy: tw.DistributedStrategy, setup: Setup
) -> torch.optim.Optimizer:
    """LAMB takes over an Adam and LARS an SGD, whatever the others train with."""
    if setup.make_optimizer is None and strategy.lamb is not None:
        return torch.optim.Adam(model.named_parameters(), lr=0.0, betas=BETAS)
    if setup.make_optimizer is None and strategy.lars is not None:
        return replace(setup, optimizer="sgd").optimizer_of(model)
    return setup.optimizer_of(model)


def _longest_interval(local: tw.LocalSGD | tw.AdaptiveLocalSGD | None) -> int:
    if local is None:
        return 1
    return local.max_k_steps if isinstance(local, tw.AdaptiveLocalSGD) else local.k_steps


def _local_config(settings: Mapping[str, Any]) -> tw.LocalSGD | tw.AdaptiveLocalSGD:
    """The config that these settings would be in a strategy file."""
    field = "adaptive_localsgd" if "init_k_steps" in settings else "localsgd"
    config: tw.LocalSGD | tw.AdaptiveLocalSGD = tw.DistributedStrategy.from_dict(
        {field: settings}
    ).on[field]
    return config
