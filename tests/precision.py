"""How torch multiplies float32 matrices, for the length of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["products_in"]


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """One of "highest", "high" or "medium", as `torch.set_float32_matmul_precision` calls it."""
    used = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(used)
