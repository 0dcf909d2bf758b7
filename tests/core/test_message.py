import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import HEADER_BYTES, VALUE_BITS, Layout, Slot, pack_nonfinite
from tests.api import message_pack as pack
from tests.api import message_unpack as unpack
from thinwire.errors import PayloadCorrupt

WHERE = {"step": 12, "bucket": 3, "source": 5}


def entries(slot, seed=0, with_zeros=False):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(slot.numel, generator=generator)[: slot.k].sort().values
    values = torch.randn(slot.k, generator=generator).abs() + 0.1
    values[::3] *= -1
    if with_zeros:
        values[1::2] = 0
    return indices, values


def resealed(raw):
    """The bytes with a checksum that fits, as only a sender could have made it."""
    body = bytes(raw[:28]) + bytes(4) + bytes(raw[32:])
    sealed = bytes(raw[:28]) + struct.pack("<I", zlib.crc32(body)) + bytes(raw[32:])
    return torch.tensor(list(sealed), dtype=torch.uint8)


def example(bits=1):
    layout = Layout((Slot(1000, 17), Slot(64, 64), Slot(33, 1)), bits)
    parts = [entries(slot, seed) for seed, slot in enumerate(layout.slots)]
    return layout, parts, *pack(layout, 12, 3, parts)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=4),
    st.sampled_from(VALUE_BITS),
    st.booleans(),
)
def test_sent_entries_arrive_in_the_size_of_the_layout(sizes, bits, with_zeros):
    layout = Layout(tuple(Slot(max(n, k), k) for n, k in sizes), bits)
    parts = [entries(slot, seed, with_zeros) for seed, slot in enumerate(layout.slots)]
    message, all_sent = pack(layout, 12, 3, parts)
    assert message.shape == (layout.nbytes,)
    unpacked = unpack(layout, message, **WHERE)
    assert unpacked.culprit is None
    for (indices, values), sent, (came_indices, came_values) in zip(
        parts, all_sent, unpacked.parts, strict=True
    ):
        carried = values != 0
        assert torch.equal(came_indices, indices[carried])
        assert torch.equal(came_values, sent[carried])
        assert sent[~carried].count_nonzero() == 0
        if bits == 32:
            assert torch.equal(sent, values)


def test_a_25_million_tensor_costs_at_most_13_2_bits_an_entry_with_header_and_scale():
    slot = Slot(25_600_000, 25_600)
    layout = Layout((slot,), 1)
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(slot.numel, (slot.k * 2,), generator=generator).unique()
    indices = indices[torch.randperm(indices.numel(), generator=generator)[: slot.k]].sort().values
    message, _ = pack(layout, 12, 3, [(indices, torch.ones(slot.k))])
    assert message.numel() == layout.nbytes
    assert 8 * layout.nbytes <= 13.2 * slot.k
    assert torch.equal(unpack(layout, message, **WHERE).parts[0][0], indices)


def test_the_header_is_little_endian_and_32_bytes():
    layout, parts, message, _ = example()
    magic, version, flags, bucket, step, digest, carried, _ = struct.unpack(
        "<4sBBHQQII", bytes(message[:32].tolist())
    )
    assert HEADER_BYTES == 32
    assert (magic, version, flags, bucket, step) == (b"thwr", 2, 0, 3, 12)
    assert digest == layout.digest
    assert carried == sum(indices.numel() for indices, _ in parts)
    assert torch.equal(message, resealed(message.tolist()))


@pytest.mark.fault("one bit flipped in a message")
@pytest.mark.parametrize("bits", [1, 32])
def test_ten_thousand_single_bit_flips_are_all_found(bits):
    layout, _, message, _ = example(bits)
    generator = torch.Generator().manual_seed(bits)
    for bit in torch.randint(8 * layout.nbytes, (10_000,), generator=generator).tolist():
        damaged = message.clone()
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(PayloadCorrupt, match="rank 5"):
            unpack(layout, damaged, **WHERE)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"step": 13}, "step 12 came, expected 13"), ({"bucket": 4}, "bucket 3 came, expected 4")],
)
def test_message_of_another_sender_is_refused_with_the_expected_one(change, complaint):
    layout, _, message, _ = example()
    with pytest.raises(PayloadCorrupt, match=f"rank 5.*{complaint}"):
        unpack(layout, message, **{**WHERE, **change})


def test_a_message_of_another_layout_of_equal_length_is_refused():
    layout, _, message, _ = example()
    other = Layout((layout.slots[0], Slot(64, 63), layout.slots[2]), 1)
    assert other.nbytes == layout.nbytes
    with pytest.raises(
        PayloadCorrupt, match=f"layout {layout.digest} came, expected {other.digest}"
    ):
        unpack(other, message, **WHERE)


@pytest.mark.fault("cut, long and forged messages; messages of another step")
@pytest.mark.parametrize("length", [0, 1, 31, 32, -1, +1])
def test_a_message_of_another_length_is_refused(length):
    layout, _, message, _ = example()
    wrong = torch.cat((message, message))[
        : length if length not in {-1, 1} else layout.nbytes + length
    ]
    with pytest.raises(
        PayloadCorrupt, match=f"length in bytes {wrong.numel()} came, expected {layout.nbytes}"
    ):
        unpack(layout, wrong, **WHERE)


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (0, 0, "magic"),
        (4, 1, "wire version 1 came, expected 2"),
        (5, 2, "flags 2 came, expected 0"),
        (24, 0, r"number of entries \(k\) 82 came, expected 0"),
    ],
)
def test_a_header_that_is_wrong_from_the_start_is_refused(at, value, complaint):
    layout, _, message, _ = example()
    message[at] = value
    with pytest.raises(PayloadCorrupt, match=complaint):
        unpack(layout, resealed(message.tolist()), **WHERE)


@pytest.mark.fault("cut, long and forged messages; messages of another step")
@given(st.data())
def test_any_payload_with_a_fitting_checksum_is_refused_or_is_legal(data):
    layout, _, message, _ = example(data.draw(st.sampled_from(VALUE_BITS)))
    size = layout.nbytes - HEADER_BYTES
    payload = data.draw(st.binary(min_size=size, max_size=size))
    raw = bytes(message[:32].tolist()) + payload
    try:
        parts = unpack(layout, resealed(raw), **WHERE).parts
    except PayloadCorrupt:
        return
    for slot, (indices, values) in zip(layout.slots, parts, strict=True):
        assert indices.numel() == values.numel() <= slot.k
        assert ((indices >= 0) & (indices < slot.numel)).all()
        assert (indices.diff() > 0).all()
        assert torch.isfinite(values).all()


def test_gradient_that_is_not_finite_is_reported_in_a_message_of_equal_length():
    layout, _, message, _ = example()
    alarm = pack_nonfinite(layout, 12, 3, 70_000)
    assert alarm.shape == message.shape
    assert unpack(layout, alarm, **WHERE) == (70_000, [])
    alarm[40] ^= 1
    with pytest.raises(PayloadCorrupt, match="checksum"):
        unpack(layout, alarm, **WHERE)


def test_a_layout_without_slots_still_has_room_for_the_alarm():
    layout = Layout((), 1)
    message, sent = pack(layout, 12, 3, [])
    assert (message.numel(), sent) == (layout.nbytes, [])
    assert unpack(layout, message, **WHERE) == (None, [])
    assert unpack(layout, pack_nonfinite(layout, 12, 3, 1), **WHERE).culprit == 1


def test_layouts_that_differ_have_other_digests():
    layouts = [
        Layout((Slot(a, b), Slot(c, d)), bits)
        for a in (9, 99)
        for b in (1, 9)
        for c in (9, 99)
        for d in (1, 9)
        for bits in (1, 2)
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert len({Layout((Slot(9, 1),), 1).digest, Layout((Slot(9, 1),), 1).digest}) == 1
