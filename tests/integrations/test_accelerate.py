"""The parts in a loop of the real Accelerate, on two ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import thinwire as tw
from tests.integrations.packages import as_under_torchrun, needs
from tests.integrations.task import (
    ACCUMULATED,
    BATCH,
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
from thinwire.integrations import EngineState, PerRankState

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


def test_clipping_by_the_accelerator_is_an_error_that_says_a_remedy(ranks: Pool) -> None:
    ranks.raise_alike("ThinwireError", "local_grad_clip_norm", clipped)


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


def local(rank: int, size: int, precision: str, wrapped: bool) -> dict[str, Any]:
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


@pytest.mark.parametrize(("precision", "wrapped"), [("no", True), ("bf16", False)])
def test_local_updates(ranks: Pool, precision: str, wrapped: bool) -> None:
    first, second = ranks.run(local, precision, wrapped)
    assert equal(first["parameters"], second["parameters"])
    assert sum(first["losses"][-5:]) < 0.5 * sum(first["losses"][:5])
    assert first["stats"]["ratio"] > 5
    assert equal(first["parameters"], first["own"]) == (precision == "no")


class ByStrategy:
    """Accelerate's own loop, whose `optimizer.step()` the engine follows."""

    def __init__(
        self, accelerator: Any, name: str, clip: float | None = None, seed: int = 0
    ) -> None:
        self.accelerator, self.losses = accelerator, list[torch.Tensor]()
        model, data = task(seed)
        self.optimizer, self.loader = accelerator.prepare(adamw(model), DataLoader(data, BATCH))
        self.model = accelerator.prepare_model(model, evaluation_mode=True)
        limit = None if clip is None else tw.ClipByGlobalNorm(clip)
        self.engine = STRATEGIES[name].prepare(self.model, self.optimizer, grad_clip=limit)
        self.engine.follow_steps(self.mean)
        EngineState(self.engine).register(accelerator)

    def mean(self) -> torch.Tensor:
        return torch.stack(self.losses[-self.accelerator.gradient_accumulation_steps :]).mean()

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.losses.append(loss.detach())
                self.optimizer.step()
                self.optimizer.zero_grad()

    def evaluation(self) -> float:
        _, data = task()
        batches = self.accelerator.prepare_data_loader(DataLoader(data, 2 * BATCH))
        with torch.no_grad():
            losses = [cross_entropy(self.model(x), y, reduction="none") for x, y in batches]
        return float(self.accelerator.gather_for_metrics(torch.cat(losses)).mean())


def by_strategy(rank: int, size: int, name: str, accumulated: int, clip: float | None) -> Any:
    with accelerator_for(rank, size, gradient_accumulation_steps=accumulated) as accelerator:
        loop = ByStrategy(accelerator, name, clip)
        before = loop.evaluation()
        for _ in range(2):
            loop.epoch()
        loop.engine.flush()
        after = loop.evaluation()
        loop.engine.close()
        own, losses = own_engine(rank, 2, name, clip=clip, accumulated=accumulated, of_batches=True)
    return {
        "losses": (torch.stack(loop.losses).tolist(), losses),
        "parameters": parameters(loop.model),
        "own": own,
        "steps": loop.engine.step,
        "evaluations": (before, after),
    }


@pytest.mark.parametrize(
    ("name", "accumulated", "clip"),
    [*((name, 2, 0.1) for name in STRATEGIES), ("none", 1, None), ("adaptive_localsgd", 1, None)],
)
def test_a_strategy_trains_as_without_the_accelerator(
    ranks: Pool, name: str, accumulated: int, clip: float | None
) -> None:
    first, second = ranks.run(by_strategy, name, accumulated, clip)
    assert first["losses"][0] == first["losses"][1]
    assert equal(first["parameters"], first["own"])
    assert equal(first["parameters"], second["parameters"])
    assert first["steps"] == len(first["losses"][0]) / accumulated
    assert first["evaluations"] == second["evaluations"]
    assert first["evaluations"][1] < first["evaluations"][0]


def resumed_by_strategy(rank: int, size: int, name: str, folder: Path) -> Any:
    with accelerator_for(rank, size) as accelerator:
        loop = ByStrategy(accelerator, name)
        loop.epoch()
        accelerator.save_state(str(folder))
        loop.epoch()
        loop.engine.flush()
    torch.distributed.barrier()
    with accelerator_for(rank, size) as accelerator:
        again = ByStrategy(accelerator, name, seed=7)
        accelerator.load_state(str(folder))
        again.epoch()
        again.engine.flush()
    states = [
        [v.clone() for e in one.engine.optimizer.state.values() for v in e.values()]
        for one in (loop, again)
    ]
    return parameters(loop.model), parameters(again.model), states


@pytest.mark.parametrize("name", ["dgc", "low_rank", "lamb", "localsgd", "adaptive_localsgd"])
def test_a_strategy_resumes_bit_for_bit(ranks: Pool, tmp_path: Path, name: str) -> None:
    for whole, again, states in ranks.run(resumed_by_strategy, name, tmp_path):
        assert equal(whole, again)
        assert equal(*states)
    assert (tmp_path / "thinwire").is_dir()


def two_engines(rank: int, size: int, folder: Path) -> list[bool]:
    with accelerator_for(rank, size) as accelerator:
        engines = []
        for seed in (0, 1):
            model, _ = task(seed)
            engines.append(tw.DistributedStrategy().prepare(model, adamw(model)))
            EngineState(engines[-1]).register(accelerator)
        kept = [parameters(engine.model) for engine in engines]
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()  # the first rank alone writes what says who has states
        with torch.no_grad():
            for engine in engines:
                for p in engine.model.parameters():
                    p.zero_()
        accelerator.load_state(str(folder))
        return [equal(k, parameters(e.model)) for k, e in zip(kept, engines, strict=True)]


def test_two_engines_of_one_accelerator_keep_their_own(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(two_engines, tmp_path) == [[True, True]] * 2
    assert (tmp_path / "thinwire_1").is_dir()


def sharded(rank: int, size: int, name: str) -> Any:
    """Two sites of two ranks: the loop of Accelerate, and the same batches in one without."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    with accelerator_for(rank, size) as accelerator:
        for followed in (True, False):
            model, data = task()
            fully_shard(model, mesh=mesh["shard"])
            optimizer, loader = accelerator.prepare(adamw(model), DataLoader(data, BATCH))
            engine = STRATEGIES[name].prepare(
                model, optimizer, grad_clip=tw.ClipByGlobalNorm(0.1), mesh=mesh
            )
            if followed:
                engine.follow_steps()
            losses = []
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                losses.append(loss.item())
                if followed:
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    engine.minimize(loss)
            engine.flush()
            engine.close()
            found.append((losses, [p.detach().full_tensor() for p in model.parameters()]))
    return found


@pytest.mark.parametrize("name", ["dgc", "localsgd"])
def test_a_model_that_fully_shard_cut(ranks: Pool, name: str) -> None:
    answers = ranks.run(sharded, name, size=4)
    for (losses, ours), (expected, plain) in answers:
        assert losses == expected
        assert equal(ours, plain)
        assert equal(ours, answers[0][0][1])


def prepared_by_fsdp_plugin(rank: int, size: int) -> list[str]:
    """What the FSDP plugin makes of a model, which Accelerate takes on a GPU alone: sharded over
    all ranks, or as it was where it is sharded already."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with accelerator_for(rank, size) as accelerator:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False
        )
        model, _ = task()
        model = fsdp2_prepare_model(accelerator, model)
        texts = []
        for given in (None, mesh):
            with pytest.raises(ValueError) as raised:
                STRATEGIES["localsgd"].prepare(model, adamw(model), mesh=given)
            texts.append(str(raised.value))
        model, _ = task()
        fully_shard(model, mesh=mesh["shard"])
        assert fsdp2_prepare_model(accelerator, model) is model
        STRATEGIES["localsgd"].prepare(model, adamw(model), mesh=mesh).close()
    return texts


def test_model_sharded_by_the_fsdp_plugin_is_refused_with_a_remedy(ranks: Pool) -> None:
    for no_mesh, with_mesh in ranks.run(prepared_by_fsdp_plugin, size=4):
        assert "fully_shard(model, mesh=mesh['shard']) and pass mesh=mesh" in no_mesh
        assert "call fully_shard(model, mesh=mesh['shard'])" in with_mesh
