"""Members of a run that train in each framework, with events at given steps."""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import thinwire as tw
from tests.integrations.frameworks import Text, gpt2, lightning_trainer, losses_of, student_of
from tests.integrations.task import BATCH, Plan, adamw, task
from tests.members.training import TIMEOUT_S, stop_for, wait_for

STEPS, EVERY = 60, 12
"""Steps of a run, and how many lie between two evaluations and two checkpoints."""
START = math.log(4)
"""Loss of a classifier of `task` that knows nothing."""
STRATEGY = tw.DistributedStrategy(
    localsgd=tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(4))
)


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module="thinwire")
            with tw.join(address, run="test", **options) as self.members:
                yield self.members


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


def shared(data: Any, members: Any) -> Any:
    return DataLoader(data, BATCH, sampler=tw.ShardedSampler(data, members=members))


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
    from lightning.pytorch.callbacks import Callback

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            events.stepped(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            events.evaluated.append(trainer.global_step)

    with events.run(address, founders) as members:
        student = student_of(Plan("localsgd", falling, seed=events.rank))
        trainer, fit = member_fit(members, events.folder, student, [Watch()], events.strategy)
        fit(events.start)
        trainer.save_checkpoint(events.folder / f"final {events.rank}")
    return ended(events, student.net, START, held_out_loss(student.net), losses=student.losses)


def falling(model: nn.Module) -> Any:
    """AdamW, whose rate falls with the steps."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def member_fit(
    members: Any,
    folder: Path,
    student: Any = None,
    callbacks: Any = (),
    strategy: Any = STRATEGY,
    **arguments: Any,
) -> tuple[Any, Callable[[str | None], None]]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireCallback

    data, student = task()[1], student or student_of(Plan("localsgd"))
    keep = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1
    )
    settings = {
        "strategy": "auto",
        "devices": 1,
        "max_epochs": None,
        "max_steps": STEPS,
        "val_check_interval": EVERY,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    ours = ThinwireCallback(strategy, members=members)
    trainer = lightning_trainer([ours, *callbacks, keep], folder, **settings | arguments)
    loaders = shared(data, members), DataLoader(data, 2 * BATCH)
    return trainer, lambda start: trainer.fit(student, *loaders, ckpt_path=start)


def adapted(rank: int) -> Any:
    """LoRA of PEFT: the same base everywhere, and other adapters than those of the run."""
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    torch.manual_seed(rank)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def member_trainer(
    members: Any, folder: Path, model: Any = None, callbacks: Any = (), **arguments: Any
) -> Any:
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging

    from thinwire.integrations.transformers import ThinwireCallback

    logging.set_verbosity_error()
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.03,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": EVERY,
        "save_strategy": "steps",
        "save_steps": EVERY,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    ours = ThinwireCallback(arguments.pop("strategy", STRATEGY), members=members)
    return Trainer(
        gpt2() if model is None else model,
        TrainingArguments(**settings | arguments),
        train_dataset=Text(),
        eval_dataset=Text(first=400, pieces=16),
        callbacks=[ours, *callbacks],
    )


def in_transformers(events: Events, address: str, founders: int) -> Ended:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.before = events.members.step

        def on_step_begin(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
            if state.global_step:
                events.stepped(state.global_step, given["lr_scheduler"].get_last_lr()[0])

        def on_evaluate(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            events.evaluated.append(state.global_step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(events.rank)  # its imports take seconds, while a run would go on
    with events.run(address, founders) as members:
        given = {"strategy": events.strategy}
        trainer = member_trainer(members, events.folder, model, [Watch()], **given)
        at_first = trainer.evaluate()["eval_loss"]
        trainer.train(resume_from_checkpoint=events.start)
        trainer.save_model(events.folder / f"final {events.rank}")
    evaluated = [step for step in events.evaluated if step]
    loss = trainer.evaluate()["eval_loss"]
    events.evaluated[:] = evaluated
    return ended(events, model, at_first, loss, losses=losses_of(trainer))


LOOPS: dict[str, Callable[[Events, str, int], Ended]] = {
    "accelerate": in_accelerate,
    "lightning": in_lightning,
    "transformers": in_transformers,
}
