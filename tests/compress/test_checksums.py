"""Sums whose parts travel with a checksum."""

import pytest
import torch
from torch import Tensor

from tests.api import CHECKSUM_BYTES, checked_sum, travels_checksummed, with_checksum

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def parts_of(count: int, dtype: torch.dtype, ranks: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, dtype=dtype, generator=generator) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 257])
def test_the_sum_is_that_of_the_parts_in_their_order(count: int, dtype: torch.dtype) -> None:
    parts = parts_of(count, dtype)
    rows = torch.stack([with_checksum(part, 7) for part in parts])
    assert rows.shape == (3, count * parts[0].element_size() + CHECKSUM_BYTES)
    total, damaged = checked_sum(rows, dtype, 7)
    assert torch.equal(total, parts[0] + parts[1] + parts[2])
    assert damaged.tolist() == [0, 0, 0]


def test_every_bit_counts_that_of_the_checksum_too() -> None:
    rows = torch.stack([with_checksum(part, 3) for part in parts_of(5, torch.float32)])
    for bit in range(8 * rows.shape[1]):
        rows[1, bit // 8] ^= 1 << bit % 8
        assert checked_sum(rows, torch.float32, 3)[1].tolist() == [0, 1, 0], f"bit {bit}"
        rows[1, bit // 8] ^= 1 << bit % 8


def test_two_bits_of_one_weight_in_two_entries_do_not_cancel() -> None:
    for bit in range(64):
        row = with_checksum(torch.zeros(16, dtype=torch.float64), 3)
        for first in range(15):
            hurt = row.clone()
            for entry in (first, first + 1):
                hurt[8 * entry + bit // 8] ^= 1 << bit % 8
            assert checked_sum(hurt.unsqueeze(0), torch.float64, 3)[1].tolist() == [1], (bit, first)


@pytest.mark.parametrize("count", [0, 4])
def test_part_that_was_lost_or_belongs_in_another_folder_is_damaged(count: int) -> None:
    mine, earlier = with_checksum(torch.zeros(count), 3), with_checksum(torch.zeros(count), 2)
    rows = torch.stack([mine, torch.zeros_like(mine), earlier])
    assert checked_sum(rows, torch.float32, 3)[1].tolist() == [0, 1, 1]


def test_gathered_bytes_stay_modest_with_many_ranks() -> None:
    part = torch.zeros(4000)
    assert [travels_checksummed(part.nbytes, ranks) for ranks in (1, 2, 5, 6)] == [
        False,
        True,
        True,
        False,
    ]
