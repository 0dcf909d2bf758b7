"""Laws of the lossless difference of two tensors."""

import math
import os
import struct
import subprocess
import sys
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.api import coder

CODED = [torch.bfloat16, torch.float16, torch.float32]
OTHERS = [torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]
BITS = {2: torch.int16, 4: torch.int32}


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def size_of_change(old: Tensor, new: Tensor) -> int:
    """Bytes of the message, after a check that it makes one tensor of the other."""
    message, became = coder.encode(old, new), old.clone()
    coder.decode(became, message)
    assert bits(became) == bits(new)
    assert len(message) <= old.nbytes + 2
    return len(message)


def weights(count: int, dtype: torch.dtype, move: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of a layer before and after a step of about this size."""
    generator = torch.Generator().manual_seed(seed)
    old, change = (0.02 * torch.randn(count, generator=generator) for _ in range(2))
    return old.to(dtype), (old + move / 0.02 * change).to(dtype)


def one_bit(count: int, senders: int, seed: int, center: float = 0.0) -> tuple[Tensor, Tensor]:
    """Anchors of local updates before and after the mean of one-bit messages."""
    generator = torch.Generator().manual_seed(seed)
    old = center + 0.02 * torch.randn(count, generator=generator)
    change = torch.zeros(count)
    for _ in range(senders):
        up, down = 1e-3 * (1 + torch.rand(2, generator=generator))
        change += torch.where(torch.rand(count, generator=generator) < 0.5, up, -down)
    return old, old - change / senders


def entropy_bytes(old: Tensor, new: Tensor) -> float:
    """Entropy of the steps of bfloat16 given the old exponents, by counts."""
    before, after = (t.view(torch.int16).tolist() for t in (old, new))
    order = {b: b if b >= 0 else -(b & 0x7FFF) - 1 for b in {*before, *after}}
    pairs = Counter((b >> 7 & 255, (order[a] - order[b]) * (1 if b >= 0 else -1))
                    for b, a in zip(before, after, strict=True))  # fmt: skip
    groups = Counter(b >> 7 & 255 for b in before)
    return -sum(n * math.log2(n / groups[group]) for (group, _), n in pairs.items()) / 8


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("move", [0.0, 1e-8, 1e-6, 1e-4, 1e-2, 10.0])
@pytest.mark.parametrize("count", [0, 1, 7, 4097, 300_000])
def test_difference_of_weights_is_lossless(dtype: torch.dtype, move: float, count: int) -> None:
    size_of_change(*weights(count, dtype, move))


@pytest.mark.parametrize("dtype", CODED)
def test_difference_of_any_bit_patterns_is_lossless(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = BITS[dtype.itemsize]
    every = torch.arange(-(1 << 15), 1 << 15)
    scale = 1 << (16 if dtype.itemsize == 4 else 0)
    others = every[torch.randperm(1 << 16, generator=generator)]
    for one in (others, every.flip(0), every * 0, torch.cat((every[1:], every[:1])), ~every):
        size_of_change((every * scale).to(whole).view(dtype), (one * scale).to(whole).view(dtype))


@pytest.mark.parametrize("dtype", CODED + OTHERS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 7), (64, 300)])
def test_difference_of_any_dtype_and_shape_is_lossless(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    old, new = torch.zeros(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
    assert size_of_change(old, old.clone()) == 0
    assert size_of_change(old, new) <= old.nbytes + 2


@pytest.mark.parametrize(("move", "above"), [(2.5e-7, 1.12), (6e-6, 1.03), (4e-5, 1.03)])
def test_size_of_a_difference_is_near_the_entropy(move: float, above: float) -> None:
    old, new = weights(200_000, torch.bfloat16, move)
    assert size_of_change(old, new) < above * entropy_bytes(old, new)


@pytest.mark.parametrize("senders", [1, 2, 4])
@pytest.mark.parametrize("count", [40_000, 600_000])
@pytest.mark.parametrize("center", [0.0, 1.0])
def test_mean_of_one_bit_messages_takes_few_bits(senders: int, count: int, center: float) -> None:
    old, new = one_bit(count, senders, 3, center)
    assert 8 * size_of_change(old, new) / count < 1.02 * senders + 0.02
    new[:100] += 0.1  # beside others
    assert 8 * size_of_change(old, new) / count < 1.02 * senders + 0.2


def test_slices_of_a_large_tensor_differ_without_harm() -> None:
    # a sample sees some of these changes, or none
    old, new = weights(1_200_000, torch.bfloat16, 0.0)
    new[5000:5003] = 1e30
    new[700_000:701_000] *= -3
    assert size_of_change(old, new) < 5000


@pytest.mark.parametrize(("move", "sizes"), [
    (2.4e-7, (9033, 8967, 9055)), (6.6e-6, (88130, 88321, 88347)),
    (4.5e-5, (257389, 257036, 257570)), (3e-3, (988657, 988251, 989037)),
])  # fmt: skip
def test_size_of_a_difference_is_at_most_that_of_version_1(
    move: float, sizes: tuple[int, ...]
) -> None:
    for seed, size in enumerate(sizes):
        assert size_of_change(*weights(1_000_000, torch.bfloat16, move, seed)) < 1.001 * size


@pytest.mark.parametrize(("senders", "size"), [(1, 75103), (2, 150117), (4, 300297)])
def test_size_of_one_bit_messages_is_that_of_version_1(senders: int, size: int) -> None:
    for seed in range(3):
        assert size_of_change(*one_bit(600_000, senders, seed)) < 1.001 * size


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.5, 1.0])
def test_difference_of_skewed_alphabets_is_lossless(dtype: torch.dtype, share: float) -> None:
    # one exponent or all of them; steps of every size, as likely as others or not
    generator = torch.Generator().manual_seed(4)
    top = 1 << 8 * dtype.itemsize - 1
    for exponents in (1, top):
        old = torch.randint(exponents, (150_000,), generator=generator)
        sizes = 2 ** (torch.rand(old.shape, generator=generator) * (8 * dtype.itemsize - 1))
        changed = torch.rand(old.shape, generator=generator) < share
        changed[7] = True
        new = (old + torch.where(changed, sizes.long(), 0)) % (2 * top)
        whole = BITS[dtype.itemsize]
        size_of_change(*(torch.where(t < top, t, t - 2 * top).to(whole).view(dtype)
                         for t in (old, new)))  # fmt: skip


def test_difference_that_takes_more_than_the_tensor_is_the_tensor() -> None:
    # a step of 2^15 is one of 2^13 of its symbol, whose raw bits it takes
    new = torch.randint(-(1 << 15), 1 << 15, (20_000,), generator=torch.Generator().manual_seed(6))
    new[::9] = -1
    old, new = (t.short().view(torch.bfloat16) for t in (new * 0, new))
    assert size_of_change(old, new) == old.nbytes + 2


@pytest.mark.parametrize("count", [20, 1000, 100_000])
@pytest.mark.parametrize("values", [1, 30, 64, 65, 300])
def test_difference_of_many_values_is_lossless(count: int, values: int) -> None:
    generator = torch.Generator().manual_seed(7)
    old = 0.02 * torch.randn(count, generator=generator)
    size_of_change(old, old + 1e-3 * torch.randint(values, (count,), generator=generator))


def shares_of(codes: bytes) -> list[int]:
    """Frequencies of an alphabet, which add up to 2^16."""
    least = [c if c < 8 else (8 + c % 8) << c // 8 - 1 for c in codes]
    shares = [max(x * 65536 // sum(least), x > 0) for x in least]
    shares[shares.index(max(shares))] += 65536 - sum(shares)
    return shares


def read_by_steps(old: list[int], message: bytes, width: int, digits: int) -> list[int]:
    """Decode a message by its description, in integers of Python alone."""
    body = BytesIO(message[2:])
    starts = [0, *body.read(body.read(1)[0])]
    codes = zlib.decompress(body.read(int.from_bytes(body.read(2), "little")), -15)
    each = len(codes) // len(starts)
    ends = [[*accumulate(shares_of(codes[at : at + each]))] for at in range(0, len(codes), each)]
    *states, count = struct.unpack("<3I", body.read(12))
    words = iter(struct.unpack(f"<{count}H", body.read()))

    def take(lane: int, low: int, high: int) -> None:
        states[lane] = (high - low) * (states[lane] >> 16) + states[lane] % 65536 - low
        if states[lane] < 65536:
            states[lane] = states[lane] << 16 | next(words)

    top, new = 1 << width - 1, []
    for i, before in enumerate(old):
        its_ends = ends[bisect_right(starts, before % top >> digits) - 1]
        symbol = bisect_right(its_ends, states[i % 2] % 65536)
        take(i % 2, symbol and its_ends[symbol - 1], its_ends[symbol])
        exponent, size = divmod((symbol + 1) // 2, 4)
        raw_bits = max(exponent - 1, 0)
        size = (size + 4 * (exponent > 0)) << raw_bits
        for at in range(0, raw_bits, 16):
            unit = 65536 >> min(raw_bits - at, 16)
            raw = states[i % 2] % 65536 // unit
            take(i % 2, raw * unit, (raw + 1) * unit)
            size += raw << at
        place = (before % top + (size if symbol % 2 else -size)) % (2 * top)
        new.append(before // top * top ^ (place if place < top else 3 * top - 1 - place))
    assert (states, next(words, None)) == ([65536, 65536], None)
    return new


@pytest.mark.parametrize(("dtype", "digits"), [
    (torch.bfloat16, 7), (torch.float16, 10), (torch.float32, 23),
])  # fmt: skip
def test_message_is_as_described(dtype: torch.dtype, digits: int) -> None:
    old, new = weights(3000, dtype, 1e-4)
    new[:20] *= -1e3
    message = coder.encode(old, new)
    width = 8 * dtype.itemsize
    one, other = ([x % (1 << width) for x in t.view(BITS[dtype.itemsize]).tolist()]
                  for t in (old, new))  # fmt: skip
    assert message[1] == 3  # by steps
    assert read_by_steps(one, message, width, digits) == other


def test_threads_decode_as_one_thread_does() -> None:
    pairs = [weights(200_000 + 1000 * i, dtype, 1e-5, i) for i, dtype in enumerate(CODED * 3)]
    pairs += [one_bit(300_000, 2, seed) for seed in range(3)]
    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(lambda pair: coder.encode(*pair), pairs))
        became = [old.clone() for old, _ in pairs]
        list(pool.map(coder.decode, became, map(memoryview, messages)))
    assert messages == [coder.encode(*pair) for pair in pairs]
    for tensor, (_, new) in zip(became, pairs, strict=True):
        assert bits(tensor) == bits(new)


def messages_of_each_kind() -> Iterator[tuple[Tensor, bytes]]:
    for dtype in CODED:
        old, new = weights(300, dtype, 1e-3)
        yield old, coder.encode(old, new)
    old, new = one_bit(300, 2, 0)
    new[5] = 3.0
    yield old, coder.encode(old, new)
    yield (every := torch.arange(300)), coder.encode(every, every * 3)
    old, new = torch.rand(2, 50, dtype=torch.float64)
    yield old, coder.encode(old, new)


def forged_messages(count: int) -> Iterator[tuple[Tensor, bytes]]:
    """Messages by steps, from zeros, with any groups, frequencies, states and words."""
    generator = torch.Generator().manual_seed(5)

    def integers(most: int, shape: int) -> list[int]:
        return list(torch.randint(most, (shape,), generator=generator).tolist())

    for i in range(count):
        starts = integers(255, i % 7)
        starts = starts if i % 2 else sorted(set(starts))
        old = torch.randn(400, generator=generator).to(CODED[i % 3])
        codes = torch.randint(256, (len(starts) + 1, 241), generator=generator)
        codes *= torch.rand(codes.shape, generator=generator) < 0.1 ** (i % 4)
        deflated = zlib.compress(bytes(codes.flatten().tolist()), wbits=-15)
        words = integers(1 << 16, i % 5 * 100)
        head = bytes((coder.VERSION, 3, len(starts), *(start + 1 for start in starts)))
        states = struct.pack("<3I", *integers(1 << 32, 2), len(words))
        yield old, b"".join((head, len(deflated).to_bytes(2, "little"), deflated, states,
                             struct.pack(f"<{len(words)}H", *words)))  # fmt: skip


def refusals(old: Tensor, messages: Iterator[bytes]) -> int:
    """Number of messages that are errors; others make another tensor."""
    refused = 0
    for message in messages:
        try:
            coder.decode(old.clone(), message)
        except ValueError:
            refused += 1
    return refused


def damaged(message: bytes) -> Iterator[bytes]:
    for at in range(len(message)):
        yield message[:at]
        for flip in (1, 128, 255):
            yield message[:at] + bytes([message[at] ^ flip]) + message[at + 1 :]
    yield message + b"\0"


def test_decode_of_damaged_bytes_is_an_error_or_another_tensor() -> None:
    kinds = set()
    for old, message in messages_of_each_kind():
        kinds.add(message[1])
        coder.decode(old.clone(), message)
        assert refusals(old, damaged(message)) > len(message)
    assert kinds == {1, 2, 3, 4}


def test_decode_of_forged_tables_is_an_error() -> None:
    for old, message in forged_messages(100):
        assert refusals(old, iter((message,))) == 1


def letters_message(count: int, escapes: bytes, letters: Tensor) -> bytes:
    """A message by values, all 1.0, with these letters."""
    steps = coder.encode(
        torch.zeros_like(letters).view(torch.bfloat16), letters.view(torch.bfloat16)
    )
    head = bytes((coder.VERSION, 4, count, len(escapes) // 4, 0))
    return head + struct.pack("<f", 1.0) * count + escapes + steps[2:]


def test_decode_of_letters_beyond_the_values_is_an_error() -> None:
    old, letters = torch.zeros(1000), (torch.arange(1000) % 2).short()
    coder.decode(old, letters_message(2, b"", letters))
    assert old.tolist() == [-1.0] * 1000
    wrong = (1, b"", letters), (1, b"", 2 * letters), (2, bytes(4), letters)
    assert refusals(old, (letters_message(*each) for each in wrong)) == 3


@pytest.mark.parametrize("count", [0, 1, 299, 301, 10**8])
def test_decode_of_deflated_bytes_of_another_size_is_an_error(count: int) -> None:
    message = bytes((coder.VERSION, 2)) + zlib.compress(bytes(count), wbits=-15)
    assert refusals(torch.zeros(300, dtype=torch.int8), iter((message,))) == 1


@pytest.mark.slow
def test_decode_of_damaged_bytes_stays_in_its_memory(tmp_path: Path) -> None:
    # an index that is out of bounds raises an IndexError here, and elsewhere reads what is there
    code = (
        "from tests.stream.test_coder import *\n"
        "for old, message in messages_of_each_kind(): refusals(old, damaged(message))\n"
        "for old, message in forged_messages(1000): refusals(old, iter((message,)))\n"
        "for dtype in CODED: test_difference_of_any_bit_patterns_is_lossless(dtype)\n"
        "test_difference_that_takes_more_than_the_tensor_is_the_tensor()"
    )
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(run, check=True, env={**os.environ, **checked}, timeout=100)


def test_encode_of_unlike_tensors_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"float32.*\(3,\)"):
        coder.encode(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("how", ["sys.modules['numba'] = None", "numba.config.DISABLE_JIT = 1"])
def test_coder_without_its_package_names_the_extra(how: str) -> None:
    code = (
        "import sys, torch\n"
        "from thinwire.stream.coder import encode\n"
        "assert 'numba' not in sys.modules\n"
        f"{'import numba' if 'config' in how else ''}\n{how}\n"
        "try: encode(torch.zeros(2), torch.ones(2))\n"
        "except ImportError as error: assert 'thinwire[stream]' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
