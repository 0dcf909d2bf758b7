"""What an engine computes, against plain torch; and what it says when it cannot."""

import contextlib
import copy
import gc
import os
import signal
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.api import Group
from tests.ranks import Lost, Pool
from tests.strategy.training import (
    batch,
    digest,
    make_engine,
    make_model,
    make_optimizer,
    prepared,
    settings,
    train,
)
from tests.toys import engine_of
from thinwire.errors import NonFinite

cross_entropy = nn.functional.cross_entropy
DOUBLE = {"dtype": torch.float64}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def engine_and_ddp(
    rank: int, size: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    engine = make_engine((), dtype=dtype)
    reference = make_model(dtype=dtype)
    ddp = DistributedDataParallel(reference)
    optimizer = make_optimizer(reference, ())
    for step in range(12):
        x, y = batch(step, rank, dtype=dtype)
        torch.manual_seed(step)  # both see the same dropout
        loss = engine.train_step(x, y)
        torch.manual_seed(step)
        expected = cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12 if size > 2 else 0)
    return state_of(engine.model), state_of(reference), rank


@pytest.mark.parametrize(
    ("size", "dtype", "within"), [(2, torch.float32, 0), (4, torch.float64, 1e-13)]
)
def test_no_field_set_is_ddp(size: int, dtype: torch.dtype, within: float, ranks: Pool) -> None:
    """To the last bit on two ranks. DDP copies rank 0's buffers before the next forward pass."""
    for ours, theirs, rank in ranks.run(engine_and_ddp, dtype, size=size):
        for name, value in ours.items():
            if rank == 0 or "running" not in name:
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=within, msg=name)


def dying_after_an_update(rank: int, size: int) -> tuple[str, str, int, bool]:
    """Rank 1 is killed when it has made update 4, before the buffers of rank 0 are copied."""
    engine = make_engine(())
    train(engine, (), 0, 3)
    before = digest(engine)
    if rank == 1:
        engine.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        train(engine, (), 3, 5)
    except tw.errors.ThinwireError as error:
        return type(error).__name__, str(error), engine.step, digest(engine) != before
    return "", "", engine.step, False


@pytest.mark.fault
def test_where_a_rank_dies_in_the_copy_of_buffers_the_update_before_stands(ranks: Pool) -> None:
    first, killed, third = ranks.run(
        dying_after_an_update, size=3, group_timeout_s=8, expect_errors=True
    )
    assert isinstance(killed, Lost)
    for name, text, step, moved in (first, third):
        assert name in ("PeerLost", "PeerStalled")
        # the copy has the bytes of rank 0 alone, so it may end well, and the next update tells
        copying = "parameters, optimizer and counters are updated" in text
        assert copying != ("step 4" in text)
        assert (step, moved) == (4, True)


def damaged_buffers(rank: int, size: int) -> tuple[list[tuple[str, str, int]], bool]:
    """Batch statistics arrive damaged on rank 1 after update 4; both ranks go on all the same."""
    engine = make_engine(())
    train(engine, (), 0, 3)
    plain, told, kept = Group.broadcast_, [], True

    def damaging(self: Group, buffer: Tensor, *, action: str) -> Any:
        pending = plain(self, buffer, action=action)
        if rank == 1 and engine.step == 4:
            pending.wait()
            buffer[buffer.numel() // 2] ^= 4
            return type(pending)(lambda: buffer)
        return pending

    with patch.object(Group, "broadcast_", damaging):
        for step in range(3, 6):
            try:
                train(engine, (), step, step + 1)
            except tw.errors.PayloadCorrupt as error:
                told.append((type(error).__name__, str(error), engine.step))
                if rank == 1 and step == 3:  # nothing like a damaged one
                    kept = all(b.abs().max() < 100 for b in engine.model.buffers())
    return told, kept


@pytest.mark.fault
def test_damaged_batch_statistics_are_not_written_and_all_ranks_hear_of_it(ranks: Pool) -> None:
    (first, _), (second, kept) = ranks.run(damaged_buffers, size=2)
    assert kept
    assert second[0][2] == first[0][2] == 4
    for _, text, _ in (*first, *second):
        assert "copying the buffers of rank 0: they arrived damaged on rank 1" in text
    assert "parameters, optimizer and counters are updated" in second[0][1]


@pytest.mark.parametrize("fields", [(), ("amp",), ("gradient_merge",)])
def test_recompute_changes_no_bit(fields: tuple[str, ...]) -> None:
    found = []
    for extra in ((), ("recompute",)):
        engine = make_engine((*fields, *extra))
        torch.manual_seed(1)
        losses = train(engine, fields, 0, 4)
        found.append((losses, digest(engine)))
        engine.close()
    assert found[0] == found[1]


def staged(
    rank: int, size: int, schedule: str, stages: int, micro: int
) -> tuple[int, dict[str, Tensor], list[float]]:
    pipeline = tw.Pipeline(stages, micro, schedule)
    engine = prepared(make_model(plain=True, blocks=4, **DOUBLE), pipeline=pipeline)
    replica = rank // stages
    losses = [engine.train_step(*batch(step, replica, **DOUBLE)).item() for step in range(5)]
    values = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return replica, values, losses


@pytest.mark.parametrize(
    ("size", "stages", "micro"), [(2, 2, 4), (4, 2, 2), (4, 2, 4), (4, 4, 8), (4, 4, 2), (2, 1, 2)]
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_times_data_parallel_is_one_process(
    size: int, stages: int, micro: int, schedule: str, ranks: Pool
) -> None:
    replicas = size // stages
    alone = make_engine((), plain=True, blocks=4, **DOUBLE)
    expected: list[list[float]] = []
    for step in range(5):
        parts = [batch(step, replica, **DOUBLE) for replica in range(replicas)]
        expected.append([cross_entropy(alone.model(x), y).item() for x, y in parts])
        alone.train_step(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    whole = dict(alone.model.named_parameters())
    seen = set()
    for replica, params, losses in ranks.run(staged, schedule, stages, micro, size=size):
        assert losses == pytest.approx([each[replica] for each in expected], abs=1e-12)
        for name, value in params.items():
            seen.add(name)
            torch.testing.assert_close(value, whole[name].detach(), rtol=0, atol=1e-12)
    assert seen == set(whole)


@pytest.mark.parametrize("fields", [{}, {"pipeline": tw.Pipeline(1, 2)}], ids="-".join)
def test_inputs_and_targets_may_be_nested(fields: dict[str, Any]) -> None:
    loss_fn = lambda outputs, targets: cross_entropy(outputs, targets["y"][0])  # noqa: E731
    engine = engine_of(nn.Bilinear(8, 4, 4), loss_fn, lr=0.0, **fields)
    (x, y), other = batch(0, 0), torch.randn(16, 4)
    by_place = engine.train_step((x, other), {"y": [y]})
    assert torch.equal(by_place, engine.train_step({"input2": other, "input1": x}, {"y": [y]}))
    torch.testing.assert_close(by_place, engine.evaluate((x, other), {"y": [y]}))
    torch.testing.assert_close(by_place, cross_entropy(engine.model(x, other), y).detach())


def test_the_loss_that_comes_back_is_detached_and_unscaled() -> None:
    scaled = prepared(amp=tw.AMP("bfloat16", tw.FixedLossScale(1024.0)))
    plain = prepared(amp=tw.AMP("bfloat16"))
    for step in range(3):
        loss, expected = (engine.train_step(*batch(step, 0)) for engine in (scaled, plain))
        assert not loss.requires_grad
        assert loss.shape == ()
        assert torch.equal(loss, expected)
    assert digest(scaled) == digest(plain)  # a power of two changes no bit


def test_close_takes_every_hook_off_and_a_closed_engine_refuses() -> None:
    engine = make_engine(("localsgd", "recompute", "amp"))
    model = engine.model
    train(engine, (), 0, 2)
    engine.close()
    engine.close()
    assert "forward" not in vars(model[1])
    assert "forward" not in vars(model)
    assert not engine.optimizer._optimizer_step_post_hooks
    with pytest.raises(RuntimeError, match="closed"):
        engine.train_step(*batch(0, 0))
    tw.DistributedStrategy(localsgd=tw.LocalSGD(2)).prepare(model, engine.optimizer).close()


def test_an_engine_that_is_forgotten_leaves_nothing_on_the_model() -> None:
    engine = make_engine(("localsgd", "recompute"))
    train(engine, (), 0, 2)
    model, gone = engine.model, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert "forward" not in vars(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.DistributedStrategy(localsgd=tw.LocalSGD(2)).prepare(model, optimizer).close()


def overflowing(
    rank: int, size: int, fields: tuple[str, ...]
) -> tuple[list[str], list[float], list[int]]:
    engine = make_engine(fields, plain=True)
    digests, scales, dropped = [], [], []
    for step in range(6):
        x, y = batch(step, rank)
        if step == 3 - ("gradient_merge" in fields) and rank == 1:  # the first of two microsteps
            x = x * float("inf")
        engine.train_step(x, y)
        digests.append(digest(engine))
        scales.append(engine.stats()["loss_scale"])
        dropped.append(engine.stats()["dropped_steps"])
    assert all(p.isfinite().all() for p in engine.model.parameters())
    return digests, scales, dropped


@pytest.mark.fault("an overflow under a loss scale")
@pytest.mark.parametrize(
    "fields",
    [("amp",), ("amp", "gradient_merge"), ("amp", "dgc"), ("amp", "dgc", "lamb"), ("amp", "lars")],
)
def test_an_overflow_on_one_rank_drops_the_step_on_all(
    fields: tuple[str, ...], ranks: Pool
) -> None:
    one, two = ranks.run(overflowing, fields, size=2)
    assert one == two
    digests, scales, dropped = one
    assert digests[3] == digests[2] != digests[5]
    assert scales[3] == scales[2] / 2
    assert dropped == [0, 0, 0, 1, 1, 1]


def poisoned_batch(rank: int, size: int, merged: bool) -> tuple[str, int, int, bool]:
    """A NaN on rank 1 in the third microstep."""
    engine = make_engine(("localsgd", "gradient_merge") if merged else ("localsgd",))
    for step in range(8):
        hook = None
        if (step, rank) == (2, 1):
            hook = next(engine.model.parameters()).register_hook(lambda g: g * float("nan"))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine.train_step(*batch(step, rank))
        texts = [str(each.message) for each in told]
        assert any("was dropped on this rank" in text for text in texts) == (
            rank == 1 and step == (3 if merged else 2)
        ), texts
        if hook is not None:
            hook.remove()
    engine.flush()
    finite = all(bool(p.isfinite().all()) for p in engine.model.parameters())
    return digest(engine), engine.stats()["dropped_steps"], engine.step, finite


@pytest.mark.parametrize("merged", [False, True])
def test_under_local_updates_a_rank_drops_its_own_step(ranks: Pool, merged: bool) -> None:
    (first, none, made, _), (second, one, fewer, finite) = ranks.run(poisoned_batch, merged, size=2)
    assert (none, one) == (0, 1)
    assert fewer == made - 1
    assert first == second and finite


def poisoned_rank(rank: int, size: int, config: Any) -> tuple[int, str, bool]:
    adaptive = isinstance(config, tw.AdaptiveLocalSGD)
    engine = prepared(make_model(), **{"adaptive_localsgd" if adaptive else "localsgd": config})
    if rank == max(size - 1, 0):
        next(engine.model.parameters()).register_hook(lambda g: g * float("nan"))
    with warnings.catch_warnings(), pytest.raises(NonFinite) as caught:
        warnings.simplefilter("ignore")
        for step in range(20):
            engine.train_step(*batch(step, rank))
    finite = all(bool(p.isfinite().all()) for p in engine.model.parameters())
    return step, str(caught.value), finite


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(
    ("config", "averaging"),
    [
        (tw.LocalSGD(3), 10),
        (tw.LocalSGD(4, fragments=2), 11),
        (tw.LocalSGD(16), 17),
        (tw.AdaptiveLocalSGD(5, max_k_steps=5), 11),
    ],
    ids=["at the tenth", "fragments", "seldom", "adaptive"],
)
def test_ten_local_steps_that_are_not_finite_in_a_row_are_an_error_on_all_ranks(
    ranks: Pool, size: int, config: Any, averaging: int
) -> None:
    """All ranks hear of them at the next averaging: docs/reliability.md says so."""
    answers = ranks.run(poisoned_rank, config, size=size)
    assert len({(step, text) for step, text, _ in answers}) == 1
    step, text, _ = answers[0]
    assert step + 1 == averaging and all(finite for *_, finite in answers)
    assert f"rank {max(size - 1, 0)}: local step {step + 1} was dropped" in text
    assert f"this was dropped step {step + 1} in a row" in text


def refuse(rank: int, size: int, case: str) -> None:
    model = make_model(plain=True)
    optimizer = make_optimizer(model, ())
    if case == "different models":
        prepared(make_model(plain=True, blocks=2 + rank))
    elif case == "different states":
        if rank:
            model(batch(0, 0)[0]).sum().backward()
            optimizer.step()
        prepared(model, optimizer)
    elif case == "one rank has another optimizer":
        given = torch.optim.Adagrad(model.parameters()) if rank else optimizer
        prepared(model, given, lars=tw.LARS())
    elif case == "ranks and stages":
        prepared(pipeline=tw.Pipeline(stages=2, micro_batches=1))


@pytest.mark.fault("another setting on one rank")
@pytest.mark.parametrize(
    ("case", "size", "kind", "needles"),
    [
        ("different models", 2, "Mismatch", ["parameter", "rank 1"]),
        ("different states", 2, "Mismatch", ["state of the optimizer"]),
        ("ranks and stages", 3, "StrategyError", ["3", "2", "stages"]),
    ],
)
def test_disagreement_is_an_error_on_every_rank(
    case: str, size: int, kind: str, needles: list[str], ranks: Pool
) -> None:
    ranks.raise_alike(kind, needles, refuse, case, size=size)


CHANGES = {
    "added": ("3.weight", "after prepare"),
    "unfrozen": ("3.weight", "after prepare"),
    "replaced": ("3.weight", "is another object"),
    "all replaced": ("0.weight", "is another object"),
}
"""A parameter that is named, and what is said of it."""


def changed_in_mid_training(
    rank: int, size: int, fields: tuple[str, ...], change: str
) -> tuple[str, str, str]:
    """What was said, the bits then if any had moved, and those after a new engine has gone on."""
    model = make_model(plain=True)
    late = model.get_parameter("3.weight")
    optimizer, named = make_optimizer(model, fields), contextlib.nullcontext()
    if change == "added":
        others = [(name, p) for name, p in model.named_parameters() if p is not late]
        optimizer = torch.optim.SGD(others, lr=0.05, momentum=0.9)
        named = pytest.warns(UserWarning, match="in no group of .*: 3.weight")
    late.requires_grad_(change != "unfrozen")
    with named:
        engine = prepared(model, optimizer, **settings(fields))
    train(engine, fields, 0, 4)
    if change == "added":
        engine.optimizer.add_param_group({"params": [("3.weight", late)]})
    elif change == "unfrozen":
        late.requires_grad_(True)
    elif change == "replaced":
        model.get_submodule("3").weight = nn.Parameter(torch.ones_like(late))
    else:
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)
    before = digest(engine)
    with pytest.raises(RuntimeError, match=CHANGES[change][1]) as refusal:
        train(engine, fields, 4, 12)
    moved = "" if digest(engine) == before else digest(engine)
    engine.close()
    again = prepared(model, make_optimizer(model, fields), **settings(fields))
    late = model.get_parameter("3.weight").detach().clone()
    train(again, fields, 12, 20)
    again.flush()
    assert not torch.equal(model.get_parameter("3.weight"), late)
    return str(refusal.value), moved, digest(again)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        *((fields, change) for change in CHANGES for fields in [(), ("dgc",), ("gradient_merge",)]),
        *((("localsgd",), change) for change in ("replaced", "all replaced")),
    ],
)
def test_changing_parameter_is_refused(fields: tuple[str, ...], change: str, ranks: Pool) -> None:
    """Within eight steps, and before any update that would not be exchanged."""
    answers = ranks.run(changed_in_mid_training, fields, change, size=2)
    for (text, moved, after), wanted in zip(answers, reversed(answers), strict=True):
        assert CHANGES[change][0] in text
        assert after == wanted[2]
        assert (
            moved == ("" if change in ("added", "unfrozen") else wanted[1]) or "localsgd" in fields
        )


class OfTheUsers(tw.schedules.Schedule):
    """Prints as its address, like any plain object."""

    def value_at(self, step: int) -> float:
        return 0.1


def rank_1_at_another_step(rank: int, size: int, fields: tuple[str, ...]) -> None:
    engine = make_engine(fields, plain=True)
    train(engine, fields, 0, 3)
    before = copy.deepcopy(engine.state_dict())
    train(engine, fields, 3, 6)
    if rank == 1:
        engine.load_state_dict(before)
    train(engine, fields, 6, 9)


@pytest.mark.parametrize("fields", [(), ("dgc",), ("low_rank",), ("localsgd",)])
def test_rank_at_another_step_is_reported_as_that(fields: tuple[str, ...], ranks: Pool) -> None:
    """Not as the message that it sends of its own step, which is not the one that others expect."""
    ranks.raise_alike("Mismatch", "rank 0 is at step", rank_1_at_another_step, fields, size=2)


def schedule_of_the_users(rank: int, size: int) -> bool:
    keep = [object() for _ in range(1000 * rank)]  # addresses differ between the ranks
    rate = OfTheUsers().then(OfTheUsers(), at=3)
    engine = prepared(optimizer=lambda net: tw.optim.SGD(net.named_parameters(), lr=rate))
    engine.train_step(*batch(0, rank))
    return bool(engine.step == 1 and len(keep) == 1000 * rank)


def test_a_schedule_of_the_users_is_the_same_on_all_ranks(ranks: Pool) -> None:
    assert ranks.run(schedule_of_the_users, size=2) == [True, True]


def test_an_error_of_one_rank_is_an_error_of_all(ranks: Pool) -> None:
    first, second = ranks.run(refuse, "one rank has another optimizer", size=2, expect_errors=True)
    assert second.type_name == "StrategyError"
    assert first.type_name == "Mismatch"
    assert "StrategyError" in first.text
    assert "Adagrad" in first.text


def test_train_step_needs_a_loss_function() -> None:
    engine = prepared(loss=None)
    with pytest.raises(RuntimeError, match=r"prepare\(model, optimizer, loss_fn\).*minimize"):
        engine.train_step(*batch(0, 0))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    engine = prepared(loss=lambda o, t: cross_entropy(o, t, reduction="none"))
    with pytest.raises(ValueError, match=r"scalar, got shape \(16,\)"):
        engine.train_step(*batch(0, 0))
    with pytest.raises(ValueError, match="no parameter"):
        engine.minimize(torch.tensor(1.0))
    with pytest.raises(TypeError, match="loss"):
        engine.minimize(1.0)


def test_model_that_cannot_be_prepared_is_refused() -> None:
    model = make_model(plain=True)
    optimizer = make_optimizer(model, ())
    strategy = tw.DistributedStrategy()
    with pytest.raises(TypeError, match="model"):
        strategy.prepare(model.parameters(), optimizer)
    with pytest.raises(TypeError, match="optimizer"):
        strategy.prepare(model, model)
    with pytest.raises(TypeError, match="loss_fn"):
        strategy.prepare(model, optimizer, 3)
    with pytest.raises(ValueError, match=r"not in model, the first of shape \(16, 8\)"):
        strategy.prepare(make_model(plain=True), optimizer)
    with pytest.raises(ValueError, match="nothing"):
        tw.DistributedStrategy(recompute=tw.Recompute(("nothing.*",))).prepare(model, optimizer)
    with pytest.raises(tw.StrategyError, match="stages"):
        tw.DistributedStrategy(pipeline=tw.Pipeline(stages=2, micro_batches=2)).prepare(
            model, optimizer
        )
    assert "forward" not in vars(model[1])


class OldStyle(torch.optim.SGD):
    """Whose step has no default for its closure."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, OldStyle])
@pytest.mark.parametrize("fields", [(), ("localsgd",), ("dgc",)])
def test_optimizer_that_requires_a_closure_is_refused(kind: Any, fields: tuple[str, ...]) -> None:
    with pytest.raises(tw.StrategyError, match=rf"{kind.__name__}\.step requires a closure"):
        prepared(optimizer=lambda net: kind(net.parameters(), lr=0.1), **settings(fields))


def test_a_step_that_a_scheduler_wraps_requires_no_closure() -> None:
    model = make_model(plain=True)
    optimizer = make_optimizer(model, ())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared(model, optimizer).train_step(*batch(0, 0))
    scheduler.step()


def destroyed(rank: int, size: int, fields: tuple[str, ...], steps: int) -> tuple[bool, list[str]]:
    engine = make_engine(fields, plain=True)
    train(engine, fields, 0, steps)
    before, told = digest(engine), []
    dist.destroy_process_group()
    for _ in range(2):
        with pytest.raises(tw.errors.ThinwireError) as caught:
            engine.train_step(*batch(9, rank))
        told.append(str(caught.value))
    return digest(engine) == before, told


@pytest.mark.parametrize(("fields", "steps"), [((), 0), ((), 3), (("dgc",), 3), (("amp",), 3)])
def test_after_the_end_of_the_process_group_nothing_moves(
    fields: tuple[str, ...], steps: int, ranks: Pool
) -> None:
    for same, told in ranks.run(destroyed, fields, steps, size=2):
        assert same
        for text in told:
            assert "the process group was destroyed" in text
            assert "after the last step" in text


def wrapped(rank: int, size: int) -> None:
    model = make_model(plain=True)
    tw.DistributedStrategy().prepare(DistributedDataParallel(model), make_optimizer(model, ()))


def test_ddp_model_is_refused_with_advice(ranks: Pool) -> None:
    ranks.raise_alike("TypeError", ["ddp.module", "attach"], wrapped, size=2)


class WithoutRate(torch.optim.Optimizer):
    """A method whose groups hold no `lr`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


def trained_without_rate(rank: int, size: int) -> str:
    engine = prepared(optimizer=lambda net: WithoutRate(net.parameters(), {}))
    engine.train_step(*batch(0, rank))
    return digest(engine)


def test_an_optimizer_without_a_learning_rate_trains(ranks: Pool) -> None:
    first, second = ranks.run(trained_without_rate, size=2)
    assert first == second


def reshaped(rank: int, size: int, fields: tuple[str, ...], change: str, odd: set[int]) -> None:
    """Train some steps, so that buckets leave during the backward pass; then change a model."""
    model = make_model(plain=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = prepared(model, optimizer, options={"timeout": 50}, **settings(fields))
    train(engine, fields, 0, 6)
    if rank in odd and change == "double":
        model.double()
    elif rank in odd:
        rows = 2 if change == "cut" else 6
        for p in model[-1].parameters():
            p.data = torch.cat([p.data, p.data])[:rows]
    dtype = next(model.parameters()).dtype
    for step in range(6, 9):
        x, y = batch(step, rank, dtype=dtype)
        engine.train_step(x, y % 2)


@pytest.mark.parametrize("fields", [(), ("dgc",), ("gradient_merge", "low_rank"), ("localsgd",)])
@pytest.mark.parametrize("odd", [{0, 1}, {1}], ids=["all ranks", "one rank"])
def test_change_inplace_is_an_error(fields: tuple[str, ...], odd: set[int], ranks: Pool) -> None:
    for change, before, after in [
        ("cut", "3.weight was float32 [4, 16]", "float32 [2, 16] now"),
        ("padded", "3.weight was float32 [4, 16]", "float32 [6, 16] now"),
        ("double", "0.weight was float32 [16, 8]", "float64 [16, 8] now"),
    ]:
        says = f"rank {min(odd)}: parameter {before}", after
        ranks.raise_alike("ThinwireError", says, reshaped, fields, change, odd)


def test_modules_that_are_wrapped_later_go_on() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    engine = engine_of(model)
    x = torch.randn(5, 4)
    before = engine.train_step(x, x)
    model[0] = nn.Sequential(model[0])
    model[1] = nn.Sequential(model[1], nn.Linear(8, 8))
    assert engine.train_step(x, x) != before


def test_row_sparse_state_is_refused_with_advice(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 10))
    engine = engine_of(model, cross_entropy, momentum=0.9)
    x = torch.randint(0, 10, (4,))
    engine.train_step(x, x)
    with pytest.raises(TypeError, match=r"momentum_buffer of 0\.weight .*LazyAdam"):
        engine.state_dict()
    with pytest.raises(tw.errors.CheckpointError, match=r"momentum_buffer of 0\.weight .*LazyAdam"):
        engine.save(tmp_path)


@pytest.mark.parametrize("fields", [(), ("dgc",), ("gradient_merge",), ("localsgd",)])
@pytest.mark.parametrize("make", [torch.optim.AdamW, tw.optim.SGD])
def test_a_state_in_memory_may_be_loaded_many_times(fields: tuple[str, ...], make: Any) -> None:
    told = {"momentum": 0.9} if make is tw.optim.SGD else {}
    own = settings(fields)
    engine = prepared(optimizer=lambda net: make(net.parameters(), lr=0.05, **told), **own)
    train(engine, fields, 0, 4)
    state, losses = engine.state_dict(), []
    for _ in range(3):
        engine.load_state_dict(state)
        losses.append(train(engine, fields, 4, 10))
    assert losses[0] == losses[1] == losses[2]
