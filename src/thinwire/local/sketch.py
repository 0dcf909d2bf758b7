"""Sketches: 64 sums that stand for a tensor of any size and preserve inner products of tensors.

Every entry, or 4,096 drawn ones, scaled up, are added with a random sign to one of 64 sums. The
mean error of an inner product is about an eighth of the product of the norms.

Source: count sketch, Charikar, Chen and Farach-Colton, 2002, section 3. Differs: one row, whose
places follow from the position; only a sample of a large tensor.
"""

import functools
import math

import torch
from torch import Tensor

from thinwire.kernels.reference import mixed
from thinwire.layout.message import SKETCH_NUMEL

_MOST = 1 << 12
_DRAWS, _SIGNS = 1, 2


def sketch(values: Tensor, key: int) -> Tensor:
    """Return the 64 sums of one real tensor, float64, on the CPU."""
    flat = values.reshape(-1)
    draws, signs = _plan(flat.numel(), key, flat.device)
    # one order of additions, wherever the tensor is
    signed = (flat if draws is None else flat[draws]).cpu().double() * signs
    return (
        torch.nn.functional.pad(signed, (0, -signed.numel() % SKETCH_NUMEL))
        .view(-1, SKETCH_NUMEL)
        .sum(0)
    )


@functools.lru_cache(maxsize=512)
def _plan(numel: int, key: int, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """Return the drawn entries (None for all) and their signs times the scale; at most 64 KiB."""
    count = min(numel, _MOST)
    positions = torch.arange(count, device=device)
    signs = 1.0 - 2.0 * (mixed(mixed(positions + (_SIGNS << 20)) + mixed(key)) & 1)
    signs = signs.cpu().double() * math.sqrt(max(1, numel) / max(1, count))
    if count == numel:
        return None, signs
    return mixed(mixed(positions + (_DRAWS << 20)) + mixed(key)) % numel, signs
