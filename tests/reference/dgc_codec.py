"""Slow oracle of the wire format: Python integers as bit strings, sums by `math.fsum`."""

import itertools
import math
import struct
from fractions import Fraction


def low_bits(numel, k):
    """Largest number of bits with k * 2^bits <= numel."""
    bits = 0
    while k << (bits + 1) <= numel:
        bits += 1
    return bits


def position_code(positions, numel, k):
    """Elias-Fano code as bytes."""
    width = low_bits(numel, k)
    low = high = 0
    for i, position in enumerate(positions):
        low |= (position % 2**width) << (i * width)
        high |= 1 << ((position // 2**width) + i)
    high_bits = k + (numel - 1) // 2**width + 1
    return low.to_bytes(math.ceil(k * width / 8), "little") + high.to_bytes(
        math.ceil(high_bits / 8), "little"
    )


def positions(code, numel, k):
    """Positions of an Elias-Fano code, or None if no sender writes it."""
    width = low_bits(numel, k)
    split = math.ceil(k * width / 8)
    low, high = int.from_bytes(code[:split], "little"), int.from_bytes(code[split:], "little")
    found = []
    for bit in range(high.bit_length()):
        if high >> bit & 1:
            found.append(((bit - len(found)) << width) + (low >> (len(found) * width)) % 2**width)
    is_ascending = all(a < b for a, b in itertools.pairwise(found))
    in_range = all(position < numel for position in found)
    if len(found) > k or not is_ascending or not in_range or low >> (len(found) * width):
        return None
    return found


def float32(x):
    """The float32 nearest to x, as a Python float; saturates."""
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    return struct.unpack("<f", struct.pack("<f", max(-largest, min(largest, x))))[0]


def levels(values, bits, k):
    """Magnitudes that a code of 1, 2 or 4 bits can express for these values, ascending."""
    magnitudes = [abs(v) for v in values]
    if bits == 1:
        return [float32(math.fsum(magnitudes) / k)]
    cells = [(magnitudes, 0.0)]
    for _ in range(bits - 1):
        halves = []
        for cell, inherited in cells:
            mean = math.fsum(cell) / len(cell) if cell else inherited
            halves += [
                ([x for x in cell if x <= mean], mean),
                ([x for x in cell if x > mean], mean),
            ]
        cells = halves
    return [
        float32(math.fsum(cell) / len(cell) if cell else inherited) for cell, inherited in cells
    ]


def nearest_on_grid(magnitude, low, high, steps):
    """The nearest of low, ..., high in `steps` equal steps, by exact fractions."""
    if low == high:
        return low
    step = (Fraction(high) - Fraction(low)) / steps
    level = math.ceil((Fraction(magnitude) - Fraction(low)) / step - Fraction(1, 2))
    return float32(float(Fraction(low) + min(max(level, 0), steps) * step))


def sent(values, bits, k):
    """What the receiver decodes: the nearest level, the lower of two, with the value's sign."""
    if bits == 32:
        return [float32(v) for v in values]
    if bits <= 4:
        grid = levels(values, bits, k)
        return [
            math.copysign(min(grid, key=lambda level: (abs(abs(v) - level), level)), v)
            for v in values
        ]
    low, high = (float32(extreme(abs(v) for v in values)) for extreme in (min, max))
    return [
        math.copysign(nearest_on_grid(abs(v), low, high, 2 ** (bits - 1) - 1), v) for v in values
    ]
