"""How the Triton kernels are launched: on the device of their tensors, and without contraction of a
* b + c.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["BLOCK", "blocks_of", "count_of", "launch"]

BLOCK = 1024
"""Entries that one program works on at a time; a power of two."""


def blocks_of(length: int, block: int) -> int:
    """How many blocks cover `length` entries; at least one, since a grid must not be empty."""
    return max(1, -(-length // block))


def launch(
    kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **constants: Any
) -> None:
    """Run a kernel on the device of `like`.

    Without `enable_fp_fusion=False` the compiler turns m * u + g into one operation that rounds
    once, and a proposal would no longer have the bits of the readable twin.
    """
    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]  # of torch
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


def count_of(number: int, like: Tensor) -> Tensor:
    """A number as kernels read counts: shape (), int64, written on the device of `like`."""
    return torch.full((), number, dtype=torch.int64, device=like.device)
