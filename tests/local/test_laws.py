"""Laws of local updates over real ranks, against a simulation that shares no code."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import LocalUpdates
from tests.ranks import Pool
from tests.reference.local_training import Simulation, intervals

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


CASES: dict[str, tuple[tw.LocalSGD, dict[str, Any]]] = {
    "plain": (tw.LocalSGD(4), {"k": 4}),
    "begin 0": (tw.LocalSGD(3, begin_step=0), {"k": 3, "begin": 0}),
    "begin 6": (tw.LocalSGD(5, begin_step=6), {"k": 5, "begin": 6}),
    "every step": (tw.LocalSGD(1), {"k": 1}),
    "outer rate": (tw.LocalSGD(4, outer_lr=0.7), {"k": 4, "outer": (0.7, 0.0, False)}),
    "outer momentum": (
        tw.LocalSGD(4, outer_lr=0.6, outer_momentum=0.5),
        {"k": 4, "outer": (0.6, 0.5, False)},
    ),
    "outer nesterov": (
        tw.LocalSGD(4, begin_step=0, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True),
        {"k": 4, "begin": 0, "outer": (0.7, 0.9, True)},
    ),
    "fragments": (tw.LocalSGD(6, fragments=3), {"k": 6, "parts": [["a"], ["b"], ["c", "d"]]}),
    "delay": (tw.LocalSGD(5, delay=3), {"k": 5, "delay": 3}),
    "delay and momentum": (
        tw.LocalSGD(5, delay=3, outer_momentum=0.5),
        {"k": 5, "delay": 3, "outer": (1.0, 0.5, False)},
    ),
    "fragments, delay and nesterov": (
        tw.LocalSGD(7, fragments=2, delay=2, outer_lr=0.8, outer_momentum=0.6, outer_nesterov=True),
        {"k": 7, "parts": [["a"], ["b", "c", "d"]], "delay": 2, "outer": (0.8, 0.6, True)},
    ),
    "sparse": (
        tw.LocalSGD(4, compression=tw.Sparse(0.75, 32, 0.9, "all")),
        {"k": 4, "sparsity": 0.75, "decay": 0.9},
    ),
    "sparse, forgetting": (
        tw.LocalSGD(4, begin_step=2, compression=tw.Sparse(0.9, 32, 0.0, "all")),
        {"k": 4, "begin": 2, "sparsity": 0.9, "decay": 0.0},
    ),
    "all at once": (
        tw.LocalSGD(
            6, fragments=2, delay=1, outer_momentum=0.5, compression=tw.Sparse(0.8, 32, 1.0, "all")
        ),
        {
            "k": 6,
            "parts": [["a"], ["b", "c", "d"]],
            "delay": 1,
            "outer": (1.0, 0.5, False),
            "sparsity": 0.8,
            "decay": 1.0,
        },
    ),
}


BITS = (1, 2, 4, 8, 16)
COMPRESSED: dict[str, tuple[tw.LocalSGD, dict[str, Any]]] = {
    **{
        f"{bits} bits": (tw.LocalSGD(3, compression=tw.Quantized(bits)), {"k": 3, "bits": bits})
        for bits in BITS
    },
    "4 bits, forgetting, outer, fragments and delay": (
        tw.LocalSGD(
            6,
            fragments=2,
            delay=2,
            outer_lr=0.8,
            outer_momentum=0.5,
            outer_nesterov=True,
            compression=tw.Quantized(decay=0.5),
        ),
        {
            "k": 6,
            "parts": [["a"], ["b", "c", "d"]],
            "delay": 2,
            "outer": (0.8, 0.5, True),
            "bits": 4,
            "decay": 0.5,
        },
    ),
    "over the senders": (
        tw.LocalSGD(4, compression=tw.Sparse(0.75, value_bits=32, decay=0.9)),
        {"k": 4, "sparsity": 0.75, "decay": 0.9, "senders": True},
    ),
    "over the senders, outer, fragments and delay": (
        tw.LocalSGD(
            6, fragments=2, delay=1, outer_momentum=0.5, compression=tw.Sparse(0.8, value_bits=32)
        ),
        {
            "k": 6,
            "parts": [["a"], ["b", "c", "d"]],
            "delay": 1,
            "outer": (1.0, 0.5, False),
            "sparsity": 0.8,
            "decay": 0.95,
            "senders": True,
        },
    ),
}
RAMP = tw.DGC(
    rampup_begin_step=7, rampup_step=9, sparsity=(0.5, 0.8, 0.9), min_numel=12, value_bits=32
)
RAMPED: dict[str, tuple[tw.LocalSGD, tw.DGC, dict[str, Any]]] = {
    "from the start": (
        tw.LocalSGD(3),
        tw.DGC(sparsity=(0.8,), min_numel=1, value_bits=32),
        {"k": 3, "ramp": (0, 1, (0.8,), 1)},
    ),
    "ramp": (
        tw.LocalSGD(2, begin_step=4),
        RAMP,
        {"k": 2, "begin": 4, "ramp": (7, 9, (0.5, 0.8, 0.9), 12)},
    ),
    "every step, by a ramp": (tw.LocalSGD(1), RAMP, {"k": 1, "ramp": (7, 9, (0.5, 0.8, 0.9), 12)}),
    "outer, fragments and delay": (
        tw.LocalSGD(6, fragments=2, delay=2, outer_lr=0.8, outer_momentum=0.5, outer_nesterov=True),
        RAMP,
        {
            "k": 6,
            "parts": [["a"], ["b", "c", "d"]],
            "delay": 2,
            "outer": (0.8, 0.5, True),
            "ramp": (7, 9, (0.5, 0.8, 0.9), 12),
        },
    ),
}


def follow(rank: int, size: int, config: Any, dgc: tw.DGC | None, steps: int) -> list[Any]:
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    with LocalUpdates(model, optimizer, config, compression=dgc) as sync:
        for step in range(1, steps + 1):
            set_gradients(model, step, rank)
            optimizer.step()
            errors = {name: e.numpy() for name, e in sync.state_dict()["residuals"].items()}
            found.append((sync.synced, values(model), errors))
        assert (sync.step, sync.k_steps) == (steps, config.k_steps)
    return [*found, (None, values(model), None)]


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.slow) for case in CASES), *COMPRESSED, *RAMPED]
)
@pytest.mark.parametrize("size", [1, 3])
def test_training_is_that_of_the_simulation(ranks: Pool, case: str, size: int) -> None:
    """1e-11: float64 sums in another order, and under compression float32 on the wire, rounded
    alike by both. 1e-6: scales are rounded to float32 from such sums, and a difference stays in
    the errors."""
    config, *dgc, settings = {**CASES, **COMPRESSED, **RAMPED}[case]
    most = {"rtol": 0, "atol": 1e-6} if case in COMPRESSED else {"rtol": 1e-11, "atol": 1e-11}
    steps = 33 if case in CASES else 26
    found = ranks.run(follow, config, dgc[0] if dgc else None, steps, size=size)
    start = {name: value.numpy() for name, value in start_values().items()}
    oracle = Simulation(start, size, lr=0.1, momentum=0.9, **settings)
    for step in range(steps):
        averaged = oracle.advance(gradient)
        for rank in range(size):
            synced, params, errors = found[rank][step]
            assert synced == averaged, step
            if dgc:
                least = dgc[0].min_numel
                assert set(errors) == {name for name, p in params.items() if p.size >= least}
            for name, p in params.items():
                twin = oracle.ranks[rank]
                np.testing.assert_allclose(p, twin.p[name], **most)
                if errors:
                    nothing = np.zeros_like(p)
                    kept = errors.get(name, nothing)
                    wanted = twin.error.get(name, nothing)
                    np.testing.assert_allclose(kept, wanted, **most)
    if case not in CASES:
        assert any(e.any() for e in found[0][steps - 1][2].values())
        return
    oracle.finish()
    for rank in range(size):
        for name, p in found[rank][-1][1].items():
            outer = settings.get("outer", (1.0, 0.0, False))
            if outer == (1.0, 0.0, False) and "sparsity" not in settings:
                np.testing.assert_allclose(p, oracle.ranks[rank].p[name], **most)
            np.testing.assert_array_equal(p, found[0][-1][1][name])


def synchronous(rank: int, size: int, momentum: float, nesterov: bool) -> float:
    """The largest difference to SGD on the mean gradient, with interval 1, over 50 steps."""
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.01}
    local, single = Bag(), Bag()
    ours = torch.optim.SGD(local.parameters(), **options)  # type: ignore[arg-type]
    theirs = torch.optim.SGD(single.parameters(), **options)  # type: ignore[arg-type]
    worst = 0.0
    with tw.local_sgd(local, ours, tw.LocalSGD(1)):
        for step in range(1, 51):
            set_gradients(local, step, rank)
            ours.step()
            for name, p in single.named_parameters():
                p.grad = 0.3 * p.detach() + sum(noise(step, r, name) for r in range(size)) / size
            theirs.step()
            for p, q in zip(local.parameters(), single.parameters(), strict=True):
                worst = max(worst, float((p.detach() - q.detach()).abs().max()))
    return worst


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_interval_1_with_sgd_is_synchronous(ranks: Pool, momentum: float, nesterov: bool) -> None:
    assert max(ranks.run(synchronous, momentum, nesterov, size=4)) < 1e-12


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
        for step in range(1, 401):
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
            if size > 1:
                torch.distributed.all_reduce(sums)
            sent = (start[name] - p.detach()) * size
            worst = max(worst, float((sent + sums[1] - sums[0]).abs().max()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize(
    "compression",
    [
        *(tw.Sparse(0.9, bits, 1.0, "all") for bits in (1, 2, 32)),
        *(tw.Quantized(bits) for bits in BITS),
        *(tw.Quantized(bits, exchange="split") for bits in BITS),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost_over_200_rounds(
    ranks: Pool, compression: Any, size: int, dtype: torch.dtype, most: float
) -> None:
    """Sums of a few hundred terms of size 1; float32 may send all that was folded."""
    assert max(ranks.run(keep_books, compression, dtype, size=size)) < most
