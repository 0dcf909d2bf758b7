"""Loops behind `core` and `wire`, in three bodies with one signature.

The bodies are torch for any device, numba for CPU and Triton for CUDA. `for_device` chooses numba
for the CPU and Triton for CUDA if they can be imported, else torch. In the environment
`THINWIRE_KERNELS=reference` forces torch. `THINWIRE_KERNELS=triton` forces Triton, on the CPU too,
where its interpreter runs it (`TRITON_INTERPRET=1`): slow, for tests. All bodies return the same
bits, except for the rounding of trust ratios in `compiled_steps`.
"""

import functools
import os
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.rules import (
    Fold,
    LambRule,
    LarsRule,
    OuterRule,
    has_address,
    is_plain,
    require_lengths,
    share_memory,
)


class Kernels(Protocol):
    """Functions of every body.

    `core.feedback` and `wire.codes` describe them and check the arguments.
    """

    def top_k(self, values: Tensor, k: int) -> Tensor: ...

    def propose_list(
        self, folds: Sequence[Fold], ks: Sequence[int]
    ) -> list[tuple[Tensor, Tensor, bool | Tensor]]: ...

    def commit_list_(
        self, folds: Sequence[Fold], sent: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
    ) -> None: ...

    def step_along_list_(
        self,
        params: Sequence[Tensor],
        parts: Sequence[Sequence[tuple[Tensor, Tensor]]],
        rates: Sequence[float],
        sources: int,
    ) -> None: ...

    def encode_slots(
        self,
        slots: NDArray[np.int64],
        parts: Sequence[tuple[Tensor, Tensor]],
        bits: int,
        *,
        spare: bool,
        code: NDArray[np.uint8],
    ) -> tuple[list[Tensor], int] | None: ...

    def decode_slots(
        self, slots: NDArray[np.int64], code: NDArray[np.uint8], bits: int
    ) -> list[tuple[Tensor, Tensor]] | None: ...

    def store_(self, target: Tensor, values: Tensor, seed: int) -> None: ...

    def count_nonzero(self, values: Tensor) -> int: ...

    def is_ascending(self, indices: Tensor) -> bool: ...

    def encode_positions(
        self, indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int
    ) -> Tensor: ...

    def decode_positions(
        self, code: Tensor, k: int, low_bits: int, low_bytes: int
    ) -> tuple[Tensor, int]: ...

    def encode_values(self, values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]: ...

    def decode_values(self, code: Tensor, count: int, bits: int) -> Tensor: ...

    def sum_sparse(
        self, indices: list[Tensor], values: list[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...


def for_device(device: torch.device) -> Kernels:
    """Return the kernels for tensors on `device`.

    Args:
        device: Of all tensors of the call.

    Returns:
        The numba body for a CPU, the Triton body for CUDA. The torch body for other devices, and if
        those cannot be imported.

    Raises:
        ValueError: `THINWIRE_KERNELS` is unknown, or names a body that cannot run here.
    """
    choice = os.environ.get("THINWIRE_KERNELS", "auto")
    if choice not in {"auto", "reference", "triton"}:
        raise ValueError(
            f"THINWIRE_KERNELS is {choice!r}; allowed are 'auto' (the default), 'reference' and "
            "'triton'"
        )
    if choice == "triton":
        return _demanded_triton(device)
    if choice == "auto" and device.type == "cuda":
        return _triton_kernels() or reference
    if choice == "auto" and device.type == "cpu":
        return _numba_kernels() or reference
    return reference


def body_name(device: torch.device) -> str:
    """Return the name of the body that `for_device` chooses."""
    kernels = for_device(device)
    if kernels is reference:
        return "reference"
    return "numba" if kernels is _numba_kernels() else "triton"


def is_static(device: torch.device) -> bool:
    """Return True if exchanges on `device` have static shapes and no host synchronization.

    That is the case where Triton runs.

    >>> is_static(torch.device("cpu"))
    False
    """
    kernels = for_device(device)
    return kernels is not reference and kernels is not _numba_kernels()


def _demanded_triton(device: torch.device) -> Kernels:
    kernels = _triton_kernels()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kernels is None or (device.type != "cuda" and not interpreted):
        why = "triton cannot be imported" if kernels is None else f"the tensors are on {device}"
        raise ValueError(
            f"THINWIRE_KERNELS is 'triton', but {why}: install triton, and for tensors that are "
            "not on CUDA set TRITON_INTERPRET=1 before the first import, or unset THINWIRE_KERNELS"
        )
    return kernels


class CompiledSteps(Protocol):
    """Whole steps for lists of tensors, as in `core.lamb`, `core.lars` and `core.outer`."""

    def lamb_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        rule: LambRule,
    ) -> Tensor: ...

    def lars_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        velocities: Sequence[Tensor] | None,
        rule: LarsRule,
    ) -> Tensor: ...

    def outer_(
        self,
        anchors: Sequence[Tensor],
        changes: Sequence[Tensor],
        buffers: Sequence[Tensor] | None,
        rule: OuterRule,
    ) -> None: ...


def compiled_steps(*lists: Sequence[Tensor]) -> CompiledSteps | None:
    """Return compiled steps for tensors like these, or None if torch must compute them.

    Args:
        lists: All tensors of the call; the first list is not empty.

    Returns:
        The body of `for_device`, if it is compiled and all tensors fit: contiguous, all float32 or
        all float64, on one device, of torch's own classes. Shards and tensors of a compiler's trace
        have no memory that may be written to. No tensor of the first list may share memory with
        another one, since several threads work on them.

    Raises:
        ValueError: `THINWIRE_KERNELS` is wrong. Tensors of one index have different lengths.
    """
    dtype, device = lists[0][0].dtype, lists[0][0].device
    tensors = (tensor for group in lists for tensor in group)
    if dtype not in _STEP_TYPES:
        return None
    if device.type == "cpu":
        fit = all(has_address(tensor, dtype) for tensor in tensors)
    else:
        fit = all(is_plain(tensor, dtype) and tensor.device == device for tensor in tensors)
    if not fit or share_memory(lists[0]):
        return None
    require_lengths(zip(*filter(None, lists), strict=True))
    return _steps_for(device)


def _steps_for(device: torch.device) -> CompiledSteps | None:
    kernels = for_device(device)
    if kernels is reference:
        return None
    if kernels is _numba_kernels():
        from thinwire.kernels.cpu import numba_steps

        return cast("CompiledSteps", numba_steps)
    if device.type == "cuda" and not _triton_rounds():
        return None
    from thinwire.kernels.cuda import device_steps

    return cast("CompiledSteps", device_steps)


_STEP_TYPES = (torch.float32, torch.float64)


@functools.cache
def _numba_kernels() -> Kernels | None:
    """Return the numba body, or None without numba; the import takes half a second."""
    try:
        import numba
    except ImportError:
        return None
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return None
    from thinwire.kernels.cpu import numba_body

    return cast("Kernels", numba_body)


@functools.cache
def _triton_rounds() -> bool:
    """Return True if rounded division and root keep subnormal numbers on a GPU; Triton before 3.6
    flushes them to zero.
    """
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


@functools.cache
def _triton_kernels() -> Kernels | None:
    """Return the Triton body, or None without Triton; the import takes a second."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from thinwire.kernels.cuda import triton_body

    return cast("Kernels", triton_body)
