"""State that is another rank's, or mixed from several, is noticed however it was saved."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import make_engine, train


def made(
    order: int = 1, *, named: bool = True, **settings: Any
) -> tuple[nn.Module, tw.optim.DGCMomentum]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40))
    params: list[Any] = list(model.named_parameters())[::order]
    if not named:
        params = [p for _, p in params]
    return model, tw.optim.DGCMomentum(
        params, lr=0.1, **{"min_numel": 16, "sparsity": (0.9,), **settings}
    )


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    data = torch.Generator().manual_seed(rank)
    for _ in range(count):
        model(torch.randn(8, 20, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(load: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(*args)
    return [
        str(w.message)
        for w in caught
        if "thinwire" in str(w.message) or "position" in str(w.message)
    ]


def through_dcp(rank: int, size: int, folder: str, way: str) -> tuple[list[str], int, bool]:
    model, optimizer = made()
    ddp = DistributedDataParallel(model)
    optimizer.attach(ddp)
    steps(ddp, optimizer, rank, 6)
    again, other = made()
    twin = DistributedDataParallel(again)
    other.attach(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "get_optimizer_state_dict":
            dcp.save({"o": get_optimizer_state_dict(ddp, optimizer)}, checkpoint_id=folder)
            state = {"o": get_optimizer_state_dict(twin, other)}
            dcp.load(state, checkpoint_id=folder)
        else:
            dcp.save({"o": optimizer.state_dict()}, checkpoint_id=folder)
            steps(twin, other, rank, 1)  # something to load into
            state = {"o": other.state_dict()}
            dcp.load(state, checkpoint_id=folder)
    if way == "get_optimizer_state_dict":
        texts = told(set_optimizer_state_dict, twin, other, state["o"])
    else:
        texts = told(other.load_state_dict, state["o"])
    same = all(
        torch.equal(optimizer.state[p]["residual"], other.state[q]["residual"])
        for p, q in zip(model.parameters(), again.parameters(), strict=True)
        if "residual" in optimizer.state[p]
    )
    return texts, other.position, same


@pytest.mark.parametrize("way", ["get_optimizer_state_dict", "state_dict"])
def test_torch_distributed_checkpoint_is_noticed_and_the_position_kept(
    ranks: Pool, tmp_path: Path, way: str
) -> None:
    answers = ranks.run(through_dcp, str(tmp_path / "dcp"), way)
    for texts, position, same in answers:
        assert position == 6
        assert same or texts, "a residual that is not this rank's came without a word"
    assert any(texts for texts, _, _ in answers)
    assert all(
        "engine.save" in text and "PerRankState" in text
        for texts, _, _ in answers
        for text in texts
    )


def through_rank_0(rank: int, size: int, folder: str, what: str) -> list[str]:
    path = Path(folder, "state.pt")
    barrier = torch.distributed.barrier
    if what == "optimizer":
        model, optimizer = made()
        steps(model, optimizer, rank, 6)
        state, fresh = optimizer.state_dict(), made()[1].load_state_dict
    elif what == "engine":
        engine = make_engine(("dgc",), plain=True)
        train(engine, (), 0, 4)
        state, fresh = engine.state_dict(), make_engine(("dgc",), plain=True).load_state_dict
    elif what != "local":  # the optimizer of an engine
        engine = make_engine((what,), plain=True)
        train(engine, (), 0, 5)
        state = engine.optimizer.state_dict()
        other = make_engine((what,), plain=True)
        fresh = other.optimizer.load_state_dict
    else:
        model, optimizer = made()[0], None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.local_sgd(model, optimizer, tw.LocalSGD(5, begin_step=1)) as sync:
            steps(model, optimizer, rank, 3)
            state = sync.state_dict()
        again = made()[0]
        block = tw.local_sgd(
            again, torch.optim.SGD(again.parameters(), lr=0.1), tw.LocalSGD(5, begin_step=1)
        )
        fresh = block.__enter__().load_state_dict
    if rank == 0:
        torch.save(state, path)
    barrier()
    loaded = torch.load(path, weights_only=True)
    if what == "local":
        texts = told(fresh, loaded)
        block.close()
        return texts
    return told(fresh, loaded)


@pytest.mark.parametrize(
    "what", ["optimizer", "engine", "local", "dgc", "localsgd", "adaptive_localsgd"]
)
def test_the_state_of_rank_0_is_not_that_of_others(ranks: Pool, tmp_path: Path, what: str) -> None:
    first, second = ranks.run(through_rank_0, str(tmp_path), what)
    assert first == []
    assert len(second) == 1
    assert "rank 1 of 2 loads the state that rank 0 of 2 saved" in second[0]
    assert "engine.save" in second[0] and "PerRankState" in second[0]


def test_change_of_state_is_noticed() -> None:
    model, optimizer = made()
    steps(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    assert told(made()[1].load_state_dict, state) == []
    entry = next(e for e in state["state"].values() if "residual" in e)
    entry["residual"] = entry["residual"] + 1
    [text] = told(made()[1].load_state_dict, state)
    assert "differs from the saved one" in text


def test_a_position_that_was_lost_is_noticed() -> None:
    model, optimizer = made()
    steps(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    bare = {
        "param_groups": state["param_groups"],
        "state": {
            k: {n: v for n, v in e.items() if n != "provenance"} for k, e in state["state"].items()
        },
    }
    other = made()[1]
    [text] = told(other.load_state_dict, bare)
    assert "no position" in text and "ramp-up" in text


def test_live_state_has_no_provenance_and_torch_loads_the_saved_one(tmp_path: Path) -> None:
    model, optimizer = made()
    steps(model, optimizer, 0, 3)
    torch.save(optimizer.state_dict(), tmp_path / "s.pt")
    other = made()[1]
    other.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=True))
    keys = {key for o in (optimizer, other) for entries in o.state.values() for key in entries}
    assert keys == {"momentum_buffer", "residual"}


# ---- names decide


def residuals(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: optimizer.state[p]["residual"]
        for name, p in model.named_parameters()
        if "residual" in optimizer.state[p]
    }


@pytest.mark.parametrize("kind", ["DGCMomentum", "Adam", "Lamb"])
def test_state_names_decide_its_parameter(kind: str) -> None:
    def both(order: int) -> tuple[nn.Module, Any]:
        model, optimizer = made(order)
        if kind != "DGCMomentum":
            optimizer = getattr(tw.optim, kind)(list(model.named_parameters())[::order], lr=0.1)
        return model, optimizer

    model, optimizer = both(1)
    steps(model, optimizer, 0, 4)
    again, other = both(-1)
    other.load_state_dict(optimizer.state_dict())
    twins = dict(again.named_parameters())
    for name, param in model.named_parameters():
        ours, theirs = optimizer.state[param], other.state[twins[name]]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    assert other.param_groups[0]["param_names"] == list(twins)[::-1]
    steps(again, other, 0, 1)


def test_other_names_are_an_error_that_names_one() -> None:
    model, optimizer = made()
    steps(model, optimizer, 0, 2)
    other = nn.ModuleDict({"net": made()[0]})
    mine = tw.optim.DGCMomentum(other.named_parameters(), lr=0.1, min_numel=16)
    with pytest.raises(ValueError, match=r"net\.0\.(weight|bias), which no group of the state has"):
        mine.load_state_dict(optimizer.state_dict())
    wrapped = [(f"module.{name}", p) for name, p in made()[0].named_parameters()]
    tw.optim.DGCMomentum(wrapped, lr=0.1, min_numel=16).load_state_dict(optimizer.state_dict())


def test_without_names_shapes_tell() -> None:
    model, optimizer = made(named=False)
    steps(model, optimizer, 0, 2)
    with pytest.raises(ValueError, match=r"shape"):
        made(-1, named=False)[1].load_state_dict(optimizer.state_dict())
