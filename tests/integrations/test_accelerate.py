"""The parts in a loop of the real Accelerate: what holds there alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import thinwire as tw
from tests.integrations.frameworks import accelerator_for
from tests.integrations.packages import needs
from tests.integrations.task import BATCH, STRATEGIES, adamw, dgc, equal, parameters, task
from tests.ranks import Pool
from thinwire.integrations import EngineState

pytestmark = [pytest.mark.integrations, needs("accelerate")]


def clipped(rank: int, size: int) -> None:
    with accelerator_for(rank, size) as accelerator:
        model, data = task()
        optimizer = dgc(model)
        net, wrapped, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))
        optimizer.attach(net)
        x, y = next(iter(loader))
        accelerator.backward(cross_entropy(net(x), y))
        accelerator.clip_grad_norm_(net.parameters(), 1e-3)
        wrapped.step()


def test_clipping_by_the_accelerator_is_an_error_that_says_a_remedy(ranks: Pool) -> None:
    ranks.raise_alike("ThinwireError", "local_grad_clip_norm", clipped)


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
    assert (tmp_path / "thinwire").is_dir() and (tmp_path / "thinwire_1").is_dir()


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
    """As the FSDP plugin does, on a GPU alone: sharded over all ranks, or as it was if sharded."""
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
