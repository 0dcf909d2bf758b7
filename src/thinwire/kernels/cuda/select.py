"""Fold and selection on the device: exact, in static shapes, and without a word to the host.

A radix selection: histograms of one digit after the other of the magnitude's bit pattern, from the
highest; after each, one program finds the digit of the k-th largest magnitude and how many entries
are still wanted there. The folded residual is computed anew in every pass, so that no copy of full
size is needed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.cuda import launching, triton_select
from thinwire.kernels.cuda.launching import blocks_of, launch

__all__ = ["commit_", "propose", "store_", "top_k"]

_DIGITS = {torch.float32: (10, 10, 11), torch.float64: (10, 10, 10, 11, 11, 11)}
"""Bits of each digit, from the highest; together all bits but the sign."""
_PROGRAMS = 1024
"""At most so many programs count digits: each keeps a histogram while it strides over several
blocks."""


class _Folding(NamedTuple):
    """What is folded and how, as the kernels take it."""

    grad: Tensor
    residual: Tensor
    buffer: Tensor
    momentum: Tensor
    mode: Any
    wide: torch.dtype
    """In what is computed."""

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors."""
        return self.grad, self.residual, self.buffer, self.momentum


def top_k(values: Tensor, k: int) -> Tensor:
    """See `thinwire.core.select.top_k`."""
    x = values if values.dtype in _DIGITS else values.float()
    return _largest(_Folding(x, x, x, x, triton_select.VALUES, x.dtype), k)[0]


def propose(
    grad: Tensor,
    residual: Tensor,
    momentum_buffer: Tensor | None,
    k: int,
    *,
    momentum: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `thinwire.core.feedback.propose`; always `k` entries, and shape (), bool: whether all was
    finite.
    """
    indices, values = _largest(_folding(grad, residual, momentum_buffer, momentum, nesterov), k)
    # Whatever is not finite counts as larger than all that is, so it is among the k.
    return indices, values, values.isfinite().all()


def commit_(
    grad: Tensor,
    residual: Tensor,
    momentum_buffer: Tensor | None,
    indices: Tensor,
    sent: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    seed: int,
) -> None:
    """See `thinwire.core.feedback.commit_`."""
    folding = _folding(grad, residual, momentum_buffer, momentum, nesterov)
    block, mode, bits = launching.BLOCK, folding.mode, _signed(seed)
    rest = torch.empty(indices.numel(), dtype=folding.wide, device=residual.device)
    count, few = indices.numel(), (blocks_of(indices.numel(), block),)
    launch(
        triton_select.keep_rest,
        few,
        residual,
        *folding.given,
        indices,
        sent,
        rest,
        count,
        MODE=mode,
        BLOCK=block,
    )
    many = (blocks_of(residual.numel(), block),)
    launch(
        triton_select.fold_,
        many,
        residual,
        *folding.given,
        residual.numel(),
        bits,
        MODE=mode,
        BLOCK=block,
    )
    state, has_buffer = (folding.residual, folding.buffer), momentum_buffer is not None
    given = (*state, indices, rest, count, bits)
    launch(triton_select.put_rest_, few, residual, *given, HAS_BUFFER=has_buffer, BLOCK=block)


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    """See `thinwire.core.feedback.store_`."""
    block, numel = launching.BLOCK, target.numel()
    given = (target.view(torch.int16), values, numel, _signed(seed))
    launch(triton_select.round_, (blocks_of(numel, block),), target, *given, BLOCK=block)


def _signed(seed: int) -> int:
    """The same 32 bits as a signed number, so that its type is one for all seeds and nothing is
    compiled again.
    """
    return seed - (1 << 32) if seed >> 31 else seed


def _folding(
    grad: Tensor, residual: Tensor, momentum_buffer: Tensor | None, momentum: float, nesterov: bool
) -> _Folding:
    v, wide = (
        _as_bits(residual),
        torch.float64 if residual.dtype == torch.float64 else torch.float32,
    )
    if momentum_buffer is None:
        return _Folding(grad, v, v, v, triton_select.PLAIN, wide)
    # In the dtype that is computed in, which an argument of a kernel could not have.
    m = torch.full((1,), momentum, dtype=wide, device=residual.device)
    mode = triton_select.NESTEROV if nesterov else triton_select.MOMENTUM
    return _Folding(grad, v, _as_bits(momentum_buffer), m, mode, wide)


def _as_bits(state: Tensor) -> Tensor:
    return state.view(torch.int16) if state.dtype == torch.bfloat16 else state


def _largest(folding: _Folding, k: int) -> tuple[Tensor, Tensor]:
    """Positions and values of the `k` largest, ascending."""
    residual, block = folding.residual, launching.BLOCK
    numel, blocks, mode = residual.numel(), blocks_of(residual.numel(), block), folding.mode
    state = _last_chosen(folding, k)
    counts = torch.empty((2, blocks), dtype=torch.int64, device=residual.device)
    launch(
        triton_select.count_chosen,
        (blocks,),
        residual,
        *folding.given,
        state,
        counts,
        numel,
        MODE=mode,
        BLOCK=block,
    )
    before = counts.cumsum(1) - counts
    indices = torch.empty(k, dtype=torch.int64, device=residual.device)
    values = torch.empty(k, dtype=folding.wide, device=residual.device)
    given = (*folding.given, state, before, indices, values)
    launch(triton_select.write_chosen, (blocks,), residual, *given, numel, MODE=mode, BLOCK=block)
    return indices, values


def _last_chosen(folding: _Folding, k: int) -> Tensor:
    """The k-th largest key, and how many entries with just this key are wanted: shape (2,),
    int64.
    """
    residual, block = folding.residual, launching.BLOCK
    numel, digits = residual.numel(), _DIGITS[folding.wide]
    state = torch.zeros(2, dtype=torch.int64, device=residual.device)
    state[1].fill_(k)
    histogram = torch.zeros(1 << max(digits), dtype=torch.int64, device=residual.device)
    programs = min(blocks_of(numel, block), _PROGRAMS)
    low = sum(digits)
    for bits in digits:
        low -= bits
        given = (*folding.given, state, histogram, numel, low)
        constants = {"DIGIT_BITS": bits, "MODE": folding.mode, "BLOCK": block}
        launch(triton_select.count_digits, (programs,), residual, *given, **constants)
        launch(triton_select.choose_digit, (1,), residual, histogram, state, DIGIT_BITS=bits)
    return state
