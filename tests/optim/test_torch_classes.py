"""SGD, Adam, AdamW, RMSprop, Adagrad: torch's bits for all that torch's own tests try."""

import copy
import inspect

import pytest
import torch
from torch import nn

from tests.optim.cases import ALL, EXTRAS, TORCHS, model, same, train
from thinwire import optim

THEIRS = {name: getattr(torch.optim, name) for name in TORCHS}
NOTHING = {"grad_clip": optim.ClipByNorm(1e30), "regularizer": optim.L2Decay(0.0)}


def data_base(name: str) -> list[tuple[str, dict]]:
    """Every configuration (name, keyword arguments) that torch tests its class with on a CPU."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_optimizers import optim_db  # for seconds, so not above

    cases = []
    for info in optim_db:
        if info.optim_cls is THEIRS[name]:
            for given in info.optim_inputs_func(device=torch.device("cpu")):
                a_tensor = isinstance(given.kwargs.get("lr"), torch.Tensor)
                # torch refuses a tensor with True
                for foreach in (None, False) if a_tensor else (None, True, False):
                    kwargs = {**given.kwargs, "foreach": foreach}
                    cases.append((f"{given.desc}, foreach={foreach}", kwargs))
    return cases


@pytest.mark.parametrize("route", ["plain", "through the stages"])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_configurations_give_torchs_bits_and_state(name: str, route: str) -> None:
    cases = data_base(name)
    assert len(cases) >= 15
    for case, given in cases:
        ours, theirs = model(), model()
        kwargs = {"lr": 0.01, **given}
        a = getattr(optim, name)(
            ours.named_parameters(),
            **copy.deepcopy(kwargs),
            **(NOTHING if route != "plain" else {}),
        )
        plain = {k: float(v) if k == "lr" else v for k, v in kwargs.items()}
        b = THEIRS[name](theirs.named_parameters(), **plain)
        assert same(train(ours, a, range(5)), train(theirs, b, range(5))), case
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert a.state[p].keys() == b.state[q].keys(), case
            for key, value in b.state[q].items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(a.state[p][key], value), (case, key)


def test_torchs_own_bad_arguments_are_refused_with_torchs_error() -> None:
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_optimizers import optim_db

    tried = 0
    for info in optim_db:
        name = info.optim_cls.__name__
        if name not in TORCHS:
            continue
        for case in info.optim_error_inputs_func(torch.device("cpu"), torch.float32):
            given = case.optimizer_error_input
            if (
                "lr" in given.kwargs
                and isinstance(given.kwargs["lr"], torch.Tensor)
                and given.kwargs["lr"].numel() == 1
            ):
                continue  # a tensor of one element is read as a number here, whatever else is set
            if isinstance(given.params, list) and "duplicate parameters" in case.error_regex:
                continue  # a warning there, an error here
            with pytest.raises((case.error_type, ValueError, TypeError)):
                make = getattr(optim, name)(given.params, **given.kwargs)
                make.step()
            tried += 1
    assert tried >= 10


@pytest.mark.parametrize("name", ["SGD", "Lamb", "DGCMomentum"])
@pytest.mark.parametrize("decay", [-1, float("nan"), "0.1"])
def test_a_decay_that_is_written_into_a_group_is_checked(name: str, decay: object) -> None:
    model = nn.Linear(3, 4)
    optimizer = getattr(optim, name)(model.named_parameters(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = decay
    model(torch.ones(2, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match="weight_decay of group 0 at step 0"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", TORCHS)
def test_arguments_are_torchs_and_the_common_part(name: str) -> None:
    ours, theirs = (inspect.signature(c).parameters for c in (getattr(optim, name), THEIRS[name]))
    extra = [k for k in ours if k not in theirs]
    assert extra == ["grad_clip", "regularizer", "exclude_from_weight_decay"]
    assert [k for k in ours if k in theirs] == list(theirs)
    assert all(
        ours[k].default == theirs[k].default and ours[k].kind == theirs[k].kind for k in theirs
    )


@pytest.mark.parametrize("name", TORCHS)
def test_the_state_goes_back_and_forth(name: str) -> None:
    ours, theirs = model(), model()
    a, b = TORCHS[name](ours.parameters()), THEIRS[name](theirs.parameters(), **TORCHS[name].kwargs)
    train(theirs, b, range(3))
    ours.load_state_dict(theirs.state_dict())
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    assert same(train(ours, a, range(3, 5)), train(theirs, b, range(3, 5)))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert same(train(ours, a, range(5, 7)), train(theirs, b, range(5, 7)))


# torch's Adagrad makes sparse tensors without a choice
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_of_sgd_and_adagrad_as_in_torch() -> None:
    for name in ("SGD", "Adagrad"):
        ours, theirs = (torch.nn.Parameter(torch.ones(6, 2)) for _ in range(2))
        a = getattr(optim, name)([ours], lr=0.1, grad_clip=optim.ClipByGlobalNorm(1.0))
        b = THEIRS[name]([theirs], lr=0.1)
        for _ in range(3):
            grad = torch.sparse_coo_tensor(
                [[1, 1, 4]], torch.ones(3, 2), (6, 2), check_invariants=True
            )
            ours.grad = grad
            whole = grad.coalesce()
            theirs.grad = whole * (1.0 / whole.values().norm())
            a.step()
            b.step()
            assert ours.grad is grad
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_differentiable_keeps_its_graph_through_the_stages() -> None:
    start = torch.tensor([3.0, 4.0], requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    p = start.clone()
    p.retain_grad()
    optimizer = optim.SGD([p], lr=1.0, differentiable=True, grad_clip=optim.ClipByNorm(100.0))
    p.grad = start * scale
    optimizer.step()
    (d,) = torch.autograd.grad(p.sum(), scale)
    assert d.item() == -7.0


@pytest.mark.parametrize("name", ALL)
def test_the_common_arguments_have_names_and_no_others_are_taken(name: str) -> None:
    arguments = inspect.signature(getattr(optim, name)).parameters
    assert {*EXTRAS, "maximize", "foreach"} <= set(arguments)
    assert all(p.kind != inspect.Parameter.VAR_KEYWORD for p in arguments.values())
    with pytest.raises(TypeError, match=rf"{name}.*unexpected keyword argument 'grad_clips'"):
        ALL[name](model().named_parameters(), grad_clips=None)
