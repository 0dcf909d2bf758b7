"""Groups: keys, decay exclusion, centralization, order of the parameters."""

import copy
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.api import global_norm
from tests.optim.cases import OURS, Case, model, same, train, values
from thinwire import optim


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("grad_centralizaiton", "grad_centralization"),
        ("weight_decy", "weight_decay"),
        ("regulariser", "regularizer"),
        ("parms", "params"),
    ],
)
def test_unknown_key_is_an_error_with_the_closest_one(case: Case, key: str, closest: str) -> None:
    with pytest.raises(ValueError, match=rf"'{key}' with value 3.*'{closest}'"):
        case([{"params": model().named_parameters(), key: 3}])


def test_a_warning_names_the_line_that_made_the_optimizer(case: Case) -> None:
    with pytest.warns(UserWarning, match="weight_decay is usually below 1, got 2") as found:
        case(model().named_parameters(), weight_decay=2.0)
    assert [Path(warning.filename).name for warning in found] == ["cases.py"]


def test_keys_that_torch_uses_are_accepted(case: Case) -> None:
    net = model()
    optimizer = case([{"params": net.named_parameters(), "initial_lr": 0.1, "name": "all"}])
    again = type(optimizer)(optimizer.param_groups, lr=0.1)
    assert again.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_a_key_of_another_method_is_unknown() -> None:
    with pytest.raises(ValueError, match="momentum"):
        optim.Lamb([{"params": model().parameters(), "momentum": 0.9}])


def test_torch_refusals_stay(case: Case) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="empty"):
        case([])
    with pytest.raises(ValueError, match="more than one"):
        case([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="more than once"):
        case([p, p])
    with pytest.raises(ValueError, match="non-leaf"):
        case([p * 2])
    with pytest.raises(TypeError, match="iterable"):
        case(p)
    with pytest.raises(TypeError, match="Tensors"):
        case(["p"])
    with pytest.raises(TypeError, match="ordered"):
        case([{"params": {p}}])
    with pytest.raises(ValueError, match="names"):
        case([("p", p), torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="'params'"):
        case([{"lr": 0.1}])


def test_parameters_given_the_wrong_way_are_refused_with_a_remedy(case: Case) -> None:
    net, late = model(), torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"Sequential.*muon_groups\(model\)"):
        case(net)
    optimizer = case(net.named_parameters())
    with pytest.raises(ValueError, match=r"'0\.weight'.*named_parameters"):
        optimizer.add_param_group({"params": late.parameters()})
    optimizer.add_param_group({"params": late.named_parameters()})


@pytest.mark.parametrize("field", ["lamb", "lars"])
def test_group_for_a_converted_optimizer_is_reported_to_have_names(field: str) -> None:
    net, late = model(), torch.nn.Linear(2, 2)
    kind = torch.optim.AdamW if field == "lamb" else torch.optim.SGD
    given, config = kind(net.parameters(), 0.1), {"lamb": tw.LAMB, "lars": tw.LARS}
    tw.DistributedStrategy(**{field: config[field]()}).prepare(net, given)
    with pytest.raises(ValueError, match=r"of the model.*named_parameters"):
        given.add_param_group({"params": late.parameters()})


@pytest.mark.parametrize(
    "patterns", [("*.bias", "1.*"), ["*.bias", "1.*"], lambda name, p: p.ndim < 2]
)
def test_excluded_parameters_have_no_decay(case: Case, patterns: object) -> None:
    """The same as two groups of which one has weight_decay 0."""
    net, twin = model(), model()
    a = case(net.named_parameters(), weight_decay=0.3, exclude_from_weight_decay=patterns)
    named = list(twin.named_parameters())
    b = case(
        [
            {"params": [(n, p) for n, p in named if p.ndim >= 2]},
            {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
        ],
        weight_decay=0.3,
    )
    assert same(train(net, a, range(4)), train(twin, b, range(4)))
    assert not same(values(net), train(model(), case(model().named_parameters()), range(1)))


def test_the_regularizer_still_acts_on_excluded_parameters() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.SGD(
        [("p", p)],
        lr=0.5,
        weight_decay=0.25,
        regularizer=optim.L2Decay(0.5),
        exclude_from_weight_decay=("p",),
    )
    p.grad = torch.zeros(3)
    optimizer.step()
    assert p.tolist() == [0.75] * 3


def test_a_groups_regularizer_replaces_the_constructors() -> None:
    a, b, c = (torch.nn.Parameter(torch.full((1,), 2.0)) for _ in range(3))
    optimizer = optim.SGD(
        [
            {"params": [a]},
            {"params": [b], "regularizer": optim.L1Decay(0.5)},
            {"params": [c], "regularizer": None},
        ],
        lr=1.0,
        regularizer=optim.L2Decay(0.5),
    )
    for p in (a, b, c):
        p.grad = torch.zeros(1)
    optimizer.step()
    assert [p.item() for p in (a, b, c)] == [1.0, 1.5, 2.0]


def test_exclusion_errors(case: Case) -> None:
    net = model()
    with pytest.raises(ValueError, match=r"no names.*named_parameters"):
        case(net.parameters(), exclude_from_weight_decay=("*.bias",))
    with pytest.raises(ValueError, match=r"'\*\.bais' matches no parameter name.*bias"):
        case(net.named_parameters(), exclude_from_weight_decay=("*.weight", "*.bais"))
    with pytest.raises(TypeError, match="single pattern"):
        case(net.named_parameters(), exclude_from_weight_decay="*.bias")
    with pytest.raises(TypeError, match="pattern"):
        case(net.named_parameters(), exclude_from_weight_decay=("*.bias", 3))
    with pytest.raises(TypeError, match="exclude_from_weight_decay"):
        case(net.named_parameters(), exclude_from_weight_decay=3)
    with pytest.raises(TypeError, match="True or False"):
        case(net.named_parameters(), exclude_from_weight_decay=lambda name, p: None)
    with pytest.raises(ValueError, match="without a name"):
        case(net.parameters(), exclude_from_weight_decay=lambda name, p: "bias" in name)
    case(net.parameters(), exclude_from_weight_decay=lambda name, p: p.ndim < 2)
    case(net.parameters(), exclude_from_weight_decay=())


def test_patterns_are_case_sensitive() -> None:
    with pytest.raises(ValueError, match="matches no"):
        optim.SGD(model().named_parameters(), exclude_from_weight_decay=("*.BIAS",))
    upper, lower = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = optim.SGD(
        [("A", upper), ("a", lower)], lr=1.0, weight_decay=0.5, exclude_from_weight_decay=("A",)
    )
    upper.grad, lower.grad = torch.zeros(1), torch.zeros(1)
    optimizer.step()
    assert (upper.item(), lower.item()) == (1.0, 0.5)


def test_the_predicate_is_asked_once_per_parameter_and_again_only_for_new_ones() -> None:
    asked = []

    def predicate(name: str, p: torch.Tensor) -> bool:
        asked.append(name)
        return name.endswith("bias")

    net = model()
    optimizer = optim.AdamW(
        net.named_parameters(), weight_decay=0.1, exclude_from_weight_decay=predicate
    )
    names = [name for name, _ in net.named_parameters()]
    assert asked == names
    late = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("late.bias", late)]})
    train(net, optimizer, range(2))
    assert asked == [*names, "late.bias"]
    late.grad = torch.zeros(2)
    optimizer.step()
    assert late.tolist() == [1.0, 1.0], "excluded too"


@pytest.mark.parametrize(
    ("group", "error", "name"),
    [
        ({"grad_centralization": 1}, TypeError, "grad_centralization"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay"),
        ({"weight_decay": "0"}, TypeError, "weight_decay"),
        ({"regularizer": 0.1}, TypeError, "regularizer"),
        ({"maximize": 1}, TypeError, "maximize"),
    ],
)
def test_wrong_values_in_a_group_change_nothing(
    case: Case, group: dict, error: type[Exception], name: str
) -> None:
    optimizer = case(model().named_parameters())
    with pytest.raises(error, match=name):
        optimizer.add_param_group(
            {"params": [("late", torch.nn.Parameter(torch.ones(1)))], **group}
        )
    assert len(optimizer.param_groups) == 1
    assert len(optimizer._common.order) == 6
    train(model(), optimizer, range(1))


@pytest.mark.parametrize(
    ("kwargs", "error", "name"),
    [
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay"),
        ({"grad_clip": 1.0}, TypeError, "grad_clip"),
        ({"grad_clip": optim.L1Decay(1.0)}, TypeError, "grad_clip"),
        ({"regularizer": 0.1}, TypeError, "regularizer"),
    ],
)
def test_wrong_common_options(case: Case, kwargs: dict, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        case(model().named_parameters(), **kwargs)


WRONG = (TypeError, ValueError)
METHODS_ARGUMENTS = [
    (optim.SGD, {"momentum": float("nan")}, ValueError, "momentum"),
    (optim.RMSprop, {"alpha": 1.5}, ValueError, "alpha must be .* < 1, got 1.5"),
    (optim.Lamb, {"betas": 0.9}, TypeError, "betas"),
    (optim.Lamb, {"betas": (0.9, 1.0)}, ValueError, "betas"),
    (optim.Lamb, {"eps": 0.0}, ValueError, "eps"),
    (optim.Lamb, {"trust_clip": 3.0}, TypeError, "trust_clip"),
    (optim.Lamb, {"trust_clip": (1.0, 0.5)}, ValueError, "trust_clip"),
    (optim.Lamb, {"trust_clip": (0.0, 0.0)}, ValueError, "trust_clip"),
    (optim.Lars, {"lr": 0.1, "momentum": -0.1}, ValueError, "momentum"),
    (optim.Lars, {"lr": 0.1, "trust_coefficient": 0}, ValueError, "trust_coefficient"),
    (optim.Lars, {"lr": 0.1, "eps": -1.0}, ValueError, "eps"),
    (optim.Lars, {"lr": 0.1, "nesterov": 1}, TypeError, "nesterov"),
    (optim.Lars, {"lr": 0.1, "nesterov": True, "momentum": 0.0}, ValueError, "momentum"),
    (optim.LazyAdam, {"betas": (-0.1, 0.9)}, ValueError, "betas"),
    (optim.LazyAdam, {"eps": 0}, ValueError, "eps"),
    (optim.Ftrl, {"lr_power": 0.1}, ValueError, "lr_power"),
    (optim.Ftrl, {"l1": -0.1}, ValueError, "l1"),
    (optim.Ftrl, {"l2": None}, TypeError, "l2"),
    (optim.Ftrl, {"initial_accumulator": -0.1}, ValueError, "initial_accumulator"),
    (optim.ProximalAdagrad, {"l1": float("inf")}, ValueError, "l1"),
    # what torch would compare before it looks at the kind
    (optim.SGD, {"weight_decay": "1"}, TypeError, "weight_decay must be a number.*'1'"),
    (optim.SGD, {"weight_decay": None}, TypeError, "weight_decay must be a number"),
    (optim.SGD, {"weight_decay": torch.ones(2)}, ValueError, "weight_decay.*one element"),
    (optim.SGD, {"momentum": "x"}, TypeError, "momentum must be a number"),
    (optim.SGD, {"nesterov": True}, ValueError, "needs a momentum"),
    (optim.SGD, {"nesterov": "x"}, TypeError, "nesterov must be"),
    (optim.AdamW, {"eps": "x"}, TypeError, "eps must be a number"),
    (optim.RMSprop, {"alpha": "x"}, TypeError, "alpha must be a number"),
    (optim.Adam, {"betas": 0.9}, TypeError, "betas must be two numbers"),
    (optim.Adam, {"betas": (True, 0.9)}, TypeError, r"betas\[0\]"),
    (optim.Adam, {"betas": (2.0, 0.9)}, ValueError, r"betas\[0\].*got 2.0"),
    (optim.Muon, {"eps": torch.ones(2)}, ValueError, "eps.*one element"),
    (optim.Muon, {"momentum": torch.tensor(True)}, TypeError, "momentum"),
    (optim.Muon, {"momentum": -1}, ValueError, "momentum"),
    (optim.Muon, {"betas": (0.9, 0.95, 0.99)}, WRONG, "betas must be two numbers"),
    (optim.Muon, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]"),
    (optim.Muon, {"nesterov": "no"}, TypeError, "nesterov must be"),
    (optim.Muon, {"ns_steps": 0}, ValueError, "ns_steps"),
    (optim.Muon, {"ns_dtype": "float16"}, ValueError, "ns_dtype.*bfloat16"),
    (optim.Muon, {"ns_dtype": 32}, WRONG, "ns_dtype"),
    (optim.Muon, {"ns_coefficients": 3.0}, TypeError, "ns_coefficients.*three"),
    (optim.Muon, {"ns_coefficients": (3.4, -4.8)}, ValueError, "ns_coefficients.*three"),
    (optim.Muon, {"ns_coefficients": (3.4, -4.8, "2")}, TypeError, r"ns_coefficients\[2\]"),
    (optim.Muon, {"adjust_lr_fn": "mean"}, ValueError, "adjust_lr_fn.*match_rms_adamw"),
    (optim.Muon, {"muon": "yes"}, TypeError, "muon"),
    (optim.Muon, {"conv": 1}, TypeError, "conv"),
]


@pytest.mark.parametrize(("method", "kwargs", "error", "name"), METHODS_ARGUMENTS)
def test_wrong_arguments_of_the_methods(
    method: type, kwargs: dict, error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=name):
        method(model().parameters(), **kwargs)
    own = {k: v for k, v in kwargs.items() if k != "lr"}
    with pytest.raises(error, match=name):
        method([{"params": model().parameters(), **own}], lr=0.1)


@pytest.mark.parametrize("name", OURS)
def test_complex_parameters_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="complex"):
        OURS[name]([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize("name", ["Lamb", "Lars"])
def test_sparse_gradients_are_refused_by_name(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = OURS[name]([("table", p)])
    p.grad = torch.ones(3, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="table"):
        optimizer.step()


@pytest.mark.parametrize("name", ["LazyAdam", "Ftrl", "ProximalAdagrad"])
def test_a_sparse_gradient_has_to_be_of_rows(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = OURS[name]([("table", p)])
    p.grad = torch.ones(3, 2).to_sparse(2)
    with pytest.raises(RuntimeError, match=r"table.*sparse_dim 2"):
        optimizer.step()


def test_order_params_fixes_the_order_and_not_the_numbers(case: Case) -> None:
    net, twin = model(), model()
    reverse = list(net.named_parameters())[::-1]
    groups = [
        {"params": net[0].named_parameters(prefix="0")},
        {"params": net[1:].named_parameters(prefix="rest")},
    ]
    a = case([*groups, {"order_params": reverse}], grad_clip=optim.ClipByNorm(0.1))
    b = case(
        [
            {"params": twin[0].named_parameters(prefix="0")},
            {"params": twin[1:].named_parameters(prefix="rest")},
        ],
        grad_clip=optim.ClipByNorm(0.1),
    )
    assert a._common.order == [p for _, p in reverse]
    assert len(a.param_groups) == 2
    pairs = a.backward(net(torch.ones(1, 5)).sum())
    assert [p for p, _ in pairs] == [p for _, p in reverse]
    assert same(train(net, a, range(3)), train(twin, b, range(3)))
    late = torch.nn.Parameter(torch.ones(1))
    a.add_param_group({"params": [("late", late)]})
    assert a._common.order[-1] is late


def test_the_order_changes_no_bit_of_the_global_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(7, generator=generator) ** 3 for _ in range(61)]
    assert global_norm(grads) != global_norm(grads[::-1]), "the sum does depend on the order"
    runs = []
    for reverse in (False, True):
        params = [torch.nn.Parameter(torch.zeros(7)) for _ in grads]
        order = params[::-1] if reverse else params
        optimizer = optim.SGD(
            [{"params": params}, {"order_params": order}],
            lr=1.0,
            grad_clip=optim.ClipByGlobalNorm(1.0),
        )
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        runs.append(params)
    assert same(*runs)


def test_order_params_errors(case: Case) -> None:
    net = model()
    params = list(net.parameters())
    group = {"params": params}
    with pytest.raises(ValueError, match="misses 1 of 6"):
        case([group, {"order_params": params[1:]}])
    with pytest.raises(ValueError, match="none of the parameter groups"):
        case([group, {"order_params": [*params, torch.nn.Parameter(torch.ones(1))]}])
    with pytest.raises(ValueError, match="twice"):
        case([group, {"order_params": [*params, params[0]]}])
    with pytest.raises(ValueError, match="once"):
        case([group, {"order_params": params}, {"order_params": params}])
    with pytest.raises(ValueError, match="alone"):
        case([group, {"order_params": params, "lr": 0.1}])
    with pytest.raises(TypeError, match="order_params"):
        case([group, {"order_params": params[0]}])
    with pytest.raises(TypeError, match=r"order_params\[0\]"):
        case([group, {"order_params": ["0.weight"]}])
    with pytest.raises(ValueError, match="order_params"):
        case(params).add_param_group({"order_params": params})


def test_centralization_is_per_group() -> None:
    a, b = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    optimizer = optim.SGD([{"params": [a], "grad_centralization": True}, {"params": [b]}], lr=1.0)
    give = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    a.grad, b.grad = give, give.clone()
    optimizer.step()
    assert a.tolist() == [[1.0, 0.0, -1.0], [1.0, 1.0, -2.0]]
    assert torch.equal(b, -give)
    assert same([a.grad, b.grad], [give, give])
    a.grad = give.to_sparse(2)
    with pytest.raises(RuntimeError, match="sparse_dim 2"):
        optimizer.step()


def test_parameters_of_one_name_keep_their_own_state(case: Case) -> None:
    def made() -> tuple[list[torch.nn.Linear], torch.optim.Optimizer]:
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
        both = [pair for each in models for pair in each.named_parameters()]
        return models, case(both)

    def step(models: list[torch.nn.Linear], optimizer: torch.optim.Optimizer) -> None:
        for factor, each in enumerate(models, start=1):
            each.weight.grad = torch.full((4, 4), 5.0 * factor)
        optimizer.step()

    models, optimizer = made()
    step(models, optimizer)
    others, loaded = made()
    for mine, other in zip(models, others, strict=True):
        other.load_state_dict(mine.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(models, optimizer)
        step(others, loaded)
    for mine, other in zip(models, others, strict=True):
        assert torch.equal(mine.weight, other.weight)


class Adapter(torch.nn.Module):
    """Has `weight` and `module.weight`, which a wrapper's prefix would make one."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(3, 3, bias=False)
        self.weight = torch.nn.Parameter(torch.zeros(3, 3))


def test_names_like_a_wrappers_are_kept() -> None:
    adapter = Adapter()
    optimizer = optim.Adam(adapter.named_parameters(), lr=0.1)
    adapter.weight.grad, adapter.module.weight.grad = torch.ones(3, 3), torch.full((3, 3), 5.0)
    optimizer.step()
    again = optim.Adam(reversed(list(adapter.named_parameters())), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    for p in adapter.parameters():
        assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    wrapped = torch.nn.Module()
    wrapped.module = adapter
    in_ddp = optim.Adam(wrapped.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match="ambiguous"):
        in_ddp.load_state_dict(optimizer.state_dict())


def test_a_rate_that_rounding_left_below_zero_is_zero() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, end_factor=0.0, total_iters=5)
    for _ in range(8):
        before = p.detach().clone()
        p.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    assert torch.equal(p, before)


def test_a_gradient_too_small_for_its_square_leaves_ftrl_finite() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([1e-25, 0.0, 1.0])
    optim.Ftrl([p], lr=0.1, initial_accumulator=0.0).step()
    assert bool(p.isfinite().all())
    assert p[0] == 1
