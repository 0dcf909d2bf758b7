"""Bits of tensors, and how torch multiplies float32 matrices for the length of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["assert_same_bits", "products_in", "same_bits"]


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """One of "highest", "high" or "medium", as `torch.set_float32_matmul_precision` calls it."""
    used = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(used)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaNs and signs of zeros included."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert same_bits(a, b)
