"""Train one strategy from the first step to the last, on every rank."""

import copy
import gc
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean, median
from typing import Any, final

import torch
import torch.distributed as dist

from thinwire.errors import Mismatch, NonFinite, ThinwireError
from thinwire.tools.network.netns import interface_bytes
from thinwire.tools.run.config import OPTIMIZERS, RunConfig, TaskError
from thinwire.tools.run.launch import Events
from thinwire.tools.run.task import Workload, untouched, work_of
from thinwire.tools.run.trainers import Setup, bare_step, build_trainer, gradient_bytes

_WARM_UP_SHARE, _LAST_FACTOR = 0.1, 0.1
_CONTROLS_PER_EVALUATION, _MOST_STEPS_BETWEEN_CONTROLS = 4, 50


def rate_factor(progress: float) -> float:
    """Return the fraction of the peak rate: linear warm-up over a tenth, then cosine to a tenth."""
    if progress < _WARM_UP_SHARE:
        return max(progress, 0.01) / _WARM_UP_SHARE
    x = min(1.0, (progress - _WARM_UP_SHARE) / (1 - _WARM_UP_SHARE))
    return _LAST_FACTOR + (1 - _LAST_FACTOR) * 0.5 * (1 + math.cos(math.pi * x))


@final
class BySteps:
    """Budget of a fixed number of updates."""

    def __init__(self, steps: int, evaluations: int) -> None:
        self.steps = steps
        self.marks = {round(steps * (i + 1) / evaluations) for i in range(evaluations)} | {steps}

    def progress(self, step: int) -> float:
        """Return the completed fraction of the run after `step` updates, in [0, 1]."""
        return min(1.0, step / self.steps)

    def advance(self, step: int, elapsed_s: float, reserve_s: float) -> tuple[bool, bool]:
        """Return two flags after `step` updates in `elapsed_s`: evaluate now, and end the run."""
        return step in self.marks, step >= self.steps


@final
class ByClock:
    """Budget of seconds, measured on rank 0."""

    def __init__(self, seconds: float, evaluations: int) -> None:
        self.seconds = seconds
        self.evaluations = evaluations
        self.control_s = seconds / (_CONTROLS_PER_EVALUATION * evaluations)
        self.known_step = 0
        self.known_progress = 0.0
        self.progress_per_step = 0.0
        self.next_control_step = 1
        self.evaluated = 0
        self.planned_s = 0.0

    def progress(self, step: int) -> float:
        """See `BySteps`; extrapolated between two broadcasts."""
        return min(1.0, self.known_progress + (step - self.known_step) * self.progress_per_step)

    def advance(self, step: int, elapsed_s: float, reserve_s: float) -> tuple[bool, bool]:
        if step < self.next_control_step:
            return False, False
        message = torch.tensor(self._plan(step, elapsed_s, reserve_s), dtype=torch.float64)
        dist.broadcast(message, src=0)
        progress, per_step, wait, evaluate, stop = message.tolist()
        self.known_step = step
        self.known_progress = progress
        self.progress_per_step = per_step
        self.next_control_step = step + int(wait)
        return bool(evaluate), bool(stop)

    def _plan(self, step: int, elapsed_s: float, reserve_s: float) -> list[float]:
        usable_s = max(self.seconds - reserve_s, 1e-6)
        progress = elapsed_s / usable_s
        step_s = max((elapsed_s - self.planned_s) / max(1, step - self.known_step), 1e-6)
        self.planned_s = elapsed_s
        due = math.floor(progress * self.evaluations)
        evaluate = due > self.evaluated or progress >= 1
        self.evaluated = max(self.evaluated, due)
        # half of what is left at most: the end is met to a step, however long the steps between
        # have been
        wait = round(min(self.control_s, (usable_s - elapsed_s) / 2) / step_s)
        wait = max(1, min(_MOST_STEPS_BETWEEN_CONTROLS, wait))
        return [min(1.0, progress), step_s / usable_s, wait, evaluate, progress >= 1]


_LR = 1e-4
_RAMP_STEPS = 5
# settings that only say when something happens, not what; every one of them is kept where it is
# smaller
_MOST: dict[str, float] = {
    "k_steps": 4, "init_k_steps": 4, "max_k_steps": 4, "fragments": 2, "delay": 1, "begin_step": 1,
    "rampup_begin_step": 1, "rampup_step": _RAMP_STEPS, "init_loss_scale": 1024.0,
}  # fmt: skip


def shortened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with intervals of a few steps."""
    found = {}
    for key, value in options.items():
        short = min(value, type(value)(_MOST[key])) if key in _MOST and value is not None else value
        found[key] = shortened(value) if isinstance(value, Mapping) else short
    return found


def rehearse(config: RunConfig, work: Workload) -> None:
    """Train a copy of the model until every part of the strategy was used, on all ranks."""
    recipe = config.recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup = Setup.of(config, work)
        options = shortened(recipe.arguments(config.ramp_steps))
        trainer = build_trainer(recipe.trainer, options, copy.deepcopy(work.model), setup)
        # ranks that bring the same would be told so
        inputs, targets = work.some_batch(seed=os.getpid())
        with untouched(work.model):
            for _ in range(trainer.steady_from_step + trainer.round_steps + 1):
                for group in trainer.optimizer.param_groups:
                    group["lr"] = _LR
                trainer.train_step(inputs, targets)
            trainer.finish()
        trainer.close()
    del trainer
    gc.collect()  # DDP and its hooks know each other; their buffers are as large as the model


@final
class Check:
    """Job that rehearses each strategy before the first one trains."""

    def __init__(self, config: Mapping[str, Any], events: Events) -> None:
        self.runs = [RunConfig.from_dict(run) for run in config["runs"]]
        self.events = events

    def train(self) -> dict[str, Any]:
        """Return name and error of each strategy that does not work with the model."""
        work = work_of(replace(self.runs[0], batch=1))
        refused: dict[str, str] = {}
        for run in self.runs:
            name = run.recipe.name
            self.events.write("checking", strategy=name)
            try:
                rehearse(run, work)
            except TaskError:
                raise
            except (TypeError, ValueError, Mismatch) as error:
                # of `prepare`, which raises on all ranks or on none
                refused[name] = f"{type(error).__name__}: {error}"
            except NonFinite:
                # on all ranks too, and a matter of rates, not of the model: the training will tell
                continue
            dist.barrier()
        return {"refused": refused}


@final
class BareStep:
    """Timed steps without an exchange, on a copy of the model."""

    def __init__(self, setup: Setup, work: Workload) -> None:
        self.setup = setup
        self.work = work
        self.model = copy.deepcopy(work.model)
        setup.sharded(self.model, within=True)
        self.optimizer = setup.optimizer_of(self.model, lr=_LR)
        self.batch = work.some_batch(seed=0)
        self.seconds: list[float] = []

    def measure(self, steps: int) -> None:
        """Time steps on all ranks at once, since ranks share the cores in training too."""
        dist.barrier()
        with untouched(self.work.model):
            for _ in range(steps):
                begin_s = time.perf_counter()
                bare_step(self.setup, self.model, self.optimizer, *self.batch)
                self.seconds.append(time.perf_counter() - begin_s)


_BARE_STEPS_UNTIMED, _BARE_STEPS_AT_START, _BARE_STEPS_BETWEEN = 2, 4, 2
_FEWEST_STEADY_STEPS = 5


@final
class TrainingRun:
    """Measured training of one strategy; clock and counters stop during evaluation."""

    def __init__(self, config: Mapping[str, Any], events: Events) -> None:
        self.config = RunConfig.from_dict(config)
        self.events = events
        recipe = self.config.recipe
        self.work = work_of(self.config)
        self.setup = setup = Setup.of(self.config, self.work)
        self.bare = BareStep(setup, self.work)
        self.bare.measure(_BARE_STEPS_UNTIMED)
        self.bare.seconds.clear()  # those paid for memory and caches
        self.bare.measure(_BARE_STEPS_AT_START)
        rehearse(self.config, self.work)
        self.trainer = build_trainer(
            recipe.trainer, recipe.arguments(self.config.ramp_steps), self.work.model, setup
        )
        self.peaks = self._peaks()
        self.step_s: list[float] = []
        # bytes sent up to each step: by the library's count, and by the interface's
        self.bytes = [torch.zeros(2, dtype=torch.float64)]
        self.evaluations: list[dict[str, float]] = []

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return len(self.step_s)

    def train(self) -> dict[str, Any]:
        """Train; return the measurements, as means over the ranks."""
        budget = self._budget()
        dist.barrier()  # until all ranks are prepared, and the command has restored the limits
        self.events.write("prepared")
        self.events.wait_for_release()
        self._evaluate()
        self.preparation_s = time.time() - self.config.launched_unix_s
        due = stop = False
        while not stop:
            factor = rate_factor(budget.progress(self.step))
            for group, peak in zip(self.trainer.optimizer.param_groups, self.peaks, strict=True):
                group["lr"] = peak * factor
            last = self.trainer.train_step(*self.work.next_batch())
            self.step_s.append(0.0)
            self.bytes.append(self.bytes[-1].clone())
            self._extend()
            progress = budget.progress(self.step)
            loss = float(last)
            self.events.write_sometimes("step", step=self.step, progress=progress, loss=loss)
            if self.step == self.trainer.steady_from_step:
                self._stop_clock()
                self._start_clock()
            now, stop = budget.advance(self.step, sum(self.step_s), self.trainer.finish_s)
            due = due or now
            if stop:
                self.trainer.finish()
                self._extend()
            # between averagings no rank has the model that one would save
            if stop or (due and self.trainer.agreed):
                due = False
                progress = budget.progress(self.step)
                loss = self._evaluate()
                self.events.write("evaluation", progress=progress, step=self.step, loss=loss)
        self.trainer.close()
        return self._result()

    def _peaks(self) -> list[float]:
        """Return the peak learning rate of each group."""
        groups = self.trainer.optimizer.param_groups
        given = self.config.lr
        if given is None and self.setup.make_optimizer is not None:
            return [float(group["lr"]) for group in groups]
        rate = self.config.recipe.rates[self.setup.optimizer] if given is None else given
        return [rate] * len(groups)

    def _budget(self) -> BySteps | ByClock:
        config = self.config
        if config.steps is not None:
            return BySteps(config.steps, config.evaluations)
        assert config.seconds is not None, "steps or seconds are given"
        return ByClock(config.seconds, config.evaluations)

    def _start_clock(self) -> None:
        dist.barrier()
        self.mark_bytes = self._kernel_bytes()
        self.mark_s = time.perf_counter()

    def _stop_clock(self) -> None:
        # What a step has sent may still lie in the socket; behind it in the same queue, the barrier
        # waits for it.
        dist.barrier()
        self._count_kernel_bytes()

    def _extend(self) -> None:
        """Add time and bytes since the last call to the last step."""
        now_s = time.perf_counter()
        self.step_s[-1] += now_s - self.mark_s
        self.mark_s = now_s
        self.bytes[-1][0] = self.trainer.sent_bytes()
        self._count_kernel_bytes()

    def _kernel_bytes(self) -> int:
        """Return the bytes that this rank's own interface has sent; 0 without one."""
        return interface_bytes(self.config.interface) if self.config.interface else 0

    def _count_kernel_bytes(self) -> None:
        count = self._kernel_bytes()
        self.bytes[-1][1] += count - self.mark_bytes
        self.mark_bytes = count

    def _evaluate(self) -> float:
        if self.step:
            self._stop_clock()
        loss = self.work.evaluate(self.trainer.module)
        if not isfinite(loss):
            raise ThinwireError(
                f"the training diverged: held-out loss {loss} after {self.step} steps at a peak "
                f"learning rate of {max(self.peaks):g}; lower it with --lr"
            )
        point = {"step": self.step, "seconds": sum(self.step_s), "loss": loss}
        self.evaluations.append({**point, "library_bytes": float(self.bytes[-1][0])})
        if self.step:
            self.bare.measure(_BARE_STEPS_BETWEEN)
        self._start_clock()
        return loss

    def _result(self) -> dict[str, Any]:
        steady = max(0, min(self.trainer.steady_from_step, self.step - _FEWEST_STEADY_STEPS))
        sent, kernel_sent = self._mean_bytes_per_step(steady)
        optimizer = OPTIMIZERS[self.setup.optimizer]
        if self.setup.make_optimizer is not None:
            optimizer = f"the task's {type(self.trainer.optimizer).__name__}"
        return {
            "strategy": self.config.recipe.name,
            "steps": self.step,
            "seconds": sum(self.step_s),
            "preparation_seconds": self.preparation_s,
            "parameters": sum(p.numel() for p in self.trainer.module.parameters()),
            "gradient_bytes": gradient_bytes(self.trainer.module),
            "evaluations": self.evaluations,
            "alike": self.work.alike,
            "steady_from_step": steady,
            "step_ms": [1e3 * s for s in self.step_s],
            "median_step_ms": 1e3
            * median(_round_means(self.step_s[steady:], self.trainer.round_steps)),
            "median_bare_step_ms": 1e3 * median(self.bare.seconds),
            "library_bytes_per_step": sent,
            "kernel_sent_bytes_per_step": kernel_sent if self.config.interface else None,
            "settings": {"lr": max(self.peaks), "optimizer": optimizer, **self.trainer.settings},
        }

    def _mean_bytes_per_step(self, steady: int) -> list[float]:
        means = self.bytes[-1] - self.bytes[steady]
        dist.all_reduce(means)
        per_step: list[float] = (means / (dist.get_world_size() * (self.step - steady))).tolist()
        return per_step


def _round_means(step_s: Sequence[float], round_steps: int) -> list[float]:
    """Return the mean step seconds of each full round; of all steps if there is none."""
    begins = range(0, len(step_s) - round_steps + 1, round_steps)
    return [fmean(step_s[i : i + round_steps]) for i in begins] or [fmean(step_s)]
