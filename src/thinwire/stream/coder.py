"""Lossless difference of two tensors, near the entropy of its steps.

The bits of a float, ordered as integers, change by a step: a number of units in the last place,
positive away from zero. A step is a symbol (its sign and its size, to three binary digits) and raw
bits below. Symbols are coded by ANS with frequencies for each group of exponents of the old value;
groups and frequencies are those of a slice of the tensor, and travel with it.

    message  VERSION, kind, then
    SAME     nothing: the tensors are equal
    WHOLE    the new bytes
    ZLIB     old XOR new, deflated
    STEPS    slices of 2^21 entries

    slice    g - 1, then the first exponents of groups 1 to g - 1,
             the sizes of g + 1 alphabets (0: all entries are zero), and their frequencies,
             the number of words, and these: groups 0 to g - 1, then escapes,
             whole raw bytes, then the raw bits left

The last letter of a group's alphabet is an escape to the common alphabet that follows. Frequencies
are integers that add up to 2^24, each at least one, so that the coder's models are exact and equal
on every machine.
"""

import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
"""An array of NumPy, whose views and operators are untyped."""

VERSION = 1
_SAME, _WHOLE, _ZLIB, _STEPS = range(4)
_SLICE = 1 << 21
_EXPONENTS = {torch.bfloat16: (7, 255), torch.float16: (10, 31), torch.float32: (23, 255)}
"""Shift and mask of the exponent in the bits of each coded type."""
_SYMBOLS = 248
"""Zero, and 123 sizes of either sign."""
_TOTAL = 1 << 24
_SMALL = 4096
"""Bytes below which deflating is tried for floats too."""
_LARGEST_MODEL = 4096
"""Most blocks of letters in a model."""
_GROUP_COSTS = 8192
"""A group takes time: as much as a bit for so many entries."""


def encode(old: Tensor, new: Tensor) -> bytes:
    """Return what makes `new` of `old`: contiguous tensors of one dtype and shape on the CPU."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(
            f"two tensors of one dtype and shape are needed, got {old.dtype} {tuple(old.shape)} "
            f"and {new.dtype} {tuple(new.shape)}"
        )
    before, after = _bytes(old), _bytes(new)
    if np.array_equal(before, after):
        return bytes((VERSION, _SAME))
    messages = [bytes((VERSION, _WHOLE)) + after.tobytes()]
    exponent = _EXPONENTS.get(old.dtype)
    if exponent:
        unsigned = f"u{old.element_size()}"
        parts = zip(_slices(before.view(unsigned)), _slices(after.view(unsigned)), strict=True)
        coded = (_encoded(*part, *exponent) for part in parts)
        messages.append(b"".join((bytes((VERSION, _STEPS)), *coded)))
    if not exponent or before.size <= _SMALL:
        messages.append(bytes((VERSION, _ZLIB)) + zlib.compress(before ^ after, 6))
    return min(messages, key=len)


def decode(old: Tensor, data: bytes) -> None:
    """Make `old` the new tensor in place; at a ValueError some of it may have changed."""
    read, before = _Reader(data), _bytes(old)
    if (version := read.byte()) != VERSION:
        raise ValueError(f"a difference of version {VERSION} is needed, got version {version}")
    kind, exponent = read.byte(), _EXPONENTS.get(old.dtype)
    if kind == _STEPS and exponent:
        for part in _slices(before.view(f"u{old.element_size()}")):
            _decode_(part, read, *exponent)
    elif kind == _WHOLE:
        before[:] = read.array(before.size)
    elif kind == _ZLIB:
        before ^= _inflated(read.array(len(data) - 2), before.size)
    elif kind != _SAME:
        raise ValueError(f"no kind of difference of {old.dtype} is {kind}: the bytes are damaged")
    read.check_end()


class _Reader:
    """Takes values from a message, never beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = np.frombuffer(data, np.uint8), 0

    def array(self, count: int) -> Array:
        if count > self._data.size - self._at:
            raise ValueError(f"{count} more bytes are needed, {self._data.size - self._at} came")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return int(self.array(1)[0])

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def check_end(self) -> None:
        if self._at != self._data.size:
            raise ValueError(f"{self._data.size - self._at} bytes are left over")


def _bytes(tensor: Tensor) -> Array:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _slices(entries: Array) -> Iterator[Array]:
    return (entries[start : start + _SLICE] for start in range(0, entries.size, _SLICE))


def _inflated(data: Array, size: int) -> Array:
    """Return the bytes of a deflated array of this size."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"the deflated bytes are damaged: {error}") from None
    if len(plain) != size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"{size} deflated bytes are needed, the message has another number")
    return np.frombuffer(plain, np.uint8)


def _encoded(old: Array, new: Array, shift: int, mask: int) -> bytes:
    """Return the code of one slice."""
    changed = _where(old != new)
    symbols = np.zeros(old.size, np.uint8)
    symbols[changed], raw, widths = _split(_steps(old[changed], new[changed]))
    exponents = (old >> shift & mask).astype(np.uint8)
    starts, tables = _fitted(_histogram(exponents, symbols))
    streams, escaped = [], []
    for k, (start, end) in enumerate(pairwise((*starts, 256))):
        index = _members(exponents, start, end)
        letters = symbols[index]
        if not tables[k].size and letters.any():
            tables[k] = np.array([_minifloat(letters.size, 3), 0], np.uint8)
        if tables[k].size:
            escaped.append(letters[letters >= tables[k].size - 1])
            streams.append((np.minimum(letters, tables[k].size - 1), tables[k]))
    escapes = np.concatenate((*escaped, symbols[:0]))
    tables.append(_minifloat(np.bincount(escapes), 3).astype(np.uint8))
    streams.append((escapes, tables[-1]))
    coder = _constriction().stream.stack.AnsCoder()
    for letters, table in reversed(streams):
        if letters.size:
            block = _block(table.size, letters.size)
            coder.encode_reverse(_joined(letters, table.size, block), _model(table, block))
    words = coder.get_compressed().astype("<u4")
    sizes = [table.size for table in tables]
    head = bytes((len(starts) - 1, *starts[1:], *sizes)) + b"".join(map(bytes, tables))
    return b"".join((head, _varint(words.size), words.tobytes(), _packed(raw, widths)))


def _histogram(exponents: Array, symbols: Array) -> Array:
    """Return counts of symbols by exponent, shape (256, 256); those of long slices by samples."""
    changed = np.flatnonzero(symbols)
    thin = max(1, changed.size >> 18)
    keys = exponents[changed[::thin]] * np.intp(256) + symbols[changed[::thin]]
    counts = thin * np.bincount(keys, minlength=1 << 16).reshape(256, 256)
    thin = max(1, exponents.size >> 18)
    entries = thin * np.bincount(exponents[::thin], minlength=256)
    counts[:, 0] = np.maximum(entries - counts.sum(1), 0)
    return counts


def _fitted(counts: Array) -> tuple[list[int], list[Array]]:
    """Return the first exponents of groups and their tables, which take the fewest bits."""
    exponents = np.flatnonzero(counts.any(1))
    total = np.zeros((exponents.size + 1, 256), np.int64)
    np.cumsum(counts[exponents], 0, out=total[1:])
    best, came_from = [0.0], [0]
    for end in range(1, exponents.size + 1):
        group = total[end] - total[:end]
        bits = _bits(group.sum(1)) - _bits(group).sum(1) + np.minimum(group, 8).sum(1)
        bits += np.array(best) + 24 + total[-1].sum() / _GROUP_COSTS
        came_from.append(int(bits.argmin()))
        best.append(float(bits.min()))
    starts: list[int] = []
    tables: list[Array] = []
    end = exponents.size
    while end:
        start = came_from[end]
        starts.insert(0, int(exponents[start]) if start else 0)
        tables.insert(0, _table(total[end] - total[start]))
        end = start
    return starts, tables


def _bits(counts: Array) -> Array:
    """Return n log2 n."""
    return counts * np.log2(np.maximum(counts, 1))


def _table(counts: Array) -> Array:
    """Return the frequencies of a group's letters, the escape last; none if nothing changed."""
    if not counts[1:].any():
        return np.empty(0, np.uint8)
    above = counts[::-1].cumsum()[::-1][1 : _SYMBOLS + 1]  # with an alphabet of 1, 2, ... symbols
    size = int((8 * np.arange(_SYMBOLS) + above).argmin()) + 1
    return _minifloat(np.append(counts[:size], above[size - 1]), 3).astype(np.uint8)


def _members(exponents: Array, start: int, end: int) -> Array:
    """Return where the exponents are in [start, end)."""
    return np.flatnonzero(exponents - start < end - start)


def _where(changed: Array) -> Array | slice:
    """Return an index of the changed entries, or of all of them where that is faster."""
    return np.flatnonzero(changed) if 8 * np.count_nonzero(changed) < changed.size else slice(None)


def _block(size: int, count: int) -> int:
    """Return how many letters are coded as one."""
    fitting = [block for block in (1, 2, 4, 8) if size**block <= _LARGEST_MODEL]
    return fitting[-1] if count >= 2048 else 1


def _joined(letters: Array, size: int, block: int) -> Array:
    """Return blocks of letters as numbers, the last block filled with zeros."""
    joined = np.zeros(-(-letters.size // block) * block, np.uint16)
    joined[: letters.size] = letters
    while block > 1:
        joined = joined[0::2] * np.uint16(size) + joined[1::2]
        size, block = size * size, block // 2
    return joined.astype(np.int32)


def _letters(coder: Any, table: Array, count: int) -> Array:
    """Return letters that the coder decodes."""
    if not count:
        return np.empty(0, np.uint8)
    block = _block(table.size, count)
    blocks = coder.decode(_model(table, block, decoding=True), -(-count // block))
    return _digits(table.size, block)[blocks].view(np.uint8)[:count]


@lru_cache
def _digits(size: int, block: int) -> Array:
    """Return the letters of each block, as the bytes of one integer."""
    digits = np.indices((size,) * block, np.uint8).reshape(block, -1)
    return digits.T.copy().view(f"u{block}")[:, 0]


def _model(table: Array, block: int, *, decoding: bool = False) -> Any:
    """Return constriction's model of independent letters in blocks.

    The model takes relative frequencies, scales them to add up to 2^24 minus their number, and adds
    one to each. These are integers that add up to that already, so no operation on them rounds.
    """
    counts = _least(table.astype(np.int64), 3)
    if counts.size < 2 or not counts.any():
        raise ValueError("a table of frequencies is empty: the bytes are damaged")
    shares = counts * _TOTAL // counts.sum()
    for _ in range(block.bit_length() - 1):
        shares = np.outer(shares, shares).ravel() // _TOTAL
    free = _TOTAL - shares.size
    shares = shares * free // _TOTAL
    shares[shares.argmax()] += free - shares.sum()
    # a search from the first letter on, instead of one by halves, with the same frequencies
    lazy = decoding and bool(shares[0] > 0.75 * free)
    model = _constriction().stream.model.Categorical
    return model(shares.astype(np.float32), perfect=False, lazy=lazy)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError:
        raise ModuleNotFoundError(
            "differences of weights need constriction: pip install 'thinwire[stream]'"
        ) from None
    return constriction


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _packed(raw: Array, widths: Array) -> bytes:
    """Return the low whole bytes of numbers of so many bits, then the bits above, without gaps."""
    whole = raw.view(np.uint8).reshape(raw.size, raw.itemsize)
    top = (raw >> (widths & 24)).astype(np.uint8)[:, None]
    bits = np.unpackbits(top, axis=1, bitorder="little")[_columns(8) < (widths & 7)[:, None]]
    low = whole[_columns(raw.itemsize) < (widths >> 3)[:, None]]
    return low.tobytes() + np.packbits(bits, bitorder="little").tobytes()


def _unpacked(read: _Reader, widths: Array, itemsize: int) -> Array:
    """Return what `_packed` wrote."""
    whole = np.zeros((widths.size, itemsize), np.uint8)
    low = _columns(itemsize) < (widths >> 3)[:, None]
    whole[low] = read.array(int(np.count_nonzero(low)))
    above = _columns(8) < (widths & 7)[:, None]
    top, count = np.zeros((widths.size, 8), np.uint8), int(np.count_nonzero(above))
    top[above] = np.unpackbits(read.array(-(-count // 8)), count=count, bitorder="little")
    high = np.packbits(top, axis=1, bitorder="little")[:, 0].astype(f"u{itemsize}")
    return whole.view(f"u{itemsize}")[:, 0] | high << (widths & 24)


def _columns(count: int) -> Array:
    return np.arange(count, dtype=np.uint8)


def _decode_(old: Array, read: _Reader, shift: int, mask: int) -> None:
    """Change one slice in place."""
    exponents = (old >> shift & mask).astype(np.uint8)
    groups = read.byte() + 1
    starts = [0, *read.array(groups - 1).tolist(), 256]
    if any(start >= end for start, end in pairwise(starts)):
        raise ValueError("the groups of exponents are not in order: the bytes are damaged")
    tables = [read.array(size) for size in read.array(groups + 1).tolist()]
    words = read.array(4 * read.varint()).view("<u4").astype(np.uint32)
    coder = _constriction().stream.stack.AnsCoder(words)
    symbols, escaped = np.zeros(old.size, np.uint8), [np.empty(0, np.intp)]
    for table, (start, end) in zip(tables, pairwise(starts), strict=False):
        if table.size:
            index = _members(exponents, start, end)
            letters = _letters(coder, table, index.size)
            symbols[index] = letters
            escaped.append(index[letters == table.size - 1])
    escapes = np.concatenate(escaped)
    symbols[escapes] = _letters(coder, tables[-1], escapes.size)
    if not coder.is_empty() or symbols.max() >= _SYMBOLS:
        raise ValueError("the coded words do not end with the entries: the bytes are damaged")
    changed = _where(symbols > 0)
    symbols = symbols[changed]
    steps = _BASES.astype(f"i{old.itemsize}")[symbols]
    far = np.flatnonzero(_WIDTHS[symbols])
    raw = _unpacked(read, _WIDTHS[symbols[far]], old.itemsize).view(steps.dtype)
    steps[far] += np.where(symbols[far] & 1, raw, -raw)
    old[changed] = _moved(old[changed], steps)


def _steps(old: Array, new: Array) -> Array:
    """Return the steps from `old` to `new`, signed; they wrap."""
    sign = old & old.dtype.type(1 << 8 * old.itemsize - 1)
    return _ordered(new ^ sign) - (old ^ sign).view(f"i{old.itemsize}")


def _moved(old: Array, steps: Array) -> Array:
    sign = old & old.dtype.type(1 << 8 * old.itemsize - 1)
    return _ordered((old ^ sign) + steps.view(old.dtype)).view(old.dtype) ^ sign


def _ordered(bits: Array) -> Array:
    """Return integers in the order of these floats; its own inverse."""
    signed = bits.view(f"i{bits.itemsize}")
    return signed ^ (signed >> 8 * bits.itemsize - 1 & np.iinfo(signed.dtype).max)


def _split(steps: Array) -> tuple[Array, Array, Array]:
    """Return the symbols of steps; the raw bits of those that have some, and their numbers."""
    two_bytes = steps.itemsize == 2
    symbols = _symbols_of_two_bytes()[steps.view(np.uint16)] if two_bytes else _symbols(steps)
    widths = _WIDTHS[symbols]
    far = np.flatnonzero(widths)
    sizes, widths = np.abs(steps[far]).view(f"u{steps.itemsize}"), widths[far]
    return symbols, sizes & ((1 << widths.astype(sizes.dtype)) - 1), widths


def _symbols(steps: Array) -> Array:
    sizes = np.abs(steps).view(f"u{steps.itemsize}")
    return (2 * _minifloat(sizes, 2) - (steps > 0)).astype(np.uint8)


@lru_cache(1)
def _symbols_of_two_bytes() -> Array:
    return _symbols(np.arange(1 << 16, dtype=np.uint16).view(np.int16))


def _minifloat(values: Array | int, digits: int) -> Array:
    """Return codes of counts: exponent and `digits` binary digits below the first, rounded down."""
    values = np.asarray(values)
    bits = values.astype(np.float64).view(np.int64) >> 52 - digits
    return np.where(values < 1 << digits, values, bits - (1022 + digits << digits)).astype(np.int64)


def _least(codes: Array, digits: int) -> Array:
    """Return the least count that has each code."""
    shift = np.maximum((codes >> digits) - 1, 0)
    return codes - (shift << digits) << shift


_CODES = (np.arange(_SYMBOLS) + 1) // 2
_WIDTHS = np.maximum((_CODES >> 2) - 1, 0).astype(np.uint8)
"""Raw bits that follow each symbol."""
_BASES = np.where(np.arange(_SYMBOLS) & 1, 1, -1) * _least(_CODES, 2)
"""The smallest step of each symbol; odd symbols lead away from zero."""
