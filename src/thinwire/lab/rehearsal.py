"""A few untimed steps on a copy of the model that is thrown away, before a strategy's clock starts.

Kernels are compiled or read from disk, modules imported, buffers made and every collective of the
strategy used once, so that no strategy pays for these in its training time. The intervals of the
copy are short, so that few steps see it all.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from thinwire.lab.trainers import Setup, build_trainer

__all__ = ["rehearse", "shortened"]

_RATE_SHARE = 0.01
_RAMP_STEPS = 5
# settings that only say when something happens, not what; every one of them is kept where it is
# smaller
_MOST: dict[str, float] = {
    "k_steps": 4, "init_k_steps": 4, "max_k_steps": 4, "fragments": 2, "delay": 1, "begin_step": 1,
    "rampup_begin_step": 1, "rampup_step": _RAMP_STEPS, "init_loss_scale": 1024.0,
}  # fmt: skip


def shortened(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same methods at intervals of a few steps: what is done does not change, only how soon it
    is done first.
    """
    return {key: _short(key, value) for key, value in options.items()}


def _short(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return shortened(value)
    if key in _MOST and value is not None:
        return min(value, type(value)(_MOST[key]))
    if key == "average_state":  # a number means at every so many averagings
        return bool(value)
    return value


def rehearse(config: Mapping[str, Any], model: nn.Module, batch: int) -> None:
    """Trains a copy of `model` until every part of the strategy has been used; on every rank at the
    same time.

    `model` and torch's random numbers are afterwards as they were.

    Args:
        config: With `trainer`, `options`, `lr`, `momentum` and `context`.
        model: Not wrapped.
        batch: Sequences per step.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup = Setup(config["momentum"], _RAMP_STEPS)
        trainer = build_trainer(
            config["trainer"], shortened(config["options"]), copy.deepcopy(model), setup
        )
        # ranks that bring the same would be told so
        own = torch.Generator().manual_seed(os.getpid())
        inputs, targets = torch.randint(256, (2, batch, config["context"]), generator=own)
        for _ in range(trainer.steady_from_step + trainer.round_steps + 1):
            for group in trainer.optimizer.param_groups:
                group["lr"] = _RATE_SHARE * config["lr"]
            trainer.train_step(inputs, targets)
        trainer.finish()
        trainer.close()
    del trainer
    gc.collect()  # DDP and its hooks know each other; their buffers are as large as the model
