"""Stochastic rounding to bfloat16: what is stored is right on average, and a pure function of what
is known anyway.

bfloat16 is the upper half of a float32: 8 bits of significand, with the range of a float32. Of x,
which lies between two neighbours a < x < b in magnitude, b is stored with the probability (x - a) /
(b - a), so the expectation is x, exactly, down to the denormals. Nothing that is a bfloat16
changes, zeros among them; beyond the largest bfloat16, 3.39e38, x becomes that one and never
infinity.

The random bits of position i are those of a hash of i and a seed, 32 a position: the lower 16 are
for a residual, the upper 16 for a momentum buffer. Position i and i + 2^32 of one tensor have the
same.

Source: stochastic rounding as in Gupta et al., 2015, arXiv 1502.02551, section 3. Differs: a
counter-based hash instead of a generator, so there is no generator to save, and the order of
the work changes no bit.
"""

from torch import Tensor

from thinwire.kernels import for_device
from thinwire.kernels.reference import mixed

__all__ = ["rounding_seed", "store_"]


def rounding_seed(step: int, key: int) -> int:
    """The seed for one tensor in one step, the same on every rank, so that ranks with equal state
    stay equal.

    Args:
        step: Completed updates, >= 0.
        key: The tensor's place among all, >= 0.

    Returns:
        0 to 2^32 - 1.
    """
    return int(mixed(mixed(step) + key))


def store_(target: Tensor, values: Tensor, seed: int) -> None:
    """Put `values` into `target`, stochastically rounded if that is bfloat16, else as torch
    converts.

    Args:
        target: Shape (n,), contiguous; changed.
        values: Shape (n,), contiguous, float32 or float64, on the same device; read only.
        seed: 0 to 2^32 - 1, another one in every step and for every tensor.

    Raises:
        ValueError: The shapes do not fit.
    """
    if target.shape != values.shape or target.dim() != 1:
        raise ValueError(
            f"target has shape {tuple(target.shape)} and values {tuple(values.shape)}; both must "
            "be (n,)"
        )
    if target.dtype.itemsize == 2:
        for_device(target.device).store_(target, values.float(), seed)
    else:
        target.copy_(values)
