"""Every optimizer against its formula in NumPy float64, 60 updates long, with every option."""

import numpy as np
import pytest
import torch

from tests.reference.optimizers import Options, run, run_rows
from thinwire import optim
from thinwire.schedules import CosineDecay

UPDATES = 60
SHAPES = {
    "weight": (6, 5),
    "bias": (6,),
    "conv": (3, 2, 2, 2),
    "scale": (),
    "zero": (4, 3),
    "idle": (3,),
}

OWN_HYPER = {
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.8, "nesterov": True}],
    "Adam": [{}, {"betas": (0.8, 0.95), "eps": 1e-3}],
    "AdamW": [{}, {"betas": (0.8, 0.95), "eps": 1e-3}],
    "RMSprop": [{}, {"alpha": 0.9, "momentum": 0.5, "eps": 1e-3}, {"centered": True, "eps": 1e-2}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}],
    "Lamb": [
        {},
        {"betas": (0.7, 0.9), "eps": 1e-3},
        {"trust_clip": (0.2, 0.9)},
        {"trust_clip": (0.5, float("inf"))},
    ],
    "Lars": [
        {},
        {"momentum": 0.5, "nesterov": True, "trust_coefficient": 0.02, "eps": 0.1},
        {"momentum": 0.0},
    ],
    "LazyAdam": [{}, {"betas": (0.8, 0.95), "eps": 1e-3}],
    "Ftrl": [
        {},
        {"lr_power": -0.7, "l1": 0.3, "l2": 0.1},
        {"lr_power": 0.0, "initial_accumulator": 0.0, "l2": 0.5},
    ],
    "ProximalAdagrad": [{}, {"l1": 0.05, "l2": 0.1, "initial_accumulator": 0.0}],
}
COMMON = {
    "plain": Options(),
    "decay": Options(weight_decay=0.03, excluded=("bias", "scale")),
    "global norm": Options(clip=("global", 2.0, 0.0)),
    "norm": Options(clip=("norm", 1.0, 0.0), weight_decay=0.01),
    "value": Options(clip=("value", 0.5, -0.2), maximize=True),
    "l1": Options(l1_decay=0.05, centralize=True),
    "l2": Options(
        l2_decay=0.05, weight_decay=0.02, centralize=True, excluded=("weight",), maximize=True
    ),
}
CASES = [
    pytest.param(method, {**hyper}, common, id=f"{method}-{i}-{common}")
    for method, hypers in OWN_HYPER.items()
    for i, hyper in enumerate(hypers)
    for common in COMMON
    if i == 0 or common in ("plain", "l2")
]


def start(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in SHAPES.items():
        value = (
            torch.zeros(shape)
            if name == "zero"
            else torch.randn(shape, generator=generator, dtype=torch.float64)
        )
        made[name] = torch.nn.Parameter(value.to(torch.float32).to(dtype))
    return made


def gradients() -> list[dict[str, torch.Tensor | None]]:
    """One after the other, exact in float32; `idle` has a gradient in every third update only."""
    generator = torch.Generator().manual_seed(5)
    updates = []
    for s in range(UPDATES):
        grads = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        updates.append(
            {name: g if name != "idle" or s % 3 == 0 else None for name, g in grads.items()}
        )
    return updates


def build(
    method: str, params: dict[str, torch.nn.Parameter], hyper: dict, common: Options, lr: object
):
    clip = None
    if common.clip is not None:
        kind, c, low = common.clip
        clip = {"global": optim.ClipByGlobalNorm, "norm": optim.ClipByNorm}.get(
            kind, optim.ClipByValue
        )(c, *([low] if kind == "value" else []))
    regularizer = None
    if common.l1_decay or common.l2_decay:
        regularizer = (
            optim.L1Decay(common.l1_decay) if common.l1_decay else optim.L2Decay(common.l2_decay)
        )
    group = {"params": list(params.items()), "grad_centralization": common.centralize}
    return getattr(optim, method)(
        [group],
        lr=lr,
        weight_decay=common.weight_decay,
        grad_clip=clip,
        regularizer=regularizer,
        exclude_from_weight_decay=common.excluded,
        maximize=common.maximize,
        **hyper,
    )


def assert_near(ours: torch.Tensor, oracle: np.ndarray, tolerance: float, what: str) -> None:
    scale = max(float(np.abs(oracle).max(initial=0.0)), 1e-6)
    worst = float(np.abs(ours.detach().double().numpy() - oracle).max(initial=0.0)) / scale
    assert worst <= tolerance, f"{what}: {worst:.2e} of its largest entry, allowed {tolerance:.0e}"


@pytest.mark.parametrize(("method", "hyper", "common"), CASES)
def test_float64_follows_the_formula(method: str, hyper: dict, common: str) -> None:
    follow(method, hyper, COMMON[common], torch.float64, 1e-9)


@pytest.mark.parametrize("method", OWN_HYPER)
@pytest.mark.parametrize("common", ["plain", "decay", "l1"])
def test_float32_follows_the_formula(method: str, common: str) -> None:
    follow(method, {}, COMMON[common], torch.float32, 1e-5)


def follow(method: str, hyper: dict, common: Options, dtype: torch.dtype, tolerance: float) -> None:
    schedule = CosineDecay(0.002, 0.05, UPDATES)
    params = start(dtype)
    before = {name: p.detach().double().numpy().copy() for name, p in params.items()}
    optimizer = build(method, params, hyper, common, schedule)
    updates = gradients()
    for grads in updates:
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].to(dtype)
        optimizer.step()
    rates = [0.002 + (0.05 - 0.002) / 2 * (1 + np.cos(np.pi * s / UPDATES)) for s in range(UPDATES)]
    plain = [
        {k: None if g is None else g.double().numpy() for k, g in grads.items()}
        for grads in updates
    ]
    full = Options(**{**common.__dict__, "hyper": hyper})
    expected = run(method, before, plain, rates, full)
    ratios = expected.pop("__ratios__")
    for name, value in expected.items():
        assert_near(params[name], value, tolerance, f"{method} {name}")
    if method in ("Lamb", "Lars"):
        given = {name for name, g in updates[-1].items() if g is not None}
        seen = optimizer.trust_ratios()
        assert set(seen) == given
        for name in given:
            assert seen[name] == pytest.approx(ratios[name], rel=max(tolerance, 1e-9))


@pytest.mark.parametrize("method", ["LazyAdam", "Ftrl", "ProximalAdagrad"])
@pytest.mark.parametrize("common", ["plain", "norm", "global norm", "l1", "decay"])
def test_row_sparse_gradients_follow_the_formula_by_rows(method: str, common: str) -> None:
    options = COMMON[common]
    options = Options(**{**options.__dict__, "excluded": (), "hyper": OWN_HYPER[method][-1]})
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(9, 4, generator=generator).double()
    param = torch.nn.Parameter(table.clone())
    optimizer = build(method, {"table": param}, options.hyper, options, 0.05)
    updates = []
    for s in range(UPDATES):
        count = 0 if s == 7 else 5
        # repeats happen, row 8 never comes
        rows = torch.randint(0, 8, (count,), generator=generator)
        values = torch.randn(count, 4, generator=generator).double()
        updates.append((rows.numpy(), values.numpy()))
        param.grad = torch.sparse_coo_tensor(rows[None], values, (9, 4), check_invariants=True)
        optimizer.step()
    expected = run_rows(method, table.numpy(), updates, [0.05] * UPDATES, options)
    assert_near(param, expected, 1e-9, method)
    assert torch.equal(param[8], table[8]), "a row without a gradient keeps its bits"
    assert optimizer.state[param]["step"] == UPDATES


@pytest.mark.parametrize(
    ("method", "theirs", "told", "dtype", "within"),
    [
        # on dense gradients; to the last bit
        ("LazyAdam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, torch.float32, 0.0),
        # whose ratio is one where nothing decays
        (
            "Lars",
            torch.optim.SGD,
            {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.0},
            torch.float64,
            1e-9,
        ),
    ],
)
def test_limits_of_methods_are_torchs(
    method: str, theirs: type, told: dict, dtype: torch.dtype, within: float
) -> None:
    pairs = start(dtype), start(dtype)
    ours = getattr(optim, method)(pairs[0].values(), **told)
    optimizers = ours, theirs(pairs[1].values(), **told, foreach=False)
    for grads in gradients():
        for params, optimizer in zip(pairs, optimizers, strict=True):
            for name, p in params.items():
                p.grad = None if grads[name] is None else grads[name].to(dtype)
            optimizer.step()
    torch.testing.assert_close(*pairs, rtol=within, atol=within / 1000)


@pytest.mark.parametrize("method", ["Lamb", "Lars"])
@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.0}])
def test_layouts_that_fused_kernels_do_not_take(method: str, hyper: dict) -> None:
    """A transposed parameter, a gradient and a saved state in other layouts."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(4, 6, generator=generator).double()
    grads = [torch.randn(4, 6, generator=generator).double() for _ in range(UPDATES)]
    params = [torch.nn.Parameter(table.clone()), torch.nn.Parameter(table.clone().T.contiguous().T)]
    assert not params[1].is_contiguous()
    optimizers = [getattr(optim, method)([p], lr=0.02, **hyper) for p in params]
    for s, grad in enumerate(grads):
        params[0].grad = grad if s % 2 else grad.T.contiguous().T
        params[1].grad = grad
        for optimizer in optimizers:
            optimizer.step()
        if s == 20:
            first, second = (optimizer.state_dict() for optimizer in optimizers)
            optimizers[0].load_state_dict(second)
            optimizers[1].load_state_dict(first)
    options = Options(weight_decay=hyper.get("weight_decay", 0.01 if method == "Lamb" else 5e-4))
    expected = run(
        method, {"p": table.numpy()}, [{"p": g.numpy()} for g in grads], [0.02] * UPDATES, options
    )
    for p in params:
        assert_near(p, expected["p"], 1e-9, method)


def test_lamb_moves_a_tensor_of_zeros_and_survives_a_zero_update() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = optim.Lamb([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(p, torch.zeros(3))
    p.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    assert p[0] < 0 < p[1]
    assert p[2] == 0


def test_ftrl_and_proximal_adagrad_give_true_zeros() -> None:
    for optimizer_class in (optim.Ftrl, optim.ProximalAdagrad):
        p = torch.nn.Parameter(torch.tensor([1e-3, 2.0]))
        optimizer = optimizer_class([p], lr=0.1, l1=1.0)
        p.grad = torch.tensor([1e-3, -3.0])
        optimizer.step()
        assert p[0] == 0
        assert p[1] > 0


def test_proximal_adagrad_leaves_an_element_without_accumulator() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = optim.ProximalAdagrad([p], lr=0.1, l1=5.0, initial_accumulator=0.0)
    p.grad = torch.tensor([0.0, 1.0])
    optimizer.step()
    assert p[0] == 1
    assert p[1] != 1
