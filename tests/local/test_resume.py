"""A run that is stopped between two averagings: what its state holds, and where it is refused."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.api import private
from tests.local.test_laws import net
from tests.ranks import Pool
from tests.toys import descend, engine_of


def rolled_back(rank: int, size: int) -> list[int]:
    """Bytes that exchanges hold, after each time that an averaging was given up on its way."""
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = []
    with tw.local_sgd(model, optimizer, tw.LocalSGD(4, begin_step=0, delay=2)) as sync:
        state = sync.state_dict()
        for _ in range(6):
            for _ in range(5):
                model(torch.full((2, 200), 1.0 + rank)).sum().backward()
                optimizer.step()
            sync.load_state_dict(state)
            held.append(sum(t.nbytes for *_, tensors in private._pending.values() for t in tensors))
    return held


def test_an_averaging_that_is_given_up_is_not_kept(ranks: Pool) -> None:
    model_bytes = 4 * (200 * 200 + 200)
    for held in ranks.run(rolled_back, size=2):
        assert max(held) < 2.5 * model_bytes  # the last one may still be on its way


def open_one(config: tw.LocalSGD | None = None) -> Any:
    model = net()
    return tw.local_sgd(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config or tw.LocalSGD(6)
    )


def test_a_state_is_loaded_inside_the_block() -> None:
    with open_one() as sync:
        state = sync.state_dict()
    with pytest.raises(RuntimeError, match="inside `with"):
        sync.load_state_dict(state)
    with pytest.raises(RuntimeError, match="inside `with"):
        open_one().load_state_dict(state)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    with open_one(tw.LocalSGD(5, compression=tw.Sparse(0.9))) as other:
        foreign = other.state_dict()
    with open_one() as sync:
        good = sync.state_dict()
        bad_shape = {**good, "anchors": {**good["anchors"], "0.weight": torch.zeros(2)}}
        for state, text in [
            (foreign, "residuals, 0.weight has shape"),
            ({**good, "more": 1}, "unknown .'more'"),
            ({}, "missing"),
            (bad_shape, r"anchors, 0.weight has shape \(2,\) in it and \(9, 5\) here"),
        ]:
            with pytest.raises(ValueError, match=text):
                sync.load_state_dict(state)
        again = sync.state_dict()
        assert again["step"] == 0
        assert all(torch.equal(good["anchors"][n], again["anchors"][n]) for n in good["anchors"])


def with_a_longer_begin(rank: int, size: int) -> list[float]:
    """A run, and one that stops with a result on its way, then averages in every step for long."""
    found = []
    for longer in (False, True):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def steps(count: int, model: nn.Linear = model, optimizer: Any = optimizer) -> None:
            for _ in range(count):
                model.weight.grad = torch.full((1, 2), 1.0 + rank)
                optimizer.step()

        with tw.local_sgd(model, optimizer, tw.LocalSGD(8, delay=4)) as sync:
            steps(10)
            state = sync.state_dict()
            if not longer:
                steps(10)
        if longer:
            with tw.local_sgd(model, optimizer, tw.LocalSGD(8, begin_step=15, delay=4)) as sync:
                sync.load_state_dict(state)
                steps(10)
        found.append(model.weight.tolist()[0][0])
    return found


def test_result_on_its_way_is_applied_once_where_a_loaded_run_always_averages(ranks: Pool) -> None:
    assert ranks.run(with_a_longer_begin) == [[-30.0, -30.0]] * 2


def merging(config: Any) -> tw.Engine:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    field = "adaptive_localsgd" if isinstance(config, tw.AdaptiveLocalSGD) else "localsgd"
    fields = {"gradient_merge": tw.GradientMerge(k_steps=4), field: config}

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.mean() + 1e-3 * out.square().mean()

    return engine_of(model, loss_fn, lr=1e-4, **fields)


def intervals_of(engine: tw.Engine, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        engine.train_step(x, torch.full((3,), 1.0 if step % 4 else 100.0))
        found.append(engine.stats()["k_steps"])
    return found


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_the_losses_of_merged_microsteps_are_saved(stop: int, tmp_path: Path) -> None:
    config = tw.AdaptiveLocalSGD(2, begin_step=0)
    with closing(merging(config)) as engine:
        intervals_of(engine, 0, stop)
        engine.save(tmp_path)
        wanted = intervals_of(engine, stop, 24)
        engine.load(tmp_path)  # what was observed since is gone
        assert intervals_of(engine, stop, 24) == wanted
    with closing(merging(config)) as engine:
        engine.load(tmp_path)
        assert intervals_of(engine, stop, 24) == wanted
    with closing(merging(config)) as engine:
        engine.load(tmp_path)
        engine.flush()  # the leftovers of the merge are an update, which needs a loss
        assert engine.step == 2


def test_the_tokens_of_merged_microsteps_are_saved(tmp_path: Path) -> None:
    config = tw.LocalSGD(2, begin_step=0, round_seconds=1e6)
    x, y = torch.ones(3, 4), torch.ones(3)
    found = []
    for loads in (False, True):
        with closing(merging(config)) as engine:
            if loads:
                engine.load(tmp_path)
            else:
                for _ in range(10):  # two updates are a round
                    engine.train_step(x, y, tokens=100)
                engine.save(tmp_path)
            assert engine.sync is not None
            found.append(engine.sync.state_dict())
    assert [state["work"]["now"] for state in found] == [200, 200]


def without_its_state(rank: int, size: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    config = tw.LocalSGD(4, begin_step=0, delay=2, average_state=True)

    with tw.local_sgd(model, optimizer := torch.optim.Adam(model.parameters()), config) as sync:
        for _ in range(5):
            descend(optimizer, (model(torch.randn(3, 4)) - rank).square().mean())
        state = sync.state_dict()
    sync = tw.local_sgd(model, torch.optim.Adam(model.parameters()), config)
    sync.__enter__()
    sync.load_state_dict(state)
    before = model.weight.detach().clone()
    with pytest.raises(tw.errors.ThinwireError, match="load the optimizer's state before") as error:
        sync.flush()
    sync.close()
    return str(error.value), torch.equal(before, model.weight)


def test_a_mean_for_state_that_is_not_there_is_refused_before_anything_moves(ranks: Pool) -> None:
    for text, unmoved in ranks.run(without_its_state):
        assert "state weight exp_avg" in text
        assert unmoved
