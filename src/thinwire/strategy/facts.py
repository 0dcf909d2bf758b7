"""What must be the same: on all ranks before an engine is made, and in a checkpoint and the engine
that loads it.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire._names import named_buffers, named_parameters, plain_names
from thinwire._version import __version__
from thinwire.local.model import looks
from thinwire.optim.common import CommonOptimizer
from thinwire.strategy.documents import to_dict
from thinwire.strategy.fields import Fields
from thinwire.wire.message import WIRE_VERSION

__all__ = ["checkpoint_facts", "model_facts", "strategy_facts", "versions"]


def strategy_facts(strategy: Fields) -> dict[str, Any]:
    """What ranks must have in common before they make process groups together."""
    return {
        "wire version": WIRE_VERSION,
        "strategy": to_dict(strategy),
        "dp_degree": strategy.expected_replicas,
    }


def versions() -> dict[str, str]:
    """What may differ between ranks."""
    return {"thinwire": __version__, "torch": str(torch.__version__)}


def checkpoint_facts(
    strategy: Fields, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What a checkpoint says of the engine that wrote it."""
    return {
        "strategy": to_dict(strategy),
        "optimizer": type(optimizer).__name__,
        "parameters": [f"{name} {looks(p)}" for name, p in named_parameters(model)],
        "state_dict": _names_by_key(model),
    }


def _names_by_key(model: nn.Module) -> dict[str, str | None]:
    """For every key of the model's own `state_dict` the parameter or buffer that it stands for,
    which for tied weights is the same one; None for what is neither.
    """
    tensors = [*named_parameters(model), *named_buffers(model)]
    names = {id(tensor): name for name, tensor in tensors}
    values = model.state_dict(keep_vars=True)
    keys = plain_names(values)
    return {key: names.get(id(value)) for key, value in zip(keys, values.values(), strict=True)}


def model_facts(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, digest: bool
) -> dict[str, Any]:
    """What they must have in common beside the strategy; `digest`: the state of the
    optimizer too.
    """
    names = {p: name for name, p in named_parameters(model)}
    return {
        "parameter": [
            f"{name} {looks(p)} requires_grad={p.requires_grad}" for p, name in names.items()
        ],
        "buffer": [f"{name} {looks(b)}" for name, b in named_buffers(model)],
        "optimizer": type(optimizer).__name__,
        "group": [
            {
                key: repr(value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            | {"params": [names.get(p, "not in the model") for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "setting": optimizer.shared_settings() if isinstance(optimizer, CommonOptimizer) else None,
        # ranks that go on from different moments would part without a word; those of an optimizer
        # that exchanges differ by nature
        "state of the optimizer": _state_digest(optimizer)
        if digest and not getattr(optimizer, "exchanges_gradients", False)
        else None,
    }


def _state_digest(optimizer: torch.optim.Optimizer) -> int:
    checksum = 0
    for piece in _bytes_of(optimizer.state_dict()["state"]):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _bytes_of(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, Tensor):
        yield tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield repr(key).encode()
            yield from _bytes_of(value)
    else:
        yield repr(tree).encode()
