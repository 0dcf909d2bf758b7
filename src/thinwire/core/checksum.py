"""Checksums of tensors by their bits, for replicas that must be equal."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.layout.message import CHECKSUM_BYTES

_WORDS = 512
"""Number of 64-bit words in a block. The sum of a block has one weight."""
_BLOCK = 8 * _WORDS
_CACHED = 1 << 19
"""Size in bytes that stays in a core's own cache while it is read again."""
_SMALL = 1 << 15
"""Size in bytes below which tensors are joined first: a call for each costs more than the copy."""
ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits, as a signed number


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return one number for the bits of all tensors, in their order.

    It is the sum over blocks b of (2 b + 1) c times the sum of the 64-bit words in b, modulo 2^64.
    The words are those of all tensors end to end, padded with zeros. Every weight is odd, so that a
    change of any single word changes the result.

    Entries count in their logical order, NaN by its bits; of a sharded tensor the local shard. It
    is the same on every device, and takes one host synchronization on any but the CPU.

    >>> checksum([torch.ones(3)]) == checksum([torch.ones(2), torch.ones(1)])
    True
    """
    return int(unread_checksum(tensors)) % (1 << 64)


def unread_checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return `checksum` as int64, shape (), on the device of the tensors; none is waited for."""
    sums: list[Tensor] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = flat_bytes(tensor)
        whole = flat.numel() - flat.numel() % _BLOCK if flat.numel() >= _SMALL else 0
        if whole:
            sums.append(_sums(flat[:whole]))
        if whole < flat.numel():
            small.setdefault(tensor.device, []).append(flat[whole:])
    for pieces in small.values():
        rest = -sum(piece.numel() for piece in pieces) % _BLOCK
        sums.append(_sums(torch.cat([*pieces, pieces[0].new_zeros(rest)])))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    device = sums[0].device if len({s.device for s in sums}) == 1 else torch.device("cpu")
    every = torch.cat([s.to(device) for s in sums])
    return (every * odd_weights(every.numel(), device)).sum()


def bit_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return per tensor the sum of its 64-bit words modulo 2^64, int64, shape (), on its device.

    It is cheaper than `checksum` of each and needs no host synchronization. A change of any single
    word changes it; an exchange of two words does not.

    >>> int(bit_sums([torch.tensor([5])])[0])
    5
    """
    sums = []
    for tensor in tensors:
        size = tensor.element_size()
        if (
            tensor.dim()
            and tensor.numel()
            and tensor.is_contiguous()
            and tensor.shape[-1] * size % 8 == tensor.storage_offset() * size % 8 == 0
            and not (tensor.is_complex() or tensor.is_neg())
        ):
            # the common case, in the fewest calls
            sums.append(tensor.detach().view(torch.int64).sum())
            continue
        flat = flat_bytes(tensor)
        rest = flat.numel() % 8
        words = flat[: flat.numel() - rest].view(torch.int64).sum()
        if rest:
            words += torch.nn.functional.pad(flat[-rest:], (0, 8 - rest)).view(torch.int64)[0]
        sums.append(words)
    return sums


def checked_mean_(total: Tensor, count: int, *, bits: bool) -> Tensor:
    """Divide a sum in place, and check the result while it is still in the cache.

    `total` is contiguous, of one dimension. Returned is int64, shape (2,), on its device: 1 if the
    entries add up to a finite number, else 0; then with `bits` a number that a change of any 64-bit
    word of the result changes, else 0. No host synchronization.

    >>> total = torch.tensor([2.0, 4.0])
    >>> int(checked_mean_(total, 2, bits=False)[0]), total
    (1, tensor([1., 2.]))
    """
    length = _CACHED // total.element_size() if total.is_cpu else max(1, total.numel())
    sums, words = [], []
    for piece in torch.split(total, length) if total.numel() > length else [total]:
        sums.append((piece if count == 1 else piece.div_(total.new_full((), count))).sum())
        words += bit_sums([piece]) if bits else []
    finite = torch.stack(sums).sum().isfinite().long()
    if len(words) > 1:
        # odd weights preserve every bit of a change
        weights = torch.arange(len(words), device=total.device).mul_(2).add_(1)
        words = [(torch.stack(words) * weights).sum()]
    return torch.stack([finite, *(words or [torch.zeros_like(finite)])])


def odd_weights(count: int, device: torch.device) -> Tensor:
    """Return (2 i + 1) c for i below `count`, int64. Odd weights lose no bit of a word."""
    return torch.arange(count, device=device).mul_(2).add_(1).mul_(ODD)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the content of a tensor, uint8, readable as 64-bit words; a copy only if necessary."""
    local = tensor.detach().resolve_neg()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    # a column stays strided, and a single entry keeps its stride
    flat = local.reshape(-1).contiguous().as_strided((local.numel(),), (1,)).view(torch.uint8)
    return flat if flat.storage_offset() % 8 == 0 else flat.clone()


def _sums(flat: Tensor) -> Tensor:
    return flat.view(torch.int64).view(-1, _WORDS).sum(1)


def with_checksum(part: Tensor, salt: int) -> Tensor:
    """Return the bytes of a tensor, and a checksum that holds for one `salt`, such as a step."""
    content = flat_bytes(part)
    return torch.cat([content, _checksums(content.unsqueeze(0), salt).view(torch.uint8)])


def checked_sum(rows: Tensor, dtype: torch.dtype, salt: int) -> tuple[Tensor, Tensor]:
    """Sum the parts of several sources in the order of the rows: the same bits on every rank.

    Also return int64, shape (sources,), 0 for an intact part. No host synchronization.

    >>> rows = torch.stack([with_checksum(torch.tensor([x]), salt=7) for x in (1.0, 2.0)])
    >>> checked_sum(rows, torch.float32, salt=7)
    (tensor([3.]), tensor([0, 0]))
    """
    contents, damaged = opened_rows(rows, salt)
    parts = contents.contiguous().view(dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total, damaged


def opened_rows(rows: Tensor, salt: int) -> tuple[Tensor, Tensor]:
    """Return the contents of messages, and int64, shape (sources,), 0 for an intact one."""
    contents, checksums = rows[:, :-CHECKSUM_BYTES], rows[:, -CHECKSUM_BYTES:]
    wanted = _checksums(contents, salt).view(torch.uint8).view(-1, CHECKSUM_BYTES)
    return contents, (checksums != wanted).any(1).long()


def _checksums(contents: Tensor, salt: int) -> Tensor:
    """Return a checksum per row, int64, modulo 2^64.

    It is the sum over words w_i of mix((2 i + 1) c w_i), plus a term for the place. `mix` is
    invertible, so that a change of any single word changes the sum. It is not linear, so that
    several changes do not cancel through their positions alone.
    """
    rest = -contents.shape[1] % 8
    whole = torch.nn.functional.pad(contents, (0, rest)) if rest else contents.contiguous()
    words = whole.view(torch.int64)
    product = words * _kept_weights(words.shape[1], words.device)
    product = (product ^ (product >> 32 & 0xFFFFFFFF)) * ODD
    return product.sum(1) + (2 * salt + 1) * 0x632BE59BD9B4E019 % (1 << 62)


_kept_weights = lru_cache(maxsize=64)(odd_weights)
