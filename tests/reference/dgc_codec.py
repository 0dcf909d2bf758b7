"""Slow oracle of the wire format: Python integers as bit strings, sums by `math.fsum`."""

import math
import struct


def low_bits(numel, k):
    """Largest l with k * 2^l <= numel."""
    l = 0
    while k << (l + 1) <= numel:
        l += 1
    return l


def position_code(positions, numel, k):
    """Elias-Fano code as bytes."""
    l = low_bits(numel, k)
    low = high = 0
    for i, position in enumerate(positions):
        low |= (position % 2**l) << (i * l)
        high |= 1 << ((position // 2**l) + i)
    high_bits = k + (numel - 1) // 2**l + 1
    return low.to_bytes(math.ceil(k * l / 8), "little") + high.to_bytes(math.ceil(high_bits / 8), "little")


def positions(code, numel, k):
    """Positions of an Elias-Fano code, or None if no sender writes it."""
    l = low_bits(numel, k)
    split = math.ceil(k * l / 8)
    low, high = int.from_bytes(code[:split], "little"), int.from_bytes(code[split:], "little")
    found = []
    for bit in range(high.bit_length()):
        if high >> bit & 1:
            found.append(((bit - len(found)) << l) + (low >> (len(found) * l)) % 2**l)
    is_ascending = all(a < b for a, b in zip(found, found[1:], strict=False))
    in_range = all(position < numel for position in found)
    if len(found) > k or not is_ascending or not in_range or low >> (len(found) * l):
        return None
    return found


def float32(x):
    """The float32 nearest to x, as a Python float; saturates."""
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    return struct.unpack("<f", struct.pack("<f", max(-largest, min(largest, x))))[0]


def levels(values, bits, k):
    """Magnitudes that a code of `bits` can express for these values, ascending; None at 32 bits."""
    magnitudes = [abs(v) for v in values]
    if bits == 32:
        return None
    if bits == 1:
        return [float32(math.fsum(magnitudes) / k)]
    if bits <= 4:
        cells = [(magnitudes, 0.0)]
        for _ in range(bits - 1):
            halves = []
            for cell, inherited in cells:
                mean = math.fsum(cell) / len(cell) if cell else inherited
                halves += [([x for x in cell if x <= mean], mean), ([x for x in cell if x > mean], mean)]
            cells = halves
        return [float32(math.fsum(cell) / len(cell) if cell else inherited) for cell, inherited in cells]
    low, high = float32(min(magnitudes, default=0.0)), float32(max(magnitudes, default=0.0))
    count = 2 ** (bits - 1)
    return [float32(low + j * ((high - low) / (count - 1))) for j in range(count)]


def sent(values, bits, k):
    """What the receiver decodes: the nearest level, the lower of two, with the sign of the value."""
    grid = levels(values, bits, k)
    if grid is None:
        return [float32(v) for v in values]
    return [math.copysign(min(grid, key=lambda level: (abs(abs(v) - level), level)), v) for v in values]
