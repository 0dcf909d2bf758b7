"""Compiled loops for the CPU: DGC's fold and selection; LAMB and LARS.

All loops stand in this file, since numba's cache looks for changes in the file of a loop alone. A
call takes many tensors as a table of addresses: 160 calls would cost more than the work on small
tensors. An item is a tensor's number and the part [start, stop) that one thread works on. An array
of uint16 holds bfloat16, which NumPy does not know: the upper half of a float32.

Indices are unsigned: a signed one might count from the end, which costs a comparison each.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload
from numba.np import arrayobj
from numpy.typing import NDArray

Array = NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
u64: Any = np.uint64
i64: Any = np.int64
_settings: Any = numba.config
_make_array: Any = arrayobj.make_array
_populate_array: Any = arrayobj.populate_array
_log = logging.getLogger("thinwire")


class _Cache(FunctionCache):
    """numba's cache, but a damaged file is compiled again instead of ending every start."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:
            _log.warning("%s is damaged (%s), and compiled again", self.cache_path, error)
            self.flush()  # type: ignore[no-untyped-call]
            return None


def _cache_folder() -> str | None:
    """Return a folder that only this user can enter: code of others would run here."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        outer = Path(_settings.CACHE_DIR or Path(home) / "thinwire")
        for folder, others in ((outer, 0o022), (outer / "loops", 0o077)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            foreign = os.name != "nt" and status.st_uid not in (0, os.geteuid())
            if foreign or (os.name != "nt" and status.st_mode & others):
                raise PermissionError(f"others can write to {folder}")
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:
        _log.warning(
            "every start compiles loops again for some seconds (%s): set NUMBA_CACHE_DIR to a "
            "folder that only you can write",
            error,
        )
        return None
    return str(folder)


@contextlib.contextmanager
def _cached_in(folder: str) -> Iterator[None]:
    before, _settings.CACHE_DIR = _settings.CACHE_DIR, folder
    try:
        yield
    finally:
        _settings.CACHE_DIR = before


_folder = _cache_folder()
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def inner(function: F) -> F:
    """Compile into the loops that call it."""
    return cast("F", numba.njit(**_OPTIONS)(function))


def loop(function: F) -> F:
    """Compile a loop that Python calls, without the GIL, cached on disk.

    Division follows the processor: Python's error on zero would prevent vectorisation.
    """
    compiled: Any = numba.njit(**_OPTIONS)(function)
    if _folder is not None:
        # no file to watch in an archive
        with contextlib.suppress(OSError, RuntimeError), _cached_in(_folder):
            compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return cast("F", compiled)


def _array_code(context: Any, address: Any, length: Any, like: Any) -> Any:
    """Make a flat array of `length` entries at `address`, of the type of `like`, unchecked."""
    flat: Any = types.Array

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = _make_array(signature.return_type)(target, builder)
        entry = target.get_data_type(like.dtype)
        nbytes = target.get_constant(types.intp, target.get_abi_sizeof(entry))
        _populate_array(
            array,
            data=builder.inttoptr(arguments[0], entry.as_pointer()),
            shape=[arguments[1]],
            strides=[nbytes],
            itemsize=nbytes,
            meminfo=None,
        )
        return array._getvalue()

    return flat(like.dtype, 1, "C")(types.int64, types.int64, like), generate


array_at: Any = intrinsic(_array_code)


def wide(x: Any) -> Any:
    """Return an entry in the type of the computation."""


@overload(wide, strict=False)
def _wide(x: Any) -> Any:
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def key(x: Any) -> Any:
    """Return the bits without the sign: in the order of magnitudes, not finite values on top."""


@overload(key, strict=False)
def _key(x: Any) -> Any:
    if x == types.float32:
        return lambda x: i64(np.float32(x).view(np.int32)) & i64(0x7FFFFFFF)
    return lambda x: np.float64(x).view(np.int64) & i64(0x7FFFFFFFFFFFFFFF)


def narrow(x: Any, noise: Any, like: Any) -> Any:
    """Return an entry as it is stored: bfloat16 is rounded by 16 random bits."""


@overload(narrow, strict=False)
def _narrow(x: Any, noise: Any, like: Any) -> Any:
    if like.dtype != types.uint16:
        return lambda x, noise, like: x

    def rounded(x: Any, noise: Any, like: Any) -> Any:
        bits = np.float32(x).view(np.uint32)
        # above the largest bfloat16 there is only infinity; infinity and NaN must not move at all
        finite = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F7F0000)
        return np.uint16(np.uint32(bits + (noise if finite else np.uint32(0))) >> np.uint32(16))

    return rounded


@inner
def mixed(position: Any, seed: Any) -> Any:
    """Mix bits as `reference.mixed` does, cut to 32 bits, which allows vectorisation."""
    x = np.uint32(np.uint32(position) ^ seed)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


Facts = tuple[Array, Array, Any, int]
"""Arrays of the types of gradients and of states, momentum, and mode: of all tensors of a call."""
VALUES, PLAIN, MOMENTUM, NESTEROV = range(4)
"""Modes of the fold: none (the residual itself), v + g, v + (m u + g), or (v + m (u + g)) + g."""
SPAN = 1024
"""Entries that stay in the nearest cache from one pass to the next."""
BLOCK = 64
"""Entries among which candidates are looked for together."""
RUN = 16
"""Neighbours that are sampled together: they share a cache line."""
_FEW = 4
_DIGIT = 8


@inner
def folded(g: Any, v: Any, u: Any, m: Any, mode: int) -> Any:
    """Return v' and u' of one entry, rounded after every operation."""
    if mode == VALUES:
        return wide(v), wide(u)
    if mode == PLAIN:
        return wide(v) + wide(g), wide(u)
    if mode == MOMENTUM:
        x = m * wide(u) + wide(g)
        return wide(v) + x, x
    x = m * (wide(u) + wide(g))
    return (wide(v) + x) + wide(g), x


@loop
def commit(
    rows: Array, sizes: Array, facts: Facts, like_sent: Array, seeds: Array, items: Array
) -> None:
    """Fold the items, subtract the sent values and clear the momentum there.

    `rows`: addresses of g, v, u, positions and sent values. `items`: tensor, start, stop, first
    and last of the sent entries in it.
    """
    like_grad, like_state, m, mode = facts
    left, low = np.empty(SPAN, like_sent.dtype), np.uint32(0xFFFF)
    for item in range(len(items)):
        t, last = items[item, 0], items[item, 4]
        grad, residual = (
            array_at(rows[t, 0], sizes[t], like_grad),
            array_at(rows[t, 1], sizes[t], like_state),
        )
        buffer = array_at(rows[t, 2], sizes[t], like_state)
        positions, sent = array_at(rows[t, 3], last, rows), array_at(rows[t, 4], last, like_sent)
        first, stop = u64(items[item, 1]), u64(items[item, 2])
        at, seed = u64(items[item, 3]), seeds[t]
        while first < stop:
            end, behind = min(first + u64(SPAN), stop), at
            # before the span changes: what stays is rounded once
            while behind < u64(last) and u64(positions[behind]) < end:
                i = u64(positions[behind])
                v, _ = folded(grad[i], residual[i], buffer[i], m, mode)
                left[behind - at] = v - sent[behind]
                behind += u64(1)
            if mode == PLAIN:  # `buffer` is `residual`
                for i in range(first, end):
                    v, _ = folded(grad[i], residual[i], buffer[i], m, PLAIN)
                    residual[i] = narrow(v, np.uint32(mixed(i, seed) & low), residual)
            else:
                for i in range(first, end):
                    v, u = folded(grad[i], residual[i], buffer[i], m, mode)
                    noise = mixed(i, seed)
                    residual[i] = narrow(v, np.uint32(noise & low), residual)
                    buffer[i] = narrow(u, np.uint32(noise >> np.uint32(16)), buffer)
            for j in range(at, behind):
                i = u64(positions[j])
                if mode != PLAIN:
                    buffer[i] = 0
                residual[i] = narrow(left[j - at], np.uint32(mixed(i, seed) & low), residual)
            first, at = end, behind


@loop
def floors(
    rows: Array, sizes: Array, samples: Array, facts: Facts, found: Array, items: Array
) -> None:
    """Estimate for tensors a magnitude that somewhat more than k entries reach.

    `samples`: the number of runs, their stride, and the rank in the sample; no runs: 0.
    """
    like_grad, like_state, m, mode = facts
    for item in range(len(items)):
        t = items[item, 0]
        found[t] = 0
        runs, stride, rank = samples[t, 0], samples[t, 1], samples[t, 2]
        if rank >= runs * RUN:
            continue
        grad = array_at(rows[t, 0], sizes[t], like_grad)
        residual = array_at(rows[t, 1], sizes[t], like_state)
        buffer = array_at(rows[t, 2], sizes[t], like_state)
        values, indices = np.empty(runs * RUN, found.dtype), np.empty(runs * RUN, np.int64)
        for run in range(u64(runs)):
            for j in range(u64(RUN)):
                i = run * u64(stride) + j
                v, _ = folded(grad[i], residual[i], buffer[i], m, mode)
                values[run * u64(RUN) + j] = v
        found[t] = keep_largest(indices, values, runs * RUN, rank)


@loop
def candidates(
    rows: Array,
    sizes: Array,
    items: Array,
    found: Array,
    facts: Facts,
    room: int,
    indices: Array,
    values: Array,
    counts: Array,
) -> None:
    """Write the up to k largest of each item that reach the floor of its tensor, ascending.

    `items`: tensor, start, stop, k, number of the item, and where its entries begin in `indices`
    and `values`. Values that are not finite are always candidates. When the room is full, only the
    k largest so far stay, and later ones must exceed the last of them.
    """
    like_grad, like_state, m, mode = facts
    its_indices, its_values = np.empty(room, np.int64), np.empty(room, values.dtype)
    for item in range(len(items)):
        t, k, to = items[item, 0], items[item, 3], u64(items[item, 5])
        n = sizes[t]
        grad = array_at(rows[t, 0], n, like_grad)
        residual, buffer = array_at(rows[t, 1], n, like_state), array_at(rows[t, 2], n, like_state)
        first, stop, floor, count = u64(items[item, 1]), u64(items[item, 2]), found[t], u64(0)
        while first < stop:
            end, hits = min(first + u64(BLOCK), stop), np.int32(0)
            for i in range(end - first):
                j = first + i
                v, _ = folded(grad[j], residual[j], buffer[j], m, mode)
                hits += np.int32(not (abs(v) < floor))
            if hits and count + (end - first) > u64(room):
                least = keep_largest(its_indices, its_values, i64(count), k)
                floor, count = np.nextafter(least, values.dtype.type(np.inf)), u64(k)
            if hits > _FEW:
                for i in range(first, end):
                    # written always, kept by the counter: no branch to be mispredicted
                    v, _ = folded(grad[i], residual[i], buffer[i], m, mode)
                    its_indices[count] = i
                    its_values[count] = v
                    count += u64(not (abs(v) < floor))
            elif hits:
                i = first
                while hits and i < end:  # a new floor may leave out some
                    v, _ = folded(grad[i], residual[i], buffer[i], m, mode)
                    if not (abs(v) < floor):
                        its_indices[count] = i
                        its_values[count] = v
                        count += u64(1)
                        hits -= np.int32(1)
                    i += u64(1)
            first = end
        if i64(count) > k:
            keep_largest(its_indices, its_values, i64(count), k)
            count = u64(k)
        counts[items[item, 4]] = count
        for i in range(count):
            indices[to + i] = its_indices[i]
            values[to + i] = its_values[i]


@loop
def keep_largest(indices: Array, values: Array, count: int, k: int) -> Any:
    """Move the `k` largest of the first `count` entries to the front, in order.

    Returns the least magnitude kept; infinity if none is finite. Of equal ones the first stay.
    """
    digits = np.empty(1 << _DIGIT, np.int64)
    high, prefix, ties = i64(8 * values.itemsize - 1), i64(0), i64(k)
    while high > 0:
        low = max(high - _DIGIT, 0)
        for digit in range(len(digits)):
            digits[digit] = 0
        for i in range(u64(count)):
            own = key(values[i])
            if (own >> high) == prefix:
                digits[u64((own >> low) & ((1 << (high - low)) - 1))] += 1
        digit = i64((1 << (high - low)) - 1)
        while digits[digit] < ties:
            ties -= digits[digit]
            digit -= 1
        prefix, high = (prefix << (high - low)) | digit, low
    kept, least = u64(0), values.dtype.type(np.inf)
    for i in range(u64(count)):
        own = key(values[i])
        if own > prefix or (own == prefix and ties > 0):
            ties -= own == prefix
            indices[kept] = indices[i]
            values[kept] = values[i]
            kept += u64(1)
            least = min(least, abs(values[i]))
    return least


CHUNK = 1 << 15
"""Entries whose squares have a sum of their own: sums depend on lengths alone, not on threads."""
Rest = tuple[Array, Array, Array, Array, Array]
"""Constants of the rule, of the trust ratio, first chunks of tensors, sums and ratios."""
WHOLE, SUMS, MOVE = range(3)
"""Phases of a step: all of it, for whole tensors; only the sums for the norms; only the rest."""
LANES = 128
"""Number of sums that are accumulated in parallel, whatever the width of the registers."""


@loop
def lamb(rows: Array, sizes: Array, phase: int, rest: Rest, items: Array) -> None:
    """Update p, g, m, v by LAMB; changes p, m, v, `sums` and `ratios`.

    `constants`: lr, b1, 1 - b1, b2, 1 - b2, 1/(1 - b1^t), 1/(1 - b2^t), eps, wd. `trust`: see
    `_trust_ratio`. `items`: tensor, start, a multiple of CHUNK, stop.
    """
    constants, trust, first_chunks, sums, ratios = rest
    b1, rest1, b2, rest2 = constants[1], constants[2], constants[3], constants[4]
    scale1, scale2, eps, wd = constants[5], constants[6], constants[7], constants[8]
    lanes, r = np.zeros((2, LANES)), np.empty(SPAN, constants.dtype)
    for item in range(len(items)):
        t, start, stop = items[item, 0], u64(items[item, 1]), u64(items[item, 2])
        p, g = array_at(rows[t, 0], sizes[t], constants), array_at(rows[t, 1], sizes[t], constants)
        m, v = array_at(rows[t, 2], sizes[t], constants), array_at(rows[t, 3], sizes[t], constants)
        if phase != MOVE:
            first = start
            while first < stop:
                n = min(u64(SPAN), stop - first)
                for i in range(n):
                    at = first + i
                    mean = b1 * m[at] + rest1 * g[at]
                    square = b2 * v[at] + rest2 * (g[at] * g[at])
                    m[at] = mean
                    v[at] = square
                    r[i] = scale1 * mean / (np.sqrt(scale2 * square) + eps) + wd * p[at]
                _add_squares(p, first, n, lanes[0])
                _add_squares(r, u64(0), n, lanes[1])
                first += n
                if first % u64(CHUNK) == 0 or first == stop:
                    _drain(lanes, sums[first_chunks[t] + (i64(first) - 1) // CHUNK])
        if phase != SUMS:
            ratios[t] = _trust_ratio(sums, first_chunks[t], sizes[t], trust)
            rate = constants[0] * ratios[t]
            # computing directions again costs no more than keeping them
            for i in range(start, stop):
                r_i = scale1 * m[i] / (np.sqrt(scale2 * v[i]) + eps) + wd * p[i]
                p[i] = p[i] - rate * r_i


NO_MOMENTUM, HEAVY_BALL, LOOKAHEAD = range(3)
"""The kinds of momentum of LARS; the last is Nesterov's."""


@loop
def lars(kind: int, rows: Array, sizes: Array, phase: int, rest: Rest, items: Array) -> None:
    """Update p, g and, with momentum, b by LARS; changes p, b, `sums` and `ratios`.

    `constants`: lr, momentum, wd. Without wd there is no ratio, and MOVE needs no sums. Other
    arguments as for `lamb`.
    """
    constants, trust, first_chunks, sums, ratios = rest
    lanes, momentum, wd = np.zeros((2, LANES)), constants[1], constants[2]
    for item in range(len(items)):
        t, start, stop = items[item, 0], u64(items[item, 1]), u64(items[item, 2])
        p, g = array_at(rows[t, 0], sizes[t], constants), array_at(rows[t, 1], sizes[t], constants)
        b = array_at(rows[t, 2], sizes[t], constants)
        if phase != MOVE:
            first = start
            while first < stop:
                n = min(u64(SPAN), stop - first)
                _add_squares(p, first, n, lanes[0])
                _add_squares(g, first, n, lanes[1])
                first += n
                if first % u64(CHUNK) == 0 or first == stop:
                    _drain(lanes, sums[first_chunks[t] + (i64(first) - 1) // CHUNK])
        if phase == SUMS:
            continue
        if wd != 0:
            ratios[t] = _trust_ratio(sums, first_chunks[t], sizes[t], trust)
        rate = constants[0] * ratios[t]
        if kind == NO_MOMENTUM:
            for i in range(start, stop):
                p[i] = p[i] - rate * (g[i] + wd * p[i])
        elif kind == HEAVY_BALL:
            for i in range(start, stop):
                velocity = momentum * b[i] + rate * (g[i] + wd * p[i])
                b[i] = velocity
                p[i] = p[i] - velocity
        else:
            for i in range(start, stop):
                step = rate * (g[i] + wd * p[i])
                velocity = momentum * b[i] + step
                b[i] = velocity
                p[i] = p[i] - (step + momentum * velocity)


@inner
def _trust_ratio(sums: Array, first_chunk: int, n: int, trust: Array) -> float:
    """Return `core.norms.trust_ratio` from squares; `trust`: coefficient, wd, eps, low, high."""
    param, update = 0.0, 0.0
    for chunk in range(first_chunk, first_chunk + (n + CHUNK - 1) // CHUNK):
        param += sums[chunk, 0]
        update += sums[chunk, 1]
    param, update = np.sqrt(param), np.sqrt(update)
    if not (param > 0 and update > 0):
        return 1.0
    ratio = trust[0] * param / (update + trust[1] * param + trust[2])
    if ratio < trust[3]:
        ratio = trust[3]
    elif ratio > trust[4]:
        ratio = trust[4]
    return ratio  # type: ignore[no-any-return]


@inner
def _add_squares(x: Array, first: Any, n: Any, lanes: Array) -> None:
    """Add the squares of `n` entries, at most SPAN, to `lanes`: each takes every 128th."""
    if n == SPAN:
        for j in range(u64(LANES)):
            lower, upper = 0.0, 0.0
            for row in range(u64(SPAN // LANES // 2)):  # unrolled by the compiler
                a = np.float64(x[first + u64(2) * row * u64(LANES) + j])
                lower += a * a
                b = np.float64(x[first + (u64(2) * row + u64(1)) * u64(LANES) + j])
                upper += b * b
            lanes[j] += lower + upper
    else:
        for i in range(n):
            a = np.float64(x[first + i])
            lanes[i % u64(LANES)] += a * a


@inner
def _drain(lanes: Array, sums: Array) -> None:
    """Sum the lanes by halves into `sums`, and set them to zero."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[0, j] += lanes[0, half + j]
            lanes[1, j] += lanes[1, half + j]
        half //= 2
    sums[0] = lanes[0, 0]
    sums[1] = lanes[1, 0]
    for j in range(LANES):
        lanes[0, j] = 0.0
        lanes[1, j] = 0.0
