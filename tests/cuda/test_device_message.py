"""Messages made and read on a device: the bytes, the values and the refusals of the host's own."""

from collections.abc import Iterator

import pytest
import torch

from tests.core.messages import entries, resealed
from tests.core.test_kernels import assert_same_bits
from tests.triton_body import DEVICE, require_triton, triton_kernels

require_triton()

from tests.api import (  # noqa: E402  # noqa: E402  # noqa: E402
    HEADER_BYTES,
    VALUE_BITS,
    Layout,
    Proposal,
    Slot,
    device_message,
    message,
    sum_sparse,
)
from thinwire.errors import PayloadCorrupt  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
WHERE = {"step": (1 << 63) + 12, "bucket": 3}
SLOTS = (Slot(1000, 17), Slot(64, 64), Slot(33, 1))


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    with triton_kernels():
        yield


def host(function, *arguments, **named):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_KERNELS", "reference")
        return function(*arguments, **named)


def proposals(parts, finite):
    for (indices, values), flag in zip(parts, finite, strict=True):
        yield Proposal(indices.to(DEVICE), values.to(DEVICE), torch.tensor(flag, device=DEVICE))


def packed(layout, parts, finite=None):
    given = list(proposals(parts, finite or [True] * len(parts)))
    return device_message.pack(layout, *WHERE.values(), given)


def read_all(layout, rows, **where):
    return device_message.read(layout, rows.to(DEVICE), **(where or WHERE))


def refusal(layout, row, where=WHERE):
    try:
        host(message.unpack, layout, row, **where, source=5)
    except PayloadCorrupt as refused:
        return str(refused)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_the_bytes_and_what_is_read_are_those_of_the_host(bits, with_zeros):
    layout = Layout(SLOTS, bits)
    senders = [
        [entries(slot, 10 * r + i, with_zeros) for i, slot in enumerate(SLOTS)] for r in range(3)
    ]
    if with_zeros:
        senders[1] = [(i, torch.zeros_like(v)) for i, v in senders[1]]
    rows = []
    for parts in senders:
        expected, expected_sent = host(message.pack, layout, *WHERE.values(), parts)
        made, sent = packed(layout, parts)
        assert_same_bits(made.cpu(), expected)
        for a, b in zip(sent, expected_sent, strict=True):
            assert_same_bits(a.cpu(), b)
        rows.append(expected)
    arrived = read_all(layout, torch.stack(rows))
    assert arrived.verdicts.tolist() == [0, 0, 0]
    expected = [host(message.unpack, layout, row, **WHERE, source=5).parts for row in rows]
    for i, (slot, part) in enumerate(zip(SLOTS, arrived.parts, strict=True)):
        for r, count in enumerate(part.counts.tolist()):
            assert_same_bits(part.indices[r, :count].cpu(), expected[r][i][0])
            assert_same_bits(part.values[r, :count].cpu(), expected[r][i][1])
        for dtype in (torch.float32, torch.float64):
            indices, sums = host(sum_sparse, [parts[i] for parts in expected], dtype)
            total = torch.zeros(slot.numel, dtype=dtype).index_put_((indices,), sums)
            places, sums = (t.cpu() for t in device_message.sum_rows(part, slot.numel, dtype))
            assert_same_bits(
                torch.zeros(slot.numel, dtype=dtype).index_put_((places,), sums), total
            )
            assert_same_bits(sums, total[places])  # every repetition too


def test_a_sum_of_nothing_is_harmless():
    layout = Layout((Slot(50, 4),), 1)
    row, _ = packed(layout, [(torch.arange(4), torch.zeros(4))])
    arrived = read_all(layout, torch.stack([row, row]))
    places, sums = device_message.sum_rows(arrived.parts[0], 50, torch.float32)
    assert places.tolist() == [0] * 8
    assert sums.tolist() == [0.0] * 8


@pytest.mark.parametrize("finite", [(False, True, True), (True, False, False)])
def test_a_gradient_that_is_not_finite_makes_the_hosts_alarm(finite):
    layout = Layout(SLOTS, 4)
    parts = [entries(slot, i) for i, slot in enumerate(SLOTS)]
    for (_, values), flag in zip(parts, finite, strict=True):
        values[0] = 1.0 if flag else float("nan")
    made, _ = packed(layout, parts, list(finite))
    assert_same_bits(
        made.cpu(), message.pack_nonfinite(layout, *WHERE.values(), finite.index(False))
    )
    good, _ = packed(layout, [entries(slot, i) for i, slot in enumerate(SLOTS)])
    arrived = read_all(layout, torch.stack([made, good]))
    assert arrived.verdicts.tolist() == [0, 0]
    assert arrived.parts[0].counts.tolist() == [0, 17]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 32])
def test_single_bit_flips_are_found_and_explained_as_on_the_host(bits):
    layout = Layout(SLOTS, bits)
    row, _ = packed(layout, [entries(slot, i) for i, slot in enumerate(SLOTS)])
    flips = torch.randint(
        8 * layout.nbytes, (24,), generator=torch.Generator().manual_seed(bits)
    ).tolist()
    flips += range(0, 8 * HEADER_BYTES, 13)
    rows = row.cpu().repeat(len(flips), 1)
    for damaged, bit in zip(rows, flips, strict=True):
        damaged[bit // 8] ^= 1 << (bit % 8)
    with triton_kernels(256):  # the interpreter's time goes by programs
        verdicts = read_all(layout, rows).verdicts.tolist()
    for damaged, verdict in zip(rows, verdicts, strict=True):
        assert verdict
        with pytest.raises(PayloadCorrupt) as found:
            host(device_message.explain, layout, damaged.to(DEVICE), verdict, **WHERE, source=5)
        assert str(found.value) == refusal(layout, damaged)


@pytest.mark.slow
def test_whatever_came_with_a_fitting_checksum_is_judged_as_on_the_host():
    generator = torch.Generator().manual_seed(3)
    legal = 0
    for slots, bits in [((Slot(7, 3),), 1), ((Slot(40, 3),), 32), ((Slot(9, 2), Slot(5, 5)), 8)]:
        layout = Layout(slots, bits)
        row = host(message.pack, layout, *WHERE.values(), [entries(slot, 1) for slot in slots])[0]
        rows = row.repeat(40, 1)
        for i, changed in enumerate(rows):
            at = torch.randint(
                24 if i % 3 else HEADER_BYTES, layout.nbytes, (1 + i // 14,), generator=generator
            )
            changed[at] = torch.randint(256, at.shape, generator=generator).to(torch.uint8) >> (
                i % 7
            )
            rows[i] = resealed(changed.tolist())
        for changed, verdict in zip(rows, read_all(layout, rows).verdicts.tolist(), strict=True):
            assert (verdict == 0) == (refusal(layout, changed) is None)
            legal += verdict == 0
    assert 10 < legal < 100


@pytest.mark.parametrize(("at", "value"), [(0, 0), (4, 2), (5, 2), (5, 1), (6, 9), (24, 0)])
def test_a_header_that_is_wrong_from_the_start_is_judged_as_on_the_host(at, value):
    layout = Layout(SLOTS, 2)
    row, _ = packed(layout, [entries(slot, i) for i, slot in enumerate(SLOTS)])
    row[at] = value
    row = resealed(row.tolist())
    verdict = int(read_all(layout, row.unsqueeze(0)).verdicts)
    assert (verdict == 0) == (refusal(layout, row) is None) == ((at, value) == (5, 1))


@pytest.mark.parametrize(("byte", "bit"), [(7, 4), (10, 7)])
def test_low_bits_of_positions_that_did_not_come_are_found(byte, bit):
    """Of 17 positions of 5 bits 9 came: bit 60 belongs to the 13th, bit 87 to none."""
    layout = Layout(SLOTS[:1], 1)
    row, _ = packed(layout, [entries(SLOTS[0], with_zeros=True)])
    row[HEADER_BYTES + byte] |= 1 << bit
    row = resealed(row.tolist())
    assert "low bits came" in refusal(layout, row)
    assert int(read_all(layout, row.unsqueeze(0)).verdicts) == 1 << device_message.FAULTS.index(
        "positions"
    )


def test_a_message_of_elsewhere_is_found():
    layout, other = Layout(SLOTS, 1), Layout((SLOTS[0], Slot(64, 63), SLOTS[2]), 1)
    row, _ = packed(layout, [entries(slot, i) for i, slot in enumerate(SLOTS)])
    for its_layout, where in [
        (layout, {"step": 13, "bucket": 3}),
        (layout, {**WHERE, "bucket": 4}),
        (other, WHERE),
    ]:
        assert int(read_all(its_layout, row.unsqueeze(0), **where).verdicts) & 1
    with pytest.raises(
        PayloadCorrupt, match=f"length in bytes {layout.nbytes + 1} came, expected {layout.nbytes}"
    ):
        read_all(layout, torch.zeros(1, layout.nbytes + 1, dtype=torch.uint8))


def test_a_verdict_that_the_host_does_not_share_is_refused_all_the_same():
    layout = Layout((Slot(50, 4),), 1)
    row, _ = packed(layout, [entries(layout.slots[0])])
    with pytest.raises(
        PayloadCorrupt, match=r"rank 5 .* checksum, values found wrong there, nothing on the host"
    ):
        host(device_message.explain, layout, row, 0b10010, **WHERE, source=5)
