"""Replicas are made equal: only what differs travels, and it is verified before it is written."""

import logging
import time
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.api import Group, make_equal_, waiting
from tests.ranks import Pool
from tests.toys import arriving
from tests.waiting import time_out


def tensors(rank: int) -> dict[str, Tensor]:
    """Equal on all ranks but for `other`, `complex` and `flags`."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "same": torch.arange(1000.0),
        "empty": torch.empty(0),
        "other": torch.randn(700, 500, generator=generator).t(),
        "complex": torch.full((3,), complex(rank, 1)),
        "count": torch.tensor(7),
        "flags": torch.tensor([rank == 0, True]),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }


def equal_afterwards(rank: int, size: int) -> tuple[bool, int, int]:
    held, group = tensors(rank), Group()
    versions = held["same"]._version
    make_equal_(held, group, action="copying")
    alike = all(torch.equal(value, tensors(0)[name]) for name, value in held.items())
    sent = group.bytes_sent
    make_equal_(held, group, action="copying")
    assert held["same"]._version == versions
    return alike, sent, group.bytes_sent - sent


@pytest.mark.fault("other initial values")
def test_only_differing_tensors_travel(ranks: Pool) -> None:
    answers = ranks.run(equal_afterwards, size=3)
    assert [alike for alike, _, _ in answers] == [True] * 3
    assert 2_800_000 < answers[0][1] < 2_804_000, "a copy to each of two"
    assert [again for _, _, again in answers] == [48] * 3


def flipped(rank: int, size: int) -> bool:
    held, group = tensors(rank), Group()

    def hurt(buffer: Tensor, _: str) -> Tensor:
        buffer[buffer.numel() // 2] ^= 4 * (rank == 1)
        return buffer

    try:
        with arriving(Group, "broadcast_", hurt):
            make_equal_(held, group, action="copying")
    finally:
        assert all(torch.equal(value, tensors(rank)[name]) for name, value in held.items())
    return True


@pytest.mark.fault
def test_a_flipped_bit_is_an_error_on_all_ranks_and_nothing_is_written(ranks: Pool) -> None:
    answers = ranks.run(flipped, size=3, expect_errors=True)
    assert {(a.type_name, a.text) for a in answers} == {("PayloadCorrupt", answers[0].text)}
    assert "copying: other arrived damaged on rank 1" in answers[0].text


def slow_line(rank: int, size: int) -> list[str]:
    """Every piece takes time in proportion to its size, all together more than the time-out."""
    real, told = Group.broadcast_, []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    def slowly(self: Group, buffer: Tensor, *, action: str, source: int) -> object:
        time.sleep(time_out(buffer.numel() / 200e3))
        return real(self, buffer, action=action, source=source)

    group = Group(timeout=time_out(3))
    log = logging.getLogger("thinwire")
    log.addHandler(Told())
    log.setLevel(logging.INFO)
    often = patch.object(waiting, "_LOG_EVERY_S", 1.0)
    with often, patch.object(Group, "broadcast_", slowly):
        make_equal_(tensors(rank), group, action="copying")
    log.handlers.clear()
    return told


def test_a_copy_may_take_longer_than_the_time_out_and_tells_its_progress(ranks: Pool) -> None:
    for told in ranks.run(slow_line):
        assert len(told) >= 3
        assert (
            told[0].startswith("copying: ")
            and " of 1.4 MB, " in told[0]
            and told[0].endswith(" s left")
        )
