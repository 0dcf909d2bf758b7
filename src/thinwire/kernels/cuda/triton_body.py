"""The kernels in Triton, for CUDA: bit for bit what `reference` gives.

These are the functions that every body has; their shapes follow the data, so they wait for the
device. What exchanges messages without waiting uses the static forms behind them: `device_select`,
`device_codes`, `device_crc`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.cuda import codes
from thinwire.kernels.cuda.launching import count_of
from thinwire.kernels.cuda.select import commit_, propose, store_, top_k
from thinwire.kernels.reference import (
    commit_each_,
    decode_slots,
    encode_slots,
    propose_each,
    step_along_list_,
)
from thinwire.kernels.rules import Fold

__all__ = [
    "commit_list_",
    "count_nonzero",
    "decode_positions",
    "decode_slots",
    "decode_values",
    "encode_positions",
    "encode_slots",
    "encode_values",
    "is_ascending",
    "propose_list",
    "step_along_list_",
    "store_",
    "sum_sparse",
    "top_k",
]


def propose_list(
    folds: Sequence[Fold], ks: Sequence[int]
) -> list[tuple[Tensor, Tensor, bool | Tensor]]:
    """`propose` of each tensor."""
    return propose_each(propose, folds, ks)


def commit_list_(
    folds: Sequence[Fold], sent: Sequence[tuple[Tensor, Tensor]], seeds: Sequence[int]
) -> None:
    """`commit_` of each tensor."""
    commit_each_(commit_, folds, sent, seeds)


def count_nonzero(values: Tensor) -> int:
    """See `thinwire.kernels.reference.count_nonzero`."""
    return int(values.count_nonzero())


def is_ascending(indices: Tensor) -> bool:
    """See `thinwire.kernels.reference.is_ascending`."""
    return bool((indices[1:] > indices[:-1]).all())


def encode_positions(indices: Tensor, low_bits: int, low_bytes: int, high_bytes: int) -> Tensor:
    """See `thinwire.wire.positions.encode_positions`."""
    count = count_of(indices.numel(), indices)
    return codes.encode_positions(indices.contiguous(), count, low_bits, low_bytes, high_bytes)


def decode_positions(code: Tensor, k: int, low_bits: int, low_bytes: int) -> tuple[Tensor, int]:
    """See `thinwire.kernels.reference.decode_positions`."""
    rows = codes.decode_positions(code.contiguous().unsqueeze(0), k, low_bits, low_bytes)
    count = int(rows.counts[0])
    return rows.indices[0, : min(count, k)], count


def encode_values(values: Tensor, bits: int, k: int) -> tuple[Tensor, Tensor]:
    """See `thinwire.wire.values.encode_values`."""
    count = values.numel()
    padded = torch.cat((values, values.new_zeros(k - count)))
    code, sent = codes.encode_values(padded, count_of(count, values), bits)
    return code, sent[:count]


def decode_values(code: Tensor, count: int, bits: int) -> Tensor:
    """See `thinwire.wire.values.decode_values`."""
    counts = count_of(count, code).view(1)
    return codes.decode_values(code.contiguous().unsqueeze(0), counts, bits, count)[0][0]


def sum_sparse(
    indices: list[Tensor], values: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `thinwire.core.feedback.sum_sparse`."""
    lengths = [i.numel() for i in indices]
    counts = torch.tensor(lengths, device=indices[0].device)
    padded = torch.nn.utils.rnn.pad_sequence(indices, batch_first=True)
    numel = torch.iinfo(torch.int64).max
    places, sums = codes.sum_rows(
        padded, torch.nn.utils.rnn.pad_sequence(values, batch_first=True), counts, numel, dtype
    )
    total = sum(lengths)
    if not total:
        return places[:0], sums[:0]
    first = torch.cat((places.new_ones(1, dtype=torch.bool), places[1:] != places[:-1]))
    return places[first], sums[first]
