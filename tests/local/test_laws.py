"""The interval of local updates, and what shares of codes keep; the rest is in `tests/laws`."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool
from tests.reference.local_training import intervals

SHAPES = {"a": (6, 5), "b": (7,), "c": (3, 4), "d": ()}


class Bag(nn.Module):
    """Parameters by name, and nothing to compute."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        for name, value in start_values(shapes).items():
            self.register_parameter(name, nn.Parameter(value.to(dtype)))


def start_values(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def noise(step: int, rank: int, name: str) -> Tensor:
    seed = 10_000 * step + 100 * rank + list(SHAPES).index(name)
    return torch.randn(
        SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def gradient(step: int, rank: int, name: str, p: np.ndarray) -> np.ndarray:
    """Of a bowl that is not quite the same for every rank and step."""
    return 0.3 * p + noise(step, rank, name).numpy()


def set_gradients(model: nn.Module, step: int, rank: int) -> None:
    for name, p in model.named_parameters():
        p.grad = (0.3 * p.detach().double() + noise(step, rank, name)).to(p.dtype)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def bag() -> tuple[Bag, torch.optim.SGD]:
    model = Bag()
    return model, sgd(model)


def one_step(model: nn.Module, optimizer: Any, step: int = 1, rank: int = 0) -> None:
    set_gradients(model, step, rank)
    optimizer.step()


def values(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def digest(model: nn.Module) -> str:
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


BITS = (1, 2, 4, 8, 16)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1))


def adapt(
    rank: int, size: int, curve: list[float], rates: list[float], config: Any
) -> tuple[list[int], list[int]]:
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ks, averaged = [], []
    with tw.local_sgd(model, optimizer, config) as sync:
        for step, (loss, rate) in enumerate(zip(curve, rates, strict=True), start=1):
            # rank 0's is the one that counts
            optimizer.param_groups[0]["lr"] = rate if rank == 0 else rate + 5
            set_gradients(model, step, rank)
            # other losses on every rank, with the mean of the curve
            spread = loss * (rank - (size - 1) / 2) / 2
            sync.observe(loss + spread - loss / 4)
            sync.observe(torch.tensor(loss + spread + loss / 4, dtype=torch.float64))
            optimizer.step()
            ks.append(sync.k_steps)
            if sync.synced:
                averaged.append(step)
    return ks, averaged


LENGTH = 120
CURVES = {
    "falling loss": ([2.0**-8 + 4 * 0.97**i for i in range(LENGTH)], [0.125] * LENGTH),
    "falling rate": ([1.5] * LENGTH, [0.1 * 0.96**i for i in range(LENGTH)]),
    "rising loss": ([1.0 + 0.07 * i for i in range(LENGTH)], [0.1] * LENGTH),
    "rate from 0": (
        [3 * 0.98**i for i in range(LENGTH)],
        [0.01 * max(0, i - 5) for i in range(LENGTH)],
    ),
    "loss reaches 0": ([max(0.0, 1 - 0.02 * i) for i in range(LENGTH)], [0.1] * LENGTH),
    "loss begins at 0": ([0.0, 0.0, 1.0] * 40, [0.1] * LENGTH),
    "rate falls to 0": ([1.0] * LENGTH, [max(0.0, 0.1 - 0.002 * i) for i in range(LENGTH)]),
}


@pytest.mark.fault("a rank dies between two averagings; a joiner; a stage of a pipeline dies")
@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("begin", [0, 1, 4])
def test_the_interval_follows_loss_and_rate(ranks: Pool, name: str, begin: int) -> None:
    losses, rates = CURVES[name]
    config = tw.AdaptiveLocalSGD(5, begin_step=begin, max_k_steps=12)
    found = ranks.run(adapt, losses, rates, config, size=2)
    assert found[0] == intervals(losses, rates, init=5, most=12, begin=begin)
    assert found[1] == found[0]


@pytest.mark.parametrize("name", ["falling loss", "rising loss", "loss reaches 0"])
def test_a_delay_does_not_change_when_ranks_average(ranks: Pool, name: str) -> None:
    """Where the interval falls below the delay, what is on its way is applied early."""
    losses, rates = CURVES[name]
    config = tw.AdaptiveLocalSGD(5, max_k_steps=12, delay=4)
    found = ranks.run(adapt, losses, rates, config, size=2)
    assert found == [intervals(losses, rates, init=5, most=12, begin=1)] * 2


def keep_books(rank: int, size: int, compression: Any, dtype: torch.dtype) -> float:
    """Largest error of: what ranks sent, plus what they keep, is what they changed."""
    model = Bag(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = tw.LocalSGD(2, begin_step=0, compression=compression)
    changed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, 61):
            set_gradients(model, step, rank)
            for name, p in model.named_parameters():
                assert p.grad is not None
                changed[name] += 0.1 * p.grad
            optimizer.step()
        errors = sync.state_dict()["residuals"]
        assert sync.stats()["applied_share"] == 1
        worst = 0.0
        for name, p in model.named_parameters():
            sums = torch.stack([changed[name], errors[name]])
            torch.distributed.all_reduce(sums)
            sent = (start[name] - p.detach()) * size
            worst = max(worst, float((sent + sums[1] - sums[0]).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("bits", "dtype", "most"),
    [*((bits, torch.float64, 1e-10) for bits in BITS), (4, torch.float32, 1e-4)],
)
def test_nothing_is_lost_by_shares_of_codes(
    ranks: Pool, bits: int, dtype: torch.dtype, most: float
) -> None:
    """Sums of a few terms of size 1; what ranks gather is compared with the oracle of the laws."""
    compression = tw.Quantized(bits, exchange="split")
    assert max(ranks.run(keep_books, compression, dtype, size=3)) < most
