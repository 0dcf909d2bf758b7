"""The callback under the real Trainer of transformers: what holds there alone."""

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import thinwire as tw
from tests.integrations.frameworks import UPDATES as STEPS
from tests.integrations.frameworks import gpt2, trainer_of, trainers
from tests.integrations.frameworks import losses_of as losses
from tests.integrations.packages import needs
from tests.integrations.task import STRATEGIES, equal, parameters, sgd
from tests.ranks import Pool

pytestmark = [pytest.mark.integrations, needs("transformers"), pytest.mark.timeout(240)]


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


def published(rank: int, size: int, folder: Path) -> dict[str, torch.Tensor]:
    with trainers(rank, size):
        trainer, _ = trainer_of(STRATEGIES["localsgd"], folder, publish=str(folder / "versions"))
        trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_followers_have_the_model_that_was_trained(ranks: Pool, tmp_path: Path) -> None:
    trained, _ = ranks.run(published, tmp_path, timeout_s=120)
    version = tw.follow(tmp_path / "versions").latest()
    found = version.state_dict()
    assert version.number > 1
    assert all(torch.equal(found[name], p) for name, p in trained.items())


@pytest.mark.parametrize("name", ["dgc", "localsgd"])
def test_evaluation_sees_the_final_parameters(ranks: Pool, tmp_path: Path, name: str) -> None:
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
        trainer, _ = trainer_of(STRATEGIES["localsgd"], folder)
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


def test_training_after_a_failed_one_is_as_if_it_were_first(ranks: Pool, tmp_path: Path) -> None:
    for again, undisturbed, limit in ranks.run(interrupted, tmp_path, timeout_s=120):
        assert again == undisturbed
        assert limit == 0.05


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
def test_absent_state_is_error(ranks: Pool, tmp_path: Path, how: str, kind: str, text: str) -> None:
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
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer.train()
        printers = [one for one in trainer.callback_handler.callbacks if "on_log" in vars(one)]
        assert not printers, "their own methods again"
        lines = [line for line in printed.getvalue().splitlines() if "'loss'" in line]
        assert bool(lines) == (rank == 0)
        for line in lines:
            assert line.count("thinwire/") == 6
            assert len(line) < 400
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
