"""Schedules: printed examples, formulas, rules, composition, and others' optimizers."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import optim
from thinwire.schedules import (
    Constant,
    CosineDecay,
    ExponentialDecay,
    InverseDecay,
    NaturalExpDecay,
    PiecewiseConstant,
    PolynomialDecay,
    Schedule,
    ScheduledLR,
    Table,
    WarmUp,
    sparsity_at,
)

EXAMPLES = [
    (
        PiecewiseConstant([2, 5, 10], [0.1, 0.05, 0.01]).table(10),
        [0.1] * 2 + [0.05] * 3 + [0.01] * 5,
    ),
    (ExponentialDecay(0.1, 0.9, 1).table(6, 2), [0.1, 0.1, 0.09, 0.09, 0.081, 0.081]),
    (NaturalExpDecay(0.1, 0.9, 2, True).table(6, 2), [0.1] * 4 + [0.016529888822158657] * 2),
    (InverseDecay(0.1, 0.5, 1, True).table(6, 1), [0.1, 0.1 / 1.5, 0.05, 0.04, 0.1 / 3, 0.1 / 3.5]),
    (CosineDecay(0.01, 0.1, 2).table(6, 2), [0.1, 0.1, 0.055, 0.055, 0.01, 0.01]),
    (
        PolynomialDecay(0.1, 0.01, 2, 0.5).table(6, 2),
        [0.1, 0.1, 0.07363961030678928, 0.07363961030678928, 0.01, 0.01],
    ),
    (WarmUp(0.1, 2).table(6, 2), [0.0, 0.0, 0.05, 0.05, 0.1, 0.1]),
    ([PolynomialDecay(0.1, 0.01, 4, 0.5)(2)], [0.07363961030678928]),
    (
        PiecewiseConstant([2, 4, 6, 8], [0.2, 0.4, 0.6, 0.8, 1.0]).table(12),
        [0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0, 1.0, 1.0, 1.0],
    ),
]
EVERY = [
    Constant(0.1),
    PiecewiseConstant([2, 5], [0.1, 0.05, 0.01]),
    ExponentialDecay(0.1, 0.9, 3),
    NaturalExpDecay(0.1, 0.1, 3, staircase=True),
    InverseDecay(0.1, 0.5, 3),
    CosineDecay(0.01, 0.1, 7),
    PolynomialDecay(0.1, 0.01, 4, 2.0, update_decay_steps=True),
    WarmUp(0.1, 4),
    Table([0.1] * 40),
    WarmUp(0.1, 4).then(CosineDecay(0.01, 0.1, 7), at=4),
]


@pytest.mark.parametrize(("table", "expected"), EXAMPLES)
def test_printed_examples_are_kept(table: list[float], expected: list[float]) -> None:
    assert table == pytest.approx(expected, rel=1e-9)


@given(
    s=st.integers(0, 300), d=st.integers(1, 50), rate=st.floats(0.05, 0.99), lr=st.floats(1e-4, 10)
)
def test_formulas(s: int, d: int, rate: float, lr: float) -> None:
    def near(value: float) -> object:
        return pytest.approx(value, rel=1e-9, abs=1e-300)

    assert ExponentialDecay(lr, rate, d)(s) == near(lr * rate ** (s / d))
    assert ExponentialDecay(lr, rate, d, True)(s) == near(lr * rate ** math.floor(s / d))
    assert NaturalExpDecay(lr, rate, d)(s) == near(lr * math.exp(-rate * s))
    assert NaturalExpDecay(lr, rate, d, True)(s) == near(
        lr * math.exp(-rate * d * math.floor(s / d))
    )
    assert InverseDecay(lr, rate, d)(s) == near(lr / (1 + rate * s / d))
    assert InverseDecay(lr, rate, d, True)(s) == near(lr / (1 + rate * math.floor(s / d)))
    assert WarmUp(lr, d)(s) == near(lr * min(s, d) / d)
    cosine = lr * rate + (lr - lr * rate) / 2 * (1 + math.cos(math.pi * min(s, d) / d))
    assert CosineDecay(lr * rate, lr, d)(s) == near(cosine)
    assert PolynomialDecay(lr, 0.5, d, 2)(s) == near((lr - 0.5) * (1 - min(s, d) / d) ** 2 + 0.5)
    stretched = d * max(math.ceil(s / d), 1)
    assert PolynomialDecay(lr, 0.5, d, 2, True)(s) == near(
        (lr - 0.5) * (1 - s / stretched) ** 2 + 0.5
    )


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_a_schedule_is_a_value(schedule: Schedule) -> None:
    twin = pickle.loads(pickle.dumps(schedule))
    assert twin == schedule
    assert hash(twin) == hash(schedule)
    assert (
        schedule.table(30)
        == [schedule(s) for s in range(30)]
        == [twin(torch.tensor(s)) for s in range(30)]
    )
    assert schedule != Constant(0.123)
    with pytest.raises(AttributeError):
        schedule.lr = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)]
)
@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_a_step_is_an_integer_from_zero(
    schedule: Schedule, step: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="step"):
        schedule(step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "step", [torch.tensor(1.0), torch.tensor([1]), torch.tensor(True), None, 1j]
)
def test_other_kinds_of_steps_are_refused(step: object) -> None:
    with pytest.raises(TypeError, match="step"):
        Constant(1.0)(step)  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")
REFUSED = [
    (lambda: Constant(-1), ValueError, "value"),
    (lambda: PiecewiseConstant({2}, [0.1]), TypeError, "milestones"),
    (lambda: PiecewiseConstant([2], torch.ones(1)), TypeError, "values"),
    (lambda: PiecewiseConstant([], []), ValueError, "milestones"),
    (lambda: PiecewiseConstant([2, 2], [0.1, 0.2]), ValueError, "increasing"),
    (lambda: PiecewiseConstant([0], [0.1]), ValueError, "milestones"),
    (lambda: PiecewiseConstant([2, 4], [0.1]), ValueError, "values"),
    (lambda: PiecewiseConstant([2], [0.1, 0.2, 0.3]), ValueError, "values"),
    (lambda: PiecewiseConstant([2], [-0.1]), ValueError, "values"),
    (lambda: ExponentialDecay(0, 0.9, 1), ValueError, "lr"),
    (lambda: ExponentialDecay(0.1, 0, 1), ValueError, "decay_rate"),
    (lambda: ExponentialDecay(0.1, 0.9, 0), ValueError, "decay_steps"),
    (lambda: ExponentialDecay(0.1, 0.9, 1, 1), TypeError, "staircase"),
    (lambda: NaturalExpDecay(INF, 0.9, 1), ValueError, "lr"),
    (lambda: InverseDecay(0.1, None, 1), TypeError, "decay_rate"),
    (lambda: CosineDecay(0.1, 0.1, 2), ValueError, "max_lr"),
    (lambda: CosineDecay(-0.1, 0.1, 2), ValueError, "min_lr"),
    (lambda: PolynomialDecay(0.1, -0.1, 2, 1), ValueError, "end_lr"),
    (lambda: PolynomialDecay(0.1, 0.1, 2, 0), ValueError, "power"),
    (lambda: PolynomialDecay(0.1, 0.1, 2, 1, None), TypeError, "update_decay_steps"),
    (lambda: WarmUp(-1, 2), ValueError, "lr"),
    (lambda: WarmUp(0.1, 0), ValueError, "warmup_steps"),
    (lambda: Table([]), ValueError, "values"),
    (lambda: Table(iter([1])), TypeError, "values"),
    (lambda: Table(torch.ones(2, 2)), ValueError, "values"),
    (lambda: Table([0.1, INF]), ValueError, r"values\[1\]"),
    (lambda: Table([0.1, None]), TypeError, r"values\[1\]"),
    (lambda: Constant(1).then(0.1, at=2), TypeError, "schedule"),
    (lambda: Constant(1).then(Constant(2), at=-1), ValueError, "at"),
    (lambda: Constant(1).table(0), ValueError, "total_steps"),
    (lambda: Constant(1).table(3, 0), ValueError, "steps_per_epoch"),
]


@pytest.mark.parametrize(("make", "error", "name"), REFUSED)
def test_wrong_arguments_are_named(make: object, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        make()  # type: ignore[operator]


def test_values_that_are_not_finite_name_the_step() -> None:
    with pytest.raises(ValueError, match="step 5000"):
        ExponentialDecay(1.0, 10.0, 1)(5000)
    with pytest.raises(ValueError, match=f"step {10**400}"):
        InverseDecay(1.0, 1.0, 1)(10**400)


def test_a_table_ends_with_an_error_that_names_both_numbers() -> None:
    table = Table(torch.tensor([1, 2, 3]))
    assert table.table(3) == [1.0, 2.0, 3.0]
    with pytest.raises(IndexError, match=r"step 3 .* 3 values"):
        table(3)


def test_then_counts_anew() -> None:
    joined = WarmUp(1.0, 2).then(Table([5, 6, 7]), at=3)
    assert joined.table(6) == [0.0, 0.5, 1.0, 5.0, 6.0, 7.0]
    assert Constant(1).then(Constant(2), at=0).table(2) == [2.0, 2.0]


def test_users_may_write_their_own() -> None:
    class Square(Schedule):
        def value_at(self, step: int) -> float:
            return step**2

    class Called(Schedule):
        def __call__(self, step: int) -> float:
            return 2.0 * step

    assert Square().then(Called(), at=3).table(5) == [0.0, 1.0, 4.0, 0.0, 2.0]
    with pytest.raises(NotImplementedError, match="value_at"):
        Schedule()(0)


def test_sparsity_ramp_counts_in_integers() -> None:
    levels = (0.75, 0.9375, 0.984375, 0.996, 0.999)
    seen = [sparsity_at(s, 0, 100, levels) for s in range(120)]
    assert seen == [level for level in levels for _ in range(20)] + [0.999] * 20
    assert sparsity_at(1251, 1252, 1000, (0.999, 0.9)) == 0.0
    assert sparsity_at(1252, 1252, 1, (0.5, 0.9)) == 0.5
    assert sparsity_at(1253, 1252, 1, (0.5, 0.9)) == 0.9
    huge = 2**60
    assert sparsity_at(huge + 2, huge, 3, (0.1, 0.2, 0.3)) == 0.3


def test_scheduled_lr_drives_every_group_of_any_optimizer() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([{"params": [a]}, {"params": [b], "lr": 3.0}])
    printed = [0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0, 1.0, 1.0, 1.0]
    scheduler = ScheduledLR(optimizer, PiecewiseConstant([2, 4, 6, 8], [0.2, 0.4, 0.6, 0.8, 1.0]))
    for value in printed:
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [value, value]
        scheduler.step()


def test_scheduled_lr_saves_its_count_and_not_the_schedule(tmp_path: object) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = ScheduledLR(optimizer, WarmUp(1.0, 8))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    torch.save(scheduler.state_dict(), f"{tmp_path}/s.pt")
    saved = torch.load(f"{tmp_path}/s.pt", weights_only=True)
    assert "schedule" not in saved
    other = ScheduledLR(optimizer, WarmUp(1.0, 8))
    other.load_state_dict(saved)
    other.optimizer.step()
    other.step()
    assert other.get_last_lr() == [0.5]


def test_scheduled_lr_impossible_arguments_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    driven = optim.SGD([parameter], lr=Constant(0.1))
    with pytest.raises(ValueError, match="schedule of its own"):
        ScheduledLR(driven, Constant(0.2))
    with pytest.raises(TypeError, match="schedule"):
        ScheduledLR(torch.optim.SGD([parameter], lr=0.1), lambda step: 0.1)  # type: ignore[arg-type]

    class Negative(Schedule):
        def value_at(self, step: int) -> float:
            return -1.0 if step == 1 else 1.0

    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = ScheduledLR(optimizer, Negative())
    optimizer.step()
    with pytest.raises(ValueError, match="step 1"):
        scheduler.step()
