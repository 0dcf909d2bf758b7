"""A compression by a stranger, one file and one export: all that reads strategies knows it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.one_bit import OneBit
from tests.ranks import Pool
from tests.strategy.training import digest, prepared, train

STRATEGY = tw.DistributedStrategy(compression=OneBit(min_numel=8))
OF_CHANGES = tw.DistributedStrategy(localsgd=tw.LocalSGD(2, compression=OneBit()))


def test_file_has_the_tag_and_the_settings(tmp_path: Path) -> None:
    for strategy in (STRATEGY, OF_CHANGES):
        strategy.save(tmp_path / "strategy.yaml")
        assert tw.DistributedStrategy.load(tmp_path / "strategy.yaml") == strategy
    assert STRATEGY.to_dict() == {"compression": {"one_bit": {"min_numel": 8}}}


def test_explain_names_the_method_its_tensors_and_its_bytes() -> None:
    model = torch.nn.Linear(100, 7)
    text = " ".join(STRATEGY.explain(model).split())
    assert "by one_bit" in text and "the gradient of 700 numbers in 1 tensor: weight" in text
    assert "dense, below min_numel=8, the gradient of 7 numbers in 1 tensor: bias" in text
    assert f"a message has {8 + 4 + 88} bytes" in text
    assert f"a message has {8 + 4 + 88 + 4 + 1} bytes" in OF_CHANGES.explain(model)


def trained(rank: int, size: int, strategy: tw.DistributedStrategy, folder: str) -> Any:
    engine = prepared(**strategy.on)
    losses = train(engine, (), 0, 30)
    engine.flush()
    engine.save(folder)
    return losses, digest(engine)


@pytest.mark.parametrize("strategy", [STRATEGY, OF_CHANGES], ids=["gradients", "changes"])
def test_it_trains_and_goes_on_with_more_ranks(
    ranks: Pool, strategy: tw.DistributedStrategy, tmp_path: Path
) -> None:
    answers = ranks.run(trained, strategy, str(tmp_path))
    assert len({bits for _, bits in answers}) == 1
    assert all(sum(losses[-5:]) < sum(losses[:5]) for losses, _ in answers)
    again = ranks.run(continued, strategy, str(tmp_path), size=3)
    assert len({bits for bits, _ in again}) == 1
    assert len({pending for _, pending in again}) == 1


def continued(
    rank: int, size: int, strategy: tw.DistributedStrategy, folder: str
) -> tuple[str, float]:
    """The bits after more steps, and the sum of the residuals that were loaded, over all ranks."""
    engine = prepared(**strategy.on)
    engine.load(folder)
    residuals = engine.state_dict()["exchange"]["residuals"].values()
    pending = sum(float(residual.double().sum()) for residual in residuals)
    train(engine, (), 31, 41)
    engine.flush()
    return digest(engine), pending
