"""One strategy from the first step to the last, on every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any, final

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.lab.batches import Batches
from thinwire.lab.diary import GO, Diary
from thinwire.lab.measure import BareStep, kernel_bytes, mean_loss
from thinwire.lab.model import ByteTransformer
from thinwire.lab.pace import ByClock, BySteps, Pace, rate_factor
from thinwire.lab.rehearsal import rehearse
from thinwire.lab.shape import ModelShape
from thinwire.lab.trainers import Setup, build_trainer

__all__ = ["TrainingRun", "initial_model"]

_BARE_STEPS_UNTIMED, _BARE_STEPS_AT_START, _BARE_STEPS_BETWEEN = 2, 4, 2
_FEWEST_STEADY_STEPS = 5
_POLL_S = 0.02


def initial_model(config: Mapping[str, Any]) -> ByteTransformer:
    """The model that every strategy starts from, equal on all ranks."""
    torch.manual_seed(config["seed"])
    return ByteTransformer(ModelShape(config["width"], config["layers"], config["context"]))


@final
class TrainingRun:
    """Trains and keeps the books; the clock and the kernel's counters stand still while it
    evaluates.
    """

    def __init__(self, config: Mapping[str, Any], diary: Diary) -> None:
        self.config, self.diary = config, diary
        model = initial_model(config)
        self.batches = Batches(config, dist.get_rank())
        self.held_out = self.batches.held_out_batches(dist.get_rank(), dist.get_world_size())
        self.bare = BareStep(model, config["momentum"])
        self.bare.measure(_BARE_STEPS_UNTIMED, self.batches.batch, self.batches.context)
        self.bare.seconds.clear()  # those paid for memory and caches
        self.bare.measure(_BARE_STEPS_AT_START, self.batches.batch, self.batches.context)
        rehearse(config, model, config["batch"])
        setup = Setup(config["momentum"], config["ramp_steps"])
        self.trainer = build_trainer(config["trainer"], config["options"], model, setup)
        self.step_s: list[float] = []
        self.library_bytes = [0.0]
        self.kernel_sent, self.kernel_received = [0], [0]
        self.evaluations: list[dict[str, float]] = []

    @property
    def step(self) -> int:
        """Updates done so far."""
        return len(self.step_s)

    def train(self) -> dict[str, Any]:
        """All the steps; returns what was measured, means over the ranks where ranks differ."""
        pace = self._pace()
        self._wait_for_the_link()
        self._evaluate()
        due = stop = False
        while not stop:
            rate = self.config["lr"] * rate_factor(pace.progress(self.step))
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = rate
            loss = self.trainer.train_step(*self.batches.next_batch())
            self._count()
            self.diary.write_sometimes(
                "step", step=self.step, progress=pace.progress(self.step), loss=float(loss)
            )
            if self.step == self.trainer.steady_from_step:
                self._stop_clock()
                self._start_clock()
            now, stop = pace.advance(self.step, sum(self.step_s), self.trainer.finish_s)
            due = due or now
            if stop:
                self.trainer.finish()
                self._extend()
            if stop or (
                due and self.trainer.agreed
            ):  # a model that no rank has alone: what one would save
                due = False
                self._evaluate()
                point = self.evaluations[-1]
                self.diary.write(
                    "evaluation",
                    progress=pace.progress(self.step),
                    step=self.step,
                    loss=point["loss"],
                )
        self.trainer.close()
        return self._result()

    def _wait_for_the_link(self) -> None:
        """Preparation is over on all ranks; the command puts the limits of the link in force and
        then says so.
        """
        dist.barrier()
        self.diary.write("prepared")
        go = Path(self.config["events"]) / GO
        while not go.exists():
            time.sleep(_POLL_S)
        self.preparation_s = time.time() - self.config["launched_unix_s"]

    def _pace(self) -> Pace:
        steps, evaluations = self.config["steps"], self.config["evaluations"]
        return (
            ByClock(self.config["seconds"], evaluations)
            if steps is None
            else BySteps(steps, evaluations)
        )

    def _start_clock(self) -> None:
        dist.barrier()
        self.mark_bytes = kernel_bytes(self.config["interface"])
        self.mark_s = time.perf_counter()

    def _stop_clock(self) -> None:
        # What a step has sent may still lie in the socket; behind it in the same queue, the barrier
        # waits for it.
        dist.barrier()
        self._count_kernel_bytes()

    def _count(self) -> None:
        self.step_s.append(0.0)
        self.library_bytes.append(0.0)
        self.kernel_sent.append(self.kernel_sent[-1])
        self.kernel_received.append(self.kernel_received[-1])
        self._extend()

    def _extend(self) -> None:
        """Time and bytes since the last look belong to the last step."""
        now_s = time.perf_counter()
        self.step_s[-1] += now_s - self.mark_s
        self.mark_s = now_s
        self.library_bytes[-1] = self.trainer.sent_bytes()
        self._count_kernel_bytes()

    def _count_kernel_bytes(self) -> None:
        sent, received = kernel_bytes(self.config["interface"])
        self.kernel_sent[-1] += sent - self.mark_bytes[0]
        self.kernel_received[-1] += received - self.mark_bytes[1]
        self.mark_bytes = (sent, received)

    def _evaluate(self) -> None:
        if self.step:
            self._stop_clock()
        loss = mean_loss(self.trainer.module, self.held_out)
        if not isfinite(loss):
            raise ThinwireError(
                f"the training diverged: held-out loss {loss} after {self.step} steps at a peak "
                f"learning rate of {self.config['lr']:g}; give a smaller one with --lr"
            )
        point = {
            "step": self.step,
            "seconds": sum(self.step_s),
            "loss": loss,
            "library_bytes": self.library_bytes[-1],
        }
        self.evaluations.append({**point, "kernel_bytes": float(self.kernel_sent[-1])})
        if self.step:
            self.bare.measure(_BARE_STEPS_BETWEEN, self.batches.batch, self.batches.context)
        self._start_clock()

    def _result(self) -> dict[str, Any]:
        steady = max(0, min(self.trainer.steady_from_step, self.step - _FEWEST_STEADY_STEPS))
        sent, kernel_sent, kernel_received = self._mean_bytes_per_step(steady)
        measured = self.config["interface"] is not None
        return {
            "strategy": self.config["strategy"],
            "steps": self.step,
            "seconds": sum(self.step_s),
            "preparation_seconds": self.preparation_s,
            "parameters": sum(p.numel() for p in self.trainer.module.parameters()),
            "evaluations": self.evaluations,
            "steady_from_step": steady,
            "step_ms": [1e3 * s for s in self.step_s],
            "bare_step_ms": [1e3 * s for s in self.bare.seconds],
            "median_step_ms": 1e3
            * median(_round_means(self.step_s[steady:], self.trainer.round_steps)),
            "median_bare_step_ms": 1e3 * median(self.bare.seconds),
            "library_bytes_per_step": sent,
            "kernel_sent_bytes_per_step": kernel_sent if measured else None,
            "kernel_received_bytes_per_step": kernel_received if measured else None,
            "settings": {
                "lr": self.config["lr"],
                "momentum": self.config["momentum"],
                **self.trainer.settings,
            },
        }

    def _mean_bytes_per_step(self, steady: int) -> list[float]:
        counts = (self.library_bytes, self.kernel_sent, self.kernel_received)
        means = torch.tensor(
            [float(count[-1] - count[steady]) for count in counts], dtype=torch.float64
        )
        dist.all_reduce(means)
        per_step: list[float] = (means / (dist.get_world_size() * (self.step - steady))).tolist()
        return per_step


def _round_means(step_s: Sequence[float], round_steps: int) -> list[float]:
    """Mean seconds of a step in every whole round, in which each cost occurs once; of all where
    there is none.
    """
    rounds = len(step_s) // round_steps
    if rounds == 0:
        return [fmean(step_s)]
    return [fmean(step_s[i * round_steps : (i + 1) * round_steps]) for i in range(rounds)]
