"""The callbacks under the real Trainer of Lightning: what holds there alone."""

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests.api import LocalUpdates
from tests.integrations.frameworks import lightning_part, student_of
from tests.integrations.frameworks import lightning_trainer as trainer_of
from tests.integrations.frameworks import loader_of as loader
from tests.integrations.packages import as_under_torchrun, needs
from tests.integrations.task import STEPS, STRATEGIES, Plan, adamw, dgc, equal, parameters, sgd
from tests.integrations.test_frameworks import ADAPTIVE, SEVENTH
from tests.ranks import Pool

pytestmark = [pytest.mark.integrations, needs("lightning")]


def module(make: Any, seed: int = 0) -> Any:
    return student_of(Plan("none", make, seed=seed))


def observed_losses(rank: int, size: int, folder: Path, method: Any) -> Any:
    with as_under_torchrun(rank, size):
        student, (part, _) = module(sgd), lightning_part(method)
        accumulated = {"accumulate_grad_batches": 3, "limit_train_batches": 4}
        trainer = trainer_of(part, folder, max_epochs=2, **accumulated)
        observe = LocalUpdates.observe
        with patch.object(LocalUpdates, "observe", autospec=True, side_effect=observe) as spy:
            trainer.fit(student, loader(rank))
        seen = [float(call.args[1]) for call in spy.call_args_list]
    return seen, student.losses


@pytest.mark.parametrize("method", [ADAPTIVE, "adaptive_localsgd"], ids=["alone", "strategy"])
def test_losses_observed_equal_the_batches(ranks: Pool, tmp_path: Path, method: Any) -> None:
    """Not the shares of them that Lightning lets accumulate, also of the last ones."""
    for seen, losses in ranks.run(observed_losses, tmp_path, method):
        assert len(losses) == 8
        assert seen == pytest.approx(losses, rel=1e-6)


def kept_one(rank: int, size: int, folder: Path) -> None:
    with as_under_torchrun(rank, size):
        from lightning.pytorch.callbacks import ModelCheckpoint

        from thinwire.integrations.lightning import CompressedExchange

        keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=1)
        trainer = trainer_of([CompressedExchange(), keep], folder, "ddp", enable_checkpointing=True)
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

        scaling = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        method, strategy, make, arguments = {
            "a strategy in DDP": ("dgc", "ddp", adamw, {}),
            "clipping": ("compressed", "ddp", dgc, {"gradient_clip_val": 1e-3}),
            "another optimizer": ("compressed", "ddp", sgd, {}),
            "wrapped": (ADAPTIVE, "ddp", sgd, {}),
            "not wrapped": ("compressed", None, dgc, {}),
            "scaler": (ADAPTIVE, None, sgd, {"plugins": [scaling]}),
        }[how]
        part, _ = lightning_part(method)
        trainer = trainer_of(part, folder, strategy, **arguments)
        trainer.fit(module(make), loader(rank))


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

        from thinwire.integrations.lightning import LocalAveraging, ThinwireCallback

        def fit(start: Path | None) -> None:
            own = method == "local"
            part = LocalAveraging(SEVENTH) if own else None
            part = part or ThinwireCallback(STRATEGIES[method])
            student = module(sgd if own else adamw)
            if start is None:
                student.on_train_batch_end = lambda *_: 1 / (len(student.losses) < 5)
            keep = ModelCheckpoint(dirpath=folder, filename="x", save_on_exception=True)
            trainer = trainer_of([part, keep], folder, enable_checkpointing=True)
            trainer.fit(student, loader(rank), ckpt_path=start)

        with pytest.raises(ZeroDivisionError):
            fit(None)
        torch.distributed.barrier()
        fit(next(folder.glob("*.ckpt")))


@pytest.mark.parametrize("method", ["local", "low_rank", "localsgd"])
def test_checkpoint_of_an_exception_is_no_start(ranks: Pool, tmp_path: Path, method: str) -> None:
    ranks.raise_alike(
        "CheckpointMissing", "saved after an exception", after_an_exception, tmp_path, method
    )


def swapped(rank: int, size: int, folder: Path, kind: str, first: bool) -> dict[str, Any]:
    """A fit with a callback that swaps an average of the weights in; what was held at saves too."""
    with as_under_torchrun(rank, size):
        from lightning.pytorch import callbacks

        from thinwire.integrations.lightning import LocalAveraging, ThinwireCallback

        noted, student = list[float](), module(sgd)

        def note(*_: Any) -> None:
            noted.extend(float(p.detach().sum()) for p in student.net.parameters())

        student.on_save_checkpoint = student.on_validation_epoch_end = note
        rate = {"swa_lrs": 0.01, "swa_epoch_start": 2} if "Stochastic" in kind else {}
        theirs = getattr(callbacks, kind)(**rate)
        ours = ThinwireCallback(STRATEGIES["localsgd"])
        parts = [ours, theirs] if first else [theirs, LocalAveraging(ADAPTIVE)]
        keep = callbacks.ModelCheckpoint(
            dirpath=folder, every_n_train_steps=5, save_top_k=-1, save_weights_only=True
        )
        trainer = trainer_of([*parts, keep], folder, enable_checkpointing=True)
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

        from thinwire.integrations.lightning import LocalAveraging

        seen = []

        class First(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                seen.append(again.sync.step)

        config = tw.LocalSGD(k_steps=5, begin_step=3, outer_lr=0.7, outer_momentum=0.5)
        first = LocalAveraging(config)
        trainer = trainer_of(first, folder)
        trainer.fit(module(sgd), loader(rank))
        trainer.save_checkpoint(folder / "final.ckpt")
        end = first.sync.step
        again = LocalAveraging(config)
        second = trainer_of([again, First()], folder, max_epochs=5)
        second.fit(module(sgd, 7), loader(rank), ckpt_path=folder / "final.ckpt")
        return end, seen[0], bool(list(folder.glob("final.ckpt.0.*")))


def test_local_updates_go_on_from_a_checkpoint_after_the_fit(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(after_the_fit, tmp_path) == [(4 * STEPS, 4 * STEPS, True)] * 2


def fits_again(rank: int, size: int, folder: Path) -> list[int]:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import ThinwireCallback

        part = ThinwireCallback(STRATEGIES["localsgd"])
        trainer, student = trainer_of(part, folder), module(adamw)
        trainer.fit(student, loader(rank))
        trainer.save_checkpoint(folder / "own.ckpt")
        trainer.validate(student, loader(rank), ckpt_path=folder / "own.ckpt")
        trainer.fit_loop.max_epochs = 5
        trainer.fit(student, loader(rank))  # with another engine
        return [len(student.losses), part.engine.step]


def test_fit_after_validation_of_a_checkpoint_does_not_resume(ranks: Pool, tmp_path: Path) -> None:
    for losses, engine_step in ranks.run(fits_again, tmp_path):
        assert losses == 5 * STEPS
        assert engine_step == STEPS


def skips_batches(rank: int, size: int, folder: Path, method: str) -> int:
    with as_under_torchrun(rank, size):
        from thinwire.integrations.lightning import ThinwireCallback

        student, steps = module(adamw), []
        train = type(student).training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            loss = train(student, batch, batch_idx)
            return None if batch_idx == 1 else loss

        student.training_step = training_step
        callback = ThinwireCallback(STRATEGIES[method])
        # on more ranks Lightning itself refuses it
        trainer = trainer_of(callback, folder, max_epochs=1, devices=1)
        trainer.fit(student, loader(rank))
        return len(steps)


@pytest.mark.parametrize("method", ["dgc", "localsgd"])
def test_a_batch_without_a_loss_is_passed_over(ranks: Pool, tmp_path: Path, method: str) -> None:
    assert ranks.run(skips_batches, tmp_path, method, size=1) == [STEPS]
