"""Parameters that are DTensors: norms, ratios and updates are those of the whole tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.optim.cases import ALL, give_gradients, model
from tests.ranks import Pool
from thinwire import optim


def train_sharded(
    rank: int, size: int, name: str, clip: float, foreach: bool | None
) -> list[Tensor]:
    net = model(torch.float64)
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    optimizer = ALL[name](
        [{"params": net.named_parameters(), "grad_centralization": True}],
        grad_clip=optim.ClipByGlobalNorm(clip),
        regularizer=optim.L1Decay(0.01),
        foreach=foreach,
    )
    for seed in range(4):
        whole = model(torch.float64)
        give_gradients(whole, seed)
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        optimizer.step()
    values = [p.full_tensor().detach() for p in net.parameters()]
    if name in ("Lamb", "Lars"):
        values.append(torch.tensor(list(optimizer.trust_ratios().values()), dtype=torch.float64))
    return values


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", ALL)
def test_sharding_changes_no_number(ranks: Pool, name: str, foreach: bool | None) -> None:
    net = model(torch.float64)
    optimizer = ALL[name](
        [{"params": net.named_parameters(), "grad_centralization": True}],
        grad_clip=optim.ClipByGlobalNorm(0.7),
        regularizer=optim.L1Decay(0.01),
    )
    for seed in range(4):
        give_gradients(net, seed)
        optimizer.step()
    expected = [p.detach() for p in net.parameters()]
    if name in ("Lamb", "Lars"):
        expected.append(torch.tensor(list(optimizer.trust_ratios().values()), dtype=torch.float64))
    for got in ranks.run(train_sharded, name, 0.7, foreach, size=2):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=max(1e-12, ALL[name].rounding))


def of_large_gradients(rank: int, size: int, name: str, clip: Any) -> list[list[Tensor]]:
    found = []
    for scale in (2.0**10, 2.0**70):
        net = model()
        for p in net.parameters():  # Lars does not limit the update of a tensor of zeros
            p.requires_grad_(p.ndim == 2)
        if size > 1:
            fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
        optimizer = ALL[name](net.named_parameters(), grad_clip=clip)
        for seed in range(2):
            torch.manual_seed(seed)
            (net(torch.randn(4, 5)).square().mean() * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = [p.full_tensor() if size > 1 else p for p in net.parameters()]
        found.append([p.detach() for p in whole])
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "clip"),
    [("SGD", optim.ClipByNorm(0.1)), ("SGD", optim.ClipByGlobalNorm(0.1)), ("Lars", None)],
)
def test_norms_have_room_for_large_gradients(ranks: Pool, name: str, clip: Any, size: int) -> None:
    for large, larger in ranks.run(of_large_gradients, name, clip, size=size):
        torch.testing.assert_close(larger, large, rtol=1e-4, atol=1e-5)


def minimized(rank: int, size: int, name: str) -> list[bool]:
    ends = []
    for by_minimize in (True, False):
        net = model(torch.float64)
        mesh = init_device_mesh("cpu", (size,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = ALL[name](net.named_parameters())
        first, *_, last = net.parameters()
        begun = first.full_tensor().detach().clone()
        for seed in range(3):
            torch.manual_seed(seed)
            loss = net(torch.randn(4, first.shape[1], dtype=torch.float64)).square().mean()
            if by_minimize:
                last.grad = None
                _, pairs = optimizer.minimize(loss, no_grad_set=[last])
                assert last.grad is None
                assert len(pairs) == len(list(net.parameters())) - 1
            else:
                loss.backward()
                last.grad = None
                optimizer.step()
            optimizer.zero_grad()
        ends.append([p.full_tensor().detach() for p in net.parameters()])
        assert not torch.equal(ends[-1][0], begun)
    return [torch.equal(a, b) for a, b in zip(*ends, strict=True)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "SGD"])
def test_minimize_trains_shards_as_backward_and_step_do(ranks: Pool, name: str) -> None:
    for same in ranks.run(minimized, name, size=2):
        assert all(same)
