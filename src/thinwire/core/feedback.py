"""Momentum correction, residual and masking of deep gradient compression.

Throughout: g gradient, u momentum buffer, v residual, S the entries that are sent, m the momentum.
All are flat, contiguous and on one device; u and v are float32, float64 or bfloat16, g may be of
any floating-point type. The arithmetic rounds after every operation, so a proposal and the commit
that follows it see the same bits. u and v in bfloat16 are read as float32 and computed with in
float32; what stays is rounded as `thinwire.core.rounding` says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.core.checksum import word_sums
from thinwire.kernels import body_name, for_device
from thinwire.kernels.rules import Fold

__all__ = [
    "Fold",
    "FoldRule",
    "Proposal",
    "Seal",
    "commit_",
    "commit_list_",
    "in_chunks",
    "propose",
    "propose_list",
]


_CHUNK = 1 << 22
"""Entries of the tensors of one call."""
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class FoldRule:
    """How a gradient is folded into momentum buffer and residual."""

    momentum: float
    """m, unitless, at least 0; without a momentum buffer it has no effect."""
    nesterov: bool = False
    """Whether the gradient is counted once more, ahead of the momentum."""


class Proposal(NamedTuple):
    """What one tensor would send."""

    indices: Tensor
    """Shape (k,), int64, ascending; empty if not finite (but never where `finite` is a tensor)."""
    values: Tensor
    """Shape (k,), the folded residual at `indices`, in the dtype that is computed in; as long as
    `indices`."""
    finite: bool | Tensor
    """Whether gradient and folded residual hold finite values only; shape (), bool, where the host
    need not know."""


def propose(
    grad: Tensor, residual: Tensor, momentum_buffer: Tensor | None, k: int, rule: FoldRule
) -> Proposal:
    """The `k` entries of largest magnitude of the folded residual; nothing is changed.

    v' = v + (m * u + g), with Nesterov u' = m * (u + g) and v' = v + u' + g, without momentum
    buffer v' = v + g.

    Args:
        grad: Shape (n,), this rank's gradient; converted to the dtype that is computed in.
        residual: Shape (n,), v.
        momentum_buffer: Shape (n,) and the residual's dtype, u; or None.
        k: Between 1 and n.
        rule: Momentum and Nesterov.

    Returns:
        Positions, values and whether all was finite; equal magnitudes by lowest position.

    Raises:
        ValueError: Shapes, dtypes or `k` do not fit.

    Source: arXiv 1712.01887, algorithms 1 and 4. Differs: exact selection.
    """
    _check_state(grad, residual, momentum_buffer)
    _check_k(k, residual)
    fold = Fold(grad, residual, momentum_buffer, rule.momentum, rule.nesterov)
    return Proposal(*for_device(residual.device).propose_list([fold], [k])[0])


def commit_(
    grad: Tensor,
    residual: Tensor,
    momentum_buffer: Tensor | None,
    indices: Tensor,
    sent: Tensor,
    rule: FoldRule,
    *,
    seed: int | None = None,
) -> None:
    """Fold the gradient for good, take off what was sent and mask the momentum; changes u and v in
    place.

    u and v become u' and v' of `propose`; then v[S] -= sent and u[S] = 0.

    Args:
        grad: Shape (n,), the gradient of the proposal, unchanged since; read only.
        residual: Shape (n,), v; changed.
        momentum_buffer: Shape (n,), u, or None; changed.
        indices: Shape (j,), int64, strictly ascending from 0 to n - 1 (which is not checked): S.
        sent: Shape (j,), float32 or float64: what the receivers decode at S.
        rule: That of the proposal.
        seed: For u and v in bfloat16, which need one: 0 to 2^32 - 1, another one in every step and
            for every tensor. It has no effect on wider ones.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the seed is missing.

    Source: arXiv 1712.01887, algorithm 4. Differs: the rounding error of the values stays in v.
    """
    _check_state(grad, residual, momentum_buffer)
    _check_sent(indices, sent)
    _check_seed(seed, residual)
    fold = Fold(grad, residual, momentum_buffer, rule.momentum, rule.nesterov)
    for_device(residual.device).commit_list_([fold], [(indices, sent)], [seed or 0])


def in_chunks(sizes: Mapping[_Key, int]) -> Iterator[list[_Key]]:
    """Tensors that are worth one call together, so few that what is made for all of them stays
    small.

    Args:
        sizes: Entries of every tensor.
    """
    chunk: list[_Key] = []
    room = _CHUNK
    for key, size in sizes.items():
        if chunk and size > room:
            yield chunk
            chunk, room = [], _CHUNK
        chunk.append(key)
        room -= size
    if chunk:
        yield chunk


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[Proposal]:
    """`propose` for many tensors, in few passes over Python where the loops are compiled; nothing
    is changed.

    Args:
        folds: Per tensor its gradient, state and rule, as for `propose`, all on one device.
        ks: Per tensor k.

    Raises:
        ValueError: As in `propose`.
    """
    for fold, k in zip(folds, ks, strict=True):
        _check_state(fold.grad, fold.residual, fold.momentum_buffer)
        _check_k(k, fold.residual)
    kernels = for_device(folds[0].residual.device if folds else torch.device("cpu"))
    return [Proposal(*found) for found in kernels.propose_list(folds, ks)]


class Seal(NamedTuple):
    """What a commit found and left, by the sums of `thinwire.core.checksum.word_sums`."""

    residual_before: int
    buffer_before: int
    residual: int
    buffer: int


def commit_list_(
    folds: Sequence[Fold],
    sent: Sequence[tuple[Tensor, Tensor]],
    seeds: Sequence[int | None],
    *,
    sealed: bool = False,
) -> list[Seal]:
    """`commit_` for many tensors; changes residuals and momentum buffers in place.

    Args:
        folds: Per tensor its gradient, state and rule: those of the proposal.
        sent: Per tensor (indices, values), as for `commit_`.
        seeds: Per tensor, as for `commit_`.
        sealed: Whether to say what was found and left; in compiled loops that is almost free.

    Returns:
        Per tensor, if `sealed`; without momentum buffer its sums are 0.

    Raises:
        ValueError: As in `commit_`.
    """
    device = folds[0].residual.device if folds else torch.device("cpu")
    fused = body_name(device) == "numba" and all(f.residual.dtype != torch.bfloat16 for f in folds)
    before = [_rests(fold, fused) for fold in folds] if sealed else []
    for fold, (indices, values), seed in zip(folds, sent, seeds, strict=True):
        _check_state(fold.grad, fold.residual, fold.momentum_buffer)
        _check_sent(indices, values)
        _check_seed(seed, fold.residual)
    sums = for_device(device).commit_list_(folds, sent, [seed or 0 for seed in seeds])
    return _seals(before, folds, sums if fused else [None] * len(folds)) if sealed else []


def _rests(fold: Fold, fused: bool) -> list[int]:
    """The sums of residual and buffer; where loops make them, of the last entry that fills no word,
    if there is one.
    """
    states = [fold.residual, *([] if fold.momentum_buffer is None else [fold.momentum_buffer])]
    if not fused:
        return word_sums(states)
    filled = (
        fold.residual.numel()
        * fold.residual.element_size()
        // 8
        * 8
        // fold.residual.element_size()
    )
    return (
        [] if filled == fold.residual.numel() else word_sums([state[filled:] for state in states])
    )


def _seals(
    before: Sequence[Sequence[int]], folds: Sequence[Fold], sums: Sequence[NDArray[np.int64] | None]
) -> list[Seal]:
    found = []
    for rests, fold, own in zip(before, folds, sums, strict=True):
        four = [0, 0, 0, 0] if own is None else own.tolist()
        for place, rest in (*enumerate(rests), *enumerate(_rests(fold, own is not None), 2)):
            four[place] = _wrapped(four[place] + rest)
        found.append(Seal(*four))
    return found


def _wrapped(number: int) -> int:
    """As a signed number of 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _check_k(k: int, residual: Tensor) -> None:
    if not 1 <= k <= residual.numel():
        raise ValueError(
            f"k is {k}; it must be between 1 and the {residual.numel()} entries of residual"
        )


def _check_seed(seed: int | None, residual: Tensor) -> None:
    if residual.dtype == torch.bfloat16 and seed is None:
        raise ValueError("seed is None and the residual bfloat16; give rounding_seed(step, key)")


def _check_sent(indices: Tensor, sent: Tensor) -> None:
    if indices.shape != sent.shape or indices.dim() != 1:
        raise ValueError(
            f"indices has shape {tuple(indices.shape)} and sent {tuple(sent.shape)}; both must be "
            "(j,)"
        )
    if indices.dtype != torch.int64 or sent.dtype not in {torch.float32, torch.float64}:
        raise ValueError(
            f"indices is {indices.dtype} and sent {sent.dtype}; int64 and float32 or float64 are "
            "needed"
        )


def _check_state(grad: Tensor, residual: Tensor, momentum_buffer: Tensor | None) -> None:
    if residual.dtype not in {torch.float32, torch.float64, torch.bfloat16}:
        raise ValueError(f"residual is {residual.dtype}; float32, float64 or bfloat16 is needed")
    if not grad.is_floating_point():
        raise ValueError(f"grad is {grad.dtype}; a floating-point type is needed")
    for name, tensor in (
        ("grad", grad),
        ("residual", residual),
        ("momentum_buffer", momentum_buffer),
    ):
        if tensor is not None and (
            tensor.shape != (residual.numel(),) or not tensor.is_contiguous()
        ):
            shape = tuple(tensor.shape)
            raise ValueError(
                f"{name} has shape {shape}; it must be flat, contiguous and as long as residual"
            )
    if momentum_buffer is not None and momentum_buffer.dtype != residual.dtype:
        raise ValueError(
            f"momentum_buffer is {momentum_buffer.dtype}; it must be {residual.dtype} as residual "
            "is"
        )
