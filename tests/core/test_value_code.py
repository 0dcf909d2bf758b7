import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import (
    VALUE_BITS,
    Layout,
    Slot,
    decode_values,
    encode_values,
    message_pack,
    value_bytes,
)
from tests.reference import dgc_codec
from thinwire.errors import PayloadCorrupt

ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool)
SCALE_BYTES = {1: 4, 2: 8, 4: 32, 8: 8, 16: 8, 32: 0}


def bits_of(x):
    return x.view(torch.int32).tolist()


@pytest.mark.parametrize("bits", VALUE_BITS)
@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 1000])
def test_the_size_is_the_scales_and_the_fields(bits, k):
    assert value_bytes(k, bits) == SCALE_BYTES[bits] + math.ceil(k * bits / 8)
    for count in {0, 1, k}:
        code, sent = encode_values(torch.ones(count), bits, k)
        assert code.shape == (value_bytes(k, bits),)
        assert sent.shape == (count,)


@given(
    st.lists(ANY_FLOAT, max_size=60), st.sampled_from(VALUE_BITS), st.integers(0, 9), st.booleans()
)
def test_sent_entries_equal_decoded_ones_bit_for_bit(values, bits, room, in_double):
    k = max(1, len(values) + room)
    tensor = torch.tensor(values, dtype=torch.float64 if in_double else torch.float32)
    code, sent = encode_values(tensor, bits, k)
    decoded = decode_values(code, len(values), bits, k)
    assert sent.dtype == decoded.dtype == torch.float32
    assert bits_of(sent) == bits_of(decoded)
    assert torch.isfinite(sent).all()
    assert torch.equal(sent.signbit(), tensor.signbit())


@pytest.mark.parametrize("bits", VALUE_BITS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-41, 1e36])
@pytest.mark.parametrize("spread", ["equal", "near", "normal", "heavy"])
def test_values_become_the_oracles_nearest_level(bits, scale, spread):
    generator = torch.Generator().manual_seed(bits)
    normal = torch.randn(600, generator=generator)
    values = {
        "equal": normal.sign(),
        "near": normal.sign() + 0.03 * normal,
        "normal": normal,
        "heavy": (normal.sign() * (2 * normal.abs()).exp()).clamp(-90, 90),
    }[spread] * scale
    values = values[values != 0]
    _, sent = encode_values(values, bits, 640)
    # The oracle's sums differ from ours in the last bit of a float64; a level may then be its
    # neighbour in float32.
    expected = torch.tensor(dgc_codec.sent(values.tolist(), bits, 640))
    torch.testing.assert_close(sent, expected, rtol=2.4e-7, atol=1.5e-45)


@pytest.mark.parametrize("bits", [8, 16])
@given(values=st.lists(ANY_FLOAT, min_size=1, max_size=60))
def test_a_fine_code_errs_by_half_a_step_at_most(bits, values):
    magnitudes = [abs(v) for v in values]
    step = (max(magnitudes) - min(magnitudes)) / (2 ** (bits - 1) - 1)
    _, sent = encode_values(torch.tensor(values), bits, len(values))
    for value, q in zip(values, sent.tolist(), strict=True):
        assert abs(value - q) <= 0.5 * step + 1.2e-7 * abs(q) + 1e-45


@pytest.mark.parametrize("bits", VALUE_BITS)
@pytest.mark.parametrize("value", [1.5, -1e-45, 1e-40, 3.4e38, -1e38])
def test_equal_magnitudes_are_sent_exactly(bits, value):
    values = torch.full((777,), value)
    values[::2] *= -1
    _, sent = encode_values(values, bits, 777)
    assert torch.equal(sent, values)


@pytest.mark.fault("values beyond what the wire's numbers hold")
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_doubles_beyond_float32_saturate_or_vanish(bits):
    largest = torch.finfo(torch.float32).max
    _, sent = encode_values(torch.tensor([1e300, -1e300], dtype=torch.float64), bits, 2)
    assert sent.tolist() == [largest, -largest]
    _, sent = encode_values(torch.tensor([1e-300, -1e-300], dtype=torch.float64), bits, 2)
    assert sent.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
def test_zeros_are_allowed_where_there_is_more_than_a_sign(bits):
    _, sent = encode_values(torch.zeros(5), bits, 5)
    assert sent.tolist() == [0.0] * 5


@pytest.mark.parametrize("bits", VALUE_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_coded_as_its_float32(bits, dtype):
    values, layout = torch.tensor([1.0, -2.5, 0.125]).to(dtype), Layout((Slot(9, 4),), bits)
    (half, _), (wide, _) = (
        message_pack(layout, 0, 0, [(torch.tensor([0, 2, 7]), x)]) for x in (values, values.float())
    )
    assert torch.equal(half, wide)


def test_more_bits_err_less_on_near_and_on_heavy_tailed_magnitudes():
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    for values in (
        normal.sign() * (1 + 0.02 * normal.abs()),
        normal.sign() * (1.5 * normal.abs()).exp(),
    ):
        errors = [
            float((encode_values(values, bits, 20_000)[1] - values).norm()) for bits in VALUE_BITS
        ]
        assert errors[:3] == sorted(errors[:3], reverse=True)
        assert errors[3] > errors[4] > errors[5] == 0
        assert errors[2] < 0.7 * errors[0]  # eight levels against one


@given(st.binary(min_size=80, max_size=80), st.sampled_from(VALUE_BITS))
def test_any_bytes_are_refused_or_are_finite_values(raw, bits):
    k = {1: 608, 2: 288, 4: 96, 8: 72, 16: 36, 32: 20}[bits]
    try:
        values = decode_values(torch.tensor(list(raw), dtype=torch.uint8), k - 1, bits, k)
    except PayloadCorrupt as refusal:
        assert "not finite" in str(refusal)
    else:
        assert values.shape == (k - 1,)
        assert torch.isfinite(values).all()
