"""Slow oracle of stochastic rounding to bfloat16, in exact arithmetic, one entry at a time."""

import math

LARGEST = (2 - 2**-7) * 2.0**127


def random_word(position, seed):
    """32 bits for one position."""
    x = (position ^ seed) % 2**32
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        x ^= x // 2**shift
        x = x * factor % 2**32
    return x ^ x // 2**16


def spacing(x):
    """Distance of the bfloat16 on both sides of x, that of the smallest exponent for denormals."""
    return 2.0 ** max(math.frexp(x)[1] - 8, -133)


def neighbours(x):
    """The two bfloat16 around x, by magnitude, and the probability of the second."""
    step = spacing(x)
    below = math.floor(abs(x) / step) * step
    above = min(below + step, LARGEST)
    sign = math.copysign(1.0, x)
    return sign * below, sign * above, (abs(x) - below) / step


def rounded(x, sixteen_bits):
    below, above, probability = neighbours(x)
    return above if sixteen_bits + probability * 2**16 >= 2**16 else below


def variance(x):
    """Of what is stored for x."""
    _, _, probability = neighbours(x)
    return probability * (1 - probability) * spacing(x) ** 2
