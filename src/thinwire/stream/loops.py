"""Compiled loops of the coder: rANS with two states, on integers alone.

A state is in [2^16, 2^32), and gives and takes words of 16 bits. Entries take turns at the states,
so that two chains of operations run side by side. The encoder goes from the last entry to the
first, and fills the words from their end. A row of `bounds` belongs to an exponent: symbol s has
the slots from `bounds[row, s]` on, below `bounds[row, s + 1]`, of 2^16. `firsts` has the symbol of
the first slot of each run. Raw bits take a part of the slots each.

A `coder` is three numbers (the states, and the index of the next word) and the words. Nothing
checks an index: those that come from a message are bounded by the tables, or by `min`. Numbers are
unsigned: a signed index might count from the end, which costs a comparison each.

Source: Duda 2013, arXiv 1311.2540, and Giesen 2014, arXiv 1402.3392. Differs: nothing.
"""

from typing import Any

import numpy as np

from thinwire.kernels.loops import inner, loop

Array = Any
Coder = tuple[Array, Array]
u64: Any = np.uint64
ZERO = u64(0)
ONE = u64(1)
NEXT = u64(2)
"""Where a coder has the index of the next word."""
WORD = u64(16)
"""Bits."""
LOW = u64(0xFFFF)
RUN_BITS = u64(6)
"""Of the slots that share an entry of `firsts`."""
ROOM = u64(3)
"""Words that an entry may take."""


@inner
def put(coder: Coder, lane: Any, low: Any, high: Any) -> None:
    """Encode the slots [low, high)."""
    numbers, words = coder
    state = numbers[lane]
    share = high - low
    # written always, kept by the index: no branch to be mispredicted
    words[numbers[NEXT] - ONE] = state
    full = u64(state >= share << WORD)
    numbers[NEXT] -= full
    state >>= full * WORD
    # 32 bits: processors divide 64 much slower
    quotient = u64(np.uint32(state) // np.uint32(share))
    numbers[lane] = (quotient << WORD) + (state - quotient * share) + low


@inner
def take(coder: Coder, lane: Any, low: Any, high: Any) -> None:
    """Go on behind the slots [low, high), one of which came."""
    numbers, words = coder
    state = numbers[lane]
    state = (high - low) * (state >> WORD) + (state & LOW) - low
    # read always, for the same reason; a damaged message may ask for too many
    word = u64(words[min(numbers[NEXT], u64(len(words)) - ONE)])
    short = state <= LOW
    numbers[lane] = state << WORD | word if short else state
    numbers[NEXT] += u64(short)


@inner
def exponent_of(bits: Any, top: Any, digits: int) -> Any:
    """Return the bits of the exponent; `top` is the bit of the sign."""
    return (bits & top - ONE) >> u64(digits)


@inner
def ordered(bits: Any, top: Any) -> Any:
    """Return integers in the order of floats, in two's complement; its own inverse."""
    return bits ^ top - ONE if bits & top else bits


@inner
def symbol_of(old: Any, new: Any, top: Any) -> Any:
    """Return the symbol of a step, and its size; `top` is the bit of the sign."""
    sign = old & top
    step = ordered(new ^ sign, top) - (old ^ sign) & top + top - ONE
    size = min(step, top + top - step)
    code = size
    if size >= u64(4):  # the exponent and two digits
        code = (np.float64(np.int64(size)).view(np.uint64) >> u64(50)) - u64(4096)
    return code + code - u64(step < top and step > ZERO), size


@inner
def raw_bits(symbol: Any) -> Any:
    """Return how many bits of the size follow a symbol."""
    return max(symbol + ONE >> u64(3), ONE) - ONE


@loop
def count_steps(old: Array, new: Array, digits: int, counts: Array) -> None:
    """Count each symbol by the exponent of the old value."""
    top = ONE << u64(8 * old.itemsize - 1)
    for i in range(u64(len(old))):
        before = u64(old[i])
        symbol, _ = symbol_of(before, u64(new[i]), top)
        counts[exponent_of(before, top, digits), symbol] += 1


@loop
def push_steps(old: Array, new: Array, digits: int, bounds: Array, coder: Coder) -> None:
    """Encode all steps; stops where the words have no room for another."""
    top = ONE << u64(8 * old.itemsize - 1)
    i = u64(len(old))
    while i > ZERO and coder[0][NEXT] >= ROOM:
        i -= ONE
        lane = i & ONE
        before = u64(old[i])
        symbol, size = symbol_of(before, u64(new[i]), top)
        end = raw_bits(symbol)
        while end > ZERO:
            begin = end - ONE & WORD
            shift = WORD - (end - begin)
            raw = (size >> begin << shift) & LOW
            put(coder, lane, raw, raw + (ONE << shift))
            end = begin
        row = exponent_of(before, top, digits)
        put(coder, lane, bounds[row, symbol], bounds[row, symbol + ONE])


@loop
def pop_steps(old: Array, digits: int, bounds: Array, firsts: Array, coder: Coder) -> None:
    """Change all entries by their steps."""
    top = ONE << u64(8 * old.itemsize - 1)
    for i in range(u64(len(old))):
        lane = i & ONE
        before = u64(old[i])
        row = exponent_of(before, top, digits)
        slot = coder[0][lane] & LOW
        symbol = u64(firsts[row, slot >> RUN_BITS])
        while slot >= bounds[row, symbol + ONE]:  # ends at the last symbol, whose bound is 2^16
            symbol += ONE
        take(coder, lane, bounds[row, symbol], bounds[row, symbol + ONE])
        end = raw_bits(symbol)
        size = (symbol + ONE >> ONE) - (end << u64(2)) << end
        begin = ZERO
        while begin < end:
            shift = WORD - min(end - begin, WORD)
            raw = (coder[0][lane] & LOW) >> shift
            take(coder, lane, raw << shift, raw + ONE << shift)
            size |= raw << begin
            begin += WORD
        step = size if symbol & ONE else ZERO - size
        sign = before & top
        old[i] = ordered((before ^ sign) + step & top + top - ONE, top) ^ sign


@loop
def find_values(old: Array, new: Array, values: Array, letters: Array) -> None:
    """Find the first value that makes of an old entry the bits of the new; else their number."""
    for i in range(u64(len(old))):
        letter = ZERO
        while (
            letter < len(values) and np.float32(old[i] - values[letter]).view(np.uint32) != new[i]
        ):
            letter += ONE
        letters[i] = letter
