"""Corners of local updates: what is applied early, what is averaged, what is left out."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import Averager
from tests.local.test_laws import (
    Bag,
    bag,
    net,
    one_step,
    sgd,
    start_values,
    values,
)
from tests.ranks import Pool
from tests.toys import descend, engine_of
from thinwire.errors import Mismatch


@pytest.mark.parametrize(
    ("config", "steps", "averagings"),
    [
        (tw.LocalSGD(2), 3, 2),  # after 1 and 3; nothing is left for the end
        (tw.LocalSGD(2), 4, 3),
        (tw.LocalSGD(2, begin_step=3), 3, 3),
        (tw.LocalSGD(4, fragments=2), 3, 3),  # after 1, a part after 3, and the whole at the end
        (tw.LocalSGD(4, delay=2), 5, 3),  # after 1, one on its way after 5, and the whole
        (tw.LocalSGD(4), 0, 0),
    ],
)
def test_the_last_averaging_is_made_where_something_is_left(
    config: Any, steps: int, averagings: int
) -> None:
    model, optimizer = bag()
    with tw.local_sgd(model, optimizer, config) as sync:
        assert sync.stats()["bytes_sent"] == 0, "what it takes to start does not count"
        for step in range(1, steps + 1):
            one_step(model, optimizer, step)
    assert sync.stats()["averagings"] == averagings


def test_leaving_by_an_error_averages_nothing_and_lets_go() -> None:
    model, optimizer = bag()
    with pytest.raises(KeyError), tw.local_sgd(model, optimizer, tw.LocalSGD(4, delay=2)) as sync:
        for step in range(1, 6):
            one_step(model, optimizer, step)
        assert sync.pending is not None
        raise KeyError
    assert sync.stats()["averagings"] == 1
    assert sync.pending is None


def test_a_loss_after_the_last_step_is_nobodys() -> None:
    model, optimizer = bag()
    with tw.local_sgd(model, optimizer, tw.AdaptiveLocalSGD(4, begin_step=0)) as sync:
        sync.observe(1.0)
        one_step(model, optimizer)
        sync.observe(float("inf"))
    assert sync.stats()["averagings"] == 1


def test_where_every_loss_was_dropped_the_interval_stays() -> None:
    model, optimizer = bag()
    with tw.local_sgd(model, optimizer, tw.AdaptiveLocalSGD(3, begin_step=0)) as sync:
        for step in range(1, 7):
            sync.observe(float("nan") if step in {1, 3} else 1.0 + step)
            if step in {1, 3}:
                sync.skip_step()
            else:
                one_step(model, optimizer, step)
            # ceil(sqrt(7 / 3) * 3), from the loss of step 2
            assert sync.k_steps == (3 if step < 6 else 5)
            assert sync.synced == (step in {3, 6})


def test_the_rate_is_the_one_that_the_optimizer_names() -> None:
    """`get_lr` passes over a group with a rate of its own."""
    model = Bag()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 5.0}, {"params": others}]
    optimizer = tw.optim.SGD(groups, lr=tw.schedules.PiecewiseConstant([2], [0.4, 0.1]))
    with tw.local_sgd(model, optimizer, tw.AdaptiveLocalSGD(2, begin_step=0)) as sync:
        for step in range(1, 5):
            sync.observe(1.0)
            one_step(model, optimizer, step)
    assert sync.k_steps == 4  # ceil(sqrt(0.4 / 0.1) * 2)


class Rememberer(torch.optim.SGD):
    """Keeps state of several kinds."""

    def remember(self, rank: int) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] |= {
                    "like": torch.full_like(p, rank),
                    "step": torch.full_like(p, rank),
                    "row": torch.full((2,), float(rank)),
                    "marks": torch.full(p.shape, rank),
                }


def averaged_state(rank: int, size: int) -> list[dict[str, float]]:
    model = Bag()
    optimizer = Rememberer(model.parameters(), lr=0.1)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(1, average_state=True)):
        optimizer.remember(2 * rank)
        one_step(model, optimizer)
    return [
        {key: float(value.double().mean()) for key, value in optimizer.state[p].items()}
        for p in model.parameters()
    ]


def test_only_state_like_a_parameter_is_averaged(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.run(averaged_state)):
        for state in found:
            assert state == {
                "like": 1.0,
                "step": 2.0 * rank,
                "row": 2.0 * rank,
                "marks": 2.0 * rank,
            }


def narrow(rank: int, size: int, options: dict[str, Any]) -> bool:
    model = Bag(dtype=torch.bfloat16)
    optimizer = sgd(model)
    same = True
    with tw.local_sgd(model, optimizer, tw.LocalSGD(2, **options)) as sync:
        for step in range(1, 6):
            one_step(model, optimizer, step, rank)
            if sync.synced:
                anchors = sync.state_dict()["anchors"]
                same = same and all(
                    torch.equal(anchors[n].bfloat16(), p) for n, p in model.named_parameters()
                )
    return same


@pytest.mark.parametrize("options", [{}, {"outer_lr": 0.7}, {"compression": tw.Sparse(0.5)}])
def test_a_parameter_is_its_anchor_rounded(ranks: Pool, options: dict[str, Any]) -> None:
    """S <- p after rounding too: it is no change that the next averaging would undo."""
    assert ranks.run(narrow, options) == [True, True]


@pytest.mark.parametrize("make", [torch.optim.SGD, tw.optim.SGD])
def test_a_closure_may_observe_the_loss(make: Any) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=0.1)
    with tw.local_sgd(model, optimizer, tw.AdaptiveLocalSGD(2, begin_step=0)) as sync:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in model.parameters())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            if sync.step < 3:
                sync.observe(loss)
            return loss

        for _ in range(2):
            assert isinstance(optimizer.step(closure), torch.Tensor)
        optimizer.step(closure=closure)
        assert sync.step == 3
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="step 4 has no loss"):
            optimizer.step(closure)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        sync.observe(1.0)
        optimizer.step()


class WithTables(nn.Module):
    """A causal mask and a table that nobody changes, and a running mean."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -torch.inf), 1))
        self.register_buffer("unknown", torch.tensor([1.0, torch.nan]))
        self.register_buffer("table", 1 + torch.rand(1000))
        self.register_buffer("mean", torch.zeros(4))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        self.mean += self.rank + 1
        return self.linear(x)


def with_tables(rank: int, size: int, delay: int, spoil: bool) -> tuple[bool, list[float], float]:
    model = WithTables(rank)
    table, mask = model.table.clone(), model.mask.clone()
    optimizer = sgd(model)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(4, delay=delay)) as sync:
        for step in range(12):
            if spoil and step == 6 and rank == 1:
                model.mean[0] = torch.nan
            descend(optimizer, model(torch.ones(3, 4) + rank).square().mean())
    same = torch.equal(model.table, table) and torch.equal(model.mask, mask)
    return same, model.mean.tolist(), sync.stats()["bytes_sent"]


@pytest.mark.parametrize("delay", [0, 2])
def test_buffers_that_nobody_changes_are_neither_sent_nor_refused(ranks: Pool, delay: int) -> None:
    """The mean of three equal float32 numbers is not always that number."""
    found = ranks.run(with_tables, delay, False, size=3)
    for same, mean, nbytes in found:
        assert same
        # what moved while a mean was on its way is overwritten by it
        assert mean == pytest.approx([16.0 if delay else 24.0] * 4)
        assert nbytes < 4 * 1000
    assert found[0][1] == found[2][1]


def test_buffer_that_turned_nan_is_refused(ranks: Pool) -> None:
    ranks.raise_alike("ThinwireError", "buffer mean is not finite", with_tables, 0, True)


def test_one_bad_loss_is_one_bad_averaging() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    refused = []
    with tw.local_sgd(model, optimizer, tw.AdaptiveLocalSGD(2, begin_step=0)) as sync:
        for step in range(1, 8):
            model.weight.grad = torch.ones(1, 4)
            sync.observe(float("nan") if step == 2 else 1.0)
            try:
                optimizer.step()
            except tw.errors.ThinwireError:
                refused.append(step)
    assert refused == [2]


def test_a_round_by_time_without_a_step_leaves_no_plan() -> None:
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    plan = tw.plan(params="1M", step_seconds=1.0)["dense"]
    config = tw.LocalSGD(4, begin_step=0, round_seconds=100.0)
    with tw.local_sgd(model, optimizer, config, plan=plan) as sync:
        for _ in range(9):
            model.weight.grad = torch.ones(1, 4)
            optimizer.step()
        sync.end_round()
        sync.end_round()
        assert sync.step == 9


@pytest.mark.parametrize("by_time", [False, True])
def test_failed_averaging_counts_steps_once(by_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tw.LocalSGD(2, begin_step=0, round_seconds=1e6 if by_time else None)
    engine = engine_of(nn.Linear(4, 1), localsgd=config)
    x, y = torch.ones(3, 4), torch.ones(3, 1)
    vote, failures = Averager._vote, iter([True])

    def failing(self: Averager, *about: Any) -> Any:
        if next(failures, False):
            raise tw.errors.PayloadCorrupt("said so by the test")
        return vote(self, *about)

    monkeypatch.setattr(Averager, "_vote", failing)
    engine.train_step(x, y)
    with pytest.raises(tw.errors.PayloadCorrupt):
        engine.train_step(x, y)
    assert engine.step == 2
    for _ in range(2):
        engine.train_step(x, y)
    assert engine.step == 4
    assert engine.sync is not None
    engine.flush()
    assert engine.sync.step == 4
    engine.close()


class Watching(nn.Module):
    """A layer, a buffer that shows one row three times, and a teacher that does not train."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("row", torch.randn(1, 4).expand(3, 4))
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def buffers_after_flush(rank: int, size: int, config: Any, steps: int) -> list[list[Tensor]]:
    """Before `flush` and after it, of a model whose statistics a rank computes anew."""
    model = Watching(rank)
    engine = engine_of(model, localsgd=config)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        engine.train_step(x, torch.zeros(8, 4))
    engine.flush()
    kept = [tensor.clone() for tensor in model.state_dict().values()]
    loader = [torch.randn(8, 4, generator=generator) for _ in range(3)]
    torch.optim.swa_utils.update_bn(loader, model)
    own = model.norm.running_mean.clone()
    engine.flush()
    engine.flush()
    return [kept, list(model.state_dict().values()), [own, model.norm.running_mean]]


@pytest.mark.parametrize(
    "config",
    [
        tw.LocalSGD(2, begin_step=0, outer_lr=0.7, outer_momentum=0.9),
        tw.LocalSGD(2, begin_step=0, compression=tw.Quantized(4), delay=1),
        tw.LocalSGD(2, begin_step=0, compression=tw.Sparse(0.5), fragments=2),
    ],
    ids=["outer momentum", "quantized", "fragments"],
)
def test_flush_averages_buffers_that_changed_without_a_step(ranks: Pool, config: Any) -> None:
    found = ranks.run(buffers_after_flush, config, 4, size=2)
    names = list(Watching(0).state_dict())
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for kept, now, _ in found:
        for name, before, after in zip(names, kept, now, strict=True):
            if name not in statistics:  # no step was made, so no outer step either
                assert torch.equal(before, after), name
    (_, first, (own_0, mean_0)), (_, second, (own_1, mean_1)) = found
    assert not torch.equal(own_0, own_1)
    torch.testing.assert_close(mean_0, (own_0 + own_1) / 2)
    assert torch.equal(mean_0, mean_1)
    assert all(map(torch.equal, first, second))


def moved_teacher(rank: int, size: int, when_synced: bool) -> list[str]:
    model = Watching(0)
    optimizer = sgd(model)
    try:
        config = tw.LocalSGD(2, begin_step=0)
        with tw.local_sgd(model, optimizer, config, digest_every=1) as sync:
            for step in range(6):
                generator = torch.Generator().manual_seed(10 * step + rank)
                descend(optimizer, model(torch.randn(8, 4, generator=generator)).square().mean())
                if sync.synced or not when_synced:
                    with torch.no_grad():
                        model.teacher.weight.lerp_(model.layer.weight, 0.1)
    except tw.errors.Diverged as error:
        return [str(error)]
    return []


def test_frozen_parameter_that_follows_others_is_reported_a_remedy(ranks: Pool) -> None:
    for (text,) in ranks.run(moved_teacher, False, size=2):
        assert "frozen parameter teacher.weight" in text
        assert "make it a buffer" in text
    assert ranks.run(moved_teacher, True, size=2) == [[], []]


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.8, False), (0.8, True)], ids=str
)
def test_applied_share_of_changes_of_one_size_is_known(momentum: float, nesterov: bool) -> None:
    """Of one rank, whose change is the same after every averaging."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    model = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = tw.LocalSGD(
        1, begin_step=0, outer_lr=0.5, outer_momentum=momentum, outer_nesterov=nesterov
    )
    with tw.local_sgd(model, optimizer, config) as sync:
        assert sync.stats()["applied_share"] == 1
        for step in range(1, 8):
            parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            share = sync.stats()["applied_share"]
            assert share == pytest.approx(parameter[0].item() / step, rel=1e-12)


@pytest.mark.parametrize("engine", [False, True])
def test_a_model_without_shapes_is_refused_by_name(engine: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(3))
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet.*Run one"):
        if engine:
            engine_of(model)
        else:
            with tw.local_sgd(model, optimizer, tw.LocalSGD(2)):
                pass


def test_buffer_shaped_later_is_named_with_its_earlier_shape() -> None:
    model = net()
    model.register_buffer("seen", torch.empty(0))
    optimizer = sgd(model)
    with (
        pytest.raises(
            tw.errors.ThinwireError, match=r"buffer seen was float32 \[0\].*one forward pass"
        ),
        tw.local_sgd(model, optimizer, tw.LocalSGD(1, begin_step=0)),
    ):
        model.seen = torch.zeros(5)
        optimizer.step()


@pytest.mark.parametrize(
    "config",
    [tw.LocalSGD(16, begin_step=0), tw.AdaptiveLocalSGD(16, begin_step=0)],
    ids=["fixed", "adaptive"],
)
def test_a_parameter_frozen_later_is_refused_within_eight_steps(config: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    field = "localsgd" if isinstance(config, tw.LocalSGD) else "adaptive_localsgd"
    engine = engine_of(model, **{field: config})
    x, y = torch.ones(2, 3), torch.zeros(2, 1)
    engine.train_step(x, y)
    model[0].requires_grad_(False)
    before = values(model[0])
    with pytest.raises(RuntimeError, match=r"0\.\w+ was frozen after prepare.*flush"):
        for _ in range(8):
            engine.train_step(x, y)
    assert all(np.array_equal(before[name], p) for name, p in values(model[0]).items())
    model[0].requires_grad_(True)
    engine.train_step(x, y)
    engine.flush()
    engine.close()


# ---- parameters that somebody else writes

LOSSY = {
    "1 bit": tw.LocalSGD(3, compression=tw.Quantized(1)),
    "sparse": tw.LocalSGD(3, compression=tw.Sparse(0.9)),
    "outer": tw.LocalSGD(3, outer_lr=0.5, outer_momentum=0.9),
    "delay": tw.LocalSGD(3, delay=1, compression=tw.Quantized(1)),
}


def other_weights() -> dict[str, Tensor]:
    return {name: value + 100 for name, value in start_values().items()}


def load_between(rank: int, size: int, config: Any, after: int, anew: bool) -> float:
    """How far six steps of nearly nothing, after other weights were loaded, move at most."""
    model, optimizer = bag()
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, after + 1):
            one_step(model, optimizer, step, rank)
        if after:
            sync.flush()
        model.load_state_dict(other_weights())
        if anew:
            sync.start_anew()
        for group in optimizer.param_groups:
            group["lr"] = 1e-9
        for step in range(1, 7):
            one_step(model, optimizer, step, rank)
        sync.flush()
        sync.require_equal()
    loaded = other_weights()
    return max(float((p.detach() - loaded[n]).abs().max()) for n, p in model.named_parameters())


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("name", LOSSY)
def test_loaded_weights_are_the_start_of_training(ranks: Pool, name: str, after: int) -> None:
    """Also in a run, which begins anew: nothing that was kept before is added to them."""
    assert max(ranks.run(load_between, LOSSY[name], after, after > 0, size=2)) < 1e-6


def clamped(rank: int, size: int) -> tuple[float, float]:
    """Parameters held within bounds after each step: what is kept stays, and ranks stay equal."""
    model, optimizer = bag()
    with tw.local_sgd(model, optimizer, tw.LocalSGD(3, compression=tw.Quantized(1))) as sync:
        for step in range(1, 13):
            one_step(model, optimizer, step, rank)
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.5, 0.5)
        kept = sum(float(e.abs().sum()) for e in sync.state_dict()["residuals"].values())
        sync.flush()
        sync.require_equal()
    return kept, max(float(p.detach().abs().max()) for p in model.parameters())


def test_parameters_may_be_held_within_bounds_after_every_step(ranks: Pool) -> None:
    for kept, largest in ranks.run(clamped, size=2):
        assert kept > 0
        assert largest < 1


def load_on(rank: int, size: int, which: list[int], shift: float) -> str:
    model, optimizer = bag()
    sync = tw.local_sgd(model, optimizer, tw.LocalSGD(3, compression=tw.Quantized(1)))
    with pytest.raises(Mismatch) as caught, sync:
        if rank in which:
            model.load_state_dict({n: v + shift * rank for n, v in other_weights().items()})
        for step in range(1, 4):
            one_step(model, optimizer, step, rank)
    return str(caught.value)


@pytest.mark.parametrize(("which", "shift", "says"), [([1], 0.0, "some"), ([0, 1], 1.0, "0 and 1")])
def test_loading_on_some_is_refused(ranks: Pool, which: list[int], shift: float, says: str) -> None:
    for text in ranks.run(load_on, which, shift, size=2):
        assert f"{says}" in text
        assert "Load or change weights in the same way on all ranks" in text


def test_fresh_start_waits_for_pending_results() -> None:
    model, optimizer = bag()
    config = tw.LocalSGD(3, delay=1, compression=tw.Quantized(1))
    with tw.local_sgd(model, optimizer, config) as sync:
        step = 0
        while not (sync.synced and step > 1):  # a measured one travels
            step += 1
            one_step(model, optimizer, step)
        with pytest.raises(RuntimeError, match=r"call flush\(\) before loading weights"):
            sync.start_anew()
        sync.flush()
        sync.start_anew()


def evaluated(rank: int, size: int, where: str) -> list[list[str]]:
    """What is said of each forward pass in eval mode, by whoever makes one."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    optimizer, x = sgd(model), torch.full((2, 4), float(rank))
    if where == "engine":
        engine = engine_of(model, optimizer=optimizer, localsgd=tw.LocalSGD(2))
        sync = engine.sync
        assert sync is not None
        step = lambda: engine.minimize(model(x).sum())  # noqa: E731
    else:
        sync = tw.local_sgd(model, optimizer, tw.LocalSGD(2)).__enter__()
        step = lambda: (model(x).sum().backward(), optimizer.step())  # noqa: E731

    def told(*, training: bool = False, grad: bool = False) -> list[str]:
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(grad):
            warnings.simplefilter("always")
            copy.deepcopy(model).eval()(x)  # an average of the weights, say
            model.train(training)(x)
            model.train()
        assert all(each.filename == __file__ for each in caught)
        return [str(each.message) for each in caught]

    found = [told()]
    step()
    found.append(told())  # averaged just now
    step()
    found += [told(training=True), told(grad=True)]
    found += [told(), told()] if rank == 0 else [[], []]
    sync.flush()
    found.append(told())
    sync.close()
    assert not model._forward_pre_hooks
    return found


@pytest.mark.parametrize("where", ["block", "engine"])
def test_evaluation_between_two_averagings_is_reported_once(ranks: Pool, where: str) -> None:
    first, second = ranks.run(evaluated, where)
    assert second == [[]] * 7
    assert [len(texts) for texts in first] == [0, 0, 0, 0, 1, 0, 0]
    assert "flush()" in first[4][0] and "this rank's own" in first[4][0]
