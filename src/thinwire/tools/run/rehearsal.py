"""A few untimed steps on a copy of the model that is thrown away, before a strategy's clock starts.

Kernels are compiled or read from disk, modules imported, buffers made and every collective of the
strategy used once, so that no strategy pays for these in its training time. The intervals of the
copy are short, so that few steps see it all.
"""

import copy
import gc
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist

from thinwire.errors import Mismatch, NonFinite
from thinwire.tools.run.config import RunConfig
from thinwire.tools.run.events import Events
from thinwire.tools.run.task import Work, untouched, work_of
from thinwire.tools.run.trainers import Setup, build_trainer

__all__ = ["Check", "rehearse", "shortened"]

_RATE = 1e-4
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


def rehearse(config: RunConfig, work: Work) -> None:
    """Train a copy of the task's model until every part of the strategy has been used; on every
    rank at the same time.

    The model and torch's random numbers are afterwards as they were.
    """
    recipe = config.recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup = Setup.of(config, work, _RAMP_STEPS)
        options = shortened(recipe.arguments)
        trainer = build_trainer(recipe.trainer, options, copy.deepcopy(work.model), setup)
        # ranks that bring the same would be told so
        inputs, targets = work.some_batch(seed=os.getpid())
        with untouched(work.model):
            for _ in range(trainer.steady_from_step + trainer.round_steps + 1):
                for group in trainer.optimizer.param_groups:
                    group["lr"] = _RATE
                trainer.train_step(inputs, targets)
            trainer.finish()
        trainer.close()
    del trainer
    gc.collect()  # DDP and its hooks know each other; their buffers are as large as the model


@final
class Check:
    """Rehearse one strategy after the other on all ranks, before the first one trains: a job of the
    workers.
    """

    def __init__(self, config: Mapping[str, Any], events: Events) -> None:
        self.runs = [RunConfig.from_dict(run) for run in config["runs"]]
        self.events = events

    def train(self) -> dict[str, Any]:
        """Name and error of every strategy that does not go with the model."""
        work = work_of(replace(self.runs[0], batch=1))
        refused: dict[str, str] = {}
        for run in self.runs:
            name = run.recipe.name
            self.events.write("checking", strategy=name)
            try:
                rehearse(run, work)
            except (TypeError, ValueError, Mismatch) as error:
                # of `prepare`, which raises on all ranks or on none
                refused[name] = f"{type(error).__name__}: {error}"
            except NonFinite:
                # on all ranks too, and a matter of rates, not of the model: the training will tell
                continue
            dist.barrier()
        return {"refused": refused}
