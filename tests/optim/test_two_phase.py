"""backward, apply_gradients, apply_optimize, minimize, clear_grad."""

import pytest
import torch

from tests.optim.cases import ALL, EXTRAS, Case, give_gradients, model, same, train, values
from thinwire import optim


def loss_of(net: torch.nn.Module) -> torch.Tensor:
    return net(torch.linspace(-1, 1, 10).reshape(2, 5)).square().sum()


def test_minimize_is_backward_and_step(case: Case) -> None:
    a, b, c = model(), model(), model()
    optimizers = [case(net.named_parameters(), **EXTRAS) for net in (a, b, c)]
    for _ in range(3):
        ops, pairs = optimizers[0].minimize(loss_of(a))
        assert ops == []
        assert [p for p, _ in pairs] == list(a.parameters())
        assert all(p.grad is g for p, g in pairs)
        optimizers[0].clear_grad()
        assert all(p.grad is None for p in a.parameters())

        pairs = optimizers[1].backward(loss_of(b))
        assert optimizers[1].apply_optimize(None, pairs) == []
        optimizers[1].clear_grad()

        optimizers[2].zero_grad()
        loss_of(c).backward()
        optimizers[2].step()
    assert same(values(a), values(b))
    assert same(values(a), values(c))


@pytest.mark.parametrize("as_names", [False, True])
def test_a_selection_leaves_other_gradients_as_they_were(as_names: bool) -> None:
    net = model()
    optimizer = optim.SGD(net.named_parameters(), lr=0.1)
    give_gradients(net, 0)
    before = {name: p.grad.clone() for name, p in net.named_parameters()}
    named = dict(net.named_parameters())

    def pick(*names: str) -> list:
        return list(names) if as_names else [named[name] for name in names]

    wanted, unwanted = pick("2.weight", "0.weight", "2.bias"), set(pick("2.bias"))
    pairs = optimizer.backward(loss_of(net), parameters=wanted, no_grad_set=unwanted)
    assert [p for p, _ in pairs] == [named["0.weight"], named["2.weight"]], (
        "in the optimizer's order"
    )
    changed = {name for name, p in named.items() if not torch.equal(p.grad, before[name])}
    assert changed == {"0.weight", "2.weight"}
    fresh = model()
    loss_of(fresh).backward()
    accumulated = before["0.weight"] + fresh[0].weight.grad
    torch.testing.assert_close(named["0.weight"].grad, accumulated)


def test_gradients_of_somebody_else_stay_as_they_were() -> None:
    net, other = model(), torch.nn.Linear(3, 1)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    optimizer.minimize(other(net(torch.ones(2, 5))).sum())
    assert all(p.grad is None for p in other.parameters())


def test_parameters_without_gradient_are_not_listed() -> None:
    net = model()
    unused = torch.nn.Parameter(torch.ones(1))
    net[0].bias.requires_grad_(False)
    optimizer = optim.SGD([*net.parameters(), unused], lr=0.1)
    pairs = optimizer.backward(loss_of(net))
    listed = {p for p, _ in pairs}
    assert unused not in listed
    assert net[0].bias not in listed
    assert len(pairs) == 5


def test_callbacks_are_called_in_order_once_for_every_pair() -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    calls = []
    first, second = (lambda p, g, i=i: calls.append((i, p, g)) for i in range(2))
    pairs = optimizer.backward(loss_of(net), callbacks=[first, second])
    assert [(i, p) for i, p, _ in calls] == [(i, p) for i in range(2) for p in net.parameters()]
    assert all(g is p.grad for _, p, g in calls)
    assert len(pairs) == 6
    with pytest.raises(TypeError, match=r"callbacks\[0\]"):
        optimizer.backward(loss_of(net), callbacks=[3])
    with pytest.raises(TypeError, match="callbacks must be Iterable, got 3"):
        optimizer.backward(loss_of(net), callbacks=3)  # type: ignore[arg-type]


def test_backward_foreign_tensor_is_refused() -> None:
    net = model()
    named, nameless = optim.SGD(net.named_parameters()), optim.SGD(net.parameters())
    foreign = torch.nn.Parameter(torch.ones(1))
    for argument in ("parameters", "no_grad_set"):
        with pytest.raises(ValueError, match="named_parameters"):
            nameless.backward(loss_of(net), **{argument: ["0.weight"]})
        with pytest.raises(ValueError, match=r"0\.wieght.*'0\.weight'"):
            named.backward(loss_of(net), **{argument: ["0.wieght"]})
        with pytest.raises(ValueError, match="not one of"):
            named.backward(loss_of(net), **{argument: [foreign]})
        with pytest.raises(TypeError, match=argument):
            named.backward(loss_of(net), **{argument: [3]})
        with pytest.raises(TypeError, match=argument):
            named.backward(loss_of(net), **{argument: "0.weight"})
    with pytest.raises(TypeError, match="loss"):
        named.backward(3.0)
    assert all(p.grad is None for p in net.parameters())


def test_apply_gradients_takes_the_users_own_tensors(case: Case) -> None:
    net, twin = model(), model()
    a, b = case(net.named_parameters(), **EXTRAS), case(twin.named_parameters(), **EXTRAS)
    for seed in range(3):
        give_gradients(twin, seed)
        own = [p.grad.clone() for p in twin.parameters()]
        given = [g.clone() for g in own]
        give_gradients(net, 100)
        held = [(p.grad, p.grad.clone()) for p in net.parameters()]
        pairs = list(zip(net.parameters(), given, strict=True))
        assert a.apply_gradients(pairs[::-1]) == []
        b.step()
        assert same(own, given), "the user's tensors stay as they are"
        assert all(
            p.grad is g and torch.equal(g, copied)
            for p, (g, copied) in zip(net.parameters(), held, strict=True)
        )
    assert same(values(net), values(twin))
    assert a.position == 3
    assert same(train(net, a, range(3, 5)), train(twin, b, range(3, 5))), (
        "step() goes back to p.grad"
    )


def test_parameters_that_are_not_listed_are_not_updated(case: Case) -> None:
    net = model()
    optimizer = case(net.named_parameters())
    give_gradients(net, 0)
    before = values(net)
    weight = net[0].weight
    optimizer.apply_gradients([(weight, torch.ones_like(weight)), (net[2].weight, None)])
    moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert moved == [True] + [False] * 5


def test_gradients_wider_than_the_parameter_are_taken() -> None:
    for name in ("SGD", "Lamb"):
        net = model(torch.bfloat16)
        optimizer = ALL[name](net.named_parameters())
        before = values(net)
        optimizer.apply_gradients(
            [(p, torch.ones_like(p, dtype=torch.float32)) for p in net.parameters()]
        )
        assert not same(before, values(net))
        assert all(p.grad is None for p in net.parameters())


def test_apply_gradients_refuses_pairs_that_do_not_fit(case: Case) -> None:
    net = model()
    optimizer = case(net.named_parameters())
    before = values(net)
    weight = net[0].weight
    foreign = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="not one of"):
        optimizer.apply_gradients([(foreign, torch.ones(2))])
    with pytest.raises(ValueError, match=r"0\.weight is given twice"):
        optimizer.apply_gradients([(weight, torch.ones_like(weight)), (weight, None)])
    with pytest.raises(ValueError, match=r"0\.weight must have shape \(4, 5\), got \(5, 4\)"):
        optimizer.apply_gradients([(weight, torch.ones(5, 4))])
    with pytest.raises(TypeError, match="gradient"):
        optimizer.apply_gradients([(weight, 3.0)])
    with pytest.raises(TypeError, match="pair"):
        optimizer.apply_gradients([weight])
    with pytest.raises(TypeError, match="list"):
        optimizer.apply_gradients(weight)
    assert same(before, values(net))
    assert optimizer.position == 0


def test_an_update_without_any_gradient_counts() -> None:
    optimizer = optim.Adam(model().parameters(), lr=[0.1, 0.2])
    optimizer.step()
    assert (optimizer.position, optimizer.get_lr()) == (1, 0.2)


def test_hooks_on_apply_gradients_may_train_further() -> None:
    net = model()
    optimizer = optim.Lamb(net.parameters())
    train(net, optimizer, range(2))
    assert optimizer.position == 2
    assert set(optimizer.trust_ratios()) == set(net.parameters())
