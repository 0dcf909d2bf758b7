"""What torch expects of an optimizer, as one contract that every class signs."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.optim.cases import (
    ALL,
    EXTRAS,
    OURS,
    TORCHS,
    Case,
    give_gradients,
    model,
    same,
    train,
    values,
)
from thinwire import optim
from thinwire.schedules import CosineDecay


def test_a_closure_is_called_once_with_gradients_enabled(case: Case) -> None:
    net = model()
    optimizer = case(net.named_parameters())
    before = values(net)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = net(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() > 0
    assert not same(before, values(net))


@pytest.mark.parametrize("way", ["step", "apply_gradients"])
def test_step_hooks_run_once_around_the_update(case: Case, way: str) -> None:
    for kind in TORCHS:  # makes torch wrap the step of its class, in which hooks would run again
        getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    net = model()
    optimizer = case(net.named_parameters())
    seen = []
    before = values(net)
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append(("pre", same(before, values(net))))
    )
    handle = optimizer.register_step_post_hook(
        lambda o, args, kwargs: seen.append(("post", same(before, values(net))))
    )
    give_gradients(net, 0)
    for _ in range(2):
        if way == "step":
            optimizer.step()
        else:
            optimizer.apply_gradients([(p, p.grad) for p in net.parameters()])
        if len(seen) == 2:
            assert seen == [("pre", True), ("post", False)]
            handle.remove()
    assert [kind for kind, _ in seen] == ["pre", "post", "pre"]


def test_a_group_can_be_added_later(case: Case) -> None:
    first, second = model(), model()
    optimizer = case(first.named_parameters())
    train(first, optimizer, range(2))
    late = [(f"late.{name}", p) for name, p in second.named_parameters()]
    mine = {"params": late, "lr": 0.003}
    optimizer.add_param_group(mine)
    assert set(mine) == {"params", "lr"}, "the user's dictionary stays as it is"
    before = values(second)
    train(second, optimizer, range(1))
    assert not same(before, values(second))
    assert [g["lr"] for g in optimizer.param_groups][1] == 0.003


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(case: Case, way: str, extras: dict) -> None:
    net = model()
    optimizer = case(net.named_parameters(), **{**extras, "lr": CosineDecay(0.001, 0.02, 10)})
    train(net, optimizer, range(3))
    if way == "deepcopy":
        twin_net, twin = copy.deepcopy((net, optimizer))
    elif way == "pickle":
        twin_net, twin = pickle.loads(pickle.dumps((net, optimizer)))
    else:
        twin_net = model()
        twin_net.load_state_dict(net.state_dict())
        twin = case(twin_net.named_parameters(), **{**extras, "lr": CosineDecay(0.001, 0.02, 10)})
        file = io.BytesIO()
        torch.save(copy.deepcopy(optimizer.state_dict()), file)
        file.seek(0)
        twin.load_state_dict(torch.load(file, weights_only=True))
    assert twin.position == 3
    assert twin.get_lr() == optimizer.get_lr()
    assert same(train(net, optimizer, range(3, 7)), train(twin_net, twin, range(3, 7)))
    assert set(twin._common.order) == set(twin_net.parameters())


def test_maximize_is_minimize_of_the_negative(case: Case) -> None:
    up, down = model(), model()
    a = case(up.named_parameters(), maximize=True, **EXTRAS)
    b = case(down.named_parameters(), **EXTRAS)
    for seed in range(5):
        give_gradients(up, seed)
        give_gradients(down, seed)
        for p in down.parameters():
            p.grad = -p.grad
        a.step()
        b.step()
    assert same(values(up), values(down))


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
def test_foreach_gives_the_bits_of_the_loop(case: Case, extras: dict) -> None:
    nets = [model(), model(), model()]
    runs = [
        train(net, case(net.named_parameters(), foreach=foreach, **extras), range(6))
        for net, foreach in zip(nets, (True, False, None), strict=True)
    ]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_a_scheduler_of_torch_can_be_attached(case: Case) -> None:
    net, twin = model(), model()
    optimizer = case(net.named_parameters(), lr=0.04)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    by_hand = case(twin.named_parameters(), lr=0.04)
    for s in range(6):
        by_hand.set_lr(0.04 * 0.5 ** (s // 2))
        train(net, optimizer, range(s, s + 1))
        train(twin, by_hand, range(s, s + 1))
        scheduler.step()
    assert same(values(net), values(twin))


@pytest.mark.parametrize("centralize", [False, True])
@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
def test_gradients_are_not_touched(case: Case, extras: dict, centralize: bool) -> None:
    net = model()
    optimizer = case(
        [{"params": net.named_parameters(), "grad_centralization": centralize}],
        maximize=True,
        **extras,
    )
    for seed in range(3):
        give_gradients(net, seed)
        before = [(p.grad, p.grad.clone(), p.grad._version) for p in net.parameters()]
        optimizer.step()
        for p, (grad, copied, version) in zip(net.parameters(), before, strict=True):
            assert p.grad is grad
            assert torch.equal(grad, copied)
            assert grad._version == version


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
# these two take any sparse gradient
@pytest.mark.parametrize("name", sorted(ALL.keys() - {"SGD", "Adagrad"}))
def test_gradients_and_groups_are_restored_after_an_error(name: str, extras: dict) -> None:
    net = model()
    optimizer = ALL[name](net.named_parameters(), **extras)
    give_gradients(net, 0)
    net[2].weight.grad = net[2].weight.grad.to_sparse()
    before = values(net)
    grads, groups = [p.grad for p in net.parameters()], optimizer.param_groups
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert all(p.grad is g for p, g in zip(net.parameters(), grads, strict=True))
    assert optimizer.position == 0
    assert same(before, values(net))


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
def test_a_parameter_without_gradient_is_left_alone(case: Case, extras: dict) -> None:
    net = model()
    optimizer = case(net.named_parameters(), **extras)
    train(net, optimizer, range(2))
    kept = {p: copy.deepcopy(optimizer.state.get(p, {})) for p in (net[0].weight, net[2].bias)}
    before = {p: p.detach().clone() for p in kept}
    give_gradients(net, 2)
    net[0].weight.grad = None
    net[2].bias.requires_grad_(False)  # frozen, with an old gradient still there
    optimizer.step()
    for p, state in kept.items():
        assert torch.equal(p, before[p])
        now = optimizer.state.get(p, {})
        assert set(now) == set(state)
        assert all(
            torch.equal(torch.as_tensor(now[k]), torch.as_tensor(v))
            for k, v in state.items()
            if v is not None
        )
    assert not torch.equal(net[2].weight, model()[2].weight)


@pytest.mark.parametrize("foreach", [True, False])
def test_empty_and_scalar_parameters(case: Case, foreach: bool) -> None:
    empty, scalar, flat = (
        torch.nn.Parameter(t) for t in (torch.zeros(0, 3), torch.tensor(2.0), torch.ones(0))
    )
    params = [("empty", empty), ("scalar", scalar), ("flat", flat)]
    optimizer = case(
        [{"params": params, "grad_centralization": True}],
        foreach=foreach,
        grad_clip=optim.ClipByNorm(1.0),
    )
    for _ in range(3):
        for _, p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert empty.shape == (0, 3)
    assert torch.isfinite(scalar)
    assert scalar.item() < 2


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
def test_no_graph_is_kept_alive(case: Case, extras: dict) -> None:
    net = model()
    optimizer = case(net.named_parameters(), **extras)
    inputs = torch.ones(2, 5)
    hidden = net[0](inputs)
    node = weakref.ref(hidden)
    loss = net[2](net[1](hidden)).square().sum()
    with warnings.catch_warnings():
        # torch warns once in a process, of the cycle that we look for
        warnings.simplefilter("ignore", UserWarning)
        loss.backward(create_graph=True)
    optimizer.step()
    assert all(p.grad_fn is None for p in net.parameters())
    for state in optimizer.state.values():
        assert all(v.grad_fn is None for v in state.values() if isinstance(v, torch.Tensor))
    optimizer.zero_grad()
    del hidden, loss
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_have_float32_state_rounded_once(name: str, dtype: torch.dtype) -> None:
    case = OURS[name]
    narrow, wide = model(dtype), model()
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        q.data.copy_(p)
    a, b = case(narrow.named_parameters(), **EXTRAS), case(wide.named_parameters(), **EXTRAS)
    give_gradients(narrow, 0)
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        q.grad = p.grad.float()
    a.step()
    b.step()
    for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(p, q.to(dtype)), "one rounding of the float32 update"
        assert all(v.dtype == torch.float32 for v in a.state[p].values())
    c = case(narrow.named_parameters())
    c.load_state_dict(a.state_dict())
    for p in narrow.parameters():
        for key, value in a.state[p].items():
            assert c.state[p][key].dtype == torch.float32
            assert torch.equal(c.state[p][key], value)


def test_grad_scaler_unscales_and_skips(case: Case) -> None:
    net, twin = model(), model()
    kwargs = {**EXTRAS, "lr": CosineDecay(0.001, 0.02, 10)}
    run_scaled(
        net, twin, case(net.named_parameters(), **kwargs), case(twin.named_parameters(), **kwargs)
    )


def run_scaled(
    net: torch.nn.Module, twin: torch.nn.Module, optimizer: object, plain: object
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for seed in range(5):
        give_gradients(twin, seed)
        give_gradients(net, seed)
        for p in net.parameters():
            p.grad.mul_(scaler.get_scale())
        scaler.scale(torch.zeros(()))  # a scaler needs to have seen a loss
        if seed == 2:
            net[0].weight.grad[0, 0] = float("inf")
        else:
            plain.step()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.position == 4
    assert same(values(net), values(twin))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_grad_scaler_with_fused_kernels(name: str) -> None:
    net, twin = model(), model()
    # it leaves some gradients as they are, so that scale shows
    extras = {**EXTRAS, "grad_clip": optim.ClipByNorm(2.0)}
    optimizer = ALL[name](net.named_parameters(), fused=True, **extras)
    run_scaled(net, twin, optimizer, ALL[name](twin.named_parameters(), fused=True, **extras))


def test_a_loaded_counter_may_be_a_plain_number(case: Case) -> None:
    net, twin = model(), model()
    optimizer, plain = case(net.named_parameters()), case(twin.named_parameters())
    for each, its in ((net, optimizer), (twin, plain)):
        train(each, its, range(2))
    saved = copy.deepcopy(plain.state_dict())
    for entries in saved["state"].values():
        if "step" in entries:
            entries["step"] = int(entries["step"])
    plain.load_state_dict(saved)
    assert same(train(net, optimizer, range(2, 4)), train(twin, plain, range(2, 4)))
    for entries, others in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert "step" not in entries or torch.equal(entries["step"], others["step"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_computes_outside_the_trace(case: Case) -> None:
    traced = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
        traced.extend(call for call in calls if "grad_enabled" not in str(call.target))
        return graph.forward

    net, twin = model(), model()
    lr = CosineDecay(0.001, 0.02, 4)
    optimizer, plain = (case(each.named_parameters(), lr=lr) for each in (net, twin))
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, backend=backend)
    for seed in range(2):
        give_gradients(net, seed)
        compiled()
        train(twin, plain, range(seed, seed + 1))
    assert not traced
    assert same(values(net), values(twin))


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_scale_that_is_no_number_of_float16_is_divided_by(name: str) -> None:
    values = {}
    for clip in (None, optim.ClipByGlobalNorm(1e9)):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(4, 4).half())
        optimizer = getattr(optim, name)([p], lr=0.5, weight_decay=0.0, fused=True, grad_clip=clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale((p.float() * 0.01).square().sum()).backward()
        before = p.detach().clone()
        scaler.step(optimizer)
        assert not torch.equal(p, before)
        values[clip is None] = p.detach().float()
    torch.testing.assert_close(values[True], values[False], rtol=2e-3, atol=2e-3)


def test_torch_may_have_the_state_made_by_a_step_that_moves_nothing(case: Case) -> None:
    net = model()
    optimizer = case(net.named_parameters(), lr=CosineDecay(0.001, 0.02, 10))
    before = values(net)
    if isinstance(optimizer, optim.Ftrl):
        with pytest.raises(ValueError, match="must be > 0 for Ftrl"):
            get_optimizer_state_dict(net, optimizer)
        return
    get_optimizer_state_dict(net, optimizer)
    assert same(values(net), before)
    assert optimizer.position == 0
    assert optimizer.get_lr() == pytest.approx(0.02)
    train(net, optimizer, range(1))
    assert not same(values(net), before)
