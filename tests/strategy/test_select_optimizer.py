"""The optimizer that trains is told what the given one was, or prepare says what it cannot do."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.api import select_optimizer
from tests.optim.cases import give_gradients
from tests.optim.cases import train as steps
from thinwire import DGC, LAMB, LARS, DistributedStrategy, StrategyError, optim
from thinwire.optim import ClipByNorm, L1Decay, L2Decay
from thinwire.schedules import CosineDecay, PiecewiseConstant


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)).to(dtype)


def selected(net, optimizer, **strategy):
    names = {p: name for name, p in net.named_parameters()}
    return select_optimizer(
        optimizer, names=names, compression=strategy.pop("dgc", None), **strategy
    )


def assert_same(a, b, **tolerance):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.allclose(p, q, **(tolerance or {"rtol": 1e-12, "atol": 1e-14})), name


def refused(net, optimizer, **strategy) -> str:
    with pytest.raises(StrategyError) as caught:
        selected(net, optimizer, **strategy)
    return str(caught.value)


SGDS = pytest.mark.parametrize("sgd", [torch.optim.SGD, optim.SGD], ids=["torch", "ours"])
ADAMS = pytest.mark.parametrize(
    "adam",
    [torch.optim.Adam, torch.optim.AdamW, optim.Adam, optim.AdamW, optim.LazyAdam],
    ids=["Adam", "AdamW", "our Adam", "our AdamW", "LazyAdam"],
)


@SGDS
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("min_numel", [1, 10, 10**6])
def test_before_dgc_begins_an_sgd_trains_as_it_would_have(sgd, lr, min_numel):
    net, twin = network(), network()
    kwargs = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.02, "maximize": True}

    def groups(model):
        own = {"lr": 0.03, "weight_decay": 0.5, "momentum": 0.5, "foreach": False}
        return [{"params": model[:2].parameters()}, {"params": model[2].parameters(), **own}]

    given, own = sgd(groups(twin), lr=lr, **kwargs), sgd(groups(net), lr=lr, **kwargs)
    assert_dense_alike(net, own, twin, given, min_numel)


def assert_dense_alike(net, own, twin, given, min_numel, **tolerance):
    """An engine whose compressor keeps the momentum, and the optimizer alone, from step 2 on."""
    for one, optimizer in ((net, own), (twin, given)):
        steps(one, optimizer, range(2))
    dgc = DGC(rampup_begin_step=100, min_numel=min_numel)
    with warnings.catch_warnings(action="ignore"):
        engine = DistributedStrategy(dgc=dgc).prepare(net, own)
    assert engine.optimizer is own
    for seed in range(2, 5):
        give_gradients(twin, seed)
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        net.zero_grad()
        engine.minimize(sum((p * q.grad).sum() for p, q in pairs))
        given.step()
    engine.close()
    assert_same(net, twin, **tolerance)


def full(model, clip=ClipByNorm(0.5)):  # noqa: B008
    """Everything that an SGD of ours can be told."""
    named = [(f"net.{name}", p) for name, p in model.named_parameters()]
    return optim.SGD(
        [
            {
                "params": named[:2],
                "lr": CosineDecay(0.0, 0.2, 10),
                "regularizer": L1Decay(0.1),
                "name": "first",
            },
            {"params": named[2:4], "lr": [0.3, 0.2, 0.1, 0.05, 0.02, 0.01]},
            {"params": named[4:], "weight_decay": 0.7, "grad_centralization": True},
            {"order_params": named[::-1]},
        ],
        lr=PiecewiseConstant([2, 4], [0.1, 0.05, 0.02]),
        momentum=0.9,
        weight_decay=0.1,
        grad_clip=clip,
        regularizer=L2Decay(0.2),
        exclude_from_weight_decay=("*.bias",),
    )


def test_schedules_groups_exclusions_order_and_clipping_are_taken_over():
    net, twin = network(), network()
    given = full(twin)
    new = selected(net, full(net)).optimizer
    assert new.grad_clip == ClipByNorm(0.5)
    assert new.param_groups[0]["name"] == "first"
    assert new.param_groups[0]["param_names"] == ["net.0.weight", "net.0.bias"], (
        "its own names go first"
    )
    assert new._common.order == list(net.parameters())[::-1]
    for _ in range(5):
        assert [g["lr"] for g in new.param_groups] == [g["lr"] for g in given.param_groups]
        steps(net, new, [new.position])
        steps(twin, given, [given.position])
    assert_same(net, twin)
    later = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for optimizer in (new, given):
        optimizer.add_param_group({"params": [("later.bias", later)]})
        assert optimizer._facts(later).weight_decay == 0.0, "the rules hold for what comes later"
        assert optimizer._facts(later).group["regularizer"] == L2Decay(0.2)
        assert optimizer.get_lr() == given.get_lr()


@pytest.mark.parametrize(("min_numel", "clip"), [(1, None), (10, None), (99, ClipByNorm(0.5))])
def test_settings_of_our_sgd_act_before_dgc(min_numel, clip):
    net, twin = network(), network()
    assert_dense_alike(net, full(net, clip), twin, full(twin, clip), min_numel)


@SGDS
def test_momentum_goes_on_in_float32_where_parameters_are_narrow(sgd):
    net, twin = network(torch.bfloat16), network(torch.bfloat16)
    own, given = (sgd(n.parameters(), lr=0.1, momentum=0.9) for n in (net, twin))
    # momentum of bfloat16 against float32: the last bit of bfloat16 per step
    assert_dense_alike(net, own, twin, given, 1, rtol=0.05, atol=0.02)


def test_a_rate_that_was_typed_over_is_the_rate():
    net = network()
    given = optim.SGD(
        [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.5}], lr=0.1
    )
    given.param_groups[0]["lr"] = 0.07
    new = selected(net, given, lars=LARS()).optimizer
    assert [g["lr"] for g in new.param_groups] == [0.07, 0.5]
    new.set_lr(0.01)
    assert [g["lr"] for g in new.param_groups] == [0.01, 0.5], (
        "which group follows the constructor stays"
    )


@SGDS
def test_optimizer_that_dgc_cannot_take_over_is_reported_at_once(sgd):
    net = network()
    optimizer = sgd(
        [{"params": net.parameters(), "dampening": 0.1}], lr=0.1, momentum=0.9, differentiable=True
    )
    said = refused(net, optimizer, dgc=DGC())
    assert "dampening" in said
    assert "0.1" in said
    assert "differentiable" in said


def test_under_local_updates_an_sgd_stays_with_dampening_and_all():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    result = selected(net, optimizer, dgc=DGC(), local=True)
    assert result.optimizer is optimizer
    assert result.folding is None


def test_optimizer_that_exchanges_itself_is_refused():
    net = network()
    given = optim.DGCMomentum(net.parameters(), lr=0.1)
    assert "pass an SGD" in refused(net, given)
    everything = refused(net, given, dgc=DGC(), lars=LARS(), lamb=LAMB(), local=True)
    assert all(
        word in everything
        for word in ("exchanges gradients", "lars replaces", "lamb replaces", "both replace")
    )


@SGDS
def test_lars_replaces_an_sgd(sgd):
    net, twin = network(), network()
    optimizer = sgd(net.named_parameters(), lr=2.0, momentum=0.8, nesterov=True, maximize=True)
    config = LARS(
        lars_coeff=0.02,
        lars_weight_decay=0.03,
        epsilon=0.1,
        exclude_from_weight_decay=("*.bias", "1.*"),
    )
    result = selected(net, optimizer, lars=config, dgc=DGC())
    assert type(result.optimizer) is optim.Lars
    assert result.folding is None, "the compression stands before it"
    same = optim.Lars(
        twin.named_parameters(),
        lr=2.0,
        momentum=0.8,
        nesterov=True,
        maximize=True,
        trust_coefficient=0.02,
        weight_decay=0.03,
        eps=0.1,
        exclude_from_weight_decay=("*.bias", "1.*"),
    )
    steps(net, result.optimizer, range(3))
    steps(twin, same, range(3))
    assert_same(net, twin)


@ADAMS
def test_lamb_replaces_an_adam_with_its_moments(adam):
    net, twin = network(), network()
    decay = {"weight_decay": 0.0}
    given = adam(net.named_parameters(), lr=0.05, betas=(0.8, 0.9), eps=1e-3, **decay)
    steps(net, given, range(2))
    twin.load_state_dict(net.state_dict())
    config = LAMB(lamb_weight_decay=0.03, exclude_from_weight_decay=("*.bias",))
    result = selected(net, given, lamb=config)
    same = optim.Lamb(
        twin.named_parameters(),
        lr=0.05,
        betas=(0.8, 0.9),
        weight_decay=0.03,
        exclude_from_weight_decay=("*.bias",),
    )
    # moments by hand, from the same gradients
    for i, p in enumerate(twin.parameters()):
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for seed in range(2):
            give_gradients(twin, seed)
            g = list(twin.parameters())[i].grad
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        same.state[p] = {"step": torch.tensor(2.0), "exp_avg": m.detach(), "exp_avg_sq": v.detach()}
    assert result.optimizer.param_groups[0]["eps"] == 1e-6
    assert "1e-06" in " ".join(result.notes)
    steps(net, result.optimizer, range(2, 5))
    steps(twin, same, range(2, 5))
    assert_same(net, twin, rtol=1e-9, atol=1e-12)


def test_betas_that_are_tensors_become_numbers():
    net = network()
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    given = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01), betas=betas, capturable=True)
    result = selected(net, given, lamb=LAMB())
    assert result.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert "capturable" in " ".join(result.notes)


@SGDS
def test_lars_has_no_use_for_the_velocity_of_an_sgd(sgd):
    net = network()
    optimizer = sgd(net.parameters(), lr=0.1, momentum=0.9)
    steps(net, optimizer, range(1))
    assert "momentum_buffer" in refused(net, optimizer, lars=LARS())
    optimizer.state.clear()
    selected(net, optimizer, lars=LARS())
    without = sgd(net.parameters(), lr=0.1)
    steps(net, without, range(1))
    selected(net, without, lars=LARS())


def test_amsgrad_is_refused_in_any_group():
    net = network()
    optimizer = torch.optim.Adam(
        [{"params": net[0].parameters()}, {"params": net[2].parameters(), "amsgrad": True}], lr=0.1
    )
    steps(net, optimizer, range(1))
    said = refused(net, optimizer, lamb=LAMB())
    assert "amsgrad=False" in said
    assert "max_exp_avg_sq" in said


@pytest.mark.parametrize(
    ("make", "strategy", "text"),
    [
        (torch.optim.Adam, {"lars": LARS()}, "lars replaces an SGD.*Adam"),
        (torch.optim.SGD, {"lamb": LAMB()}, "lamb replaces an Adam.*SGD"),
        (optim.Lars, {"lars": LARS()}, "lars replaces an SGD.*Lars"),
        (optim.Lamb, {"lamb": LAMB()}, "lamb replaces an Adam.*Lamb"),
        (torch.optim.NAdam, {"lamb": LAMB()}, "lamb replaces.*NAdam"),
    ],
)
def test_other_optimizers_are_refused(make, strategy, text):
    net = network()
    with pytest.raises(StrategyError, match=text):
        selected(net, make(net.parameters(), lr=0.1), **strategy)


def test_a_subclass_of_the_users_is_another_optimizer():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    net = network()
    assert "Mine" in refused(net, Mine(net.parameters(), lr=0.1), lars=LARS())
    assert type(selected(net, Mine(net.parameters(), lr=0.1), dgc=DGC()).optimizer) is Mine


@pytest.mark.parametrize(
    ("make", "own", "config", "works"),
    [
        (torch.optim.SGD, 0.0, LARS(lars_weight_decay=0.1), True),
        (torch.optim.SGD, 0.1, LARS(lars_weight_decay=0.1), True),
        (torch.optim.SGD, 0.2, LARS(lars_weight_decay=0.1), False),
        (optim.SGD, 0.01, LARS(), False),
        (torch.optim.AdamW, 0.01, LAMB(lamb_weight_decay=0.5), True),
        (torch.optim.AdamW, 0.0, LAMB(lamb_weight_decay=0.5), True),
        (torch.optim.AdamW, 0.1, LAMB(lamb_weight_decay=0.5), False),
        (torch.optim.Adam, 0.01, LAMB(lamb_weight_decay=0.5), False),
        (optim.LazyAdam, 0.5, LAMB(lamb_weight_decay=0.5), True),
    ],
)
def test_nothing_decays_twice(make, own, config, works):
    net = network()
    optimizer = make(net.parameters(), lr=0.1, weight_decay=own)
    field = type(config).__name__.lower()
    decay = getattr(config, f"{field}_weight_decay")
    if works:
        new = selected(net, optimizer, **{field: config}).optimizer
        assert new.param_groups[0]["weight_decay"] == decay
    else:
        said = refused(net, optimizer, **{field: config})
        assert f"weight_decay={own}" in said
        assert f"{field}_weight_decay={decay}" in said


@pytest.mark.parametrize("decays", [(5e-4, 0.0), (0.0, 5e-4), (0.01, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize(
    ("make", "default", "strategy"),
    [
        (torch.optim.SGD, 0.0, {"lars": LARS(lars_weight_decay=0.3)}),
        (optim.SGD, 0.0, {"lars": LARS(lars_weight_decay=0.3)}),
        *[
            (adam, 0.0, {"lamb": LAMB(lamb_weight_decay=0.3)})
            for adam in (torch.optim.Adam, optim.Adam, optim.AdamW, optim.LazyAdam)
        ],
        (torch.optim.AdamW, 0.01, {"lamb": LAMB(lamb_weight_decay=0.3)}),
        (torch.optim.SGD, 0.2, {"lars": LARS(lars_weight_decay=0.3)}),
    ],
)
def test_decays_that_differ_are_all_kept(make, default, strategy, decays):
    """Those that are equal, and the optimizer's default, were said by nobody."""
    net = network()
    groups = [
        {"params": net[0].parameters(), "weight_decay": decays[0]},
        {"params": [*net[1].parameters(), *net[2].parameters()], "weight_decay": decays[1]},
    ]
    new = selected(net, make(groups, lr=0.1, weight_decay=default), **strategy).optimizer
    expected = (0.3, 0.3) if set(decays) == {default} else decays
    assert tuple(g["weight_decay"] for g in new.param_groups) == expected


def test_exclusions_of_both_add_up():
    net = network()
    optimizer = optim.SGD(
        net.named_parameters(), lr=0.1, exclude_from_weight_decay=lambda name, p: p.shape == (6, 4)
    )
    new = selected(net, optimizer, lars=LARS(exclude_from_weight_decay=("*.bias",))).optimizer
    decays = {name: new._facts(p).weight_decay for name, p in net.named_parameters()}
    assert decays == {
        "0.weight": 0,
        "0.bias": 0,
        "1.weight": 0.0005,
        "1.bias": 0,
        "2.weight": 0.0005,
        "2.bias": 0,
    }


def test_patterns_need_named_parameters():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    assert "model.named_parameters()" in refused(
        net, optimizer, lars=LARS(exclude_from_weight_decay=("*.bias",))
    )


def test_pattern_that_matches_nothing_is_reported_with_the_rest():
    net = network()
    optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    said = refused(net, optimizer, lars=LARS(exclude_from_weight_decay=("*.bais",)))
    assert "'*.bais' matches no parameter name" in said
    assert "bias" in said
    assert "dampening" in said


def test_keys_of_the_users_own_stay_in_the_groups():
    net = network()
    groups = [{"params": net.parameters(), "tag": "mine", "name": "all", "initial_lr": 0.4}]
    group = selected(net, torch.optim.SGD(groups, lr=0.1), dgc=DGC()).optimizer.param_groups[0]
    assert (group["tag"], group["name"], group["initial_lr"]) == ("mine", "all", 0.4)


def test_a_replaced_step_is_found():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None
    assert "optimizer.step" in refused(net, optimizer, dgc=DGC())


def named(net, index):
    return [(f"{index}.{name}", p) for name, p in net[index].named_parameters()]


@pytest.mark.parametrize(
    "strategy", [{}, {"lars": LARS(exclude_from_weight_decay=("0.bias", "2.*"))}]
)
def test_a_stage_trains_its_own_parameters_as_the_whole_would_have(strategy):
    whole = network()
    staged = network()
    told = {"weight_decay": 0.0}

    def make(net):
        groups = [
            {"params": named(net, 0), "lr": 0.3},
            {"params": named(net, 1), "lr": CosineDecay(0.0, 0.2, 9)},
            {"params": named(net, 2)},
            {"order_params": list(net.parameters())[::-1]},
        ]
        return optim.SGD(
            groups,
            lr=0.1,
            momentum=0.9,
            exclude_from_weight_decay=lambda name, p: p.ndim > 9,
            **told,
        )

    stages = [set(staged[:1].parameters()), set(staged[1:].parameters())]
    parts = [
        selected(staged, make(staged), keep=stage.__contains__, **strategy).optimizer
        for stage in stages
    ]
    for part, counts in zip(parts, ([2, 0, 0], [0, 2, 2]), strict=True):
        assert [len(g["params"]) for g in part.param_groups] == counts
        assert [g["lr"] for g in part.param_groups] == [0.3, 0.2, 0.1]
    for seed in range(3):
        give_gradients(staged, seed)
        for part in parts:
            part.step()
    steps(whole, selected(whole, make(whole), **strategy).optimizer, range(3))
    assert_same(whole, staged)


@pytest.mark.parametrize("make", [torch.optim.Adam, optim.Adam], ids=["torch", "ours"])
def test_an_optimizer_that_stays_lets_go_of_other_stages_and_can_take_them_back(make):
    net, twin = network(), network()
    optimizer, other = (make(list(n.named_parameters()), lr=0.1) for n in (net, twin))
    steps(net, optimizer, range(1))
    steps(twin, other, range(1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    result = selected(net, optimizer, keep=set(net[1:].parameters()).__contains__)
    assert result.optimizer is optimizer
    [group] = optimizer.param_groups
    assert len(group["params"]) == len(group["param_names"]) == len(optimizer.state) == 4
    before = net[0].weight.clone()
    steps(net, optimizer, range(1, 2))
    scheduler.step()
    assert torch.equal(net[0].weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.05

    net.load_state_dict(twin.state_dict())
    optimizer = make(list(net.named_parameters()), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    selected(net, optimizer, keep=set(net[1:].parameters()).__contains__).restore()
    steps(net, optimizer, range(1, 3))
    steps(twin, other, range(1, 3))
    assert_same(net, twin)
