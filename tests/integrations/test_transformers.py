"""The callback under the real Trainer of transformers, on two ranks: a tiny GPT-2 reads the
standard library.
"""

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import thinwire as tw
from tests.integrations.packages import as_under_torchrun, needs
from tests.integrations.task import equal, parameters
from tests.ranks import Pool

pytestmark = [pytest.mark.integrations, needs("transformers"), pytest.mark.timeout(240)]

CONTEXT, BATCH, STEPS = 16, 4, 12
STRATEGIES: dict[str, Any] = {
    "none": tw.DistributedStrategy(),
    "dgc": tw.DistributedStrategy(
        dgc=tw.DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.9, 0.98), min_numel=1024)
    ),
    "low_rank": tw.DistributedStrategy(low_rank=tw.LowRank(2, begin_step=2, min_numel=1024)),
    "lamb": tw.DistributedStrategy(lamb=tw.LAMB()),
    "localsgd": tw.DistributedStrategy(localsgd=tw.LocalSGD(5, begin_step=2)),
    "sparse localsgd": tw.DistributedStrategy(
        localsgd=tw.LocalSGD(5, begin_step=2, compression=tw.Sparse(0.9))
    ),
    "adaptive_localsgd": tw.DistributedStrategy(
        adaptive_localsgd=tw.AdaptiveLocalSGD(init_k_steps=3, begin_step=2)
    ),
}


class Text(Dataset):  # type: ignore[type-arg]
    """Pieces of the standard library, byte by byte."""

    def __init__(self, first: int = 0, pieces: int = 2 * BATCH * STEPS) -> None:
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
    """Around Trainers, whose Accelerate keeps its state in the process."""
    with as_under_torchrun(rank, size):
        from accelerate.state import AcceleratorState, GradientState
        from transformers.utils import logging

        logging.set_verbosity_error()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def trainer_of(strategy: Any, folder: Path, seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import ThinwireCallback

    make = arguments.pop("make", None)
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
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
    callback = ThinwireCallback(strategy)
    trainer = Trainer(
        model,
        TrainingArguments(**settings | arguments),
        train_dataset=Text(),
        eval_dataset=Text(first=400, pieces=16),
        callbacks=[callback],
        optimizers=(make(model), None) if make else (None, None),
    )
    return trainer, callback


def losses(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def bare(strategy: Any, folder: Path, **arguments: Any) -> tuple[list[float], Any]:
    """The same without the Trainer's loop: its batches, its optimizer, its rates, and ours."""
    from transformers.optimization import get_cosine_schedule_with_warmup

    trainer, _ = trainer_of(strategy, folder, **arguments)
    model, optimizer, args = trainer.model, trainer.create_optimizer(), trainer.args
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, args.max_steps)
    clip = tw.ClipByGlobalNorm(args.max_grad_norm) if args.max_grad_norm else None
    engine = strategy.prepare(model, optimizer, grad_clip=clip)
    found, batches = [], iter(trainer.get_train_dataloader())
    model.train()
    for _ in range(args.max_steps):
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
    engine.flush()
    engine.close()
    return found, model


def curves(rank: int, size: int, folder: Path, name: str, arguments: dict[str, Any]) -> Any:
    with trainers(rank, size):
        trainer, callback = trainer_of(STRATEGIES[name], folder, **arguments)
        trainer.train()
        expected, model = bare(STRATEGIES[name], folder, **arguments)
    return {
        "losses": losses(trainer),
        "expected": expected,
        "parameters": parameters(trainer.model),
        "own": parameters(model),
        "stats": callback.engine.stats(),
        "syncs": trainer.model_wrapped.require_backward_grad_sync,
        "max_grad_norm": trainer.args.max_grad_norm,
        "optimizer": type(callback.engine.optimizer).__name__,
    }


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_steps": STEPS // 2}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, {}) for name in STRATEGIES),
        ("none", {"bf16": True}),
        ("none", ACCUMULATED | {"max_grad_norm": 0.1}),
        ("dgc", ACCUMULATED | {"max_grad_norm": 0.1}),
        ("dgc", {"make": sgd, "max_grad_norm": 0}),
        ("adaptive_localsgd", ACCUMULATED | {"max_grad_norm": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_the_loss_is_that_of_a_loop_without_it(
    ranks: Pool, tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    first, second = ranks.run(curves, tmp_path, name, arguments, timeout_s=120)
    steps = arguments.get("max_steps", STEPS)
    assert len(first["losses"]) == steps == first["stats"]["step"]
    assert first["losses"] == pytest.approx(first["expected"], rel=1e-6)
    assert first["losses"][-1] < first["losses"][0]
    assert equal(first["parameters"], first["own"])
    assert equal(first["parameters"], second["parameters"])
    assert first["syncs"]  # DDP is given back as it was, and so is what was asked for
    assert first["max_grad_norm"] == arguments.get("max_grad_norm", 1.0)
    assert first["optimizer"] == {"lamb": "Lamb"}.get(
        name, "DGCMomentum" if "make" in arguments else "AdamW"
    )


def adapted(rank: int, size: int, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    with trainers(rank, size):
        model = get_peft_model(gpt2(), config)
        frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
        settings = {"model": model, "learning_rate": 0.1}
        trainer, callback = trainer_of(STRATEGIES["localsgd"], folder, **settings)
        trainer.train()
    now = dict(model.named_parameters())
    return {
        "losses": losses(trainer),
        "frozen": all(torch.equal(now[name], p) for name, p in frozen.items()),
        "adapters": [p.detach() for name, p in now.items() if name not in frozen],
        "stats": callback.engine.stats(),
    }


@needs("peft")
def test_adapters_of_peft_train_and_nothing_else_is_sent(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(adapted, tmp_path, timeout_s=120)
    assert first["losses"][-1] < first["losses"][0]
    assert first["frozen"]
    assert equal(first["adapters"], second["adapters"])
    trained = sum(p.numel() for p in first["adapters"])
    assert first["stats"]["bytes_dense"] == 4 * trained * STEPS
    assert first["stats"]["bytes_sent"] < first["stats"]["bytes_dense"]


def resumed(rank: int, size: int, folder: Path, name: str, arguments: dict[str, Any]) -> Any:
    """A whole training with checkpoints, and one that goes on in its middle from another model."""
    saving = {"save_strategy": "steps", "save_steps": 4, **arguments}
    with trainers(rank, size):
        whole, callback = trainer_of(STRATEGIES[name], folder, **saving)
        whole.train()
    stats = callback.engine.stats()
    torch.distributed.barrier()
    with trainers(rank, size):
        again, other = trainer_of(STRATEGIES[name], folder, seed=7, **saving)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-8"))
    states = [
        [v.clone() for e in c.engine.optimizer.state.values() for v in e.values()]
        for c in (callback, other)
    ]
    now = other.engine.stats()
    same = ("step", "averagings", "k_steps", "dropped_steps")
    return {
        "whole": parameters(whole.model),
        "again": parameters(again.model),
        "states": states,
        "losses": (losses(whole)[8:], losses(again)[8:]),
        "stats": ({key: stats[key] for key in same}, {key: now[key] for key in same}),
    }


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dgc", {}),
        ("dgc", {"make": sgd, "max_grad_norm": 0}),
        ("low_rank", {"gradient_accumulation_steps": 2, "num_train_epochs": 2}),
        ("lamb", {}),
        ("sparse localsgd", {}),
        ("adaptive_localsgd", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_a_checkpoint_resumes_bit_for_bit(
    ranks: Pool, tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    for answer in ranks.run(resumed, tmp_path, name, arguments, timeout_s=120):
        assert len(answer["losses"][0]) == STEPS - 8
        assert answer["losses"][0] == answer["losses"][1]
        assert equal(answer["whole"], answer["again"])
        assert equal(*answer["states"])
        assert answer["stats"][0] == answer["stats"][1]


def on_fewer(rank: int, size: int, folder: Path, name: str) -> Any:
    with trainers(rank, size):
        again, callback = trainer_of(STRATEGIES[name], folder, seed=7)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-8"))
    return losses(again), callback.engine.step


@pytest.mark.parametrize("name", ["dgc", "sparse localsgd"])
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    ranks: Pool, tmp_path: Path, name: str
) -> None:
    ranks.run(saved, tmp_path, name, {"save_strategy": "steps", "save_steps": 8}, timeout_s=120)
    [(found, steps)] = ranks.run(on_fewer, tmp_path, name, size=1)
    assert steps == len(found) == STEPS
    assert found[8] == pytest.approx(found[7], abs=0.3)  # it goes on where the two have been


def saved(rank: int, size: int, folder: Path, name: str, arguments: dict[str, Any]) -> Any:
    """A training whose parameters are noted at every evaluation and every save."""
    from transformers import TrainerCallback

    class Notes(TrainerCallback):
        def on_evaluate(self, *_: Any, model: nn.Module, **others: Any) -> None:
            noted.append([float(p.detach().double().sum()) for p in model.parameters()])

        on_save = on_evaluate

    noted: list[list[float]] = []
    with trainers(rank, size):
        trainer, _ = trainer_of(STRATEGIES[name], folder, **arguments)
        trainer.add_callback(Notes)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    best = trainer.state.best_model_checkpoint
    return {
        "names": [name for name, _ in trainer.model.named_parameters()],
        "parameters": parameters(trainer.model),
        "evaluations": [
            each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each
        ],
        "evaluated": evaluated,
        "noted": noted,
        "best": best and Path(best).name,
        "steps": trainer.state.global_step,
    }


EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 1,
}


@pytest.mark.parametrize("name", ["dgc", "localsgd"])
def test_evaluation_and_last_checkpoint_see_the_final_parameters(
    ranks: Pool, tmp_path: Path, name: str
) -> None:
    first, second = ranks.run(saved, tmp_path, name, EVALUATED, timeout_s=120)
    assert first["noted"] == second["noted"]
    assert first["evaluations"] == second["evaluations"]
    assert len(first["evaluations"]) == 4
    assert first["evaluations"][-1] == first["evaluations"][-2] == first["evaluated"]
    assert first["evaluations"][-1] < first["evaluations"][0]
    assert equal(first["parameters"], second["parameters"])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    assert (tmp_path / f"checkpoint-{STEPS}" / "thinwire").is_dir()


def test_no_averaging_comes_after_the_best_model_was_loaded(ranks: Pool, tmp_path: Path) -> None:
    worst = {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 2}
    answers = ranks.run(saved, tmp_path, "localsgd", {**EVALUATED, **worst}, timeout_s=120)
    best = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    for answer in answers:
        assert answer["best"] == "checkpoint-4"
        assert equal(answer["parameters"], [best[name] for name in answer["names"]])


def swapped(rank: int, size: int, folder: Path) -> Any:
    """A callback, listed after ours, that puts other weights into the model at the end."""
    from transformers import TrainerCallback

    class Swap(TrainerCallback):
        @torch.no_grad()
        def on_train_end(self, *_: Any, model: nn.Module, **others: Any) -> None:
            for p in model.parameters():
                p.fill_(1.0 + rank)

    with trainers(rank, size):
        trainer, _ = trainer_of(STRATEGIES["sparse localsgd"], folder)
        trainer.add_callback(Swap)
        trainer.train()
    return parameters(trainer.model)


def test_weights_that_another_callback_swaps_in_are_averaged(ranks: Pool, tmp_path: Path) -> None:
    for found in ranks.run(swapped, tmp_path, timeout_s=120):
        assert all(torch.equal(p, torch.full_like(p, 1.5)) for p in found)


def interrupted(rank: int, size: int, folder: Path) -> Any:
    """A training that ends by an error in its third step, a second one, and one without it."""
    from transformers import TrainerCallback

    class Interruption(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    clipped = {"max_grad_norm": 0.05}
    with trainers(rank, size):
        trainer, _ = trainer_of(STRATEGIES["localsgd"], folder, **clipped)
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.add_callback(Interruption)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(Interruption)
        trainer.model.load_state_dict(start)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        undisturbed, _ = trainer_of(STRATEGIES["localsgd"], folder, **clipped)
        undisturbed.train()
    return losses(trainer), losses(undisturbed), trainer.args.max_grad_norm


def test_a_training_after_one_that_ended_by_an_error_is_as_if_it_had_not_been(
    ranks: Pool, tmp_path: Path
) -> None:
    for again, undisturbed, limit in ranks.run(interrupted, tmp_path, timeout_s=120):
        assert again == undisturbed
        assert limit == 0.05


@pytest.mark.parametrize(
    ("field", "config", "advice"),
    [
        ("amp", tw.AMP("bfloat16"), "bf16=True"),
        ("recompute", tw.Recompute(("*",)), "activation_checkpointing=True"),
        ("gradient_merge", tw.GradientMerge(2), "gradient_accumulation_steps"),
        ("pipeline", tw.Pipeline(stages=2, micro_batches=2), "fsdp"),
    ],
)
def test_settings_of_the_trainer_itself_are_refused(field: str, config: Any, advice: str) -> None:
    from thinwire.integrations.transformers import ThinwireCallback

    with pytest.raises(tw.StrategyError, match=rf"{field}: use .*{advice}"):
        ThinwireCallback(tw.DistributedStrategy(**{field: config}))


def refused(rank: int, size: int, folder: Path, arguments: dict[str, Any]) -> None:
    with trainers(rank, size):
        trainer_of(STRATEGIES["dgc"], folder, **arguments)[0].train()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"make": sgd}, "max_grad_norm=1.0 of TrainingArguments: 0 turns it off"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
    ],
    ids=["clipping", "batch size"],
)
def test_arguments_that_do_not_go_with_it_are_refused(
    ranks: Pool, tmp_path: Path, arguments: dict[str, Any], advice: str
) -> None:
    ranks.raise_alike("StrategyError", advice, refused, tmp_path, arguments)


def elsewhere(rank: int, size: int, folder: Path, how: str) -> None:
    """Resumes from a checkpoint of another folder than the output_dir, or one without our part."""
    with trainers(rank, size):
        settings = {"save_strategy": "steps", "save_steps": 8}
        for seed, name in ((0, "here"), (3, "there")):
            trainer_of(STRATEGIES["dgc"], folder / name, seed, **settings)[0].train()
    torch.distributed.barrier()
    start = folder / "there" / "checkpoint-8"
    if how == "without":
        start = folder / "here" / "checkpoint-8"
        if rank == 0:
            shutil.rmtree(start / "thinwire")
    torch.distributed.barrier()
    with trainers(rank, size):
        again, _ = trainer_of(STRATEGIES["dgc"], folder / "here")
        again.train(resume_from_checkpoint=str(start))


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("another", "CheckpointMismatch", "resume from a checkpoint in output_dir"),
        ("without", "CheckpointMissing", "written with this callback"),
    ],
)
def test_a_checkpoint_without_this_state_is_an_error(
    ranks: Pool, tmp_path: Path, how: str, kind: str, text: str
) -> None:
    ranks.raise_alike(kind, text, elsewhere, tmp_path, how, timeout_s=120)


def logged(rank: int, size: int, folder: Path) -> tuple[Any, ...]:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    with trainers(rank, size):
        trainer, callback = trainer_of(STRATEGIES["localsgd"], folder, max_grad_norm=0)
        written: dict[str, float] = {}
        writer = SummaryWriter(str(folder / str(rank)))
        writer.add_scalar = lambda name, value, step: written.update({name: value})
        trainer.add_callback(TensorBoardCallback(writer))
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        others = [entry for entry in trainer.state.log_history if "loss" not in entry]
        return history, others, written, callback.engine.stats(), vars(trainer).get("log")


def test_the_numbers_are_in_the_logs_of_the_trainer(ranks: Pool, tmp_path: Path) -> None:
    for history, others, written, stats, left in ranks.run(logged, tmp_path, timeout_s=120):
        steps = [entry["thinwire/step"] for entry in history]
        assert steps == list(range(1, len(history) + 1))
        sent = [entry["thinwire/bytes_sent"] for entry in history]
        assert sent[0] > 0 and sent == sorted(sent) and sent[-1] <= stats["bytes_sent"]
        assert not any(name.startswith("thinwire/") for entry in others for name in entry)
        assert left is None, "the Trainer's own method again"
        # report_to writes on rank 0 alone
        assert not written or written["train/thinwire/bytes_sent"] == sent[-1]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"scaler": "a scaler"}, "fp16=True .* use bf16=True"),
        ({"kind": "FSDP"}, r"fsdp shards over all ranks .* prepare\(..., mesh=mesh\)"),
        ({"kind": "DEEPSPEED"}, "DEEPSPEED exchanges gradients itself"),
        ({"n_gpu": 2}, "2 GPUs in one process: start one process per GPU with torchrun"),
        ({"is_hyper_param_search": True}, "hyperparameter_search"),
    ],
    ids=str,
)
def test_unavailable_hardware_is_refused(settings: dict[str, Any], advice: str) -> None:
    """As Accelerate and the Trainer describe it."""
    from accelerate import DistributedType

    from thinwire.integrations.transformers import ThinwireCallback

    values = {"scaler": None, "kind": "MULTI_GPU", "n_gpu": 1, "is_hyper_param_search": False}
    values |= settings
    kind = SimpleNamespace(distributed_type=DistributedType(values["kind"]))
    wrapper = SimpleNamespace(scaler=values["scaler"], accelerator_state=kind)
    args = SimpleNamespace(n_gpu=values["n_gpu"], auto_find_batch_size=False)
    state = SimpleNamespace(is_hyper_param_search=values["is_hyper_param_search"])
    callback = ThinwireCallback(STRATEGIES["none"])
    with pytest.raises(tw.StrategyError, match=advice):
        callback.on_train_begin(args, state, None, model=nn.Linear(1, 1), optimizer=wrapper)
