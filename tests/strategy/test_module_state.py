"""What modules keep by torch's get_extra_state is saved with the engine: all or nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import digest, train
from thinwire.errors import CheckpointError, CheckpointMismatch


class Counted(nn.Module):
    """What it computes depends on how often it has, which only its extra state says."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.mean: Any = torch.zeros(())
        self.refuses = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = self.mean * 0.9 + x.detach().mean()
        return x * (1 + 0.1 * self.calls) + self.mean

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "means": [self.mean, (None, "a", b"b", 0.5)]}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.mean = state["calls"], state["means"][0]
        assert state["means"][1] == (None, "a", b"b", 0.5)
        if self.refuses:
            raise KeyError("newer")


class Root(nn.Sequential):
    """One on the model itself."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def prepared(model: nn.Module | None = None, **fields: Any) -> Any:
    torch.manual_seed(1)
    made = Root(nn.Linear(8, 8), Counted(), nn.Linear(8, 4), Counted()) if model is None else model
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    strategy = tw.DistributedStrategy(**fields)
    return strategy.prepare(made, optimizer, nn.functional.cross_entropy)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, compiled: bool) -> None:
    engine = prepared()
    engine.model.kept = {"since": [1, "start"]}
    train(engine, (), 0, 3)
    engine.save(tmp_path)
    state = engine.state_dict()
    saved = copy.deepcopy(state)
    expected, end = train(engine, (), 3, 6), digest(engine)
    assert engine.model[1].calls == 6
    with torch.compiler.set_stance("force_eager"):
        for load in (lambda e: e.load(tmp_path), lambda e: e.load_state_dict(state)):
            other = prepared()
            if compiled:
                other.close()
                other = prepared(torch.compile(other.model, backend="eager"))  # type: ignore[arg-type]
            load(other)
            model = other.model._orig_mod if compiled else other.model
            assert (model[1].calls, model.kept) == (3, {"since": [1, "start"]})
            assert train(other, (), 3, 6) == expected
            assert digest(other) == end
    assert state["module_state"].keys() == {"_extra_state", "1._extra_state", "3._extra_state"}
    kept = [each["module_state"]["1._extra_state"] for each in (state, saved)]
    assert kept[0]["calls"] == kept[1]["calls"] == 3
    assert torch.equal(kept[0]["means"][0], kept[1]["means"][0]), "the state was changed"


def test_a_module_that_refuses_leaves_everything_as_it_was(tmp_path: Path) -> None:
    engine = prepared()
    train(engine, (), 0, 3)
    engine.save(tmp_path)
    state = engine.state_dict()
    other = prepared()
    train(other, (), 5, 7)
    other.model.kept = "mine"
    before = (digest(other), copy.deepcopy(other.optimizer.state_dict()))
    other.model[3].refuses = True
    for load, error in (
        (lambda: other.load(tmp_path), CheckpointMismatch),
        (lambda: other.load_state_dict(state), ValueError),
    ):
        said = r"3\._extra_state: set_extra_state of Counted failed with KeyError: 'newer'"
        with pytest.raises(error, match=said):
            load()
        assert (other.model[1].calls, other.model[3].calls, other.model.kept) == (2, 2, "mine")
        assert (digest(other), other.step) == (before[0], 2)
        assert str(other.optimizer.state_dict()) == str(before[1])


def test_a_later_refusal_undoes_it_too(tmp_path: Path) -> None:
    engine = prepared(amp=tw.AMP(loss_scale=tw.DynamicLossScale()))
    train(engine, (), 0, 3)
    state = engine.state_dict()
    state["loss_scale"] = {"scale": "none"}
    other = prepared(amp=tw.AMP(loss_scale=tw.DynamicLossScale()))
    train(other, (), 0, 1)
    with pytest.raises((TypeError, ValueError, KeyError)):
        other.load_state_dict(state)
    assert (other.model[1].calls, other.model[3].calls) == (1, 1)


@pytest.mark.parametrize(
    "value",
    [{"x": print}, torch.optim.SGD([torch.zeros(1)], 0.1), [{1, 2}]],
    ids=["function", "what has a state_dict", "set"],
)
def test_state_no_file_can_store_is_refused_with_its_module(tmp_path: Path, value: Any) -> None:
    engine = prepared()
    engine.model.kept = value
    said = r"the extra state of a Root cannot be saved: _extra_state.* is of type .*get_extra_state"
    with pytest.raises(CheckpointError, match=said):
        engine.save(tmp_path)
    with pytest.raises(TypeError, match=said):
        engine.state_dict()
    engine.model.kept = None
    engine.save(tmp_path)


def test_states_without_load_aloud(tmp_path: Path) -> None:
    engine = prepared()
    train(engine, (), 0, 2)
    state = engine.state_dict()
    del state["module_state"]
    other = prepared()
    with pytest.warns(
        UserWarning, match="state lacks _extra_state, 1._extra_state, 3._extra_state: "
    ):
        other.load_state_dict(state)
    assert (other.step, digest(other), other.model[1].calls) == (2, digest(engine), 0)
    engine.save(tmp_path)
    plain = prepared(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh()))
    with pytest.warns(UserWarning, match="the state has _extra_state, 1._extra_state, 3._extra"):
        plain.load(tmp_path)
    assert "module_state" not in plain.state_dict()


def saving(rank: int, size: int, folder: str) -> tuple[list[float], int]:
    engine = prepared()
    engine.model.kept = f"of rank {rank}"
    train(engine, (), 0, 3)
    engine.model[1].calls += rank
    engine.save(folder)
    return train(engine, (), 3, 5), engine.model[1].calls


def loading(rank: int, size: int, folder: str) -> tuple[list[float], int, str]:
    engine = prepared()
    engine.load(folder)
    kept = engine.model.kept
    return train(engine, (), 3, 5), engine.model[1].calls, kept


def test_it_is_of_every_rank_and_on_another_number_that_of_rank_0(
    ranks: Pool, tmp_path: Path
) -> None:
    expected = ranks.run(saving, str(tmp_path), size=2)
    found = ranks.run(loading, str(tmp_path), size=2)
    assert [row[:2] for row in found] == expected
    assert [row[2] for row in found] == ["of rank 0", "of rank 1"]
    for _, calls, kept in ranks.run(loading, str(tmp_path), size=3):
        assert (calls, kept) == (5, "of rank 0")
