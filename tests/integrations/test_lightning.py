"""The callbacks under the real Trainer of Lightning, on two ranks."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import thinwire as tw
from tests.api import LocalUpdates
from tests.integrations.packages import as_under_torchrun, needs
from tests.integrations.task import (
    ACCUMULATED,
    BATCH,
    STEPS,
    STRATEGIES,
    adamw,
    dgc,
    equal,
    own_compressed,
    own_engine,
    own_local,
    parameters,
    residuals,
    task,
)
from tests.ranks import Pool

pytestmark = [pytest.mark.integrations, needs("lightning")]
CONFIGS = {
    "every seven steps": tw.LocalSGD(k_steps=7, begin_step=3),
    "adaptive": tw.AdaptiveLocalSGD(init_k_steps=4, begin_step=3),
}


def module(
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer], seed: int = 0
) -> Any:
    from lightning import LightningModule

    class Student(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = task(seed)
            self.losses: list[float] = []

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.net)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            self.log("held_out", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    return Student()


def trainer_of(strategy: Any, callback: Any, folder: Path, **arguments: Any) -> Any:
    from lightning import Trainer

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings = {"max_epochs": 4, "accelerator": "cpu", "devices": 2} | quiet | arguments
    return Trainer(
        strategy=strategy,
        callbacks=callback if isinstance(callback, list) else [callback],
        default_root_dir=folder,
        **settings,
    )


def loader(rank: int) -> Any:
    data = task()[1]  # a sampler of one's own, since Lightning's would shuffle
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, 2, rank, shuffle=False))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def lamb(model: torch.nn.Module) -> torch.optim.Optimizer:
    return tw.optim.Lamb(model.named_parameters(), lr=tw.schedules.WarmUp(0.01, 20))


def compressed(rank: int, size: int, folder: Path, precision: str) -> dict[str, Any]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import CompressedExchange

        student = module(dgc)
        trainer = trainer_of(
            "ddp",
            CompressedExchange(),
            folder,
            accumulate_grad_batches=ACCUMULATED,
            precision=precision,
        )
        trainer.fit(student, loader(rank))
        stats = trainer.optimizers[0].stats()
        own = own_compressed(rank, 4, of_batches=False)
    return {
        "losses": student.losses,
        "parameters": parameters(student.net),
        "own": own,
        "stats": stats,
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_compressed_loop(ranks: Pool, tmp_path: Path, precision: str) -> None:
    first, second = ranks.run(compressed, tmp_path, precision)
    assert equal(first["parameters"], second["parameters"])
    assert sum(first["losses"][-5:]) < 0.5 * sum(first["losses"][:5])
    assert first["stats"]["step"] == 4 * STEPS / ACCUMULATED
    assert first["stats"]["ratio"] > 8
    assert equal(first["parameters"], first["own"]) == (precision == "32-true")


def local(rank: int, size: int, folder: Path, config: Any, make: Any) -> dict[str, Any]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import LocalAveraging, UnwrappedDDP

        student, averaging = module(make), LocalAveraging(config)
        trainer_of(UnwrappedDDP(), averaging, folder).fit(student, loader(rank))
        own = own_local(rank, 4, make, config, of_batches=False)
    return {
        "losses": student.losses,
        "parameters": parameters(student.net),
        "own": own,
        "stats": averaging.sync.stats(),
    }


@pytest.mark.parametrize(("config", "make"), [("every seven steps", lamb), ("adaptive", sgd)])
def test_local_updates(ranks: Pool, tmp_path: Path, config: str, make: Any) -> None:
    first, second = ranks.run(local, tmp_path, CONFIGS[config], make)
    assert equal(first["parameters"], second["parameters"])
    assert equal(first["parameters"], first["own"])
    assert sum(first["losses"][-5:]) < 0.8 * sum(first["losses"][:5])
    assert first["stats"]["ratio"] > 2


def observed_losses(rank: int, size: int, folder: Path) -> tuple[list[float], list[float]]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import LocalAveraging, UnwrappedDDP

        student, averaging = module(sgd), LocalAveraging(CONFIGS["adaptive"])
        trainer = trainer_of(
            UnwrappedDDP(), averaging, folder, accumulate_grad_batches=3, max_steps=1
        )
        observe = LocalUpdates.observe
        with patch.object(LocalUpdates, "observe", autospec=True, side_effect=observe) as spy:
            trainer.fit(student, loader(rank))
        seen = [float(call.args[1]) for call in spy.call_args_list]
    return seen, student.losses


def test_losses_observed_equal_the_batches(ranks: Pool, tmp_path: Path) -> None:
    """Not the shares of them that Lightning lets accumulate."""
    for seen, losses in ranks.run(observed_losses, tmp_path):
        assert len(losses) == 3
        assert seen == pytest.approx(losses, rel=1e-6)


def losses_of_updates(rank: int, size: int, folder: Path) -> tuple[list[float], list[float]]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import ThinwireCallback, UnwrappedDDP

        heard: list[float] = []
        loss = ThinwireCallback._loss

        def listening(callback: Any) -> Any:
            value = loss(callback)
            heard.append(float(value))
            return value

        student, callback = module(adamw), ThinwireCallback(STRATEGIES["adaptive_localsgd"])
        accumulated = {"accumulate_grad_batches": 3, "limit_train_batches": 4}
        trainer = trainer_of(UnwrappedDDP(), callback, folder, max_epochs=2, **accumulated)
        with patch.object(ThinwireCallback, "_loss", listening):
            trainer.fit(student, loader(rank))
    return heard, student.losses


def test_the_loss_of_an_update_is_a_mean_also_of_the_last_ones(ranks: Pool, tmp_path: Path) -> None:
    for heard, losses in ranks.run(losses_of_updates, tmp_path):
        groups = losses[:3], losses[3:4], losses[4:7], losses[7:]
        assert heard == pytest.approx([sum(group) / len(group) for group in groups], rel=1e-6)


def by_strategy(
    rank: int, size: int, folder: Path, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import ThinwireCallback, UnwrappedDDP

        student, callback = module(adamw), ThinwireCallback(STRATEGIES[name])
        trainer = trainer_of(UnwrappedDDP(), callback, folder, max_epochs=2, **arguments)
        trainer.fit(student, loader(rank), loader(rank))  # validates after every epoch
        [held_out] = trainer.validate(student, loader(rank))
        own, losses = own_engine(
            rank,
            2,
            name,
            clip=arguments.get("gradient_clip_val"),
            accumulated=arguments.get("accumulate_grad_batches", 1),
            of_batches=False,
        )
    return {
        "losses": (student.losses, losses),
        "parameters": parameters(student.net),
        "own": own,
        "steps": callback.engine.step,
        "clip": trainer.gradient_clip_val,
        "held_out": held_out["held_out"],
    }


ACCUMULATED_AND_CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, ACCUMULATED_AND_CLIPPED) for name in STRATEGIES),
        ("none", {}),
        ("adaptive_localsgd", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_a_strategy_trains_as_without_the_trainer(
    ranks: Pool, tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    first, second = ranks.run(by_strategy, tmp_path, name, arguments)
    assert first["losses"][0] == first["losses"][1]
    assert equal(first["parameters"], first["own"])
    assert equal(first["parameters"], second["parameters"])
    assert first["steps"] == 2 * STEPS / arguments.get("accumulate_grad_batches", 1)
    assert first["clip"] == arguments.get("gradient_clip_val")
    assert first["held_out"] == second["held_out"] < first["losses"][0][0]


@pytest.mark.parametrize(
    ("field", "config", "advice"),
    [
        ("amp", tw.AMP("bfloat16"), "bf16-mixed"),
        ("gradient_merge", tw.GradientMerge(2), "accumulate_grad_batches"),
        ("pipeline", tw.Pipeline(stages=2, micro_batches=2), "engine.train_step"),
    ],
)
def test_settings_of_the_trainer_itself_are_refused(field: str, config: Any, advice: str) -> None:
    from thinwire.integrations.lightning import ThinwireCallback

    with pytest.raises(tw.StrategyError, match=rf"{field}: use .*{advice}"):
        ThinwireCallback(tw.DistributedStrategy(**{field: config}))


def resumed(rank: int, size: int, folder: Path, method: str) -> dict[str, Any]:
    """A fit of 4 epochs, and one that goes on after the first with another initial model."""
    with as_under_torchrun(rank, size):
        from lightning.pytorch.callbacks import ModelCheckpoint

        from thinwire.integrations.lightning import (
            CompressedExchange,
            LocalAveraging,
            ThinwireCallback,
            UnwrappedDDP,
        )

        def fit(seed: int, start: Path | None) -> tuple[Any, Any]:
            config = tw.LocalSGD(k_steps=5, begin_step=3, outer_lr=0.7, outer_momentum=0.5)
            part, strategy, make = LocalAveraging(config), UnwrappedDDP(), sgd
            if method == "compressed":
                part, strategy, make = CompressedExchange(), "ddp", dgc
            elif method in STRATEGIES:
                part, make = ThinwireCallback(STRATEGIES[method]), adamw
            student = module(make, seed)
            keep = ModelCheckpoint(
                dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1
            )
            trainer = trainer_of(strategy, [part, keep], folder, enable_checkpointing=True)
            trainer.fit(student, loader(rank), ckpt_path=start)
            return trainer, student

        whole, first = fit(0, None)
        torch.distributed.barrier()
        again, second = fit(7, folder / "epoch=0.ckpt")
        states = [
            [v.clone() for e in t.optimizers[0].state.values() for v in e.values()]
            for t in (whole, again)
        ]
        pending = residuals(whole.optimizers[0])
    return {
        "whole": parameters(first.net),
        "again": parameters(second.net),
        "states": states,
        "pending": pending,
        "steps": len(second.losses),
    }


@pytest.mark.parametrize(
    "method", ["compressed", "local", "dgc", "low_rank", "lamb", "localsgd", "adaptive_localsgd"]
)
def test_a_checkpoint_resumes_bit_for_bit(ranks: Pool, tmp_path: Path, method: str) -> None:
    answers = ranks.run(resumed, tmp_path, method)
    for answer in answers:
        assert answer["steps"] == 3 * STEPS
        assert equal(answer["whole"], answer["again"])
        assert equal(*answer["states"])
    if method == "compressed":
        assert not equal(answers[0]["pending"], answers[1]["pending"])


def kept_one(rank: int, size: int, folder: Path) -> None:
    with as_under_torchrun(rank, size):
        from lightning.pytorch.callbacks import ModelCheckpoint

        from thinwire.integrations.lightning import CompressedExchange

        keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=1)
        trainer = trainer_of("ddp", [CompressedExchange(), keep], folder, enable_checkpointing=True)
        trainer.fit(module(dgc), loader(rank))


def test_the_files_of_the_ranks_go_with_their_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(kept_one, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "epoch=3.ckpt",
        *(f"epoch=3.ckpt.0.rank_0000{rank}.safetensors" for rank in range(2)),
    ]


def misused(rank: int, size: int, folder: Path, how: str) -> None:
    with as_under_torchrun(rank, size):
        from lightning.pytorch.plugins import MixedPrecision

        from thinwire.integrations.lightning import (
            CompressedExchange,
            LocalAveraging,
            ThinwireCallback,
            UnwrappedDDP,
        )

        exchange, averaging = CompressedExchange(), LocalAveraging(CONFIGS["adaptive"])
        if how == "a strategy in DDP":
            callback = ThinwireCallback(STRATEGIES["dgc"])
            trainer, student = trainer_of("ddp", callback, folder), module(adamw)
        elif how == "clipping":
            trainer, student = (
                trainer_of("ddp", exchange, folder, gradient_clip_val=1e-3),
                module(dgc),
            )
        elif how == "another optimizer":
            trainer, student = trainer_of("ddp", exchange, folder), module(sgd)
        elif how == "wrapped":
            trainer, student = trainer_of("ddp", averaging, folder), module(sgd)
        elif how == "not wrapped":
            trainer, student = trainer_of(UnwrappedDDP(), exchange, folder), module(dgc)
        else:
            plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
            trainer, student = (
                trainer_of(UnwrappedDDP(), averaging, folder, plugins=[plugin]),
                module(sgd),
            )
        trainer.fit(student, loader(rank))


@pytest.mark.parametrize(
    ("how", "kind", "advice"),
    [
        ("clipping", "ThinwireError", "local_grad_clip_norm"),
        ("another optimizer", "TypeError", "DGCMomentum"),
        ("wrapped", "ValueError", "UnwrappedDDP"),
        ("a strategy in DDP", "ValueError", "UnwrappedDDP"),
        ("not wrapped", "TypeError", "DistributedDataParallel"),
        ("scaler", "ValueError", "bf16-mixed"),
    ],
)
def test_user_error_has_a_remedy(
    ranks: Pool, tmp_path: Path, how: str, kind: str, advice: str
) -> None:
    ranks.raise_alike(kind, advice, misused, tmp_path, how)


def after_an_exception(rank: int, size: int, folder: Path, method: str) -> None:
    with as_under_torchrun(rank, size):
        from lightning.pytorch.callbacks import ModelCheckpoint

        from thinwire.integrations.lightning import LocalAveraging, ThinwireCallback, UnwrappedDDP

        def fit(start: Path | None) -> None:
            own = method == "local"
            part = LocalAveraging(CONFIGS["every seven steps"]) if own else None
            part = part or ThinwireCallback(STRATEGIES[method])
            student = module(sgd if own else adamw)
            if start is None:
                student.on_train_batch_end = lambda *_: 1 / (len(student.losses) < 5)
            keep = ModelCheckpoint(dirpath=folder, filename="x", save_on_exception=True)
            trainer = trainer_of(UnwrappedDDP(), [part, keep], folder, enable_checkpointing=True)
            trainer.fit(student, loader(rank), ckpt_path=start)

        with pytest.raises(ZeroDivisionError):
            fit(None)
        torch.distributed.barrier()
        fit(next(folder.glob("*.ckpt")))


@pytest.mark.parametrize("method", ["local", "low_rank", "localsgd"])
def test_a_checkpoint_of_an_exception_is_no_beginning(
    ranks: Pool, tmp_path: Path, method: str
) -> None:
    ranks.raise_alike(
        "CheckpointMissing", "saved after an exception", after_an_exception, tmp_path, method
    )


def swapped(rank: int, size: int, folder: Path, kind: str, first: bool) -> dict[str, Any]:
    """A fit with a callback that swaps an average of the weights in; what was held at saves too."""
    with as_under_torchrun(rank, size):
        from lightning.pytorch import callbacks

        from thinwire.integrations.lightning import LocalAveraging, ThinwireCallback, UnwrappedDDP

        noted, student = list[float](), module(sgd)

        def note(*_: Any) -> None:
            noted.extend(float(p.detach().sum()) for p in student.net.parameters())

        student.on_save_checkpoint = student.on_validation_epoch_end = note
        rate = {"swa_lrs": 0.01, "swa_epoch_start": 2} if "Stochastic" in kind else {}
        theirs = getattr(callbacks, kind)(**rate)
        ours = ThinwireCallback(STRATEGIES["localsgd"])
        parts = [ours, theirs] if first else [theirs, LocalAveraging(CONFIGS["adaptive"])]
        keep = callbacks.ModelCheckpoint(
            dirpath=folder, every_n_train_steps=5, save_top_k=-1, save_weights_only=True
        )
        trainer = trainer_of(UnwrappedDDP(), [*parts, keep], folder, enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trainer.fit(student, loader(rank), loader(rank))
        theirs._average_model = None  # the next test in this process would be told of it
    return {"noted": noted, "parameters": parameters(student.net)}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["StochasticWeightAveraging", "WeightAveraging"])
def test_all_ranks_have_the_mean_where_a_callback_swaps_it_in_or_validates_or_saves(
    ranks: Pool, tmp_path: Path, kind: str, first: bool
) -> None:
    one, other = ranks.run(swapped, tmp_path, kind, first)
    assert equal(one["parameters"], other["parameters"])
    assert one["noted"] == other["noted"]


def after_the_fit(rank: int, size: int, folder: Path) -> tuple[int, int, bool]:
    with as_under_torchrun(rank, size):
        from lightning.pytorch.callbacks import Callback

        from thinwire.integrations.lightning import LocalAveraging, UnwrappedDDP

        seen = []

        class First(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                seen.append(again.sync.step)

        config = tw.LocalSGD(k_steps=5, begin_step=3, outer_lr=0.7, outer_momentum=0.5)
        first = LocalAveraging(config)
        trainer = trainer_of(UnwrappedDDP(), first, folder)
        trainer.fit(module(sgd), loader(rank))
        trainer.save_checkpoint(folder / "final.ckpt")
        end = first.sync.step
        again = LocalAveraging(config)
        second = trainer_of(UnwrappedDDP(), [again, First()], folder, max_epochs=5)
        second.fit(module(sgd, 7), loader(rank), ckpt_path=folder / "final.ckpt")
        return end, seen[0], bool(list(folder.glob("final.ckpt.0.*")))


def test_local_updates_go_on_from_a_checkpoint_of_after_the_fit(
    ranks: Pool, tmp_path: Path
) -> None:
    assert ranks.run(after_the_fit, tmp_path) == [(4 * STEPS, 4 * STEPS, True)] * 2


def fits_again(rank: int, size: int, folder: Path) -> list[int]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import ThinwireCallback, UnwrappedDDP

        part = ThinwireCallback(STRATEGIES["localsgd"])
        trainer, student = trainer_of(UnwrappedDDP(), part, folder), module(adamw)
        trainer.fit(student, loader(rank))
        trainer.save_checkpoint(folder / "own.ckpt")
        trainer.validate(student, loader(rank), ckpt_path=folder / "own.ckpt")
        trainer.fit_loop.max_epochs = 5
        trainer.fit(student, loader(rank))  # with another engine
        return [len(student.losses), part.engine.step]


def test_a_fit_after_a_validation_of_a_checkpoint_is_none_that_resumes(
    ranks: Pool, tmp_path: Path
) -> None:
    for losses, engine_step in ranks.run(fits_again, tmp_path):
        assert losses == 5 * STEPS
        assert engine_step == STEPS


def skips_batches(rank: int, size: int, folder: Path, method: str) -> int:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import ThinwireCallback, UnwrappedDDP

        student, steps = module(adamw), []
        train = type(student).training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            loss = train(student, batch, batch_idx)
            return None if batch_idx == 1 else loss

        student.training_step = training_step
        callback = ThinwireCallback(STRATEGIES[method])
        # on more ranks Lightning itself refuses it
        trainer = trainer_of(UnwrappedDDP(), callback, folder, max_epochs=1, devices=1)
        trainer.fit(student, loader(rank))
        return len(steps)


@pytest.mark.parametrize("method", ["dgc", "localsgd"])
def test_a_batch_without_a_loss_is_passed_over(ranks: Pool, tmp_path: Path, method: str) -> None:
    assert ranks.run(skips_batches, tmp_path, method, size=1) == [STEPS]
