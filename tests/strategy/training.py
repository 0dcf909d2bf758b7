"""What the tests of the engine train: a small model on fixed data, any combination of fields."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw

FIELDS: dict[str, Any] = {
    "amp": tw.AMP("bfloat16", tw.DynamicLossScale(init_loss_scale=2.0**10, scale_window=4)),
    "recompute": tw.Recompute(("1",)),
    "pipeline": tw.Pipeline(stages=2, micro_batches=2),
    "gradient_merge": tw.GradientMerge(2),
    "dgc": tw.DGC(rampup_begin_step=1, sparsity=(0.75,), min_numel=64, value_bits=8),
    "lars": tw.LARS(lars_coeff=0.02, lars_weight_decay=1e-4, exclude_from_weight_decay=("*.bias",)),
    "lamb": tw.LAMB(lamb_weight_decay=1e-3, exclude_from_weight_decay=("*.bias",)),
    "localsgd": tw.LocalSGD(2),
    "adaptive_localsgd": tw.AdaptiveLocalSGD(2, max_k_steps=4),
    "low_rank": tw.LowRank(2, begin_step=1, min_numel=64),
    "compression": tw.Quantized(4),
}


class Block(nn.Sequential):
    """Linear, batch norm, activation, dropout."""

    def __init__(self, width: int, dtype: torch.dtype, dropout: float = 0.1) -> None:
        super().__init__(
            nn.Linear(width, width, dtype=dtype),
            nn.BatchNorm1d(width, dtype=dtype),
            nn.Tanh(),
            nn.Dropout(dropout),
        )


def make_model(
    *, dtype: torch.dtype = torch.float32, plain: bool = False, blocks: int = 2
) -> nn.Sequential:
    """Equal on all ranks; `plain` leaves out what depends on the batch or on chance."""
    torch.manual_seed(5)
    if plain:
        layers: list[nn.Module] = [
            nn.Sequential(nn.Linear(16, 16, dtype=dtype), nn.Tanh()) for _ in range(blocks)
        ]
    else:
        layers = [Block(16, dtype) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(8, 16, dtype=dtype), *layers, nn.Linear(16, 4, dtype=dtype))


def batch(
    step: int, part: int, *, rows: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A mini-batch that all who ask for the same part get."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(rows, 8, generator=generator, dtype=dtype)
    return x, (x[:, :4] * 3).argmax(1)


def make_optimizer(model: nn.Module, fields: Iterable[str]) -> torch.optim.Optimizer:
    """What the fields can work with."""
    if "lamb" in fields:
        return torch.optim.Adam(model.named_parameters(), lr=0.02)
    return torch.optim.SGD(
        model.named_parameters(), lr=0.05 if "lars" not in fields else 0.3, momentum=0.9
    )


def make_engine(
    fields: Sequence[str], *, replace: dict[str, Any] | None = None, **model: Any
) -> Any:
    """An engine with the fields on, in their settings above or those of `replace`."""
    settings = {name: {**FIELDS, **(replace or {})}[name] for name in fields}
    net = make_model(**model)
    strategy = tw.DistributedStrategy(**settings)
    return strategy.prepare(net, make_optimizer(net, fields), nn.functional.cross_entropy)


def settings(fields: Iterable[str]) -> dict[str, Any]:
    return {name: FIELDS[name] for name in fields}


def prepared(
    model: nn.Module | None = None,
    optimizer: Any = None,
    *,
    loss: Any = nn.functional.cross_entropy,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """An engine of a plain model, unless one is given; `optimizer` is one or makes one of it."""
    net = make_model(plain=True) if model is None else model
    made = make_optimizer(net, fields) if optimizer is None else optimizer
    made = made if isinstance(made, torch.optim.Optimizer) else made(net)
    return tw.DistributedStrategy(**fields).prepare(net, made, loss, **(options or {}))


def flat(model: nn.Module) -> list[float]:
    """All parameters."""
    return [float(v) for p in model.parameters() for v in p.detach().reshape(-1)]


def replica_of(rank: int, fields: Iterable[str]) -> int:
    """Which data a rank sees: ranks of one pipeline see the same."""
    return rank // 2 if "pipeline" in fields else rank


def digest(engine: Any) -> str:
    """Parameters and floating-point buffers of this rank, every bit."""
    tensors = [
        *engine.model.parameters(),
        *(b for b in engine.model.buffers() if b.is_floating_point()),
    ]
    raw = (t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(b"".join(raw)).hexdigest()


def world_rank() -> int:
    """0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def train(engine: Any, fields: Sequence[str], first: int, last: int, **data: Any) -> list[float]:
    """The losses of the microsteps `first` to `last` - 1."""
    part = replica_of(world_rank(), fields)
    return [engine.train_step(*batch(step, part, **data)).item() for step in range(first, last)]
