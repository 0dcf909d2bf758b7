"""Accelerate, Lightning and Transformers, each behind `Framework`."""

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import thinwire as tw
from tests.integrations.packages import as_under_torchrun
from tests.integrations.task import (
    BATCH,
    STRATEGIES,
    Framework,
    Plan,
    Trained,
    own_loop,
    result,
    sgd,
    started,
    task,
)
from thinwire.integrations import EngineState, PerRankState


@contextmanager
def accelerator_for(rank: int, size: int, **arguments: Any) -> Iterator[Any]:
    with without_accelerator(rank, size):
        from accelerate import Accelerator

        yield Accelerator(cpu=True, **arguments)


@contextmanager
def without_accelerator(rank: int, size: int) -> Iterator[None]:
    """Accelerate keeps its state in the process, under Transformers too."""
    with as_under_torchrun(rank, size):
        from accelerate.state import AcceleratorState, GradientState

        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


class Accelerate:
    def train(self, rank: int, size: int, plan: Plan, folder: Path, resumes: bool) -> Trained:
        precision = "bf16" if plan.narrow else "no"
        settings = {"mixed_precision": precision, "gradient_accumulation_steps": plan.accumulated}
        with accelerator_for(rank, size, **settings) as accelerator:
            model, data = task(plan.seed)
            bare, losses = plan.make(model), list[Tensor]()
            optimizer, loader = accelerator.prepare(bare, DataLoader(data, BATCH))
            compressed = plan.method == "compressed"
            net = accelerator.prepare_model(model, evaluation_mode=not compressed)
            stepped = bare if compressed or plan.narrow else optimizer
            with started(plan, net, stepped) as part:
                if isinstance(part, tw.Engine):
                    part.follow_steps(lambda: torch.stack(losses[-plan.accumulated :]).mean())
                    EngineState(part).register(accelerator)
                elif compressed:
                    PerRankState(bare).register(accelerator)
                if resumes:
                    accelerator.load_state(str(folder))
                for epoch in range(int(resumes), plan.epochs):
                    for x, y in loader:
                        with accelerator.accumulate(net):
                            loss = cross_entropy(net(x), y)
                            accelerator.backward(loss)
                            losses.append(loss.detach())
                            optimizer.step()
                            optimizer.zero_grad()
                    if epoch == 0 and not resumes:
                        accelerator.save_state(str(folder))
            trained = result(model, bare, losses, part.stats())
            trained.held_out = self.held_out(accelerator, net)
        return trained

    def held_out(self, accelerator: Any, net: nn.Module) -> float:
        batches = accelerator.prepare_data_loader(DataLoader(task()[1], 2 * BATCH))
        with torch.no_grad():
            losses = [cross_entropy(net(x), y, reduction="none") for x, y in batches]
        return float(accelerator.gather_for_metrics(torch.cat(losses)).mean())

    def own(self, rank: int, size: int, plan: Plan, folder: Path) -> Trained:
        return own_loop(rank, plan, of_batches=True)


def student_of(plan: Plan) -> Any:
    from lightning import LightningModule

    class Student(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = task(plan.seed)
            self.losses: list[float] = []

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return plan.make(self.net)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.log("held_out", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    return Student()


def lightning_trainer(callback: Any, folder: Path, strategy: Any = None, **arguments: Any) -> Any:
    from lightning import Trainer

    from thinwire.integrations.lightning import UnwrappedDDP

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings = {"max_epochs": 4, "accelerator": "cpu", "devices": 2} | quiet | arguments
    return Trainer(
        strategy=strategy or UnwrappedDDP(),
        callbacks=callback if isinstance(callback, list) else [callback],
        default_root_dir=folder,
        **settings,
    )


def loader_of(rank: int) -> Any:
    data = task()[1]  # a sampler of one's own, since Lightning's would shuffle
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, 2, rank, shuffle=False))


def lightning_part(method: Any) -> tuple[Any, str | None]:
    """The callback of a plan, and Lightning's strategy where it is not ours."""
    from thinwire.integrations.lightning import CompressedExchange, LocalAveraging, ThinwireCallback

    if method == "compressed":
        return CompressedExchange(), "ddp"
    if method in STRATEGIES:
        return ThinwireCallback(STRATEGIES[method]), None
    return LocalAveraging(method), None


class Lightning:
    def train(self, rank: int, size: int, plan: Plan, folder: Path, resumes: bool) -> Trained:
        with as_under_torchrun(rank, size):
            from lightning.pytorch.callbacks import ModelCheckpoint

            student, (part, strategy) = student_of(plan), lightning_part(plan.method)
            keep = ModelCheckpoint(
                dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1
            )
            trainer = lightning_trainer(
                [part, keep],
                folder,
                strategy,
                enable_checkpointing=True,
                max_epochs=plan.epochs,
                accumulate_grad_batches=plan.accumulated,
                gradient_clip_val=plan.clip,
                precision="bf16-mixed" if plan.narrow else "32-true",
            )
            start = folder / "epoch=0.ckpt" if resumes else None
            trainer.fit(student, loader_of(rank), loader_of(rank), ckpt_path=start)
            assert trainer.gradient_clip_val == plan.clip
            [optimizer], [held_out] = trainer.optimizers, trainer.validate(student, loader_of(rank))
            source = getattr(part, "engine", None) or getattr(part, "sync", None) or optimizer
        trained = result(student.net, optimizer, student.losses, source.stats())
        trained.held_out = held_out["held_out"]
        return trained

    def own(self, rank: int, size: int, plan: Plan, folder: Path) -> Trained:
        return own_loop(rank, plan, of_batches=False)


CONTEXT, PIECES, UPDATES, EVERY = 16, 4, 12, 4
"""Bytes of a piece of text, pieces of a batch, updates, and how many from one save to the next."""


class Text(Dataset):  # type: ignore[type-arg]
    """Pieces of the standard library, byte by byte."""

    def __init__(self, first: int = 0, pieces: int = 2 * PIECES * UPDATES) -> None:
        raw = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
        self.pieces = data[first * CONTEXT : (first + pieces) * CONTEXT].view(pieces, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def gpt2(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))


@contextmanager
def trainers(rank: int, size: int) -> Iterator[None]:
    with without_accelerator(rank, size):
        from transformers.utils import logging

        logging.set_verbosity_error()
        yield


def trainer_of(strategy: Any, folder: Path, seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import ThinwireCallback

    make = arguments.pop("make", None)
    settings = {
        "output_dir": str(folder),
        "max_steps": UPDATES,
        "per_device_train_batch_size": PIECES,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    model = arguments.pop("model", None) or gpt2(seed)
    callback = ThinwireCallback(strategy, publish=arguments.pop("publish", None))
    trainer = Trainer(
        model,
        TrainingArguments(**settings | arguments),
        train_dataset=Text(),
        eval_dataset=Text(first=400, pieces=16),
        callbacks=[callback],
        optimizers=(make(model), None) if make else (None, None),
    )
    return trainer, callback


def losses_of(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


class Transformers:
    """Where a plan does not ask for `sgd`, the Trainer makes its own AdamW."""

    def trainer(self, plan: Plan, folder: Path, **arguments: Any) -> tuple[Any, Any]:
        settings = {
            "max_steps": UPDATES // plan.accumulated * plan.epochs,
            "gradient_accumulation_steps": plan.accumulated,
            "bf16": plan.narrow,
            "max_grad_norm": plan.clip or 0.0,
            "make": sgd if plan.make is sgd else None,
        }
        return trainer_of(STRATEGIES[plan.method], folder, plan.seed, **settings, **arguments)

    def train(self, rank: int, size: int, plan: Plan, folder: Path, resumes: bool) -> Trained:
        saving = {"save_strategy": "steps", "save_steps": EVERY}
        start = str(folder / f"checkpoint-{2 * EVERY}") if resumes else None
        with trainers(rank, size):
            trainer, callback = self.trainer(plan, folder, **saving)
            trainer.train(resume_from_checkpoint=start)
            held_out = trainer.evaluate()["eval_loss"]
        # DDP is given back as it was, and so is what was asked for
        assert trainer.model_wrapped.require_backward_grad_sync
        assert trainer.args.max_grad_norm == (plan.clip or 0.0)
        optimizer, losses = (
            callback.engine.optimizer,
            losses_of(trainer)[2 * EVERY if resumes else 0 :],
        )
        trained = result(trainer.model, optimizer, losses, callback.engine.stats())
        trained.held_out = held_out
        return trained

    def own(self, rank: int, size: int, plan: Plan, folder: Path) -> Trained:
        """The Trainer's batches, its optimizer, its rates, and ours."""
        from transformers.optimization import get_cosine_schedule_with_warmup

        with trainers(rank, size):
            trainer, _ = self.trainer(plan, folder)
            model, optimizer, args = trainer.model, trainer.create_optimizer(), trainer.args
            schedule = get_cosine_schedule_with_warmup(optimizer, 0, args.max_steps)
            found, batches = [], iter(trainer.get_train_dataloader())
            model.train()
            with started(plan, model, optimizer) as engine:
                for update in range(1, args.max_steps + 1):
                    group, items = trainer.get_batch_samples(
                        batches, args.gradient_accumulation_steps, torch.device("cpu")
                    )
                    total = torch.zeros(())
                    for batch in group:
                        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                            loss = model(**batch, num_items_in_batch=items).loss.float()
                        share = loss * args.world_size
                        share.backward()
                        total += share.detach()
                    engine.apply_gradients(total)
                    schedule.step()
                    model.zero_grad()
                    found.append(float(engine.mean_loss(total)))
                    if update % EVERY == 0:  # the Trainer saves then
                        engine.flush()
        return result(model, optimizer, found, engine.stats())


FRAMEWORKS: dict[str, Framework] = {
    "accelerate": Accelerate(),
    "lightning": Lightning(),
    "transformers": Transformers(),
}
