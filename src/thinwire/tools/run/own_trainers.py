"""One training step under the strategies of thinwire: its parts by themselves, and the engine that
`prepare` makes.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm import Group
from thinwire.tools.run.trainers import BETAS, Setup

__all__ = ["Local", "Prepared", "Ramped"]


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
        """See `Trainer`."""
        return self.sync.synced

    def train_step(self, inputs: Any, targets: Any) -> Tensor:
        """See `Trainer`."""
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
        """See `Trainer`."""
        return Group.on_the_wire - self.bytes_before

    def finish(self) -> None:
        """Average once more, unless the last step ended with one."""
        self.sync.flush()

    def close(self) -> None:
        """See `Trainer`."""
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
        settled = 1 if strategy.compression is None else strategy.compression.settled_step
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
        """See `Trainer`."""
        return Group.on_the_wire - self.bytes_before

    def finish(self) -> None:
        """Apply the leftovers of a merge and the last averaging."""
        self.engine.flush()

    def close(self) -> None:
        """See `Trainer`."""
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
