"""Launch of Triton kernels: on the device of their tensors, without contraction of a * b + c."""

from typing import Any

import torch
from torch import Tensor

BLOCK = 1024
"""Number of entries that one program processes at a time; a power of two."""


def blocks_of(length: int, block: int) -> int:
    """Return the number of blocks that cover `length` entries, at least 1 for a valid grid."""
    return max(1, -(-length // block))


def launch(
    kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **constants: Any
) -> None:
    """Run a kernel on the device of `like`.

    Without `enable_fp_fusion=False` the compiler turns m * u + g into one operation that rounds
    once, and a proposal would differ in bits from the reference implementation.
    """
    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]  # of torch
        kernel[grid](*arguments, enable_fp_fusion=False, **constants)


def count_of(number: int, like: Tensor) -> Tensor:
    """Return a count in device memory: shape (), int64, written on the device of `like`."""
    return torch.full((), number, dtype=torch.int64, device=like.device)
