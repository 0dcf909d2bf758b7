"""Loops behind `core`, in two bodies with one signature.

The bodies are numba for the CPU, and torch for every other device and where numba is missing. In
the environment `THINWIRE_KERNELS=reference` forces torch. Both return the same bits, except for the
rounding of trust ratios in `compiled_steps`.
"""

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.rules import Fold, Largest, Sparse, Tensors


class Kernels(Protocol):
    """Functions of every body; `core.feedback` describes them and checks the arguments."""

    def top_k(self, values: Tensor, k: int) -> Tensor: ...

    def propose_list(self, folds: Sequence[Fold], ks: Sequence[int]) -> list[Largest]: ...

    def commit_list_(
        self, folds: Sequence[Fold], sent: Sequence[Sparse], seeds: Sequence[int]
    ) -> None: ...


def for_device(device: torch.device) -> Kernels:
    """Return the numba body for a CPU, if numba can be imported; else the torch body."""
    choice = os.environ.get("THINWIRE_KERNELS", "auto")
    if choice not in {"auto", "reference"}:
        left = "the Triton kernels left in 0.4, and every GPU runs torch operations instead; "
        raise ValueError(
            f"THINWIRE_KERNELS is {choice!r}: {left if choice == 'triton' else ''}allowed are "
            "'auto' (the default) and 'reference'"
        )
    if choice == "auto" and device.type == "cpu":
        return _numba_kernels() or reference
    return reference


def body_name(device: torch.device) -> str:
    """Return the name of the body that `for_device` chooses."""
    return "reference" if for_device(device) is reference else "numba"


def compiled_steps(*lists: Tensors) -> Any:
    """Return `kernels.cpu` if it takes these lists of tensors; None if torch must compute."""
    body: Any = for_device(lists[0][0].device)
    if body is reference or not body.takes(*lists):
        return None
    require_lengths(zip(*filter(None, lists), strict=True))
    return body


def require_lengths(rows: Iterable[Iterable[Any]]) -> None:
    """Raise for tensors of unequal lengths in a row: loops would read behind an end."""
    for first, *rest in rows:
        for other in rest:
            if isinstance(other, Tensor) and other.numel() != first.numel():
                raise ValueError(
                    f"tensors of one update have {first.numel()} and {other.numel()} entries: a "
                    "parameter changed its shape after its state was made. Make a new optimizer"
                )


@functools.cache
def _numba_kernels() -> Any:
    """Return the numba body, or None without numba; the import takes half a second."""
    try:
        import numba
    except ImportError:
        return None
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return None
    from thinwire.kernels import cpu

    return cpu
