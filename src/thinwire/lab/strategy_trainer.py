"""One training step under a strategy file: the engine that `prepare` makes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.lab.trainers import Setup

__all__ = ["Prepared"]


@final
class Prepared:
    """Momentum SGD, or Adam for LAMB to take over, under any strategy without a pipeline."""

    def __init__(self, model: nn.Module, setup: Setup, *, document: Mapping[str, Any]) -> None:
        strategy = tw.DistributedStrategy.from_dict(document)
        self.engine = strategy.prepare(model, _optimizer(model, strategy, setup), _loss)
        self.module = self.engine.model
        self.optimizer = self.engine.optimizer
        local = strategy.localsgd or strategy.adaptive_localsgd
        merged = 1 if strategy.gradient_merge is None else strategy.gradient_merge.k_steps
        self.round_steps = merged * _longest_interval(local)
        self.steady_from_step = merged * max(
            1 if local is None else local.begin_step, _ramp_end(strategy)
        )
        # parts of the model in turn, or results that come later: ranks are never quite equal before
        # the end
        self.drifting = local is not None and (local.fragments > 1 or local.delay > 0)
        self.settings: Mapping[str, Any] = {"optimizer": type(self.optimizer).__name__, **document}
        self.agreed = True
        self.local_step_s = 0.0
        self.finish_s = 0.0

    def train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Trainer`; under a gradient merge only every k-th one updates."""
        begin_s = time.perf_counter()
        loss = self.engine.train_step(inputs, targets)
        step_s = time.perf_counter() - begin_s
        waiting = bool(self.engine.pending)
        if waiting:
            self.local_step_s = step_s
        elif self.local_step_s:
            self.finish_s = max(0.0, step_s - self.local_step_s)
        self.agreed = self.drifting or not waiting
        return loss

    def sent_bytes(self) -> float:
        """See `Trainer`."""
        return float(self.engine.stats()["bytes_sent"])

    def finish(self) -> None:
        """Applies the leftovers of a merge and the last averaging."""
        self.engine.flush()

    def close(self) -> None:
        """See `Trainer`."""
        self.engine.close()


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _optimizer(
    model: nn.Module, strategy: tw.DistributedStrategy, setup: Setup
) -> torch.optim.Optimizer:
    if strategy.lamb is not None:
        return torch.optim.AdamW(model.named_parameters(), lr=0.0)
    return torch.optim.SGD(model.named_parameters(), lr=0.0, momentum=setup.momentum)


def _longest_interval(local: tw.LocalSGD | tw.AdaptiveLocalSGD | None) -> int:
    if local is None:
        return 1
    return local.max_k_steps if isinstance(local, tw.AdaptiveLocalSGD) else local.k_steps


def _ramp_end(strategy: tw.DistributedStrategy) -> int:
    """The update from which on messages have their last length."""
    dgc = strategy.dgc
    if strategy.low_rank is not None:
        return strategy.low_rank.begin_step + 1
    if dgc is None:
        return 1
    levels = len(dgc.sparsity)
    return 1 + dgc.rampup_begin_step - (-dgc.rampup_step * (levels - 1) // levels)
