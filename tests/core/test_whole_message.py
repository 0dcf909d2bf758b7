"""Messages with every entry of several tensors."""

import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import HEADER_BYTES, WHOLE_BITS, WholeLayout, apart, read_part, side_by_side
from tests.api import pack_whole as pack
from tests.api import unpack_whole as unpack
from tests.reference import whole_codes
from thinwire.errors import PayloadCorrupt

WHERE = {"step": 12, "bucket": 0, "source": 5}
NUMELS = (1000, 1, 33)


def tensors(numels=NUMELS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(n, generator=generator, dtype=torch.float64).pow(3).to(dtype) for n in numels
    ]


def decoded(layout, message):
    codes = unpack(layout, message, **WHERE)
    return [code.part(0, n) for code, n in zip(codes, layout.numels, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_arrivals_follow_the_format(bits, dtype):
    layout, given_ = WholeLayout(NUMELS, bits), tensors(dtype=dtype)
    message = pack(layout, 12, 0, given_)
    assert message.numel() == layout.nbytes == whole_codes.message_bytes(NUMELS, bits)
    for values, came in zip(given_, decoded(layout, message), strict=True):
        assert came.dtype == torch.float32
        assert came.tolist() == whole_codes.sent(values.tolist(), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", WHOLE_BITS)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8))
def test_tensors_in_one_buffer_travel_as_alone(bits, dtype, numels):
    given_, layout = tensors(numels, dtype), WholeLayout(tuple(numels), bits)
    part = [(str(key), 0, numel) for key, numel in enumerate(numels)]
    together = pack(layout, 12, 0, [(numels, [side_by_side(given_)])])
    assert torch.equal(together, pack(layout, 12, 0, given_))
    whole = read_part(unpack(layout, together, **WHERE), part, torch.device("cpu"))
    for came, alone in zip(apart(whole, numels), decoded(layout, together), strict=True):
        assert torch.equal(came, alone)


def test_one_bit_byte_for_byte():
    layout, given_ = WholeLayout(NUMELS, 1), tensors()
    message = pack(layout, 12, 0, given_)
    expected = whole_codes.signs_message([t.tolist() for t in given_], 12, layout.digest)
    assert bytes(message.tolist()) == expected


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.sampled_from(WHOLE_BITS),
)
def test_lost_part_is_never_larger_than_the_sent(values, bits):
    """Error feedback needs it: |e - q| <= |e|. 1e-6: the scales are float32."""
    tensor = torch.tensor(values)
    layout = WholeLayout((tensor.numel(),), bits)
    [came] = decoded(layout, pack(layout, 12, 0, [tensor]))
    lost = (tensor.double() - came.double()).norm()
    assert lost <= tensor.double().norm() * (1 + 1e-6)
    if tensor.numel() == 1 and bits != 1:
        assert came.item() == tensor.item()


def test_one_bit_of_lopsided_entries_loses_less_than_one_scale_would():
    tensor = torch.cat([torch.full((90,), 0.01), torch.full((10,), -1.0)])
    layout = WholeLayout((100,), 1)
    [came] = decoded(layout, pack(layout, 12, 0, [tensor]))
    assert torch.equal(came, tensor)


@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_zeros_arrive_as_zeros(bits):
    layout = WholeLayout((9,), bits)
    [came] = decoded(layout, pack(layout, 12, 0, [torch.zeros(9)]))
    assert came.count_nonzero() == 0


@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_magnitudes_beyond_float32_saturate(bits):
    layout = WholeLayout((3,), bits)
    [came] = decoded(
        layout, pack(layout, 12, 0, [torch.tensor([1e300, -1e300, 1e300], dtype=torch.float64)])
    )
    assert came.isfinite().all()
    assert came.sign().tolist() == [1, -1, 1]


@pytest.mark.parametrize("bits", WHOLE_BITS)
def test_every_damaged_byte_is_refused_with_its_source(bits):
    layout = WholeLayout((40, 3), bits)
    message = pack(layout, 12, 0, tensors((40, 3)))
    for place in range(message.numel()):
        damaged = message.clone()
        damaged[place] ^= 64
        with pytest.raises(
            PayloadCorrupt, match="the message of rank 5 for bucket 0 of step 12 was refused"
        ):
            unpack(layout, damaged, **WHERE)


def test_messages_of_another_position_or_layout_are_refused():
    layout = WholeLayout((40, 3), 4)
    message = pack(layout, 12, 0, tensors((40, 3)))
    for other, where, text in [
        (layout, {**WHERE, "step": 13}, "step 12 came, expected 13"),
        (WholeLayout((3, 40), 4), WHERE, "layout"),
        (WholeLayout((39, 3), 4), WHERE, "layout"),
        (WholeLayout((40, 3), 8), WHERE, "length in bytes"),
    ]:
        with pytest.raises(PayloadCorrupt, match=text):
            unpack(other, message, **where)
    assert WholeLayout((40,), 2).digest != WholeLayout((40,), 4).digest


@pytest.mark.parametrize(
    ("place", "text"), [(5, "flags 1"), (24, "1 entries"), (HEADER_BYTES, "not finite")]
)
def test_message_no_sender_writes_is_refused_under_a_valid_checksum(place, text):
    layout = WholeLayout((40,), 8)
    raw = bytearray(pack(layout, 12, 0, tensors((40,))).tolist())
    if place == HEADER_BYTES:
        raw[place : place + 4] = struct.pack("<f", float("inf"))
    else:
        raw[place] = 1
    raw[28:32] = struct.pack("<I", zlib.crc32(bytes(raw[:28]) + bytes(4) + bytes(raw[32:])))
    with pytest.raises(PayloadCorrupt, match=text):
        unpack(layout, torch.tensor(list(raw), dtype=torch.uint8), **WHERE)
