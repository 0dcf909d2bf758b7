"""The optimizer given to `prepare` trains itself: its groups, its schedulers, its state."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import FIELDS, batch, digest, flat, make_model, make_optimizer
from tests.toys import engine_of

cross_entropy = nn.functional.cross_entropy
Optimizer = torch.optim.Optimizer

DGC = {"dgc": tw.DGC(sparsity=(0.75,), min_numel=64, value_bits=8)}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dgc with SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), DGC),
    "dgc with our SGD": (lambda p: tw.optim.SGD(p, lr=0.05, momentum=0.9), DGC),
    "dgc with AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), DGC),
    "lars": (
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
        {"lars": tw.LARS(lars_coeff=0.02)},
    ),
    "lamb": (lambda p: torch.optim.AdamW(p, lr=0.02), {"lamb": tw.LAMB()}),
    "no field": (lambda p: torch.optim.AdamW(p, lr=0.01), {}),
    "merge": (lambda p: torch.optim.AdamW(p, lr=0.01), {"gradient_merge": tw.GradientMerge(2)}),
    "local": (lambda p: torch.optim.AdamW(p, lr=0.01), {"localsgd": tw.LocalSGD(2)}),
    "dgc with Muon": (lambda p: tw.optim.Muon(p, lr=0.01), DGC),
    "local with Muon": (lambda p: tw.optim.Muon(p, lr=0.01), {"localsgd": tw.LocalSGD(2)}),
    "local with dgc": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        {"localsgd": tw.LocalSGD(2), **DGC},
    ),
}
ALL = pytest.mark.parametrize("case", CASES)


def prepared(case: str, **told: Any) -> tuple[nn.Module, Optimizer, Any]:
    make, fields = CASES[case]
    model = make_model(plain=True)
    optimizer = make(model.named_parameters())
    strategy = tw.DistributedStrategy(**fields)
    return model, optimizer, strategy.prepare(model, optimizer, cross_entropy, **told)


def updates(engine: Any, first: int = 0, count: int = 1, part: int = 0) -> None:
    """Whole updates, however many microsteps they take."""
    before = engine.step
    step = first
    while engine.step < before + count:
        engine.train_step(*batch(step, part))
        step += 1


# ---- the same object


@ALL
def test_it_is_the_object_that_was_given(case: str) -> None:
    _, optimizer, engine = prepared(case)
    assert engine.optimizer is optimizer
    updates(engine, count=2)
    assert optimizer.state_dict()["state"]
    assert str(optimizer.state_dict()) == str(engine.optimizer.state_dict())
    saved, given = engine.state_dict(), optimizer.state_dict()
    given.pop("provenance", None)  # where ranks differ
    residuals = saved["exchange"].get("residuals", {})
    compressed = [tuple(residual.shape) for residual in residuals.values()]
    for key, entries in given["state"].items() if "SGD" in case else ():
        # what differs between ranks is in the optimizer too, and saved once
        beside = {} if "residual" in entries else entries
        assert str(saved["optimizer"]["state"][key]) == str(beside)
        assert ("residual" in entries) == (tuple(entries["momentum_buffer"].shape) in compressed)
    if not ("SGD" in case and compressed):
        assert str(given) == str(saved["optimizer"])


@ALL
def test_a_rate_set_in_its_groups_is_the_rate_of_the_next_update(case: str) -> None:
    model, optimizer, engine = prepared(case)
    group = optimizer.param_groups[0]
    updates(engine)
    group["lr"] = 0.0
    if case == "lars":
        group["momentum"] = 0.0  # its velocity contains the rates of before
    before = flat(model)
    updates(engine, 2)
    assert flat(model) == before
    group["lr"] = 0.01
    updates(engine, 4)
    assert flat(model) != before


def by_hand(case: str, make: Any, early: bool) -> tuple[list[float], list[float]]:
    """The rates that a scheduler gives the engine, and those that it gives plain torch."""
    parts = []
    for with_engine in (True, False):
        maker, fields = CASES[case]
        model, engine = make_model(plain=True), None
        optimizer = maker(model.named_parameters())
        scheduler = make(optimizer) if early else None
        if with_engine:
            engine = engine_of(model, cross_entropy, optimizer=optimizer, **fields)
        scheduler = scheduler or make(optimizer)
        rates = []
        for step in range(6):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            if engine is not None:
                updates(engine, 2 * step)
            else:
                cross_entropy(model(batch(step, 0)[0]), batch(step, 0)[1]).backward()
                optimizer.step()
            scheduler.step()
        parts.append(rates)
    return parts[0], parts[1]


SCHEDULERS = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.5**step),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 5, eta_min=1e-4),
    "SequentialLR": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda _: 0.1), CosineAnnealingLR(o, 4)], milestones=[2]
    ),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=8),
}


@pytest.mark.parametrize("early", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("case", ["dgc with SGD", "lamb", "dgc with AdamW", "merge", "local"])
def test_schedulers_drive_it(case: str, name: str, early: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a scheduler that steps before its optimizer
        got, expected = by_hand(case, SCHEDULERS[name], early)
    assert got == expected
    assert len(set(got)) > 2


def test_a_dropped_step_is_no_reason_for_a_warning_of_the_scheduler() -> None:
    amp = tw.AMP("bfloat16", tw.DynamicLossScale(init_loss_scale=2.0**10))
    engine = engine_of(make_model(plain=True), cross_entropy, amp=amp)
    scheduler = LambdaLR(engine.optimizer, lambda step: 1.0)
    x, y = batch(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step(x * float("inf"), y)
        scheduler.step()
    assert engine.stats()["dropped_steps"] == 1


@pytest.mark.parametrize("case", ["dgc with SGD", "dgc with our SGD", "lars", "lamb"])
def test_hooks_that_were_there_go_on(case: str) -> None:
    make, fields = CASES[case]
    model = make_model(plain=True)
    optimizer = make(model.named_parameters())
    seen: list[str] = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("state_dict"))
    engine = tw.DistributedStrategy(**fields).prepare(model, optimizer, cross_entropy)
    seen.clear()
    updates(engine, count=2)
    assert seen == ["step", "step"]
    optimizer.state_dict()
    assert seen[2:] == ["state_dict"]
    handle.remove()
    updates(engine)
    assert seen[3:] == []


def test_rate_that_is_a_tensor_goes_on_inplace() -> None:
    model = make_model(plain=True)
    rate = torch.tensor(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    engine = tw.DistributedStrategy(**DGC).prepare(model, optimizer, cross_entropy)
    rate.zero_()
    before = flat(model)
    updates(engine)
    assert flat(model) == before


# ---- a step by hand


@ALL
def test_its_step_by_hand_is_an_error_that_says_a_remedy(case: str) -> None:
    model, optimizer, engine = prepared(case)
    updates(engine, count=2)
    before, saved = flat(model), str(engine.state_dict())
    for call in (optimizer.step, lambda: optimizer.step(lambda: torch.zeros(()))):
        with pytest.raises(RuntimeError, match=r"engine\.train_step.*engine\.minimize.*[Rr]emove"):
            call()
    assert flat(model) == before
    assert str(engine.state_dict()) == saved
    updates(engine, 4)
    assert flat(model) != before


@ALL
def test_a_step_through_a_grad_scaler_is_an_error_too(case: str) -> None:
    _, optimizer, engine = prepared(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    updates(engine)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"engine\.train_step"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")
    updates(engine, 2)


# ---- failure and end


def everything(optimizer: Optimizer) -> dict[str, Any]:
    groups = [dict(group) for group in optimizer.param_groups]
    return {
        "kind": type(optimizer),
        "dict": dict(vars(optimizer)),
        "groups": groups,
        "state": dict(optimizer.state),
    }


def fails(rank: int, size: int, case: str, how: str) -> tuple[bool, bool, str]:
    """Whether the object is as before, and whether it trains as if nothing had been."""
    make, fields = CASES[case]
    model = make_model(plain=True)
    optimizer = make(model.named_parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    twin = make_model(plain=True)
    other = make(twin.named_parameters())
    LambdaLR(other, lambda step: 0.5)
    if how == "settings differ":
        optimizer.param_groups[0]["lr"] *= 1 + rank
    if how == "one rank cannot" and rank == 0:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    before, text = everything(optimizer), ""
    try:
        tw.DistributedStrategy(**fields).prepare(model, optimizer, cross_entropy)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    alike = everything(optimizer) == before
    if how == "settings differ":
        optimizer.param_groups[0]["lr"] /= 1 + rank
    for net, one in ((model, optimizer), (twin, other)):
        for step in range(2):
            one.zero_grad()
            cross_entropy(net(batch(step, 0)[0]), batch(step, 0)[1]).backward()
            one.step()
    scheduler.step()
    return alike, flat(model) == flat(twin), text


@pytest.mark.parametrize("how", ["settings differ", "one rank cannot"])
@pytest.mark.parametrize("case", ["dgc with SGD", "lamb", "local with dgc", "no field"])
def test_where_prepare_fails_the_object_is_as_before(case: str, how: str, ranks: Pool) -> None:
    for alike, same, text in ranks.run(fails, case, how):
        assert text, "it should have failed"
        assert alike
        assert same


def test_where_combining_fails_the_object_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.api import prepare as module

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(module, "MovingBuffers", broken)
    make, fields = CASES["dgc with SGD"]
    model = make_model(plain=True)
    optimizer = make(model.named_parameters())
    before = everything(optimizer)
    fields = {**fields, "recompute": tw.Recompute(("1",))}
    with pytest.raises(OSError, match="memory"):
        engine_of(model, cross_entropy, optimizer=optimizer, **fields)
    assert everything(optimizer) == before
    assert "forward" not in vars(model[1])
    optimizer.step()


@ALL
def test_a_closed_engine_gives_it_back(case: str) -> None:
    model, optimizer, engine = prepared(case)
    updates(engine, count=2)
    engine.close()
    before = flat(model)
    model(batch(0, 0)[0]).sum().backward()
    optimizer.step()
    assert flat(model) != before
    again = tw.DistributedStrategy(**CASES[case][1]).prepare(model, optimizer, cross_entropy)
    assert again.optimizer is optimizer
    updates(again, count=2)
    again.close()


def trained_by_engines(kind: Any, counts: list[int]) -> list[float]:
    """Parameters after as many updates by one engine after another, with one optimizer."""
    model, step = make_model(plain=True), 0
    optimizer = kind(model.named_parameters(), lr=0.05, momentum=0.9)
    ramp = {"rampup_begin_step": 1, "rampup_step": 4, "sparsity": (0.5, 0.9)}
    strategy = tw.DistributedStrategy(dgc=tw.DGC(min_numel=64, value_bits=8, **ramp))
    for count in counts:
        engine = strategy.prepare(model, optimizer, cross_entropy)
        for _ in range(count):
            engine.train_step(*batch(step, 0))
            step += 1
        engine.close()
    assert any("residual" in entries for entries in optimizer.state.values())
    return flat(model)


@pytest.mark.parametrize("kind", [torch.optim.SGD, tw.optim.SGD], ids=["torch", "ours"])
def test_second_engine_with_a_used_sgd_goes_on_with_momentum_residual_and_ramp(kind: Any) -> None:
    whole, parts = (trained_by_engines(kind, counts) for counts in ([7], [3, 4]))
    assert whole == parts


COUNTS = ("dropped_steps", "bytes_sent", "bytes_received", "bytes_between_nodes")


def one_engine_after_another(
    rank: int, size: int, node_size: int, folder: str
) -> list[dict[str, float]]:
    """What two engines with one optimizer count, the first one with a dropped update."""
    dgc = tw.DGC(sparsity=(0.75,), min_numel=64, value_bits=8, node_size=node_size)
    model = make_model(plain=True)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    told = []
    for count in (3, 4):
        engine = engine_of(model, cross_entropy, optimizer=optimizer, dgc=dgc)
        if count == 3:
            x, y = batch(9, rank)
            with warnings.catch_warnings(action="ignore"):
                engine.train_step(x * float("nan"), y)
        updates(engine, count=count, part=rank)
        told.append(engine.stats())
        if count == 4:
            engine.save(folder)
            engine.load(folder)
            told.append(engine.stats())
        engine.close()
    engine = engine_of(make_model(plain=True), cross_entropy, lr=0.05, momentum=0.9, dgc=dgc)
    engine.load(folder)
    told.append(engine.stats())
    engine.close()
    return [{key: stats[key] for key in COUNTS} for stats in told]


@pytest.mark.parametrize("size", [2, 4])
def test_a_second_engine_counts_from_0(size: int, ranks: Pool, tmp_path: Path) -> None:
    """Of four ranks two are a node each: one of both sends to the other node."""
    for first, second, again, resumed in ranks.run(
        one_engine_after_another, size // 2, str(tmp_path), size=size
    ):
        assert [each["dropped_steps"] for each in (first, second)] == [1, 0]
        # the first one compared settings besides, and exchanged four times too
        for key in ("bytes_sent", "bytes_received", "bytes_between_nodes"):
            assert second[key] <= first[key]
        assert second["bytes_sent"] > 0
        assert again == second
        assert resumed == second


def test_an_engine_takes_no_optimizer_of_another_one() -> None:
    model, optimizer, engine = prepared("dgc with AdamW")
    with pytest.raises(RuntimeError, match=r"engine\.close\(\)"):
        tw.DistributedStrategy().prepare(model, optimizer, cross_entropy)
    updates(engine)


@pytest.mark.parametrize("name", [None, "dgc", "localsgd", "recompute"])
def test_a_model_belongs_to_one_engine_until_that_is_closed(name: str | None) -> None:
    strategy = tw.DistributedStrategy(**({} if name is None else {name: FIELDS[name]}))
    model = make_model(plain=True)

    def prepared() -> tw.Engine:
        return strategy.prepare(model, make_optimizer(model, ()), nn.functional.cross_entropy)

    engine = prepared()
    engine.train_step(*batch(0, 0))
    before = digest(engine)
    with pytest.raises(RuntimeError, match=r"already trains this model.*engine\.close\(\)"):
        prepared()
    assert digest(engine) == before
    engine.train_step(*batch(1, 0))  # the first one is as it was
    engine.close()
    second = prepared()
    second.train_step(*batch(2, 0))
    del second  # one that is gone was given up too
    prepared().train_step(*batch(3, 0))


def test_parameters_that_are_trained_belong_to_one_engine_whatever_is_around_them() -> None:
    shared, head = nn.Linear(8, 16), nn.Linear(16, 4)
    models = [nn.Sequential(shared, nn.Tanh(), head), nn.Sequential(shared, nn.Tanh())]
    strategy = tw.DistributedStrategy()
    first = strategy.prepare(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="already trains this model"):
        strategy.prepare(models[1], torch.optim.SGD(models[1].parameters(), lr=0.1))
    first.close()
    for param in shared.parameters():  # frozen, it is nobody's
        param.requires_grad_(False)
    other = nn.Sequential(shared, nn.Tanh(), nn.Linear(16, 4))
    for engine in [engine_of(model) for model in (models[0], other)]:
        engine.train_step(torch.ones(2, 8), torch.ones(2, 4))


@ALL
def test_copies_of_it_train_on_alike(case: str) -> None:
    model, optimizer, engine = prepared(case)
    LambdaLR(optimizer, lambda step: 0.5)
    updates(engine, count=2)
    copied = copy.deepcopy((model, optimizer))
    unpickled = pickle.loads(pickle.dumps((model, optimizer)))
    third = make_model(plain=True)
    third.load_state_dict(model.state_dict())
    fresh = type(optimizer)(list(third.named_parameters()), lr=1.0)
    fresh.load_state_dict(optimizer.state_dict())
    results = []
    for net, one in (copied, unpickled, (third, fresh)):
        one.zero_grad()
        cross_entropy(net(batch(9, 0)[0]), batch(9, 0)[1]).backward()
        one.step()
        results.append(flat(net))
    assert results[0] == results[1] == results[2]


def test_a_frozen_parameter_with_an_old_gradient_stays_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    engine = engine_of(model)
    for _ in range(2):
        engine.train_step(torch.ones(2, 3), torch.ones(2, 1))
    assert torch.equal(model[0].weight, before)


def test_gradients_of_a_merge_under_a_loss_scale_are_unscaled() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    amp = tw.AMP(dtype="bfloat16", loss_scale=tw.FixedLossScale(1024.0))
    engine = engine_of(model, None, lr=0.0, gradient_merge=tw.GradientMerge(2), amp=amp)
    for _ in range(2):
        _, pairs = engine.minimize((model.weight * torch.tensor([1.0, 3.0])).sum())
        assert [grad.tolist() for _, grad in pairs] == [[[1.0, 3.0]]]


def test_a_merged_gradient_stays_wide_where_parameters_are_narrow() -> None:
    model = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    optimizer = tw.optim.Lars(model.parameters(), lr=0.3, momentum=0.0, weight_decay=0.0)
    engine = engine_of(
        model,
        lambda out, _: out.float().sum(),
        optimizer=optimizer,
        gradient_merge=tw.GradientMerge(2),
    )
    total = torch.zeros(16, 16)
    for step in range(2):
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        total += torch.ones(3, 16, dtype=torch.bfloat16).t() @ x
        engine.train_step(x, None)
    assert torch.equal(model.weight.detach(), (-0.3 * (total / 2)).bfloat16())
    assert not torch.equal((total / 2).bfloat16().float(), total / 2)
