"""Lossless difference of two tensors, near the entropy of its steps.

The bits of a float, ordered as integers, change by a step: units in the last place, positive away
from zero. A step is a symbol (its sign, and its size to three binary digits) and raw bits below.
Symbols are coded by ANS, with frequencies for each group of exponents of the old value. Groups and
frequencies are those of a sample of the tensor, and travel with it.

| message | after VERSION and kind |
|---|---|
| WHOLE | the new bytes |
| ZLIB | old XOR new, deflated |
| VALUES | slices: the number of values; the values; their frequencies and that of an escape; the number of words; words; escapes |
| STEPS | the number of groups, less one; the first exponents of all but the first; the sizes of their alphabets and of the common one; frequencies of all these; then slices |
| slice | the number of words; words of the groups, then of escapes; raw bits: whole bytes from the lowest on, then the bits above |

The last letter of a group's alphabet stands for a symbol of the common one. A group without letters
did not change. VALUES is for float32 entries that each change by one of few values, as those of a
mean of 1-bit messages do; an escape is a new entry. Frequencies are integers that add up to 2^24,
each at least one, so that the models of the coder are exact and equal on every machine.
"""  # noqa: E501 (a table row)

import importlib
import zlib
from collections.abc import Iterator
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # of NumPy, whose views and operators are untyped
VERSION = 1
_WHOLE, _ZLIB, _STEPS, _VALUES = range(1, 5)
_SHIFTS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
"""Types that are coded by steps: bits of the sign and below the exponent."""
_SYMBOLS = 248  # zero, and 123 sizes of either sign: what 32 bits need
_SLICE, _TOTAL, _MOST = 1 << 18, 1 << 24, 64  # entries, sum of frequencies, values


def encode(old: Tensor, new: Tensor) -> bytes:
    """Return what makes `new` of `old`, which are contiguous, alike, on the CPU; b"" if equal."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        got = " and ".join(f"{one.dtype} {tuple(one.shape)}" for one in (old, new))
        raise ValueError(f"two tensors of one dtype and shape are needed, got {got}")
    before, after, shift = _entries(old), _entries(new), _SHIFTS.get(old.dtype)
    if torch.equal(*(torch.from_numpy(entries.view(np.uint8)) for entries in (before, after))):
        return b""
    messages: list[bytes] = []
    if old.dtype == torch.float32 and (slices := _valued(before, after)):
        messages.append(b"".join((bytes((VERSION, _VALUES)), *slices)))
    if shift and (not messages or old.nbytes <= 4096):
        messages.append(b"".join((bytes((VERSION, _STEPS)), *_coded(before, after, shift))))
    if not shift or old.nbytes <= 4096:
        messages.append(bytes((VERSION, _ZLIB)) + zlib.compress(before ^ after))
    if len(shortest := min(messages, key=len)) < 2 + old.nbytes:
        return shortest
    return bytes((VERSION, _WHOLE)) + bytes(after)


def decode(old: Tensor, data: bytes) -> None:
    """Make `old` the new tensor in place; at a ValueError some of it may have changed."""
    if not data:
        return
    message, entries, shift = BytesIO(data), _entries(old), _SHIFTS.get(old.dtype)
    version, kind = _read(message, 2).tolist()
    if version != VERSION:
        raise ValueError(f"a difference of version {VERSION} is needed, got version {version}")
    if kind == _STEPS and shift:
        _decode_(entries, message, shift)
    elif kind == _VALUES and old.dtype == torch.float32:
        _decode_values_(entries, message)
    elif kind == _WHOLE:
        entries[:] = _read(message, old.nbytes).view(entries.dtype)
    elif kind == _ZLIB:
        inflater = zlib.decompressobj()
        try:
            plain = inflater.decompress(message.read(), old.nbytes + 1)
        except zlib.error as error:
            raise ValueError(f"the deflated bytes are damaged: {error}") from None
        if len(plain) != old.nbytes or not inflater.eof or inflater.unused_data:
            raise ValueError(f"{old.nbytes} deflated bytes are needed, the message has others")
        entries ^= np.frombuffer(plain, entries.dtype)
    else:
        raise ValueError(f"no kind of difference of {old.dtype} is {kind}: the bytes are damaged")
    if left := len(message.read()):
        raise ValueError(f"{left} bytes are left over: the bytes are damaged")


def _read(message: BytesIO, count: int) -> Array:
    part = message.read(count)
    if len(part) != count:
        raise ValueError(f"{count} more bytes are needed, {len(part)} are there")
    return np.frombuffer(part, np.uint8)


def _entries(tensor: Tensor) -> Array:
    """Return the bits as integers, of one byte for types that are not coded by steps."""
    size = tensor.element_size() if tensor.dtype in _SHIFTS else 1
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(f"u{size}")


def _coded(old: Array, new: Array, shift: int) -> Iterator[bytes]:
    """Yield groups and frequencies, then slices."""
    starts, tables = _fitted(old, new, shift)
    yield bytes((len(starts) - 1, *starts[1:], *map(len, tables))) + b"".join(tables)
    for at in range(0, old.size, _SLICE):
        before, after = old[at : at + _SLICE], new[at : at + _SLICE]
        changed = np.flatnonzero(before != after)
        steps = _steps(before[changed], after[changed])
        symbols = np.zeros(before.size, np.uint8)
        symbols[changed] = _symbols(steps)
        streams, escapes = [], [symbols[:0]]
        for table, members in _groups(before, starts, tables, shift):
            letters, escape = symbols[members], len(table) - 1
            escapes.append(letters[letters >= escape])
            streams.append((table, np.minimum(letters, escape)))
        streams.append((tables[-1].ljust(_SYMBOLS, b"\0"), np.concatenate(escapes)))
        yield _words(streams)
        raw, widths = np.minimum(steps, 0 - steps), _WIDTHS[symbols[changed]]
        for bit in (0, 8, 16):
            yield (raw[widths >= bit + 8] >> bit).astype(np.uint8).tobytes()
        top = (raw >> (widths & 24)).astype(np.uint8)
        for bit in range(7):
            yield np.packbits(top[widths & 7 > bit] & 1 << bit).tobytes()


def _decode_(old: Array, message: BytesIO, shift: int) -> None:
    """Change the entries in place."""
    count = int(_read(message, 1)[0]) + 1
    starts = [0, *_read(message, count - 1).tolist()]
    tables = [_read(message, size).tobytes() for size in _read(message, count + 1).tolist()]
    sizes = set(map(len, tables))
    if starts != sorted(set(starts)) or 1 in sizes or max(sizes) > _SYMBOLS + 1:
        raise ValueError("there are no such groups and alphabets: the bytes are damaged")
    for at in range(0, old.size, _SLICE):
        before = old[at : at + _SLICE]
        coder = _coder(message)
        symbols, escapes = np.zeros(before.size, np.uint8), [np.empty(0, np.intp)]
        for table, members in _groups(before, starts, tables, shift):
            symbols[members] = letters = _letters(coder, table, members.size)
            escapes.append(members[letters == len(table) - 1])
        rest = np.concatenate(escapes)
        symbols[rest] = _letters(coder, tables[-1].ljust(_SYMBOLS, b"\0"), rest.size, last=True)
        changed = np.flatnonzero(symbols)
        symbols = symbols[changed]
        steps, widths = _SIZES.astype(old.dtype)[symbols], _WIDTHS[symbols]
        for bit in (0, 8, 16):
            far = np.flatnonzero(widths >= bit + 8)
            steps[far] |= _read(message, far.size).astype(old.dtype) << bit
        for bit in range(7):
            far = np.flatnonzero(widths & 7 > bit)
            bits = np.unpackbits(_read(message, (far.size + 7) // 8), count=far.size)
            steps[far] |= bits.astype(old.dtype) << (widths[far] & 24) + bit
        steps, signs = np.where(symbols & 1, steps, 0 - steps), _signs(before[changed])
        before[changed] = _ordered((before[changed] ^ signs) + steps) ^ signs


def _valued(old: Array, new: Array) -> list[bytes] | None:
    """Return slices, or None if some entries change by other values than a few."""
    slices = []
    for at in range(0, old.size, _SLICE):
        before, after = (bits[at : at + _SLICE].view(np.float32) for bits in (old, new))
        with np.errstate(all="ignore"):
            change = before.astype(np.float64) - after
            if not np.isfinite(change).all() or (values := _values(change, after)).size > _MOST:
                return None
            letters = np.searchsorted(values[:-1] / 2 + values[1:] / 2, change).astype(np.uint8)
            found = before - values[letters]
        escapes = np.flatnonzero(found.view(np.uint32) != new[at : at + _SLICE])
        if escapes.size > before.size // 64:
            return None
        letters[escapes] = values.size
        table = _minifloat(np.bincount(letters, minlength=values.size + 1), 3).tobytes()
        head = bytes((values.size,)) + values.astype("<f4").tobytes() + table
        slices += [head, _words([(table, letters)]), after[escapes].tobytes()]
    return slices


def _values(change: Array, new: Array) -> Array:
    """Return the values of which each entry is one, but for the rounding of the new entries."""
    change, new = (entries[:: max(new.size >> 15, 1)] for entries in (change, new))
    half: Array = np.spacing(np.abs(new)).astype(np.float64) / 2
    finest = np.sort(half)[half.size // 4]
    fine = np.sort(change[half <= finest])
    rough = fine[np.diff(fine, prepend=-np.inf) > 3 * finest]
    near: Array = np.searchsorted(rough[:-1] / 2 + rough[1:] / 2, change)
    close = np.flatnonzero(np.abs(change - rough[near]) <= 2 * finest + half)
    near, change, half = near[close], change[close], half[close]
    least, most = np.full(rough.size, -np.inf), np.full(rough.size, np.inf)
    np.maximum.at(least, near, change - half)
    np.minimum.at(most, near, change + half)
    return (least / 2 + most / 2).astype(np.float32)


def _decode_values_(old: Array, message: BytesIO) -> None:
    """Change the entries in place."""
    for at in range(0, old.size, _SLICE):
        before = old[at : at + _SLICE].view(np.float32)
        count = int(_read(message, 1)[0])
        values = np.append(_read(message, 4 * count).view("<f4"), np.float32(0))
        table = _read(message, count + 1).tobytes()
        letters = _letters(_coder(message), table, before.size, last=True)
        before -= values[letters]
        escapes = np.flatnonzero(letters == count)
        before[escapes] = _read(message, 4 * escapes.size).view("<f4")


def _groups(old: Array, starts: list[int], tables: list[bytes], shift: int) -> Iterator[Any]:
    """Yield the frequencies and the entries of each group that changes."""
    exponents = (old << 1 >> shift).astype(np.uint8)
    for table, start, end in zip(tables, starts, [*starts[1:], 256], strict=False):
        if table:
            yield table, np.flatnonzero(exponents - start < end - start)


def _fitted(old: Array, new: Array, shift: int) -> tuple[list[int], list[bytes]]:
    """Return the first exponents of groups, which take the fewest bits, and all frequencies."""
    thin = max(min(old.size >> 18, 8), old.size >> 21)
    if thin > 1:  # one run of entries in so many
        whole = slice(old.size // 4096 * 4096)
        old, new = (entries[whole].reshape(-1, 4096)[::thin].ravel() for entries in (old, new))
    keys = (old << 1 >> shift).astype(np.uint16) * np.uint16(256) + _symbols(_steps(old, new))
    counts = np.bincount(keys, minlength=1 << 16).reshape(256, 256)[:, :_SYMBOLS]
    present = np.flatnonzero(counts.any(1))
    total = np.cumsum(np.pad(counts[present], ((1, 0), (0, 0))), 0)
    best, first = [0.0], [0]
    for end in range(1, present.size + 1):
        group = total[end] - total[:end]
        shares = np.maximum(group, 1) / group.sum(1, keepdims=True)
        # a group takes 24 bits, and time: as much as a bit for 4096 entries
        bits = (np.minimum(group, 8) - group * np.log2(shares)).sum(1) + 24 + old.size / 4096
        bits += best
        first.append(int(bits.argmin()))
        best.append(float(bits.min()))
    starts, tables = list[int](), list[bytes]()
    common, end = np.zeros(_SYMBOLS, np.int64), present.size
    while end:
        start = first[end]
        group = total[end] - total[start]
        rest = group[::-1].cumsum()[::-1] - group  # beyond an alphabet of 1, 2, ... symbols
        size = int((8 * np.arange(_SYMBOLS) + rest).argmin()) + 1
        common[size:] += group[size:]
        table = _minifloat(np.append(group[:size], max(rest[size - 1], thin > 1)), 3).tobytes()
        tables.insert(0, table if thin > 1 or group[1:].any() else b"")
        starts.insert(0, int(present[start]) if start else 0)
        end = start
    return starts, [*tables, _minifloat(common, 3).tobytes().rstrip(b"\0")]


def _steps(old: Array, new: Array) -> Array:
    """Return the steps from `old` to `new`, which wrap."""
    signs = _signs(old)
    return _ordered(new ^ signs) - (old ^ signs)


def _signs(bits: Array) -> Array:
    return bits & bits.dtype.type(1 << 8 * bits.itemsize - 1)


def _ordered(bits: Array) -> Array:
    """Return integers in the order of these floats, in two's complement; its own inverse."""
    return bits ^ ((bits.view(f"i{bits.itemsize}") >> 31).view(bits.dtype) >> 1)


def _symbols(steps: Array) -> Array:
    if steps.itemsize == 2:
        return _OF_TWO_BYTES[steps]
    sizes = np.minimum(steps, 0 - steps)
    return 2 * _minifloat(sizes, 2) - (steps - 1 < sizes)


def _minifloat(values: Array, digits: int) -> Array:
    """Return codes of counts: exponent and `digits` binary digits below the first, rounded down."""
    bits = values.astype(np.float64).view(np.int64) >> 52 - digits
    bits -= 1022 + digits << digits
    return np.where(values < 1 << digits, values, bits).astype(np.uint8)


def _least(codes: Array, digits: int) -> Array:
    """Return the least count that has each code."""
    shift = np.maximum((codes >> digits) - 1, 0)
    return codes - (shift << digits) << shift


_SIZES = _least((np.arange(_SYMBOLS) + 1) // 2, 2)
"""The least size of each symbol; the steps of odd symbols lead away from zero."""
_WIDTHS = np.maximum((np.arange(_SYMBOLS) + 1) // 8 - 1, 0).astype(np.uint8)
"""Raw bits that follow each symbol."""
_OF_TWO_BYTES = _symbols(np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.uint32))


def _words(streams: list[tuple[bytes, Array]]) -> bytes:
    """Return the number of words, and words that hold all letters, each stream by its table."""
    coder = extra("constriction").stream.stack.AnsCoder()
    for table, letters in reversed(streams):
        block, model, _ = _model(table, letters.size >= 2048)
        blocks = np.pad(letters, (0, -letters.size % block)).reshape(-1, block)
        powers = (len(table) ** np.arange(block)[::-1]).astype(np.uint16)
        coder.encode_reverse((blocks @ powers).astype(np.int32), model)
    words: Array = coder.get_compressed().astype("<u4")
    return bytes(words.size.to_bytes(3, "little") + words.tobytes())


def _coder(message: BytesIO) -> Any:
    words = _read(message, 4 * int.from_bytes(_read(message, 3), "little")).view("<u4")
    return extra("constriction").stream.stack.AnsCoder(words.astype(np.uint32))


def _letters(coder: Any, table: bytes, count: int, *, last: bool = False) -> Array:
    block, model, letters = _model(table, count >= 2048, decoding=True)
    found = letters[coder.decode(model, -(-count // block))].view(np.uint8)[:count]
    if last and not coder.is_empty():
        raise ValueError("more words came than these entries need: the bytes are damaged")
    return found


@lru_cache(64)
def _model(table: bytes, many: bool, *, decoding: bool = False) -> tuple[int, Any, Array]:
    """Return the size of blocks of letters, constriction's model of these, and the letters of each.

    The model scales frequencies to add up to 2^24 minus their number, and adds one to each. These
    are integers that add up to that already, so none of its operations on them rounds.
    """
    block = max(b for b in (1, 2, 4, 8) if b == 1 or (many and len(table) ** b <= 4096))
    counts = _least(np.frombuffer(table, np.uint8).astype(np.int64), 3)
    counts += not counts.any()
    shares = counts * _TOTAL // counts.sum()
    for _ in range(block.bit_length() - 1):
        shares = np.outer(shares, shares).ravel() // _TOTAL
    free = _TOTAL - shares.size
    shares = shares * free // _TOTAL
    shares[shares.argmax()] += free - shares.sum()
    # a search from the first letter on, where that is short, finds the same
    lazy = decoding and bool(shares @ np.arange(shares.size) < free * shares.size.bit_length())
    categorical = extra("constriction").stream.model.Categorical
    model = categorical(shares.astype(np.float32), perfect=False, lazy=lazy)
    letters = np.indices((len(table),) * block, np.uint8).reshape(block, -1).T.copy()
    return block, model, letters.view(f"u{block}")[:, 0]


def extra(name: str) -> Any:
    """Return a package of the extra `[stream]`, or raise an `ImportError` that names it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"publish and follow need {name.partition('.')[0]}: pip install 'thinwire[stream]'"
        raise ImportError(text) from error
