import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.api import decode_positions, encode_positions, position_bytes
from tests.reference import dgc_codec
from thinwire.errors import PayloadCorrupt

EDGES = sorted({1, 2, 3, 5, 8, 100} | {2**m + d for m in (2, 6, 8, 10) for d in (-1, 0, 1)})


def as_bytes(code):
    return bytes(code.tolist())


@pytest.mark.parametrize("numel", EDGES)
def test_every_edge_is_the_oracles_code_and_comes_back(numel):
    rng = random.Random(numel)
    for k in sorted(
        {1, 2, 3, numel // 3, numel // 2, numel // 2 + 1, numel - 1, numel}
        & set(range(1, numel + 1))
    ):
        for positions in (
            sorted(rng.sample(range(numel), k)),
            list(range(k)),
            list(range(numel - k, numel)),
            sorted(rng.sample(range(numel), k // 2)),
            [],
        ):
            code = encode_positions(torch.tensor(positions, dtype=torch.int64), numel, k)
            assert code.numel() == position_bytes(numel, k)
            assert as_bytes(code) == dgc_codec.position_code(positions, numel, k)
            assert decode_positions(code, numel, k).tolist() == positions


@given(st.integers(1, 10**7), st.sets(st.integers(0, 10**12 - 1), min_size=1, max_size=40))
def test_any_positions_of_a_huge_tensor_come_back(numel, positions):
    positions = sorted({p % numel for p in positions})
    k = len(positions)
    code = encode_positions(torch.tensor(positions), numel, k)
    assert as_bytes(code) == dgc_codec.position_code(positions, numel, k)
    assert decode_positions(code, numel, k).tolist() == positions


def test_the_size_is_at_most_two_bits_and_the_logarithm_a_position():
    for k in (1000, 10_000, 25_600):
        numel = 1000 * k
        assert 8 * position_bytes(numel, k) <= k * 11.97 + 16


@pytest.mark.fault("cut, long and forged messages; messages of another step")
@given(st.data())
def test_any_bytes_are_refused_or_read_as_by_the_oracle(data):
    numel = data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, numel))
    nbytes = position_bytes(numel, k)
    raw = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    expected = dgc_codec.positions(raw, numel, k)
    code = torch.tensor(list(raw), dtype=torch.uint8)
    if expected is None:
        with pytest.raises(PayloadCorrupt):
            decode_positions(code, numel, k)
    else:
        assert decode_positions(code, numel, k).tolist() == expected


def test_every_kind_of_damage_is_named():
    code = encode_positions(torch.tensor([3, 70, 99]), 100, 3)  # 5 low bits, bitmap of 7 bits
    with pytest.raises(PayloadCorrupt, match="4 positions came, expected at most k = 3"):
        decode_positions(code | torch.tensor([0, 0, 0b10], dtype=torch.uint8), 100, 3)
    with pytest.raises(PayloadCorrupt, match="not strictly ascending"):
        decode_positions(torch.tensor([0, 0, 0b111], dtype=torch.uint8), 100, 3)
    with pytest.raises(PayloadCorrupt, match="position 127 came, expected less than 100"):
        decode_positions(torch.tensor([31, 0, 0b1000], dtype=torch.uint8), 100, 3)
    with pytest.raises(PayloadCorrupt, match="position 100 came, expected less than 100"):
        decode_positions(torch.tensor([4, 0, 0b1000], dtype=torch.uint8), 100, 3)
    with pytest.raises(PayloadCorrupt, match="low bits came for more than the 1 positions"):
        decode_positions(torch.tensor([32, 0, 1], dtype=torch.uint8), 100, 3)
