"""The loops behind `core`, in two bodies with one signature: torch for any device, numba for the CPU.

`for_device` chooses: numba where the tensors are on the CPU and numba can be imported, torch everywhere else.
`THINWIRE_KERNELS=reference` in the environment forces torch. Both bodies give the same bits.
"""

import functools
import os
from typing import Protocol, cast

import torch
from torch import Tensor

from thinwire.core.kernels import reference

__all__ = ["Kernels", "for_device"]


class Kernels(Protocol):
    """What both bodies provide. Arguments are checked by the callers; docstrings are in `kernels.reference`."""

    def top_k(self, values: Tensor, k: int) -> Tensor: ...  # noqa: D102

    def propose(  # noqa: D102
        self, grad: Tensor, residual: Tensor, momentum_buffer: Tensor | None, k: int, *, momentum: float, nesterov: bool
    ) -> tuple[Tensor, Tensor, bool]: ...

    def commit_(  # noqa: D102
        self,
        grad: Tensor,
        residual: Tensor,
        momentum_buffer: Tensor | None,
        indices: Tensor,
        sent: Tensor,
        *,
        momentum: float,
        nesterov: bool,
        seed: int,
    ) -> None: ...

    def store_(self, target: Tensor, values: Tensor, seed: int) -> None: ...  # noqa: D102

    def count_nonzero(self, values: Tensor) -> int: ...  # noqa: D102

    def is_ascending(self, indices: Tensor) -> bool: ...  # noqa: D102

    def encode_positions(self, indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int) -> Tensor: ...  # noqa: D102

    def decode_positions(self, code: Tensor, k: int, low_bits: int, low_bytes: int) -> tuple[Tensor, int]: ...  # noqa: D102

    def encode_values(self, values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]: ...  # noqa: D102

    def decode_values(self, code: Tensor, count: int, bits: int) -> Tensor: ...  # noqa: D102

    def sum_sparse(  # noqa: D102
        self, indices: list[Tensor], values: list[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on `device`.

    Args:
        device: Where all tensors of the call are.

    Returns:
        The numba body for a CPU where numba can be imported, otherwise the torch body.

    Raises:
        ValueError: `THINWIRE_KERNELS` is set to something unknown.
    """
    choice = os.environ.get("THINWIRE_KERNELS", "auto")
    if choice not in {"auto", "reference"}:
        raise ValueError(f"THINWIRE_KERNELS is {choice!r}; allowed are 'auto' (the default) and 'reference'")
    if device.type != "cpu" or choice == "reference":
        return reference
    return _numba_kernels() or reference


@functools.cache
def _numba_kernels() -> Kernels | None:
    """The numba body, or None without numba; imported at the first use because it takes half a second."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return None
    from thinwire.core.kernels import cpu

    return cast("Kernels", cpu)
