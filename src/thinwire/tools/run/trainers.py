"""One training step under each strategy: DDP and its hooks, parts of thinwire, and the engine."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import Group
from thinwire.layout.traffic import ring_bytes
from thinwire.tools.run.built_in import ConvolutionalNet, LossFunction, loss_of, muon_shapes
from thinwire.tools.run.config import RunConfig
from thinwire.tools.run.task import Workload, called

# buckets leave while backward goes on; one bucket of everything would wait for its end
_BUCKET_CAP_MB = 4
_ONE_BUCKET_MB = 10_000
_RANK, _DENSE_STEPS = 2, 5
"""Rank, and number of initial dense steps, of torch's PowerSGD."""
MOMENTUM, BETAS, WEIGHT_DECAY = 0.9, (0.9, 0.95), 0.1
"""Hyper-parameters of SGD, AdamW and Muon, the same for every strategy."""


@dataclass(frozen=True)
class Setup:
    """Settings that all strategies share."""

    optimizer: str
    loss_fn: LossFunction = loss_of
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    shard: int = 1

    @classmethod
    def of(cls, config: RunConfig, work: Workload) -> Self:
        """Return the setup of a run; the strategy's optimizer takes precedence over the task's."""
        own = config.recipe.optimizer
        make = None if own else work.make_optimizer
        return cls(own or config.optimizer, work.loss_fn, make, config.shard)

    def optimizer_of(self, model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
        """Make the common optimizer; its learning rate is set before each step."""
        if self.make_optimizer is not None:
            return self.make_optimizer(list(model.parameters()))
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.named_parameters(), lr=lr, momentum=MOMENTUM)
        if self.optimizer == "muon":
            conv = isinstance(model, ConvolutionalNet)
            if not muon_shapes(model, conv=conv):
                raise ValueError(
                    "Muon trains hidden matrices and this model has none; omit the strategies "
                    "that use Muon"
                )
            groups = tw.optim.muon_groups(model, conv=conv)
            return tw.optim.Muon(groups, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        named = model.named_parameters()
        return torch.optim.AdamW(named, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)

    @property
    def sites(self) -> int:
        """Number of sites, each with a whole model."""
        return dist.get_world_size() // self.shard

    def sharded(self, model: nn.Module, *, within: bool) -> DeviceMesh | None:
        """Shard the elements of every ModuleList, and the rest, among the ranks of a site."""
        if self.shard == 1:
            return None
        kind = next(p.device.type for p in model.parameters())
        mesh = init_device_mesh(
            kind, (self.sites, self.shard), mesh_dim_names=("replicate", "shard")
        )
        used = mesh["shard"] if within else mesh
        for module in reversed([*model.modules()]):
            for block in module if isinstance(module, nn.ModuleList) else ():
                fully_shard(block, mesh=used)
        fully_shard(model, mesh=used)
        return mesh


def build_trainer(
    trainer: str, options: Mapping[str, Any], model: nn.Module, setup: Setup
) -> "Trainer":
    """Import a trainer, "module:Class", and wrap the model; collective over all ranks."""
    built: Trainer = resolve_name(trainer)(model, setup, **options)
    return built


def bare_step(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any
) -> Tensor:
    """Run forward pass, backward pass and update, without an exchange."""
    loss = setup.loss_fn(called(model, inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def gradient_bytes(model: nn.Module, width: int | None = None) -> float:
    """Return the gradient bytes of a model, at `width` bytes per entry or their own."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return float(sum(p.numel() * (width or p.element_size()) for p in trained))


class DDPTrainer:
    """Trainer with DDP, plain or with one of torch's hooks; with HSDP if the model is sharded."""

    # PowerSGD travels in a single bucket: with two in flight, torch's hook waits inside a callback,
    # which gloo never returns from

    round_steps, finish_s, agreed = 1, 0.0, True

    def __init__(self, model: nn.Module, setup: Setup, *, hook: str = "") -> None:
        self.module = model
        self.setup = setup
        self.hook = hook
        self.steps = 0
        self.steady_from_step = 2  # DDP rebuilds its buckets after the first
        self.settings: Mapping[str, Any] = {}
        if hook and setup.shard > 1:
            raise ValueError(
                f"{hook} is a hook of DDP, which needs whole models, but shard={setup.shard}; omit "
                "this strategy"
            )
        self.trained = model if setup.sharded(model, within=False) else self._distributed()
        self.optimizer = setup.optimizer_of(model)

    def _distributed(self) -> DistributedDataParallel:
        """Wrap the model in DDP, with the hook."""
        cap_mb = _ONE_BUCKET_MB if self.hook == "powersgd" else _BUCKET_CAP_MB
        ddp = DistributedDataParallel(
            self.module, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True
        )
        self.settings = {"bucket_cap_mb": cap_mb}
        if self.hook == "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.hook == "powersgd":
            self.state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=_RANK, start_powerSGD_iter=_DENSE_STEPS
            )
            ddp.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
            self.steady_from_step = _DENSE_STEPS + 1
        return ddp

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on a batch; return this rank's mean loss, detached."""
        self.steps += 1
        return bare_step(self.setup, self.trained, self.optimizer, inputs, targets)

    def sent_bytes(self) -> float:
        """Return the bytes that this rank, or its site, has sent to others, without headers."""
        sites = self.setup.sites
        dense = gradient_bytes(self.module)
        if self.hook == "fp16":
            dense = gradient_bytes(self.module, 2)
        if self.hook != "powersgd":
            return self.steps * ring_bytes(sites, dense)
        _, _, factors_numel = self.state.compression_stats()  # type: ignore[no-untyped-call]
        width = dense / gradient_bytes(self.module, 1)
        dense_steps = min(self.steps, _DENSE_STEPS)
        return dense_steps * ring_bytes(sites, dense) + ring_bytes(sites, width * factors_numel)

    def finish(self) -> None:
        """Do nothing: every step was exchanged."""

    def close(self) -> None:
        """Do nothing: DDP cannot remove its hooks, and ends with the process."""


@final
class Prepared:
    """The optimizer, or the one that LARS or LAMB takes over, under any strategy without a
    pipeline; attributes as of `DDPTrainer`.
    """

    def __init__(self, model: nn.Module, setup: Setup, *, document: Mapping[str, Any]) -> None:
        strategy = tw.DistributedStrategy.from_dict(document)
        mesh = setup.sharded(model, within=True)
        optimizer = _optimizer(model, strategy, setup)
        self.engine = strategy.prepare(model, optimizer, setup.loss_fn, mesh=mesh)
        self.shard = setup.shard
        self.bytes_before = _between_sites()
        self.module = self.engine.model
        self.optimizer = self.engine.optimizer
        local = strategy.local
        merged = 1 if strategy.gradient_merge is None else strategy.gradient_merge.k_steps
        self.round_steps = merged
        if isinstance(local, tw.AdaptiveLocalSGD):
            self.round_steps *= local.max_k_steps
        elif local is not None:
            self.round_steps *= local.k_steps
        method = strategy.gradient_compression
        settled = 0 if method is None else method.settled_step
        self.steady_from_step = merged * max(1 if local is None else local.begin_step, settled)
        # parts of the model in turn, or results that come later: ranks are never quite equal before
        # the end, and `agreed` is when nothing is on its way
        self.drifting = local is not None and (local.fragments > 1 or local.delay > 0)
        taken_over = strategy.lars is not None or strategy.lamb is not None
        named = {"optimizer": type(self.optimizer).__name__} if taken_over else {}
        self.settings: Mapping[str, Any] = {**named, **document}
        self.agreed = True
        self.finish_s = 0.0
        self.step_s = {True: 0.0, False: 0.0}
        """Seconds of the last step that left an exchange pending, and of the last that did not."""

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """See `DDPTrainer`; with gradient merge, only every k-th step updates."""
        begin_s = time.perf_counter()
        loss = self.engine.train_step(inputs, targets)
        step_s = time.perf_counter() - begin_s
        waiting = bool(self.engine.pending)
        self.step_s[waiting] = step_s
        if all(self.step_s.values()):
            self.finish_s = max(0.0, self.step_s[False] - self.step_s[True])
        # an averaging that is under way would go on while the clock stands still
        sync = self.engine.sync if self.drifting else None
        self.agreed = not waiting if sync is None else sync.pending is None
        return loss

    def sent_bytes(self) -> float:
        return self.shard * (_between_sites() - self.bytes_before)

    def finish(self) -> None:
        """Apply the rest of a merge and run the last averaging."""
        self.engine.flush()

    def close(self) -> None:
        self.engine.close()


def _between_sites() -> float:
    return Group.on_the_wire - Group.within_sites


Trainer = DDPTrainer | Prepared
"""Trainer of one strategy."""


def _optimizer(
    model: nn.Module, strategy: tw.DistributedStrategy, setup: Setup
) -> torch.optim.Optimizer:
    """Return the inner optimizer: LAMB replaces an Adam, LARS an SGD, whatever others use."""
    if setup.make_optimizer is None and strategy.lamb is not None:
        return torch.optim.Adam(model.named_parameters(), lr=0.0, betas=BETAS)
    if setup.make_optimizer is None and strategy.lars is not None:
        return replace(setup, optimizer="sgd").optimizer_of(model)
    return setup.optimizer_of(model)
