"""Members of a run that train in each framework, with events at given steps."""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from tests.integrations.frameworks import losses_of
from tests.integrations.member_trainers import (
    EVERY,
    STEPS,
    STRATEGY,
    adapted,
    of_lightning,
    of_transformers,
    shared,
)
from tests.integrations.task import adamw, task
from tests.members.training import TIMEOUT_S, stop_for, wait_for

START = math.log(4)
"""Loss of a classifier of `task` that knows nothing."""


@dataclass
class Events:
    """What happens to this member, and what it has done."""

    folder: Path
    rank: int
    killed: int | None = None
    """Member that dies at step 22, between two averagings and before an evaluation."""
    leaves: int | None = None
    """Member that leaves at step 30."""
    joins: int | None = None
    """Process that joins a run of the others."""
    loads: bool = False
    """Whether it has a checkpoint of them."""
    away: int | None = None
    """Process that is stopped at step 22, for longer than the time-out."""
    strategy: tw.DistributedStrategy = STRATEGY
    timeout_s: float = TIMEOUT_S
    members: Any = None
    entered: int = -1
    steps: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)

    def stepped(self, step: int, rate: float | None = None) -> None:
        """Called after each step of the run, with the rate of the next one."""
        self.steps.append(step)
        if rate is not None:
            assert rate == pytest.approx(0.03 * (1 - step / STEPS))
        if step == 22 and self.members.rank == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 30 and self.members.rank == self.leaves:
            self.members.leave()
        if self.rank == self.away and step >= 22 and self.steps[-2] < 22:
            stop_for(self.timeout_s + 3, self.folder / "coming")
        if self.members.rank == 0 and {self.joins, self.away} != {None}:
            if step == 26:
                (self.folder / "go").touch()
                with tw.busy(60):
                    wait_for(str(self.folder / "coming"))
            time.sleep(0.1 * (step > 26))

    @property
    def given(self) -> dict[str, Any]:
        """What the Trainer of this member is made with."""
        watched = {"stepped": self.stepped, "evaluated": self.evaluated.append}
        return {"strategy": self.strategy, **watched}

    @property
    def start(self) -> str | None:
        """The checkpoint that this process begins with."""
        names = [*self.folder.glob("*step=24.ckpt"), self.folder / "checkpoint-24"]
        return str(names[0]) if self.loads and self.rank == self.joins else None

    @contextmanager
    def run(self, address: str, founders: int) -> Iterator[Any]:
        if self.rank == self.joins:
            wait_for(str(self.folder / "go"))
            (self.folder / "coming").touch()
        options = {"start_members": founders, "timeout": self.timeout_s}
        with own_warnings(), tw.join(address, run="test", **options) as self.members:
            yield self.members


@contextmanager
def own_warnings() -> Iterator[None]:
    """Those of the frameworks are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="thinwire")
        yield


@dataclass
class Ended:
    """What came of it on one member."""

    parameters: list[Tensor]
    at_first: float
    held_out: float
    entered: int
    steps: list[int]
    evaluated: list[int]
    saved: bool
    losses: list[float] = field(default_factory=list)


class MemberLoop(Protocol):
    """Trains as a member, evaluates and saves every so many steps and at the end."""

    def __call__(self, events: Events, address: str, founders: int) -> Ended: ...


def ended(events: Events, model: nn.Module, at_first: float, held_out: float, **more: Any) -> Ended:
    parameters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    saved = (events.folder / f"final {events.rank}").exists()
    found = parameters, at_first, held_out, events.steps[0], events.steps, events.evaluated, saved
    return Ended(*found, **more)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    x, y = task()[1].tensors
    return float(cross_entropy(model(x[:160]), y[:160]))


def in_accelerate(events: Events, address: str, founders: int) -> Ended:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    with events.run(address, founders) as members:
        accelerator = Accelerator(cpu=True)
        model, data = task(events.rank)
        optimizer, loader = accelerator.prepare(adamw(model), shared(data, members))
        model = accelerator.prepare_model(model, evaluation_mode=True)
        engine = events.strategy.prepare(model, optimizer, members=members)
        engine.follow_steps()
        done = False
        while not done:
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                events.stepped(members.step)
                first = members.rank == 0 and engine.sync.synced
                if first and members.step % EVERY == 0:
                    with tw.busy(60):
                        held_out_loss(model)
                        accelerator.save_state(str(events.folder / f"checkpoint-{members.step}"))
                    events.evaluated.append(members.step)
                if done := members.step >= STEPS or members.left:
                    break
        engine.flush()
        engine.close()
        if members.rank == 0:
            (events.folder / f"final {events.rank}").touch()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return ended(events, model, START, held_out_loss(model))


def in_lightning(events: Events, address: str, founders: int) -> Ended:
    with own_warnings():
        import_module("thinwire.integrations.lightning")  # seconds, while a run would go on
    with events.run(address, founders) as members:
        made = of_lightning(members, events.folder, events.rank, **events.given)
        made.train(events.start)
        made.trainer.save_checkpoint(events.folder / f"final {events.rank}")
    student: Any = made.model
    return ended(events, student.net, START, held_out_loss(student.net), losses=student.losses)


def in_transformers(events: Events, address: str, founders: int) -> Ended:
    with own_warnings():
        model = adapted(events.rank)  # whose imports take seconds
        import_module("thinwire.integrations.transformers")
    with events.run(address, founders) as members:
        made = of_transformers(members, events.folder, model=model, **events.given)
        at_first = made.trainer.evaluate()["eval_loss"]
        made.train(events.start)
        made.trainer.save_model(events.folder / f"final {events.rank}")
    found = list(events.evaluated)
    loss = made.trainer.evaluate()["eval_loss"]
    events.evaluated[:] = found
    return ended(events, model, at_first, loss, losses=losses_of(made.trainer))


LOOPS: dict[str, Callable[[Events, str, int], Ended]] = {
    "accelerate": in_accelerate,
    "lightning": in_lightning,
    "transformers": in_transformers,
}
