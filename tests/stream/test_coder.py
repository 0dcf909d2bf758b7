"""Laws of the lossless difference of two tensors."""

import math
import subprocess
import sys
from collections import Counter

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
    generator = torch.Generator().manual_seed(3)
    old = center + 0.02 * torch.randn(count, generator=generator)
    change = torch.zeros(count)
    for _ in range(senders):
        up, down = 1e-3 * (1 + torch.rand(2, generator=generator))
        change += torch.where(torch.rand(count, generator=generator) < 0.5, up, -down)
    new = old - change / senders
    assert 8 * size_of_change(old, new) / count < 1.02 * senders + 0.02
    new[:100] += 0.1  # beside others
    assert 8 * size_of_change(old, new) / count < 1.02 * senders + 0.2


def test_slices_of_a_large_tensor_differ_without_harm() -> None:
    # a sample sees some of these changes, or none
    old, new = weights(1_200_000, torch.bfloat16, 0.0)
    new[5000:5003] = 1e30
    new[700_000:701_000] *= -3
    assert size_of_change(old, new) < 5000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_decode_of_damaged_bytes_is_an_error_or_another_tensor(dtype: torch.dtype) -> None:
    old, new = weights(300, torch.float32, 1e-3)
    old, new = ((t * 1000 if dtype == torch.int64 else t).to(dtype) for t in (old, new))
    new = new if dtype != torch.float32 else torch.where(new > 0, old + 1e-3, old)
    message = coder.encode(old, new)
    changed = [message[:at] + bytes([message[at] ^ flip]) + message[at + 1 :]
               for at in range(len(message)) for flip in (1, 128, 255)]  # fmt: skip
    refused = 0
    for damaged in (*changed, *(message[:at] for at in range(len(message))), message + b"\0"):
        try:
            coder.decode(old.clone(), damaged)
        except ValueError:
            refused += 1
    assert refused > len(message)


def test_encode_of_unlike_tensors_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"float32.*\(3,\)"):
        coder.encode(torch.zeros(2), torch.zeros(3))


def test_coder_without_its_package_names_the_extra() -> None:
    code = (
        "import sys, torch; sys.modules['constriction'] = None\n"
        "from thinwire.stream.coder import encode\n"
        "try: encode(torch.zeros(2), torch.ones(2))\n"
        "except ImportError as error: assert 'thinwire[stream]' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
