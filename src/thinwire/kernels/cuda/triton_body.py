"""Kernels in Triton, for CUDA; bit for bit the results of `reference`.

The shapes of the functions that every body has depend on data, so these wait for the device. Fold
and selection, `codes` and `crc` use static shapes, without host synchronization. The selection is
exact, by radix: it makes a histogram of one digit of the magnitude's bit pattern after another,
from the highest. After each, one program finds the digit of the k-th largest magnitude, and the
number of entries still wanted there. The folded residual is computed again in every pass, so that
no copy of full size is needed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.cuda import codes, launching, triton_select
from thinwire.kernels.cuda.launching import blocks_of, count_of, launch
from thinwire.kernels.reference import (
    count_nonzero,
    decode_slots,
    encode_slots,
    is_ascending,
    step_along_list_,
)
from thinwire.kernels.rules import Fold

__all__ = [
    "commit_",
    "commit_list_",
    "count_nonzero",
    "decode_positions",
    "decode_slots",
    "decode_values",
    "encode_positions",
    "encode_slots",
    "encode_values",
    "is_ascending",
    "propose",
    "propose_list",
    "step_along_list_",
    "store_",
    "sum_sparse",
    "top_k",
]

_DIGITS = {torch.float32: (10, 10, 11), torch.float64: (10, 10, 10, 11, 11, 11)}
"""Bits of each digit, from the highest; together all bits but the sign."""
_PROGRAMS = 1024
"""Largest number of programs that count digits: each keeps a histogram while it strides over
several blocks.
"""


class _Folding(NamedTuple):
    grad: Tensor
    residual: Tensor
    buffer: Tensor
    momentum: Tensor
    mode: Any
    wide: torch.dtype
    """Type of the computation."""

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors."""
        return self.grad, self.residual, self.buffer, self.momentum


def top_k(values: Tensor, k: int) -> Tensor:
    x = values if values.dtype in _DIGITS else values.float()
    return _largest(_Folding(x, x, x, x, triton_select.VALUES, x.dtype), k)[0]


def propose(fold: Fold, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return exactly `k` entries, and a flag, shape (), bool: all numbers were finite."""
    indices, values = _largest(_folding(fold), k)
    # Whatever is not finite counts as larger than all that is, so it is among the k.
    return indices, values, values.isfinite().all()


def commit_(fold: Fold, indices: Tensor, sent: Tensor, seed: int) -> None:
    folding, residual = _folding(fold), fold.residual
    block, mode, bits = launching.BLOCK, folding.mode, _signed(seed)
    rest = torch.empty(indices.numel(), dtype=folding.wide, device=residual.device)
    count, few = indices.numel(), (blocks_of(indices.numel(), block),)
    kept = (*folding.given, indices, sent, rest, count)
    launch(triton_select.keep_rest, few, residual, *kept, MODE=mode, BLOCK=block)
    many = (blocks_of(residual.numel(), block),)
    folded = (*folding.given, residual.numel(), bits)
    launch(triton_select.fold_, many, residual, *folded, MODE=mode, BLOCK=block)
    state, has_buffer = (folding.residual, folding.buffer), fold.momentum_buffer is not None
    given = (*state, indices, rest, count, bits)
    launch(triton_select.put_rest_, few, residual, *given, HAS_BUFFER=has_buffer, BLOCK=block)


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    block, numel = launching.BLOCK, target.numel()
    given = (target.view(torch.int16), values, numel, _signed(seed))
    launch(triton_select.round_, (blocks_of(numel, block),), target, *given, BLOCK=block)


def _signed(seed: int) -> int:
    """Return the same 32 bits, signed. One type for all seeds avoids compiling again."""
    return seed - (1 << 32) if seed >> 31 else seed


def _folding(fold: Fold) -> _Folding:
    v = _as_bits(fold.residual)
    wide = torch.float64 if fold.residual.dtype == torch.float64 else torch.float32
    if fold.momentum_buffer is None:
        return _Folding(fold.grad, v, v, v, triton_select.PLAIN, wide)
    # In the dtype that is computed in, which an argument of a kernel could not have.
    m = torch.full((1,), fold.momentum, dtype=wide, device=fold.residual.device)
    mode = triton_select.NESTEROV if fold.nesterov else triton_select.MOMENTUM
    return _Folding(fold.grad, v, _as_bits(fold.momentum_buffer), m, mode, wide)


def _as_bits(state: Tensor) -> Tensor:
    return state.view(torch.int16) if state.dtype == torch.bfloat16 else state


def _largest(folding: _Folding, k: int) -> tuple[Tensor, Tensor]:
    residual, block = folding.residual, launching.BLOCK
    numel, blocks, mode = residual.numel(), blocks_of(residual.numel(), block), folding.mode
    state = _last_chosen(folding, k)
    counts = torch.empty((2, blocks), dtype=torch.int64, device=residual.device)
    counted = (*folding.given, state, counts, numel)
    launch(triton_select.count_chosen, (blocks,), residual, *counted, MODE=mode, BLOCK=block)
    before = counts.cumsum(1) - counts
    indices = torch.empty(k, dtype=torch.int64, device=residual.device)
    values = torch.empty(k, dtype=folding.wide, device=residual.device)
    given = (*folding.given, state, before, indices, values)
    launch(triton_select.write_chosen, (blocks,), residual, *given, numel, MODE=mode, BLOCK=block)
    return indices, values


def _last_chosen(folding: _Folding, k: int) -> Tensor:
    """Return the k-th largest key, and the number of entries wanted with this key: (2,), int64."""
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


def propose_list(
    folds: Sequence[Fold], ks: Sequence[int]
) -> list[tuple[Tensor, Tensor, bool | Tensor]]:
    return [propose(fold, k) for fold, k in zip(folds, ks, strict=True)]


def commit_list_(
    folds: Sequence[Fold], sent: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
) -> None:
    for fold, part, seed in zip(folds, sent, seeds, strict=True):
        commit_(fold, *part, seed)


def encode_positions(indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int) -> Tensor:
    count = count_of(indices.numel(), indices)
    return codes.encode_positions(indices.contiguous(), count, low_bits, low_bytes, high_bytes)


def decode_positions(code: Tensor, k: int, low_bits: int, low_bytes: int) -> tuple[Tensor, int]:
    rows = codes.decode_positions(code.contiguous().unsqueeze(0), k, low_bits, low_bytes)
    count = int(rows.counts[0])
    return rows.indices[0, : min(count, k)], count


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    count = values.numel()
    padded = torch.cat((values, values.new_zeros(k - count)))
    code, sent = codes.encode_values(padded, count_of(count, values), bits)
    return code, sent[:count]


def decode_values(code: Tensor, count: int, bits: int) -> Tensor:
    counts = count_of(count, code).view(1)
    return codes.decode_values(code.contiguous().unsqueeze(0), counts, bits, count)[0][0]


def sum_sparse(
    indices: list[Tensor], values: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    lengths = [i.numel() for i in indices]
    counts = torch.tensor(lengths, device=indices[0].device)
    padded = torch.nn.utils.rnn.pad_sequence(indices, batch_first=True)
    numel = torch.iinfo(torch.int64).max
    positions, sums = codes.sum_rows(
        padded, torch.nn.utils.rnn.pad_sequence(values, batch_first=True), counts, numel, dtype
    )
    total = sum(lengths)
    if not total:
        return positions[:0], sums[:0]
    first = torch.cat((positions.new_ones(1, dtype=torch.bool), positions[1:] != positions[:-1]))
    return positions[first], sums[first]
