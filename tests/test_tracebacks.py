"""The traceback of an error shows this error, and no other than the user's own."""

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.laws.frontends import Case, LocalBlock, OwnStep, WithEngine
from tests.members.places import met
from tests.ranks import Pool, Raised
from tests.strategy.training import batch, make_engine

BEGIN = "Traceback (most recent call last)"
WAYS = {"engine": WithEngine, "local": LocalBlock, "dgc": OwnStep}


def damaged(folder: Path, pattern: str) -> Any:
    engine = make_engine((), plain=True)
    engine.train_step(*batch(0, 0))
    engine.save(folder)
    for file in filter(Path.is_file, folder.rglob(pattern)):
        file.write_bytes(b"{")
    return engine


def saved_over_a_file(folder: Path) -> None:
    (folder / "file").touch()
    make_engine((), plain=True).save(folder / "file" / "checkpoints")


def other_model(folder: Path) -> None:
    damaged(folder, "none")
    other = nn.Linear(3, 1)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(other, sgd, nn.functional.mse_loss)
    engine.load_parameters(folder)


def bad_yaml(folder: Path) -> None:
    (folder / "strategy.yaml").write_text("dgc: {sparsity: 3}")
    tw.DistributedStrategy.load(folder / "strategy.yaml")


def damaged_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"{")
    make_engine((), plain=True).load_parameters(folder / "model.safetensors")


def wrong_optimizer(_: Path) -> None:
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters(), lr=-0.0, amsgrad=True)
    tw.DistributedStrategy(lamb=tw.LAMB()).prepare(model, adam)


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: damaged(folder, "*.json").load(folder),
        lambda folder: damaged(folder, "*.safetensors").load(folder),
        lambda folder: damaged(folder, "*").load(folder),
        saved_over_a_file,
        other_model,
        damaged_model,
        bad_yaml,
        wrong_optimizer,
        lambda _: tw.join("tcp://127.0.0.1:9", run="a", timeout=2),
        lambda _: tw.plan("missing.json", line="20 Mbit/s"),
        lambda _: tw.DistributedStrategy.from_dict({"dgc": {"sparsity": 3}}),
    ],
)
def test_an_error_of_one_process_stands_alone(call: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises((tw.errors.ThinwireError, ValueError, TypeError)) as raised:
        call(tmp_path)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count(BEGIN) == 1, text


def left_alone(rank: int, size: int, way: str, how: str) -> None:
    trainer = WAYS[way](Case(options={"timeout": 1}, local=tw.LocalSGD(1)))
    trainer.train(rank, 0, 1)
    if rank == 1:
        time.sleep(4 if how == "late" else 0)
        os._exit(3)
    if how != "in a handler":
        trainer.train(rank, 1, 9)
    try:
        raise KeyError("mine")
    except KeyError:
        trainer.train(rank, 1, 9)


@pytest.mark.parametrize("how", ["late", "gone", "in a handler"])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_for_another_rank_stands_alone(ranks: Pool, way: str, how: str) -> None:
    found, _ = ranks.run(left_alone, way, how, expect_errors=True)
    assert isinstance(found, Raised)
    assert found.type_name in ("PeerLost", "PeerStalled")
    own = how == "in a handler"
    assert found.traceback.count(BEGIN) == 1 + own, found.traceback
    assert ("KeyError: 'mine'" in found.traceback) == own


def lost_member(rank: int, size: int, address: str) -> None:
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"run": "a", "min_members": 2, "timeout": 3}
    with (
        tw.join(address, **options) as members,
        tw.local_sgd(model, sgd, tw.LocalSGD(1), members=members),
    ):
        for step in range(9):
            if (rank, step) == (1, 3):
                os._exit(3)
            model(torch.full((2, 4), step + rank + 1.0)).sum().backward()
            sgd.step()


def test_an_error_for_a_lost_member_stands_alone(ranks: Pool) -> None:
    found = met(ranks, lost_member, size=2, errors=True)
    raised = found[0]
    assert isinstance(raised, Raised)
    assert raised.type_name in ("QuorumLost", "PeerLost")
    assert raised.traceback.count(BEGIN) == 1, raised.traceback


class Picky(nn.Linear):
    """Has an extra state that it does not take back."""

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise KeyError("mine")


def test_an_error_of_the_users_code_stays_in_the_traceback(tmp_path: Path) -> None:
    model = Picky(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(model, sgd, nn.functional.mse_loss)
    engine.save(tmp_path)
    with pytest.raises(tw.errors.CheckpointError) as raised:
        engine.load(tmp_path)
    text = "".join(traceback.format_exception(raised.value))
    assert text.count(BEGIN) == 2, text
    assert "KeyError: 'mine'" in text
