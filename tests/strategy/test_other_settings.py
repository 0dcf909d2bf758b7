"""Checkpoints that go on under other settings, and what is told or saved beside training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import thinwire as tw


def prepared(lr: float = 0.1, **fields: Any) -> tw.Engine:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return tw.DistributedStrategy(**fields).prepare(model, optimizer, mse_loss)


def steps(engine: tw.Engine, count: int) -> list[bool]:
    synced = []
    for _ in range(count):
        engine.train_step(torch.ones(3, 4), torch.zeros(3, 2))
        synced.append(engine.sync is not None and engine.sync.synced)
    return synced


@pytest.mark.parametrize("before", [tw.FixedLossScale(128.0), tw.DynamicLossScale(2.0**16)])
def test_a_fixed_scale_is_that_of_this_engine(tmp_path: Path, before: Any) -> None:
    engine = prepared(amp=tw.AMP("float16", before))
    steps(engine, 2)
    engine.save(tmp_path)
    other = prepared(amp=tw.AMP("float16", tw.FixedLossScale(256.0)))
    other.load(tmp_path)
    assert other.stats()["loss_scale"] == 256


def test_averagings_that_begin_sooner_in_a_resumed_run(tmp_path: Path) -> None:
    prepared(localsgd=tw.LocalSGD(2, begin_step=50)).save(tmp_path)
    other = prepared(localsgd=tw.LocalSGD(2, begin_step=0))
    other.load(tmp_path)
    assert steps(other, 6) == [False, True] * 3


@pytest.mark.parametrize("name", ["localsgd", "adaptive_localsgd", "dgc"])
def test_trained_state_can_be_saved_after_close(tmp_path: Path, name: str) -> None:
    configs: dict[str, Any] = {
        "localsgd": tw.LocalSGD(2),
        "adaptive_localsgd": tw.AdaptiveLocalSGD(2),
        "dgc": tw.DGC(sparsity=(0.5,), min_numel=1),
    }
    engine = prepared(**{name: configs[name]})
    steps(engine, 3)
    engine.flush()
    engine.close()
    assert engine.state_dict()["parameters"]
    engine.save(tmp_path)
    other = prepared(**{name: configs[name]})
    other.load(tmp_path)
    assert other.step == 3


@pytest.mark.parametrize("what", ["fragments", "nothing to train", "lars of Adam"])
def test_explain_and_prepare_refuse_alike(what: str) -> None:
    model = nn.Linear(4, 2)
    strategy = tw.DistributedStrategy()
    if what == "fragments":
        strategy = tw.DistributedStrategy(localsgd=tw.LocalSGD(8, fragments=8))
    if what == "nothing to train":
        model.requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "lars of Adam":
        strategy = tw.DistributedStrategy(lars=tw.LARS())
        optimizer = torch.optim.Adam(model.parameters())
    texts = []
    for call in (strategy.explain, strategy.prepare):
        with pytest.raises(ValueError) as told:
            call(model, optimizer)
        texts.append(str(told.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("loss", [True, torch.tensor(True), torch.tensor(1j)], ids=str)
def test_only_a_loss_has_a_mean(loss: Any) -> None:
    with pytest.raises(TypeError, match="loss must be a real number"):
        prepared().mean_loss(loss)
