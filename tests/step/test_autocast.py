import copy
import pickle

import pytest
import torch
from torch import nn

from tests.api import autocast_forward


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_forward_pass_runs_under_autocast_wherever_it_is_called(dtype):
    plain, net = network(), network()
    autocast_forward(net, dtype)
    with torch.autocast("cpu", dtype=dtype):
        expected = plain(X)
    out = net(X)
    assert out.dtype == expected.dtype == dtype
    assert torch.equal(out, expected)
    assert not torch.is_autocast_enabled("cpu")
    expected.float().sum().backward()
    out.float().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad)
    net.eval()
    with torch.no_grad():
        assert net(X).dtype == dtype


def test_the_weights_of_the_moment_are_used():
    """Autocast keeps narrow copies of weights, which must not outlive the call."""
    net = network()
    autocast_forward(net, torch.bfloat16)
    before = net(X).detach()
    with torch.no_grad():
        net(X)
        net[0].weight.mul_(2)
    after = net(X)
    assert not torch.equal(before, after)
    after.sum().backward()
    assert net[0].weight.grad is not None


def test_removal_leaves_nothing_and_may_be_repeated():
    plain, net = network(), network()
    handle = autocast_forward(net, torch.bfloat16)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert type(net) is nn.Sequential
    handle.remove()
    handle.remove()
    assert "forward" not in vars(net)
    assert torch.equal(net(X), plain(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_uses_its_own_weights(copied):
    net = network()
    handle = autocast_forward(net, torch.bfloat16)
    other = copied(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    handle.remove()
    plain = network()
    plain.load_state_dict(other.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(other(X), plain(X))
    assert net(X).dtype == torch.float32
    assert other(X).dtype == torch.bfloat16


def test_a_model_without_parameters_and_one_that_runs_inside_another():
    bare = nn.ReLU()
    autocast_forward(bare, torch.bfloat16)
    assert bare(X).dtype == torch.float32, "not an operation that autocast narrows"
    net = network()
    autocast_forward(net[0], torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net[0](X).dtype == torch.float16
        assert nn.functional.linear(X, X).dtype == torch.bfloat16
