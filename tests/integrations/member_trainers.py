"""Trainers of members, made alike in Lightning and in Transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import thinwire as tw
from tests.integrations.frameworks import Text, gpt2, lightning_trainer, student_of
from tests.integrations.task import BATCH, Plan, task

STEPS, EVERY = 60, 12
"""Steps of a run, and how many lie between two evaluations and two checkpoints."""
STRATEGY = tw.DistributedStrategy(
    localsgd=tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(4))
)


@dataclass
class Made:
    """A Trainer of a member, with our callback."""

    trainer: Any
    model: nn.Module
    train: Callable[[Any], Any]
    """Trains, from a checkpoint or None."""
    facts: Callable[[], Any]
    """What a training must leave as it was."""

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters() if p.requires_grad]


class Maker(Protocol):
    """Makes the Trainer of a member that calls `stepped(step, rate of the next one)` and
    `evaluated(step)`; `arguments` are those of the framework, `strategy` and `model` too."""

    def __call__(
        self,
        members: Any,
        folder: Path,
        rank: int = 0,
        stepped: Callable[[int, float], None] = ...,
        evaluated: Callable[[int], None] = ...,
        **arguments: Any,
    ) -> Made: ...


def replaced(*objects: Any) -> list[set[str]]:
    """The methods of objects that are replaced."""
    return [
        {name for name in vars(one) if callable(getattr(type(one), name, None))} for one in objects
    ]


def marks(model: nn.Module) -> list[Any]:
    """Hooks of modules and attributes of parameters."""
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    return [hooks, *(sorted(vars(p)) for p in model.parameters())]


def shared(data: Any, members: Any) -> Any:
    return DataLoader(data, BATCH, sampler=tw.ShardedSampler(data, members=members))


def falling(model: nn.Module, interval: str = "step", frequency: int = 1) -> Any:
    """AdamW, whose rate falls."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    settings = {"scheduler": schedule, "interval": interval, "frequency": frequency}
    return {"optimizer": optimizer, "lr_scheduler": settings}


def of_lightning(
    members: Any,
    folder: Path,
    rank: int = 0,
    stepped: Any = lambda *_: None,
    evaluated: Any = lambda *_: None,
    **arguments: Any,
) -> Made:
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireCallback

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            stepped(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            evaluated(trainer.global_step)

    model = student_of(Plan("localsgd", arguments.pop("make", falling), seed=rank))
    ours = ThinwireCallback(arguments.pop("strategy", STRATEGY), members=members)
    keep = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1
    )
    settings = {
        "devices": 1,
        "max_epochs": None,
        "max_steps": STEPS,
        "val_check_interval": EVERY,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    callbacks = [ours, Watch(), keep, *arguments.pop("callbacks", [])]
    form = arguments.pop("form", "auto")
    trainer = lightning_trainer(callbacks, folder, form, **settings | arguments)
    data = task()[1]
    loaders = shared(data, members), DataLoader(data, 2 * BATCH)

    def facts() -> Any:
        names = ("callbacks", "limit_val_batches", "gradient_clip_val")
        kept = [vars(trainer)[name] for name in names]
        saving = {"save_checkpoint", "remove_checkpoint"}  # for a checkpoint after the fit
        objects = trainer, trainer.strategy, model, *trainer.callbacks
        return kept, [names - saving for names in replaced(*objects)], marks(model)

    return Made(trainer, model, lambda start: trainer.fit(model, *loaders, ckpt_path=start), facts)


def adapted(rank: int) -> Any:
    """LoRA of PEFT: the same base everywhere, and other adapters than those of the run."""
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    torch.manual_seed(rank)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def of_transformers(
    members: Any,
    folder: Path,
    rank: int = 0,
    stepped: Any = lambda *_: None,
    evaluated: Any = lambda *_: None,
    **arguments: Any,
) -> Made:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    from thinwire.integrations.transformers import ThinwireCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
            if state.global_step:
                stepped(state.global_step, given["lr_scheduler"].get_last_lr()[0])

        def on_evaluate(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step:
                evaluated(state.global_step)

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
    publish, strategy = arguments.pop("publish", None), arguments.pop("strategy", STRATEGY)
    others = arguments.pop("callbacks", [])
    model = arguments.pop("model", None) or adapted(rank)
    args = arguments.pop("args", None) or TrainingArguments(**settings | arguments)
    trainer = Trainer(
        model,
        args,
        train_dataset=Text(),
        eval_dataset=Text(first=400, pieces=16),
        callbacks=[ThinwireCallback(strategy, members=members, publish=publish), Watch(), *others],
    )
    handler = trainer.callback_handler

    def facts() -> Any:
        objects = trainer, trainer.accelerator, handler, model, *handler.callbacks
        values = [dict(vars(one)) for one in (args, trainer.args)]
        return [*handler.callbacks], values, replaced(*objects), marks(model)

    return Made(trainer, model, lambda start: trainer.train(resume_from_checkpoint=start), facts)


TRAINERS: dict[str, Maker] = {"lightning": of_lightning, "transformers": of_transformers}
