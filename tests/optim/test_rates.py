"""The learning rate as number, schedule or list, per group; position, errors, get and set."""

import pytest
import torch

from tests.optim.cases import OURS, Case, give_gradients, model, same, train, values
from thinwire import optim
from thinwire.schedules import Constant, Schedule, ScheduledLR, Table, WarmUp


def test_schedule_equals_setting_the_rate_by_hand(case: Case) -> None:
    rates = [0.03, 0.01, 0.02, 0.005]
    nets = [model(), model(), model()]
    listed, scheduled, by_hand = (
        case(net.named_parameters(), lr=lr)
        for net, lr in zip(nets, (rates, Table(rates), 1.0), strict=True)
    )
    for s, rate in enumerate(rates):
        assert listed.get_lr() == scheduled.get_lr() == rate
        by_hand.set_lr(rate)
        for net, optimizer in zip(nets, (listed, scheduled, by_hand), strict=True):
            train(net, optimizer, range(s, s + 1))
    assert same(values(nets[0]), values(nets[2]))
    assert same(values(nets[1]), values(nets[2]))


def test_a_list_that_ends_is_an_error_before_anything_changes(case: Case) -> None:
    net = model()
    optimizer = case(net.named_parameters(), lr=[0.03, 0.02])
    train(net, optimizer, range(2))
    assert optimizer.get_lr() == 0.02, "the last value stays in sight"
    before = values(net)
    state = {
        k: {n: torch.as_tensor(v).clone() for n, v in s.items()} for k, s in optimizer.state.items()
    }
    give_gradients(net, 2)
    with pytest.raises(IndexError, match=r"step 2 .* 2 values"):
        optimizer.step()
    assert same(before, values(net))
    assert optimizer.position == 2
    assert all(
        torch.equal(torch.as_tensor(optimizer.state[k][n]), v)
        for k, s in state.items()
        for n, v in s.items()
    )


def test_groups_have_rates_of_their_own() -> None:
    net = model()
    groups = [
        {"params": net[0].parameters(), "lr": WarmUp(0.4, 2)},
        {"params": net[1].parameters(), "lr": [0.5, 0.6, 0.7, 0.8]},
        {"params": net[2].parameters(), "lr": 0.25},
        {"params": [torch.nn.Parameter(torch.ones(1))]},
    ]
    optimizer = optim.SGD(groups, lr=0.125)
    shown = []
    for s in range(3):
        shown.append([g["lr"] for g in optimizer.param_groups])
        train(net, optimizer, range(s, s + 1))
    assert shown == [[0.0, 0.5, 0.25, 0.125], [0.2, 0.6, 0.25, 0.125], [0.4, 0.7, 0.25, 0.125]]
    assert optimizer.get_lr() == 0.125, "that of the first group without its own"
    optimizer.set_lr(0.1)
    assert [g["lr"] for g in optimizer.param_groups] == [0.4, 0.8, 0.25, 0.1]


def test_an_added_group_follows_the_schedule_from_where_it_is() -> None:
    net = model()
    optimizer = optim.Lamb(net.parameters(), lr=WarmUp(1.0, 10))
    train(net, optimizer, range(3))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.3]


def test_a_value_typed_over_a_schedule_does_not_last(case: Case) -> None:
    net, twin = model(), model()
    a, b = (case(n.named_parameters(), lr=Constant(0.01)) for n in (net, twin))
    a.param_groups[0]["lr"] = 100.0
    assert same(train(net, a, range(2)), train(twin, b, range(2)))
    assert a.get_lr() == 0.01


def test_a_tensor_is_read_once() -> None:
    rate = torch.tensor([0.25], requires_grad=True)
    optimizer = optim.SGD(model().parameters(), lr=rate)
    with torch.no_grad():
        rate.fill_(7)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], float)


def test_set_lr_sets_all_groups_if_every_has_its_own() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = optim.Adam([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 2.0}])
    optimizer.set_lr(3.0)
    assert [g["lr"] for g in optimizer.param_groups] == [3.0, 3.0]


def test_set_lr_is_refused_while_something_drives_the_rate() -> None:
    parameters = model().parameters
    for lr in (Constant(0.1), [0.1, 0.2]):
        with pytest.raises(RuntimeError, match="schedule drives"):
            optim.SGD(parameters(), lr=lr).set_lr(0.3)
    optimizer = optim.SGD(parameters(), lr=0.1)
    scheduler = ScheduledLR(optimizer, Constant(0.2))
    with pytest.raises(RuntimeError, match="schedule drives"):
        optimizer.set_lr(0.3)
    del scheduler
    optimizer.set_lr(0.3)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-0.1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
def test_rates_that_cannot_be(case: Case, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="lr"):
        case(model().named_parameters(), lr=value)
    with pytest.raises(error, match="lr"):
        case([{"params": model().named_parameters(), "lr": value}])
    with pytest.raises(error, match="value"):
        case(model().named_parameters()).set_lr(value)


@pytest.mark.parametrize(
    ("lr", "error"),
    [
        ([], ValueError),
        ([0.1, float("nan")], ValueError),
        ([0.1, "2"], TypeError),
        (torch.ones(2), ValueError),
        (None, TypeError),
        (lambda step: 0.1, TypeError),
    ],
)
def test_other_rates_that_cannot_be(lr: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="lr"):
        optim.SGD(model().parameters(), lr=lr)


class Bad(Schedule):
    def __init__(self, value: float) -> None:
        self.bad = value

    def value_at(self, step: int) -> float:
        return self.bad if step == 2 else 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_rate_that_goes_wrong_names_the_step_and_changes_nothing(case: Case, value: float) -> None:
    net = model()
    optimizer = case(net.named_parameters(), lr=Bad(value))
    before = train(net, optimizer, range(2))
    give_gradients(net, 2)
    with pytest.raises(ValueError, match="step 2"):
        optimizer.step()
    assert same(before, values(net))
    typed = case(net.named_parameters())
    typed.param_groups[0]["lr"] = value
    with pytest.raises(ValueError, match="step 0"):
        typed.step()
    assert same(before, values(net))


def test_ftrl_refuses_a_rate_of_zero_when_it_is_needed() -> None:
    net = model()
    with pytest.raises(ValueError, match="lr"):
        optim.Ftrl(net.parameters(), lr=0.0)
    optimizer = optim.Ftrl(net.parameters(), lr=WarmUp(0.1, 3))
    before = values(net)
    give_gradients(net, 0)
    with pytest.raises(ValueError, match="step 0"):
        optimizer.step()
    assert same(before, values(net))


def test_the_position_is_saved_and_the_schedule_is_not() -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=WarmUp(1.0, 4))
    train(net, optimizer, range(3))
    saved = optimizer.state_dict()
    assert saved["position"] == 3
    assert saved["param_groups"][0]["lr"] == 0.75
    longer = optim.SGD(net.parameters(), lr=WarmUp(1.0, 6))
    longer.load_state_dict(saved)
    assert longer.get_lr() == 0.5
    plain = optim.SGD(net.parameters(), lr=0.1)
    plain.load_state_dict(saved)
    assert plain.get_lr() == 0.75


def test_a_state_of_torchs_class_is_taken_unless_a_schedule_needs_the_position() -> None:
    net = model()
    theirs = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    train(net, theirs, range(2))
    ours = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, regularizer=optim.L1Decay(0.1))
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_lr() == 0.3
    assert ours.param_groups[0]["regularizer"] == optim.L1Decay(0.1)
    theirs.load_state_dict(ours.state_dict())
    driven = optim.SGD(net.parameters(), lr=Constant(0.1), momentum=0.9)
    with pytest.raises(ValueError, match="position"):
        driven.load_state_dict(theirs.state_dict())
    assert driven.position == 0


@pytest.mark.parametrize("position", [-1, 1.5, None, "3"])
def test_a_damaged_position_changes_nothing(position: object) -> None:
    optimizer = optim.SGD(model().parameters(), lr=0.1)
    saved = {**optimizer.state_dict(), "position": position}
    saved["param_groups"][0]["lr"] = 5.0
    with pytest.raises((TypeError, ValueError), match="position"):
        optimizer.load_state_dict(saved)
    assert optimizer.get_lr() == 0.1


def test_groups_that_do_not_fit_change_nothing() -> None:
    optimizer = optim.Lamb(model().parameters(), lr=0.1)
    other = optim.Lamb([torch.nn.Parameter(torch.ones(1))], lr=0.2)
    other.step()
    with pytest.raises(ValueError, match="size"):
        optimizer.load_state_dict(other.state_dict())
    assert (optimizer.position, optimizer.get_lr()) == (0, 0.1)


@pytest.mark.parametrize("name", OURS)
def test_load_hooks_of_the_user_see_the_saved_and_the_loaded(name: str) -> None:
    net = model()
    optimizer = OURS[name](net.named_parameters())
    train(net, optimizer, range(2))
    other = OURS[name](net.named_parameters())
    seen = []
    other.register_load_state_dict_pre_hook(lambda o, saved: {**saved, "position": 17})
    other.register_load_state_dict_post_hook(
        lambda o: seen.append((o.position, list(o.state.values())))
    )
    other.load_state_dict(optimizer.state_dict())
    ((position, states),) = seen
    assert position == 17
    assert all(isinstance(v, torch.Tensor) for state in states for v in state.values())
