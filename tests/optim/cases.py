"""The optimizers that the contracts are tried on, with values to exercise each; a small model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import optim


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    kwargs: dict[str, Any]
    rounding: float = 0.0
    """What another order of the same arithmetic may change in a few steps, beyond float32's."""

    def __call__(self, params: Any, **kwargs: Any) -> Any:
        return self.make(params, **{**self.kwargs, **kwargs})


TORCHS = {
    "SGD": Case(optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": Case(optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": Case(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": Case(optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": Case(optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
}
OURS = {
    "Lamb": Case(optim.Lamb, {"lr": 0.02}),
    "Lars": Case(optim.Lars, {"lr": 0.5, "trust_coefficient": 0.05}),
    "LazyAdam": Case(optim.LazyAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "Ftrl": Case(optim.Ftrl, {"lr": 0.1, "l1": 0.01}),
    "ProximalAdagrad": Case(optim.ProximalAdagrad, {"lr": 0.1, "l1": 0.01}),
}
# five iterations enlarge the rounding of small singular values
ALL = {**TORCHS, "Muon": Case(optim.Muon, {"lr": 0.01}, rounding=1e-5), **OURS}
# one worker: the compression is at work, the exchange is not
EVERY = {
    **ALL,
    "DGCMomentum": Case(optim.DGCMomentum, {"lr": 0.05, "min_numel": 8, "sparsity": (0.5,)}),
}
EXTRAS: dict[str, Any] = {
    "grad_clip": optim.ClipByNorm(0.5),
    "regularizer": optim.L1Decay(0.01),
    "exclude_from_weight_decay": ("*.bias",),
}


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Two layers and a normalisation; the same numbers at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
        return torch.nn.Sequential(*layers).to(dtype)


def give_gradients(net: torch.nn.Module, seed: int) -> None:
    """Write random gradients, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[Tensor]:
    """One step per seed; returns copies of the parameters."""
    for seed in seeds:
        give_gradients(net, seed)
        optimizer.step()
    return values(net)


def values(net: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
