"""Lossless difference of two tensors, near the entropy of its steps.

The bits of a float, ordered as integers, change by a step: units in the last place, positive away
from zero. A step is a symbol (its sign, and its size to three binary digits) and raw bits below.
Symbols are coded by rANS, with frequencies for each group of exponents of the old value.

| message | after VERSION and kind |
|---|---|
| WHOLE | the new bytes |
| ZLIB | old XOR new, deflated, without head and checksum |
| VALUES | slices: the number of values and of escapes; values; escapes; letters, as STEPS from zeros |
| STEPS | the number of groups, less one; the first exponents of all but the first; the length of deflated codes; these, as in ZLIB; two states; the number of words; words |

VALUES is for float32 entries that each change by one of few values, as those of a mean of 1-bit
messages do. A letter is the index of an entry's value, or the number of values for an escape: a new
entry. Codes are the frequencies of all symbols in each group, to four binary digits. They are made
to add up to 2^16 with integers alone, as all of the coder in `loops`, so that every machine decodes
the same.
"""  # noqa: E501 (a table row)

import importlib
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # of NumPy, whose views and operators are untyped
VERSION = 2
_WHOLE, _ZLIB, _STEPS, _VALUES = range(1, 5)
_DIGITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
"""Types that are coded by steps: bits below the exponent."""
_SYMBOLS = 241  # zero, and 120 sizes of either sign: what 32 bits need
_LETTER = 15  # bits that are no exponent
_SLICE = 1 << 18  # entries that have values of their own
_MOST = 64  # values
_TOTAL = 1 << 16  # of frequencies
_STATE = 1 << 16  # at the beginning, and after the last entry


def encode(old: Tensor, new: Tensor) -> bytes:
    """Return what makes `new` of `old`, which are contiguous, alike, on the CPU; b"" if equal."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        got = " and ".join(f"{one.dtype} {tuple(one.shape)}" for one in (old, new))
        raise ValueError(f"two tensors of one dtype and shape are needed, got {got}")
    before = _entries(old)
    after = _entries(new)
    raw = [torch.from_numpy(entries.view(np.uint8)) for entries in (before, after)]
    if torch.equal(*raw):
        return b""
    digits = _DIGITS.get(old.dtype)
    kind = _VALUES
    body = _valued(before, after) if old.dtype == torch.float32 else b""
    if digits and not body:
        kind = _STEPS
        body = _stepped(before, after, digits)
    elif not digits:
        kind = _ZLIB
        body = zlib.compress(before ^ after, wbits=-zlib.MAX_WBITS)
    if len(body) >= min(old.nbytes, 1 << 33):  # the number of words takes 32 bits
        kind = _WHOLE
        body = bytes(after)
    return bytes((VERSION, kind)) + body


def decode(old: Tensor, data: bytes | bytearray | memoryview) -> None:
    """Make `old` the new tensor in place; at a ValueError some of it may have changed."""
    if not data:
        return
    message = BytesIO(data)
    entries = _entries(old)
    digits = _DIGITS.get(old.dtype)
    version, kind = _read(message, 2).tolist()
    if version != VERSION:
        raise ValueError(f"a difference of version {VERSION} is needed, got version {version}")
    if kind == _STEPS and digits:
        _step_(entries, message, digits)
    elif kind == _VALUES and old.dtype == torch.float32:
        _subtract_values_(entries.view(np.float32), message)
    elif kind == _WHOLE:
        entries[:] = _read(message, old.nbytes).view(entries.dtype)
    elif kind == _ZLIB:
        entries ^= _inflated(message.read(), old.nbytes).view(entries.dtype)
    else:
        raise ValueError(f"no kind of difference of {old.dtype} is {kind}: the bytes are damaged")
    if left := len(message.read()):
        raise ValueError(f"{left} bytes are left over: the bytes are damaged")


def _read(message: BytesIO, count: int) -> Array:
    part = message.read(count)
    if len(part) != count:
        raise ValueError(f"{count} more bytes are needed, {len(part)} are there")
    return np.frombuffer(part, np.uint8)


def _integer(message: BytesIO, count: int) -> int:
    return int.from_bytes(_read(message, count).tobytes(), "little")


def _inflated(data: bytes, count: int) -> Array:
    """Return so many bytes of a deflated stream without head and checksum."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain = inflater.decompress(data, count + 1)
    except zlib.error as error:
        raise ValueError(f"the deflated bytes are damaged: {error}") from None
    if len(plain) != count or not inflater.eof or inflater.unused_data:
        raise ValueError(f"{count} deflated bytes are needed, the message has others")
    return np.frombuffer(plain, np.uint8)


def _entries(tensor: Tensor) -> Array:
    """Return the bits as integers, of one byte for types that are not coded by steps."""
    size = tensor.element_size() if tensor.dtype in _DIGITS else 1
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(f"u{size}")


def _stepped(old: Array, new: Array, digits: int) -> bytes:
    """Return groups, codes, states and words; not all words if they take more than the tensor."""
    loops = _loops()
    counts = np.zeros((256, _SYMBOLS), np.int64)
    loops.count_steps(old, new, digits, counts)
    starts, codes = _grouped(counts)
    bounds, _ = _tables(starts, codes)
    # with all words taken a message is longer than the tensor, and `encode` sends the tensor
    words: Array = np.empty(old.nbytes // 2, np.uint16)
    numbers = np.array([_STATE, _STATE, words.size], np.uint64)
    loops.push_steps(old, new, digits, bounds, (numbers, words))
    words = words[int(numbers[2]) :]
    numbers[2] = words.size
    deflated = zlib.compress(codes, 9, -zlib.MAX_WBITS)
    parts = [
        bytes((len(starts) - 1, *starts[1:])),
        len(deflated).to_bytes(2, "little"),
        deflated,
        numbers.astype("<u4").tobytes(),
        words.astype("<u2", copy=False),
    ]
    return b"".join(parts)


def _step_(old: Array, message: BytesIO, digits: int) -> None:
    """Change the entries in place."""
    starts = [0, *_read(message, _integer(message, 1)).tolist()]
    deflated = _read(message, _integer(message, 2)).tobytes()
    codes = _inflated(deflated, len(starts) * _SYMBOLS)
    bounds, firsts = _tables(starts, codes.reshape(-1, _SYMBOLS))
    numbers = _read(message, 12).view("<u4").astype(np.uint64)
    words = _read(message, 2 * int(numbers[2])).view("<u2")
    numbers[2] = 0
    # the loop may read one more
    padded = np.pad(words, (0, 1)).astype(np.uint16, copy=False)
    _loops().pop_steps(old, digits, bounds, firsts, (numbers, padded))
    if numbers.tolist() != [_STATE, _STATE, words.size]:
        raise ValueError("these words do not code these entries: the bytes are damaged")


def _grouped(counts: Array) -> tuple[list[int], Array]:
    """Return the first exponents of groups, which take the fewest bits, and codes of frequencies.

    A code is an exponent and 3 binary digits below the first, rounded.
    """
    present = np.flatnonzero(counts.any(1))
    total = np.pad(counts[present].cumsum(0), ((1, 0), (0, 0)))
    total = total[:, total[-1] > 0]
    best = [0.0]
    first = [0]
    for end in range(1, present.size + 1):
        group = total[end] - total[:end]
        shares = np.maximum(group, 1) / group.sum(1, keepdims=True)
        bits = -(group * np.log2(shares)).sum(1)
        bits += 24 + np.minimum(group, 8).sum(1)  # for the codes
        bits += best
        first.append(int(bits.argmin()))
        best.append(float(bits.min()))
    edges = [present.size]
    while edges[0]:
        edges.insert(0, first[edges[0]])
    starts = [0, *present[edges[1:-1]].tolist()]
    counts = np.add.reduceat(counts, starts)
    shares = counts * _TOTAL // counts.sum(1, keepdims=True)
    shares = np.maximum(shares, counts > 0)
    bits = shares.astype(np.float64).view(np.int64) + (1 << 48) >> 49
    return starts, np.where(shares < 8, shares, bits - (1025 << 3)).astype(np.uint8)


def _tables(starts: list[int], codes: Array) -> tuple[Array, Array]:
    """Return the tables of the loops for each exponent: bounds of symbols, firsts of runs."""
    codes = codes.astype(np.int64)
    shift = np.maximum((codes >> 3) - 1, 0)
    least = codes - (shift << 3) << shift
    least += ~least.any(1, keepdims=True)
    shares = least * _TOTAL // least.sum(1, keepdims=True)
    shares = np.maximum(shares, least > 0)
    # one symbol has 271 slots or more, and may give one to each other
    shares[np.arange(len(shares)), shares.argmax(1)] += _TOTAL - shares.sum(1)
    ends = shares.cumsum(1)
    bounds = np.pad(ends, ((0, 0), (1, 0))).astype(np.uint64)
    slots = np.arange(0, _TOTAL, 1 << int(_loops().RUN_BITS))
    firsts = np.array([np.searchsorted(row, slots) for row in ends], np.uint8)
    exponents = np.diff([*starts, 256])  # negative in damaged bytes, which `repeat` refuses
    return bounds.repeat(exponents, 0), firsts.repeat(exponents, 0)


def _valued(old: Array, new: Array) -> bytes:
    """Return slices, or b"" if some entries change by other values than a few."""
    parts = list[bytes]()
    for at in range(0, old.size, _SLICE):
        before = old[at : at + _SLICE].view(np.float32)
        after = new[at : at + _SLICE]
        values = _values(before, after.view(np.float32))
        if values is None or values.size > min(_MOST, before.size // 32):
            return b""
        zeros = np.zeros(before.size, np.uint16)
        letters = np.empty_like(zeros)
        _loops().find_values(before, after, values, letters)
        escapes = after[letters == values.size]
        if escapes.size > before.size // 64:
            return b""
        parts += [
            bytes((values.size,)),
            escapes.size.to_bytes(2, "little"),
            values.astype("<f4").tobytes(),
            escapes.astype("<u4").tobytes(),
            _stepped(zeros, letters, _LETTER),
        ]
    return b"".join(parts)


def _subtract_values_(old: Array, message: BytesIO) -> None:
    """Change the entries in place."""
    for at in range(0, old.size, _SLICE):
        before = old[at : at + _SLICE]
        count = _integer(message, 1)
        its_escapes = _integer(message, 2)
        values = _read(message, 4 * count).view("<f4")
        new = _read(message, 4 * its_escapes).view("<f4")
        letters = np.zeros(before.size, np.uint16)
        _step_(letters, message, _LETTER)
        escapes = np.flatnonzero(letters == count)
        if escapes.size != its_escapes or letters.max() > count:
            raise ValueError("there are other letters than values: the bytes are damaged")
        with np.errstate(all="ignore"):
            before[:] = before - np.append(values, np.float32(0)).take(letters)
        before[escapes] = new


def _values(old: Array, new: Array) -> Array | None:
    """Return the values of which each change is one, but for the rounding of the new entries."""
    sample = slice(None, None, max(new.size >> 15, 1))
    new = new[sample]
    with np.errstate(invalid="ignore"):
        change = old[sample].astype(np.float64) - new
    if not np.isfinite(change).all():
        return None
    half: Array = np.spacing(np.abs(new)).astype(np.float64) / 2
    finest = np.sort(half)[half.size // 4]
    fine = np.sort(change[half <= finest])
    rough = fine[np.diff(fine, prepend=-np.inf) > 3 * finest]
    near: Array = np.searchsorted(rough[:-1] / 2 + rough[1:] / 2, change)
    close = np.abs(change - rough[near]) <= 2 * finest + half
    least = np.full(rough.size, -np.inf)
    most = np.full(rough.size, np.inf)
    np.maximum.at(least, near[close], (change - half)[close])
    np.minimum.at(most, near[close], (change + half)[close])
    return (least / 2 + most / 2).astype(np.float32)


def _loops() -> Any:
    """Return the compiled loops; the import takes half a second."""
    extra("numba")
    from thinwire.stream import loops

    return loops


def extra(name: str) -> Any:
    """Return a package of the extra `[stream]`, or raise an `ImportError` that names it."""
    text = f"publish and follow need {name.partition('.')[0]}: pip install 'thinwire[stream]'"
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(text) from error
    if name == "numba" and package.config.DISABLE_JIT:
        raise ImportError(f"{text}, and unset NUMBA_DISABLE_JIT")
    return package
