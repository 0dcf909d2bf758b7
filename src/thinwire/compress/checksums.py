"""Checksums of messages, for dense parts and for methods whose messages have none of their own."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.compress.protocol import (
    AllGather,
    Arrived,
    Collective,
    Compression,
    Computed,
    Context,
    Kept,
    Sending,
)
from thinwire.core.checksum import ODD, flat_bytes, odd_weights
from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import CHECKSUM_BYTES


def send_checked(method: Compression, context: Context, folded: Computed, kept: Kept) -> Sending:
    """Return the sending of a method, with checksums where its messages have none."""
    sending = method.send(context, folded, kept)
    return sending if method.has_checksums else _checked(sending, context)


def _checked(sending: Sending, context: Context) -> Sending:
    refusal: PayloadCorrupt | None = None
    asked: Sequence[Collective] = next(sending)
    while True:
        answers = yield [
            AllGather(with_checksum(one.message, salt_of(context)), one.purpose, one.within_node)
            if isinstance(one, AllGather)
            else one
            for one in asked
        ]
        found = list(answers)
        for index, one in enumerate(asked):
            if not isinstance(one, AllGather):
                continue
            rows, damaged = _opened(answers[index], salt_of(context))
            for source, damage in enumerate(damaged.tolist()):
                if damage:
                    rank = source * context.node_size
                    refusal = refusal or PayloadCorrupt(damaged_text(rank, context))
                    rows[source] = one.message  # which the method can read to its end
            found[index] = rows
        try:
            asked = sending.send(found)
        except StopIteration as end:
            if refusal is not None:
                raise refusal from None
            arrived: Arrived = end.value
            return arrived


def damaged_text(rank: int, context: Context) -> str:
    """Describe a message that does not match its checksum."""
    return (
        f"the message of rank {rank} for bucket {context.bucket} of step {context.step} was "
        "refused: it does not fit its checksum"
    )


def salt_of(context: Context) -> int:
    """Return the number that ties a checksum to one sending."""
    return (context.step << 20) + context.bucket


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
    contents, damaged = _opened(rows, salt)
    parts = contents.contiguous().view(dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total, damaged


def _opened(rows: Tensor, salt: int) -> tuple[Tensor, Tensor]:
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
