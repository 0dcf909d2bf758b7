"""What local updates leave alone and refuse, and how they fail: on all ranks, nothing applied."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.local.test_laws import Bag, bag, digest, net, one_step, set_gradients, sgd, values
from tests.ranks import Pool
from tests.toys import bits, descend, engine_of, warned


def test_alone_plain_averaging_does_not_change_a_bit() -> None:
    for config in (tw.LocalSGD(3), tw.LocalSGD(4, fragments=2, delay=1), tw.AdaptiveLocalSGD(2)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            local, plain = Bag(dtype=dtype), Bag(dtype=dtype)
            ours, theirs = sgd(local, momentum=0.9), sgd(plain, momentum=0.9)
            with tw.local_sgd(local, ours, config) as sync:
                for step in range(1, 20):
                    sync.observe(1.0)
                    one_step(local, ours, step)
                    one_step(plain, theirs, step)
            assert bits(local.parameters()) == bits(plain.parameters())


class CallsAnother(torch.optim.RMSprop):
    """Torch runs the hooks in each step that is wrapped: in both once an RMSprop has been made."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        self.scale = scale
        return super().step(closure)


def averagings_of_calls_of_another(rank: int, size: int, made_on: int) -> list[tuple[int, bool]]:
    model = Bag()
    optimizer = CallsAnother(model.parameters(), lr=0.01)
    if rank == made_on:
        torch.optim.RMSprop(nn.Linear(1, 1).parameters())
    said = []
    with tw.local_sgd(model, optimizer, tw.LocalSGD(4, begin_step=0)) as sync:
        for step in range(1, 9):
            one_step(model, optimizer, step, rank)
            said.append((sync.step, sync.synced))
    return said


@pytest.mark.parametrize("made_on", [0, 1])
def test_a_step_that_calls_that_of_its_base_class_is_one_step(made_on: int, ranks: Pool) -> None:
    expected = [(step, step % 4 == 0) for step in range(1, 9)]
    assert ranks.run(averagings_of_calls_of_another, made_on, size=2) == [expected] * 2


def test_a_step_that_raises_leaves_the_count_as_it_was() -> None:
    model = Bag()
    optimizer = CallsAnother(model.parameters(), lr=0.01)
    torch.optim.RMSprop(nn.Linear(1, 1).parameters())

    def fails() -> float:
        raise ZeroDivisionError

    with tw.local_sgd(model, optimizer, tw.LocalSGD(2, begin_step=0)) as sync:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fails)
        one_step(model, optimizer)
        assert (sync.step, sync.synced) == (1, False)


def test_arguments_of_step_beside_a_closure_arrive() -> None:
    model = Bag()
    optimizer = CallsAnother(model.parameters(), lr=0.01)
    set_gradients(model, 1, 0)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(2)):
        optimizer.step(lambda: 1.0, 0.5)
        assert optimizer.scale == 0.5
        optimizer.step(closure=lambda: 1.0, scale=0.25)
        assert optimizer.scale == 0.25


@pytest.mark.parametrize("delay", [0, 2])
def test_alone_buffers_and_state_stay_as_they_are(delay: int) -> None:
    """What came since a late result was measured is not lost."""
    models = []
    for is_local in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        config = tw.LocalSGD(4, begin_step=0, delay=delay, average_state=True)
        with tw.local_sgd(model, optimizer, config) if is_local else contextlib.nullcontext():
            for _ in range(20):
                descend(optimizer, model(torch.randn(8, 4)).square().sum())
        models.append(model)
    for name, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[name], value), name


def test_gradients_are_untouched_and_hooks_come_off() -> None:
    model, optimizer = bag()
    for leave_by_error in (False, True):
        try:
            with tw.local_sgd(model, optimizer, tw.LocalSGD(2)) as sync:
                set_gradients(model, 1, 0)
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
                assert all(
                    torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True)
                )
                assert sync.synced
                if leave_by_error:
                    raise KeyError("from the loop")
        except KeyError:
            assert leave_by_error
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        one_step(model, optimizer, 2)
        assert sync.step == 1


def buffers_and_start(rank: int, size: int) -> dict[str, Any]:
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    model[0].bias.requires_grad_(False)
    norm = model[1]
    norm.running_mean.fill_(5.0 + rank)  # type: ignore[operator,union-attr]
    optimizer = sgd(model)
    found: dict[str, Any] = {}
    with tw.local_sgd(model, optimizer, tw.LocalSGD(10)) as sync:
        found["start"] = digest(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        norm.running_mean.fill_(1.0 + rank)  # type: ignore[operator,union-attr]
        norm.num_batches_tracked.fill_(7 + rank)  # type: ignore[operator,union-attr]
        optimizer.step()
        assert sync.synced
        found["mean"] = norm.running_mean.tolist()  # type: ignore[operator,union-attr]
        found["count"] = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    return found


def test_all_start_from_rank_0_and_floating_point_buffers_are_averaged(ranks: Pool) -> None:
    a, b = ranks.run(buffers_and_start, size=2)
    assert a["start"] == b["start"]
    assert a["mean"] == b["mean"] == [1.5] * 9
    assert (a["count"], b["count"]) == (7, 8)


class Shuffled(nn.Linear):
    """A layer with buffers of no floating-point type, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 4)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("order", torch.randperm(64, generator=generator), persistent=False)
        self.register_buffer("mask", torch.rand(4, 4, generator=generator) > 0.5)
        self.register_buffer("turns", torch.randn(3, dtype=torch.cfloat, generator=generator))
        self.register_buffer("count", torch.tensor(100 * seed))


def drawn_apart(rank: int, size: int, by_engine: bool) -> tuple[dict[str, Any], list[str]]:
    """All ranks change `order` alike and `count` apart, and rank 1 changes the mask."""
    model, config = Shuffled(rank), tw.LocalSGD(2, begin_step=0)
    optimizer = sgd(model)
    with warned() as texts, contextlib.ExitStack() as stack:
        if by_engine:
            engine = engine_of(model, optimizer=optimizer, localsgd=config)
            stack.callback(engine.follow_steps().remove)
        else:
            stack.enter_context(tw.local_sgd(model, optimizer, config))
        start = {name: buffer.tolist() for name, buffer in model.named_buffers()}
        for step in range(8):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            model.count.add_(1 + rank)
            model.order.copy_(model.order.roll(1))
            if step >= 4 and rank == 1:
                model.mask.logical_not_()
    return start, [text for text in texts if "buffer" in text]


@pytest.mark.parametrize("by_engine", [False, True])
def test_integers_start_as_on_rank_0_and_a_change_is_named(ranks: Pool, by_engine: bool) -> None:
    expected = {name: buffer.tolist() for name, buffer in Shuffled(0).named_buffers()}
    for start, said in ranks.run(drawn_apart, by_engine):
        assert start == expected
        [text] = said
        assert "buffer mask" in text
        assert "rank 1" in text


def other_shape(rank: int, size: int) -> None:
    model = Shuffled(0)
    model.register_buffer("order", torch.arange(64 + rank))
    with tw.local_sgd(model, sgd(model), tw.LocalSGD(2)):
        pass


def test_an_integer_buffer_of_another_shape_is_named_on_all(ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", "buffer order", other_shape)


def partly_unused(rank: int, size: int, average_state: bool) -> tuple[Any, Any, bool]:
    model = Bag(dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    start = values(model)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(3, average_state=average_state)):
        for step in range(1, 8):
            set_gradients(model, step, rank)
            if rank == 1:
                model.b.grad = None  # type: ignore[union-attr,assignment]
            model.c.grad = None  # type: ignore[union-attr,assignment]
            optimizer.step()
    same_c = bool((values(model)["c"] == start["c"]).all())
    moments = {
        name: optimizer.state[p]["exp_avg"].tolist()
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    return values(model), moments, same_c


@pytest.mark.parametrize("average_state", [False, True])
def test_ranks_without_a_gradient_take_part(ranks: Pool, average_state: bool) -> None:
    (p, m, same), (q, n, _) = ranks.run(partly_unused, average_state, size=2)
    assert all((p[name] == q[name]).all() for name in p)
    assert same, "a parameter that nobody moved stays as it was"
    assert set(m) - set(n) == {"b"}
    assert (m["a"] == n["a"]) is average_state


def skipping(rank: int, size: int) -> tuple[list[bool], list[int], str]:
    model, optimizer = bag()
    synced, ks = [], []
    with tw.local_sgd(model, optimizer, tw.AdaptiveLocalSGD(3, begin_step=0)) as sync:
        for step in range(1, 13):
            dropped = rank == 1 and step in {1, 3, 4}
            sync.observe(float("inf") if dropped else 2.0)
            if dropped:
                sync.skip_step()
            else:
                one_step(model, optimizer, step, rank)
            synced.append(sync.synced)
            ks.append(sync.k_steps)
    return synced, ks, digest(model)


def test_a_dropped_step_counts_and_its_loss_does_not(ranks: Pool) -> None:
    a, b = ranks.run(skipping, size=2)
    assert a == b
    assert a[0] == [step % 3 == 0 for step in range(1, 13)]
    assert a[1] == [3] * 12


@pytest.mark.parametrize(
    ("config", "given", "kind", "fact"),
    [
        (tw.LocalSGD, {"k_steps": 0}, ValueError, "k_steps.*got 0"),
        (tw.LocalSGD, {"begin_step": -1}, ValueError, "begin_step"),
        (tw.LocalSGD, {"outer_lr": 0.0}, ValueError, "outer_lr.*got 0.0"),
        (tw.LocalSGD, {"outer_momentum": 1.0}, ValueError, "outer_momentum"),
        (tw.LocalSGD, {"outer_nesterov": True}, ValueError, "outer_nesterov needs"),
        (tw.LocalSGD, {"compression": tw.DGC()}, TypeError, "compression"),
        (tw.LocalSGD, {"fragments": 5}, ValueError, "fragments.*k_steps=4, got 5"),
        (tw.LocalSGD, {"fragments": 0}, ValueError, "fragments"),
        (tw.LocalSGD, {"delay": 4}, ValueError, "delay.*4 steps"),
        (tw.LocalSGD, {"fragments": 2, "delay": 2}, ValueError, "delay.*2 steps"),
        (tw.LocalSGD, {"average_state": 3}, TypeError, "average_state"),
        (tw.LocalSGD, {"round_seconds": 0}, ValueError, "round_seconds"),
        (tw.LocalSGD, {"round_seconds": 1.0, "node_size": 2}, ValueError, "node_size.*got 2"),
        (tw.LocalSGD, {"round_seconds": 1.0, "compression": tw.Sparse(0.9)}, ValueError, "mean_ov"),
        (tw.AdaptiveLocalSGD, {"init_k_steps": 4, "outer_lr": 0}, ValueError, "outer_lr"),
        (tw.AdaptiveLocalSGD, {"init_k_steps": 0}, ValueError, "init_k_steps"),
        (tw.AdaptiveLocalSGD, {"init_k_steps": 17}, ValueError, "max_k_steps=16, got 17"),
        (tw.AdaptiveLocalSGD, {"init_k_steps": 1, "max_k_steps": 0}, ValueError, "max_k_steps"),
        (tw.AdaptiveLocalSGD, {"init_k_steps": 3, "fragments": 4}, ValueError, "init_k_steps=3"),
        (tw.Sparse, {"sparsity": 1.0}, ValueError, "sparsity"),
        (tw.Sparse, {"sparsity": 0.9, "value_bits": 3}, ValueError, "value_bits"),
        (tw.Sparse, {"sparsity": 0.9, "decay": 1.1}, ValueError, "decay"),
        (tw.Sparse, {"sparsity": 0.9, "mean_over": "some"}, ValueError, "senders.*all.*'some'"),
        (tw.Quantized, {"value_bits": 32}, ValueError, "value_bits=32.*compression=None"),
        (tw.Quantized, {"value_bits": 3}, ValueError, r"\[1, 2, 4, 8, 16\], got 3"),
        (tw.Quantized, {"value_bits": 4, "decay": 1.5}, ValueError, "decay"),
        (tw.LowRank, {"rank": 0}, ValueError, "rank.*got 0"),
        (tw.LowRank, {"begin_step": -1}, ValueError, "begin_step"),
        (tw.LowRank, {"min_numel": 0}, ValueError, "min_numel"),
    ],
)
def test_wrong_setting_of_a_config_is_named(
    config: Any, given: dict[str, Any], kind: type[Exception], fact: str
) -> None:
    with pytest.raises(kind, match=fact):
        config(**({"k_steps": 4} if config is tw.LocalSGD else {}) | given)


def test_wrong_models_and_optimizers_are_refused() -> None:
    model, other = net(), net()
    optimizer = sgd(model)
    empty = Bag({"a": (0, 3)})
    dgc, frozen = tw.optim.DGCMomentum(model.parameters(), lr=0.1), net().requires_grad_(False)
    config: Any = tw.LocalSGD(2)
    for arguments, kind, text in [
        ((model, optimizer, 16), TypeError, "config must be LocalSGD or AdaptiveLocalSGD"),
        ((optimizer, optimizer, config), TypeError, "model must be Module"),
        ((model, model, config), TypeError, "optimizer must be Optimizer"),
        ((model, dgc, config), TypeError, "DGCMomentum.*SGD"),
        ((model, Wrapper(optimizer), config), TypeError, "the optimizer that it wraps"),
        ((model, sgd(other), config), ValueError, "not in model"),
        ((model, optimizer, tw.LocalSGD(20, fragments=20)), ValueError, "fragments is 20"),
        ((frozen, optimizer, config), ValueError, "nothing to average"),
        ((empty, sgd(empty), config), ValueError, "with elements"),
    ]:
        with pytest.raises(kind, match=text):
            tw.local_sgd(*arguments)  # type: ignore[arg-type]


class Wrapper(torch.optim.Optimizer):
    """As some packages make them: an Optimizer by name, without its constructor."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.optimizer = inside
        self.param_groups = inside.param_groups


def wrapped(rank: int, size: int) -> None:
    ddp = DistributedDataParallel(net())
    tw.local_sgd(ddp, sgd(ddp), tw.LocalSGD(2))


def test_a_ddp_model_is_refused(ranks: Pool) -> None:
    ranks.raise_alike("TypeError", "ddp.module", wrapped, size=2)


def test_two_cannot_be_nested_on_one_model() -> None:
    model = net()
    with tw.local_sgd(model, sgd(model), tw.LocalSGD(2)) as sync:
        for inner in (model, model[0]):
            with pytest.raises(RuntimeError, match="cannot be nested"):
                tw.local_sgd(inner, sgd(inner), tw.LocalSGD(2)).__enter__()
    with pytest.raises(RuntimeError, match="entered before"), sync:
        pass
    with tw.local_sgd(model, sgd(model), tw.LocalSGD(2)):
        pass


@pytest.mark.parametrize(
    ("loss", "kind"),
    [("1", TypeError), (None, TypeError), (True, TypeError), (torch.zeros(2), ValueError)],
)
def test_observe_refuses(loss: Any, kind: type[Exception]) -> None:
    model = Bag()
    with (
        tw.local_sgd(model, sgd(model), tw.AdaptiveLocalSGD(2)) as sync,
        pytest.raises(kind, match="loss must be"),
    ):
        sync.observe(loss)


def fail(rank: int, size: int, way: str) -> str:
    """Step 1 averages, then rank 1 goes wrong in its own way."""
    model = Bag()
    if way == "other order" and rank == 1:
        model = Bag(
            dict(reversed({name: tuple(p.shape) for name, p in model.named_parameters()}.items()))
        )
    config = tw.LocalSGD(2)
    if way in {"infinite loss", "negative loss"}:
        config = tw.AdaptiveLocalSGD(2)  # type: ignore[assignment]
    optimizer = sgd(model)
    before = ""
    try:
        with tw.local_sgd(model, optimizer, config) as sync:
            for step in range(1, 6):
                if rank == 1 and step == 3:
                    change(model, way)
                if way == "leaves early" and rank == 1 and step == 3:
                    break
                sync.observe(
                    {"infinite loss": float("inf"), "negative loss": -9.0}.get(way, 1.0)
                    if rank
                    else 1.0
                )
                for name, p in model.named_parameters():
                    p.grad = torch.ones_like(p) if name != "new" else None
                optimizer.step()
                before = "synced" if sync.synced else "local"
    except RuntimeError as error:
        return f"{type(error).__name__} after {before}: {error}"
    return "no error"


def change(model: nn.Module, way: str) -> None:
    if way == "not finite":
        with torch.no_grad():
            model.c[1, 2] = float("nan")  # type: ignore[operator]
    elif way == "removed":
        del model.b
    elif way == "added":
        model.new = nn.Parameter(torch.zeros(2))
    elif way == "frozen":
        model.a.requires_grad_(False)  # type: ignore[operator]
    elif way == "replaced":
        model.a = nn.Parameter(model.a.detach().clone())  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("other order", "layout.0 differs: rank 0 has 'parameter a: float64 [6, 5], trainable'"),
        ("not finite", "rank 1: parameter c is not finite at the averaging of step 3"),
        ("removed", "rank 1: the model was changed after local_sgd was set up: parameter b was"),
        ("added", "rank 1: the model was changed after local_sgd was set up: parameter new was"),
        ("frozen", "parameter a was float64 [6, 5], trainable and is float64 [6, 5], frozen"),
        ("replaced", "parameter a is another object"),
        ("infinite loss", "the mean loss of step 1 over the ranks is inf"),
        ("negative loss", "the mean loss of step 1 over the ranks is -4.0"),
        ("leaves early", "rank 0 is at step 3 (averaging part 0), rank 1 at step 2 (flushing)"),
    ],
)
def test_failure_on_one_rank_is_the_same_error_on_all(ranks: Pool, way: str, text: str) -> None:
    answers = ranks.run(fail, way, size=3 if way == "not finite" else 2)
    assert all(text in answer for answer in answers), answers
    # where ranks are at different steps, each names its own as the occasion
    assert (
        len({answer.replace("agreeing on step 2:", "agreeing on step 3:") for answer in answers})
        == 1
    )


def subgroup(rank: int, size: int) -> str:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = net()
    with tw.local_sgd(model, sgd(model), tw.LocalSGD(4), process_group=pairs[rank // 2]):
        for p in model.parameters():
            p.grad = torch.full_like(p, rank)
        torch.manual_seed(rank)
        with torch.no_grad():
            model[0].weight.add_(torch.randn(9, 5))  # type: ignore[operator]
    # leaving without a step averages nothing
    return digest(model)


def test_leaving_without_a_step_averages_nothing(ranks: Pool) -> None:
    assert len(set(ranks.run(subgroup, size=4))) == 4


def two_optimizers(rank: int, size: int, config: Any, first: str) -> tuple[Any, ...]:
    """One is followed, the other steps after it; the last step averages."""
    model = Bag()
    followed, other = torch.optim.SGD([model.a], 0.1), torch.optim.SGD([model.b, model.c], 0.1)
    with warned() as texts, tw.local_sgd(model, followed, config) as sync:
        for step in range(1, 5):
            set_gradients(model, step, rank)
            for optimizer in (other, followed) if first == "other" else (followed, other):
                optimizer.step()
        assert sync.synced
        sync.flush()
        flushed = digest(model)
        set_gradients(model, 9, rank)
        other.step()
        moved = values(model)
    return texts, flushed + digest(model), sync.stats()["averagings"], moved, values(model)


@pytest.mark.parametrize(
    "config",
    [
        tw.LocalSGD(1),
        tw.LocalSGD(4, begin_step=0, outer_momentum=0.5),
        tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1)),
    ],
)
def test_parameters_moved_by_a_second_optimizer_are_averaged(config: Any, ranks: Pool) -> None:
    found = ranks.run(two_optimizers, config, "followed")
    (said, first, _, moved, mean), (_, second, _, others, _) = found
    assert first == second
    for name in mean:
        # 1e-12: float64 sums in another order
        np.testing.assert_allclose(mean[name], (moved[name] + others[name]) / 2, rtol=1e-12)
    assert len(said) == 1
    assert "3 parameters" in said[0]
    assert ": b, c, d." in said[0]
    assert "all optimizers of the model in a list" in said[0]


def test_where_nothing_has_moved_nothing_is_averaged_again(ranks: Pool) -> None:
    """4 steps, and what the second optimizer moved after the flush."""
    for _, _, averagings, *_ in ranks.run(two_optimizers, tw.LocalSGD(1), "other"):
        assert averagings == 5  # of which the flush is none


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose model holds y, and whose `eval` puts x there: y = (1 - b) z + b x."""

    def __init__(self, params: Any, lr: float, b: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "b": b, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                x = (y - (1 - group["b"]) * z) / group["b"]
                z.sub_(y.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                y.copy_(x.lerp(z, 1 - group["b"]))

    def train(self) -> None:
        self._swap_(lambda y, z, b: y.mul_(b).add_(z, alpha=1 - b))

    def eval(self) -> None:
        self._swap_(lambda y, z, b: y.sub_(z, alpha=1 - b).div_(b))

    @torch.no_grad()
    def _swap_(self, change: Callable[..., Any]) -> None:
        for group in self.param_groups:
            for y in group["params"]:
                change(y, self.state[y]["z"], group["b"])


def schedule_free(rank: int, size: int, average_state: bool) -> tuple[list[str], str]:
    model = Bag()
    optimizer = ScheduleFree(model.parameters(), 0.1)
    config = tw.LocalSGD(4, begin_step=0, average_state=average_state)
    with warned() as texts:
        with tw.local_sgd(model, optimizer, config):
            for step in range(1, 7):
                one_step(model, optimizer, step, rank)
        optimizer.eval()
    return texts, digest(model)


def test_optimizer_with_parameters_of_its_own_is_reported_how_ranks_stay_equal(ranks: Pool) -> None:
    for said, _ in ranks.run(schedule_free, False):
        assert len(said) == 1
        assert "average_state=True" in said[0]
    (said, first), (_, second) = ranks.run(schedule_free, True)
    assert (said, first) == ([], second)


def averaged_weights(rank: int, size: int, where: str) -> list[str]:
    model = Bag()
    optimizer, ema = sgd(model), torch.optim.swa_utils.AveragedModel(model)
    with warned() as texts, tw.local_sgd(model, optimizer, tw.LocalSGD(3)) as sync:
        for step in range(1, 9):
            one_step(model, optimizer, step, rank)
            if where == "everywhere" or sync.synced:
                ema.update_parameters(model)
        sync.flush()
        sync.flush()
    return texts


def test_average_of_weights_that_ranks_do_not_share_is_reported_once(ranks: Pool) -> None:
    for said in ranks.run(averaged_weights, "everywhere"):
        assert len(said) == 1
        assert "sync.synced" in said[0]
        assert "extra=" in said[0]
    assert ranks.run(averaged_weights, "synced") == [[], []]
