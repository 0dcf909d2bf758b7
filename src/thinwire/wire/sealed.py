"""Small sums that cannot arrive damaged unseen: every part travels with a checksum, and all ranks
add them up alike.
"""

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.core.checksum import flat_bytes
from thinwire.layout.message import SEAL_BYTES

__all__ = ["opened_sum", "sealed"]

_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits, as a signed number


def sealed(part: Tensor, place: int) -> Tensor:
    """The bytes of a tensor and their checksum.

    Args:
        part: Any dtype and shape; read only.
        place: Where in the training the message belongs, such as its step; one of another place is
            refused.

    Returns:
        uint8, shape (part.nbytes + 8,), on its device; no host synchronization.
    """
    content = flat_bytes(part)
    return torch.cat([content, _seals(content.unsqueeze(0), place).view(torch.uint8)])


def opened_sum(rows: Tensor, dtype: torch.dtype, place: int) -> tuple[Tensor, Tensor]:
    """The sum of what several sources sealed, added in their order; the same bits on every rank.

    Args:
        rows: uint8, shape (sources, bytes), row r as source r sealed it.
        dtype: Of the parts.
        place: As in `sealed`.

    Returns:
        The sum, shape (entries,), in `dtype`; and int64, shape (sources,), 0 for a part that is
        whole. No host synchronization.
    """
    contents, seals = rows[:, :-SEAL_BYTES], rows[:, -SEAL_BYTES:]
    damaged = (
        (seals != _seals(contents, place).view(torch.uint8).view(-1, SEAL_BYTES)).any(1).long()
    )
    parts = contents.contiguous().view(dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total, damaged


def _seals(contents: Tensor, place: int) -> Tensor:
    """Per row a checksum modulo 2^64, int64: sum over words w_i of mix((2 i + 1) c w_i), plus one
    of the place.

    `mix` can be undone, so that a change of any single word changes the sum, and is not linear, so
    that changes of several cannot cancel by their places alone.
    """
    rest = -contents.shape[1] % 8
    whole = torch.nn.functional.pad(contents, (0, rest)) if rest else contents.contiguous()
    words = whole.view(torch.int64)
    product = words * _weights(words.shape[1], words.device)
    product = (product ^ (product >> 32 & 0xFFFFFFFF)) * _ODD
    return product.sum(1) + (2 * place + 1) * 0x632BE59BD9B4E019 % (1 << 62)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).mul_(2).add_(1).mul_(_ODD)
