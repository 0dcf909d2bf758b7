"""Kernels in torch operations, for any device.

They run on every device but the CPU, and are the reference for the numba body.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.rules import Fold
from thinwire.layout.message import SCALE_COUNT

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LOW_32 = (1 << 32) - 1
_LARGEST_BFLOAT16 = 0x7F7F0000
"""The bits of the largest bfloat16, as a float32."""


def top_k(values: Tensor, k: int) -> Tensor:
    magnitudes = values.abs()
    threshold = torch.topk(magnitudes, k, sorted=False).values.amin()
    above = (magnitudes > threshold).nonzero().squeeze(1)
    tied = (magnitudes == threshold).nonzero().squeeze(1)[: k - above.numel()]
    return torch.cat((above, tied)).sort().values


def propose(fold: Fold, k: int) -> tuple[Tensor, Tensor, bool]:
    folded = _folded_residual(fold)
    if not bool(torch.isfinite(folded).all()):
        return folded.new_empty(0, dtype=torch.int64), folded.new_empty(0), False
    indices = top_k(folded, k)
    return indices, folded[indices], True


def commit_(fold: Fold, indices: Tensor, sent: Tensor, seed: int) -> None:
    residual, buffer = fold.residual, fold.momentum_buffer
    v, u = _widened(residual), None if buffer is None else _widened(buffer)
    g = fold.grad.to(v.dtype)
    if u is None:
        v.add_(g)
    elif fold.nesterov:
        u.add_(g).mul_(fold.momentum)
        v.add_(u).add_(g)
    else:
        u.mul_(fold.momentum).add_(g)
        v.add_(u)
    v[indices] -= sent.to(v.dtype)
    if u is not None:
        u[indices] = 0
    if residual.dtype == torch.bfloat16:
        residual.copy_(_rounded(v, seed, for_buffer=False))
        if buffer is not None and u is not None:
            buffer.copy_(_rounded(u, seed, for_buffer=True))


def propose_list(folds: Sequence[Fold], ks: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
    return [propose(fold, k) for fold, k in zip(folds, ks, strict=True)]


def commit_list_(
    folds: Sequence[Fold], sent: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
) -> None:
    for fold, part, seed in zip(folds, sent, seeds, strict=True):
        commit_(fold, *part, seed)


def step_along_list_(
    params: Sequence[Tensor],
    parts: Sequence[Sequence[tuple[Tensor, Tensor]]],
    rates: Sequence[float],
    sources: int,
) -> None:
    """Take a step p <- p - rate * (sum of the parts / sources) on contiguous tensors."""
    for param, own, rate in zip(params, parts, rates, strict=True):
        step_along_(param, *summed(own, param.dtype, sum_sparse), rate, sources)


def summed(
    parts: Sequence[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    sum_several: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return the single part, or the sum of several by a body's `sum_sparse`."""
    if len(parts) == 1:
        return parts[0][0], parts[0][1].to(dtype) + 0.0  # from zero: no minus zero, as with several
    indices, values = map(list, zip(*parts, strict=True))
    return sum_several(indices, values, dtype)


def step_along_(param: Tensor, touched: Tensor, total: Tensor, rate: float, sources: int) -> None:
    """Take a step p <- p - rate * total / sources at the entries `touched`.

    `p` has any layout and type.
    """
    flat = param.view(-1) if param.is_contiguous() else param.reshape(-1)
    step = divided_(total, sources).mul_(rate)
    flat[touched] = (flat[touched].to(total.dtype) - step).to(param.dtype)
    if not param.is_contiguous():
        param.copy_(flat.view(param.shape))


def divided_(total: Tensor, count: int) -> Tensor:
    """Divide `total` by `count` in place; the same bits on every device.

    The divisor is a tensor: on a GPU torch divides by a plain number through its reciprocal, which
    rounds differently.
    """
    return total.div_(torch.full((), count, dtype=total.dtype, device=total.device))


def encode_slots(slots: object, parts: object, bits: int, *, spare: bool, code: object) -> None:
    """Return None: tensors are coded one by one."""


def decode_slots(slots: object, code: object, bits: int) -> None:
    """Return None: tensors are decoded one by one."""


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    target.copy_(_rounded(values, seed, for_buffer=True))


def mixed(x: Any) -> Any:
    """Return a pseudorandom number from 0 to 2^32 - 1 for every integer.

    Only the lowest 32 bits of `x` count.

    Args:
        x: An int, or int64 of any shape.

    >>> mixed(1) == mixed(1 + 2**32)
    True

    Source: multiplications and shifts as in the finalizer of MurmurHash3 (Appleby), with the
    constants that Wellons, "Prospecting for hash functions", 2018, found to leave the least bias.
    """
    x = x & _LOW_32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW_32
    x = x ^ (x >> 15)
    x = (
        x * (0x846CA68B - (1 << 32))
    ) & _LOW_32  # minus 2^32: equal in 32 bits, and int64 cannot overflow
    return x ^ (x >> 16)


def _rounded(values: Tensor, seed: int, *, for_buffer: bool) -> Tensor:
    """Round a float32 stochastically to bfloat16; values that are not finite stay unchanged."""
    noise = mixed(torch.arange(values.numel(), device=values.device) ^ seed)
    noise = noise >> 16 if for_buffer else noise & 0xFFFF
    bits = values.view(torch.int32).long() & _LOW_32
    # above the largest bfloat16 there is only infinity, and infinity and NaN must not move at all
    noise = noise.masked_fill_((bits & 0x7FFFFFFF) > _LARGEST_BFLOAT16, 0)
    rounded: Tensor = ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return rounded


def _widened(state: Tensor) -> Tensor:
    """Return state in the type of the computation: itself, or a copy in float32."""
    return state.float() if state.dtype == torch.bfloat16 else state


def _folded_residual(fold: Fold) -> Tensor:
    v = _widened(fold.residual)
    g = fold.grad.to(v.dtype)
    if fold.momentum_buffer is None:
        return v + g
    u = _widened(fold.momentum_buffer)
    # Separate operations: one fused multiply-add would round once where `commit_` rounds twice.
    if fold.nesterov:
        return (u + g).mul_(fold.momentum).add_(v).add_(g)
    return (u * fold.momentum).add_(g).add_(v)


def count_nonzero(values: Tensor) -> int:
    """Return the number of values that are not zero."""
    return int(values.count_nonzero())


def is_ascending(indices: Tensor) -> bool:
    """Return True if each index is larger than the one before."""
    return bool((indices[1:] > indices[:-1]).all())


def encode_positions(indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int) -> Tensor:
    low = _pack_fields(indices & ((1 << low_bits) - 1), low_bits, low_bytes)
    ones = (indices >> low_bits) + torch.arange(indices.numel(), device=indices.device)
    bitmap = torch.zeros(8 * high_bytes, dtype=torch.uint8, device=indices.device)
    bitmap[ones] = 1
    return torch.cat((low, _pack_bits(bitmap)))


def decode_positions(code: Tensor, k: int, low_bits: int, low_bytes: int) -> tuple[Tensor, int]:
    """Return the positions in the code, at most `k` and unchecked, and the number of set bits."""
    ones = _unpack_bits(code[low_bytes:]).nonzero().squeeze(1)
    count = ones.numel()
    ones = ones[:k]
    high = ones - torch.arange(ones.numel(), device=code.device)
    return (high << low_bits) | _unpack_fields(code[:low_bytes], ones.numel(), low_bits), count


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    if bits == 32:
        sent = values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).float()
        return _zero_padded(sent.view(torch.uint8), 4 * k), sent
    magnitudes = values.double().abs().clamp(max=_FLOAT32_MAX)
    scales = _scales(magnitudes, bits, k)
    levels = _nearest_level(magnitudes, scales, bits)
    fields = levels | ((values < 0).long() << (bits - 1))
    code = torch.cat((scales.view(torch.uint8), _pack_fields(fields, bits, (k * bits + 7) // 8)))
    return code, _decode_fields(fields, scales, bits)


def decode_values(code: Tensor, count: int, bits: int) -> Tensor:
    if bits == 32:
        return code[: 4 * count].clone().view(torch.float32)
    scale_bytes = 4 * SCALE_COUNT[bits]
    scales = code[:scale_bytes].clone().view(torch.float32)  # a copy, since a view must be aligned
    return _decode_fields(_unpack_fields(code[scale_bytes:], count, bits), scales, bits)


def sum_sparse(
    indices: list[Tensor], values: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    union, inverse = torch.unique(torch.cat(indices), return_inverse=True)
    sums = torch.zeros(union.numel(), dtype=dtype, device=union.device)
    for position, value in zip(inverse.split([i.numel() for i in indices]), values, strict=True):
        sums[position] += value.to(dtype)
    return union, sums


def _scales(magnitudes: Tensor, bits: int, k: int) -> Tensor:
    """Return the scales that travel with the fields: mean, code book, or smallest and largest."""
    if bits == 1:
        scales = [_halving_sum(magnitudes) / k]
    elif bits <= 4:
        scales = _split_at_means(magnitudes, bits - 1, 0.0)
    elif magnitudes.numel() == 0:
        scales = [0.0, 0.0]
    else:
        scales = [float(magnitudes.amin()), float(magnitudes.amax())]
    return torch.tensor(scales, dtype=torch.float64, device=magnitudes.device).float()


def _split_at_means(magnitudes: Tensor, depth: int, parent_mean: float) -> list[float]:
    mean = _halving_sum(magnitudes) / magnitudes.numel() if magnitudes.numel() else parent_mean
    if depth == 0:
        return [mean]
    lower, upper = magnitudes[magnitudes <= mean], magnitudes[magnitudes > mean]
    return _split_at_means(lower, depth - 1, mean) + _split_at_means(upper, depth - 1, mean)


def _halving_sum(x: Tensor) -> float:
    """Sum by adding the upper half to the lower: an order that every device can reproduce."""
    n = x.numel()
    while n > 1:
        half = (n + 1) // 2
        x = torch.cat((x[: n - half] + x[half:n], x[n - half : half]))
        n = half
    return float(x[0]) if n else 0.0


def _nearest_level(magnitudes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the number of the nearest level of each magnitude, the lower of two."""
    if bits == 1:
        return torch.zeros_like(magnitudes, dtype=torch.int64)
    if bits <= 4:
        book = scales.double()
        return torch.bucketize(magnitudes, (book[:-1] + book[1:]) / 2)
    low, high = scales.double().tolist()
    if low == high:
        return torch.zeros_like(magnitudes, dtype=torch.int64)
    top = (1 << (bits - 1)) - 1
    position: Tensor = (magnitudes - low) * top / (high - low)
    return (position - 0.5).ceil().clamp(0, top).long()


def _decode_fields(fields: Tensor, scales: Tensor, bits: int) -> Tensor:
    negative = (fields >> (bits - 1)) != 0
    levels = fields & ((1 << (bits - 1)) - 1)
    if bits <= 4:
        magnitudes = scales[levels]
    else:
        low, high = scales.double().tolist()
        magnitudes = (levels.double() * ((high - low) / ((1 << (bits - 1)) - 1)) + low).float()
    return torch.where(negative, -magnitudes, magnitudes)


def _pack_fields(fields: Tensor, width_bits: int, nbytes: int) -> Tensor:
    shifts = torch.arange(width_bits, device=fields.device)
    bits = ((fields.unsqueeze(1) >> shifts) & 1).to(torch.uint8).flatten()
    return _pack_bits(_zero_padded(bits, 8 * nbytes))


def _unpack_fields(code: Tensor, count: int, width_bits: int) -> Tensor:
    bits = _unpack_bits(code)[: count * width_bits].view(count, width_bits).long()
    return (bits << torch.arange(width_bits, device=code.device)).sum(dim=1)


def _pack_bits(bits: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(dim=1).to(torch.uint8)


def _unpack_bits(code: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
    return ((code.unsqueeze(1) >> shifts) & 1).flatten()


def _zero_padded(x: Tensor, length: int) -> Tensor:
    return torch.cat((x, x.new_zeros(length - x.numel())))
