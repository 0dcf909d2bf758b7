"""The parts in a loop of the real Accelerate, on two ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import thinwire as tw
from tests.integrations.packages import as_under_torchrun, needs
from tests.integrations.task import (
    ACCUMULATED,
    BATCH,
    dgc,
    equal,
    own_compressed,
    own_local,
    parameters,
    residuals,
    task,
)
from tests.ranks import Pool, Raised
from thinwire.integrations import PerRankState

pytestmark = [pytest.mark.integrations, needs("accelerate")]


@contextmanager
def accelerator_for(rank: int, size: int, **arguments: Any) -> Iterator[Any]:
    with as_under_torchrun(rank, size):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        try:
            yield Accelerator(cpu=True, **arguments)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


class Compressed:
    """The loop of the example."""

    def __init__(self, accelerator: Any, seed: int = 0) -> None:
        self.accelerator = accelerator
        model, data = task(seed)
        self.dgc = dgc(model)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            model, self.dgc, DataLoader(data, BATCH)
        )
        self.dgc.attach(self.model)
        PerRankState(self.dgc).register(accelerator)

    def epoch(self, clip: float | None = None) -> list[float]:
        losses = []
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def compressed(rank: int, size: int, precision: str) -> dict[str, Any]:
    with accelerator_for(
        rank, size, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATED
    ) as accelerator:
        loop = Compressed(accelerator)
        losses = [loop.epoch() for _ in range(4)]
        own = own_compressed(rank, 4, of_batches=True)
        wide = {t.dtype for entries in loop.dgc.state.values() for t in entries.values()} == {
            torch.float32
        }
        return {
            "losses": losses,
            "parameters": parameters(loop.model),
            "own": own,
            "stats": loop.dgc.stats(),
            "wide": wide,
        }


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_compressed_loop(ranks: Pool, precision: str) -> None:
    first, second = ranks.run(compressed, precision)
    assert equal(first["parameters"], second["parameters"])
    assert sum(first["losses"][-1]) < 0.5 * sum(first["losses"][0])
    # accumulation sends nothing by itself: one exchange for two batches
    assert first["stats"]["step"] == 4 * len(first["losses"][0]) / ACCUMULATED
    assert first["stats"]["ratio"] > 8
    assert first["wide"]
    # the framework adds no arithmetic of its own; lower precision does
    assert equal(first["parameters"], first["own"]) == (precision == "no")


def clipped(rank: int, size: int) -> None:
    with accelerator_for(rank, size, gradient_accumulation_steps=ACCUMULATED) as accelerator:
        Compressed(accelerator).epoch(clip=1e-3)


def test_clipping_by_the_accelerator_is_an_error_that_says_what_to_do(ranks: Pool) -> None:
    for answer in ranks.run(clipped, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type_name == "ThinwireError"
        assert "local_grad_clip_norm" in answer.text


def resumed(rank: int, size: int, folder: Path) -> dict[str, Any]:
    with accelerator_for(rank, size, gradient_accumulation_steps=ACCUMULATED) as accelerator:
        loop = Compressed(accelerator)
        loop.epoch()
        accelerator.save_state(str(folder))
        saved = residuals(loop.dgc)
        loop.epoch()
    torch.distributed.barrier()
    with accelerator_for(rank, size, gradient_accumulation_steps=ACCUMULATED) as accelerator:
        again = Compressed(accelerator, seed=7)
        accelerator.load_state(str(folder))
        loaded = residuals(again.dgc)
        again.epoch()
    return {
        "saved": saved,
        "loaded": loaded,
        "whole": parameters(loop.model),
        "resumed": parameters(again.model),
        "residuals": (residuals(loop.dgc), residuals(again.dgc)),
    }


def test_a_saved_state_resumes_bit_for_bit_with_the_residuals_of_every_rank(
    ranks: Pool, tmp_path: Path
) -> None:
    answers = ranks.run(resumed, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("per_rank*")) == [
        f"per_rank_0.rank_0000{rank}.safetensors" for rank in range(2)
    ]
    assert not equal(answers[0]["saved"], answers[1]["saved"])
    for answer in answers:
        assert equal(answer["saved"], answer["loaded"])
        assert equal(answer["whole"], answer["resumed"])
        assert equal(*answer["residuals"])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def local(rank: int, size: int, precision: str, wrapped: bool = False) -> dict[str, Any]:
    config = tw.LocalSGD(k_steps=7, begin_step=3)
    with accelerator_for(rank, size, mixed_precision=precision) as accelerator:
        model, data = task()
        bare = sgd(model)
        optimizer, loader = accelerator.prepare(bare, DataLoader(data, BATCH))
        model = accelerator.prepare_model(model, evaluation_mode=True)
        losses = []
        with tw.local_sgd(model, optimizer if wrapped else bare, config) as sync:
            for _ in range(4):
                for x, y in loader:
                    loss = cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        own = own_local(rank, 4, sgd, config, of_batches=True)
        return {
            "losses": losses,
            "parameters": parameters(model),
            "own": own,
            "stats": sync.stats(),
        }


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_local_updates(ranks: Pool, precision: str) -> None:
    first, second = ranks.run(local, precision)
    assert equal(first["parameters"], second["parameters"])
    assert sum(first["losses"][-5:]) < 0.5 * sum(first["losses"][:5])
    assert first["stats"]["ratio"] > 5
    assert equal(first["parameters"], first["own"]) == (precision == "no")


def test_local_updates_take_the_wrapped_optimizer(ranks: Pool) -> None:
    first, second = ranks.run(local, "no", True)
    assert equal(first["parameters"], second["parameters"])
    assert equal(first["parameters"], first["own"])
    assert first["stats"]["averagings"] > 3


def by_engine(rank: int, size: int, wrapped: bool) -> tuple[list[torch.Tensor], bool, str]:
    with accelerator_for(rank, size) as accelerator:
        model, data = task()
        bare = sgd(model)
        optimizer, loader = accelerator.prepare(bare, DataLoader(data, BATCH))
        strategy = tw.DistributedStrategy(dgc=tw.DGC(sparsity=(0.9,), min_numel=64))
        engine = strategy.prepare(model, optimizer if wrapped else bare, cross_entropy)
        for x, y in loader:
            engine.train_step(x, y)
        said = ""
        try:
            optimizer.step()
        except RuntimeError as error:
            said = str(error)
        return parameters(model), engine.optimizer is bare, said


def test_an_engine_takes_the_wrapped_optimizer(ranks: Pool) -> None:
    wrapped, plain = ranks.run(by_engine, True), ranks.run(by_engine, False)
    for (values, same, said), (expected, _, _) in zip(wrapped, plain, strict=True):
        assert same
        assert "engine.train_step" in said
        assert equal(values, expected)
