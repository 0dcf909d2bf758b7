"""States to save, and what it means that two are the same."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["bits", "fail", "flip", "rank_state", "same"]


def bits(tensor: Tensor) -> bytes:
    """Every bit of a tensor, element by element in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist())


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal in kinds, order of keys and every bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(repr(a) == repr(b))


def rank_state(rank: int, value: float) -> dict[str, Any]:
    """A small state: parameters equal on all ranks, a residual that is not, counters."""
    value = float(value)
    return {
        "model": {
            "weight": torch.full((3, 4), value),
            "bias": torch.full((4,), -value, dtype=torch.bfloat16),
        },
        "residual": {"weight": torch.full((3, 4), value + 100 * (rank + 1))},
        "optimizer": {0: {"step": int(value), "rate": value / 8, "betas": (0.9, 0.999)}},
        "rank": rank,
    }


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def fail(path: Any, *args: Any) -> Any:
    """In place of a function of files."""
    raise PermissionError(13, "Permission denied", str(path))
