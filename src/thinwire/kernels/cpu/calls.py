"""Calls that compile the loops of some work.

Every compiled loop is called on empty arrays of the types that the work has.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.kernels.cpu import jit_codes, jit_entries, jit_lists, jit_slots, jit_steps
from thinwire.kernels.cpu.numba_steps import scratch
from thinwire.kernels.cpu.select import bits_of, marks
from thinwire.kernels.rules import Need

Array = NDArray[Any]
_Calls = list[Callable[[], object]]

_TYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint16}
_NUMBERS = np.empty(0, np.int64)
_CODE = np.empty(0, np.uint8)
_FLOATS = np.empty(0, np.float32)
_WIDE = np.empty(0, np.float64)
_SEED = np.uint32(0)


def calls_for(need: Need) -> _Calls:
    """Return the calls of all loops, the slowest to compile first."""
    if need.work in ("lamb", "lars"):
        return [_step(need)]
    values = np.empty(0, np.float64 if need.dtype == torch.float64 else np.float32)
    if need.work == "codes":
        return _codes(need, values)
    calls = _select(need, values) + _codes(need, values) + _slots(need, values)
    return (_fold(need, values) if need.work == "sparse" else []) + calls


def _state(need: Need) -> tuple[Array, Array, Any]:
    state = np.empty(0, _TYPES[need.dtype])
    wide = np.float64 if need.dtype == torch.float64 else np.float32
    return np.empty(0, _TYPES[need.grad_dtype]), state, wide(0)


def _select(need: Need, values: Array) -> _Calls:
    grad, state, m = _state(need)
    arguments = grad, state, state, m, jit_entries.PLAIN
    bits = bits_of(values)
    digits = np.empty(jit_entries.DIGITS, np.int64)
    room = _NUMBERS, values, bits
    return [
        partial(
            jit_entries.scan, *arguments, 0, 0, 1, values.dtype.type(0), *room, *marks(), digits
        ),
        partial(jit_entries.sample, *arguments, 0, 0, jit_entries.RUN, values),
        partial(jit_entries.keep_largest, *room, 0, 0, digits),
        partial(jit_entries.keep_above, *room, 0, 0, 0, _NUMBERS, values, 0),
        partial(jit_entries.count_keys, bits, 0, _NUMBERS),
        partial(jit_entries.keys_between, bits, 0, 0, _NUMBERS),
    ]


def _fold(need: Need, values: Array) -> _Calls:
    grad, state, m = _state(need)
    digits, param = np.empty(jit_entries.DIGITS, np.int64), np.empty(0, _TYPES[need.param_dtype])
    rows = np.empty((0, 6), np.int64)
    kind = grad, state, m, jit_entries.PLAIN
    no_flags = np.empty(0, np.bool_)
    room, part = (_NUMBERS, values, bits_of(values), *marks(), digits), (0, 0, _NUMBERS, values)
    calls: _Calls = [
        partial(jit_lists.propose, rows, rows, 0, 0, *kind, *room, _NUMBERS, values, no_flags)
    ]
    if need.dtype == torch.bfloat16:
        seeds = np.empty(0, np.uint32)
        calls += [
            partial(jit_lists.commit_bfloat16, rows, rows, 0, 0, *kind, seeds, _FLOATS),
            partial(
                jit_entries.commit_bfloat16,
                grad,
                state,
                state,
                m,
                jit_entries.PLAIN,
                _SEED,
                *part,
                _FLOATS,
            ),
            partial(jit_entries.store, state, _FLOATS, _SEED, 0, 0),
        ]
    else:
        calls += [
            partial(jit_lists.commit, rows, rows, 0, 0, *kind),
            partial(jit_entries.commit, grad, state, state, m, jit_entries.PLAIN, *part),
        ]
    step = param, _FLOATS, param, param.dtype.type(1), _NUMBERS, param, _NUMBERS, param
    return [*calls, partial(jit_lists.step_along, rows, rows, 0, 0, *step)]


def _codes(need: Need, values: Array) -> _Calls:
    bits, sums = need.value_bits, np.empty(0, _TYPES[need.param_dtype])
    calls: _Calls = [
        partial(jit_codes.merge, _NUMBERS, sums, 0, _NUMBERS, _FLOATS, _NUMBERS, sums),
        partial(jit_codes.pack_fields, _NUMBERS, 1, 0, 0, _CODE, 0),
        partial(jit_codes.add_low_fields, _CODE, 0, 1, 0, 0, _NUMBERS),
        partial(jit_codes.set_high_parts, _NUMBERS, 1, _CODE, 0),
        partial(jit_codes.find_high_parts, _CODE, 0, 0, 1, _NUMBERS),
    ]
    if bits == 32:
        return calls
    calls += [partial(jit_codes.capped_magnitudes, values, _WIDE)]
    if bits == 1:
        return [
            *calls,
            partial(jit_codes.sign_fields, values, np.float32(0), _CODE, 0, _FLOATS),
            partial(jit_codes.decode_signs, _CODE, 0, np.float32(0), 0, 0, _FLOATS),
            partial(jit_codes.halving_sum, _WIDE, 0, 0),
        ]
    if bits > 4:
        return [
            *calls,
            partial(jit_codes.grid_fields, values, 0.0, 0.0, bits - 1, _NUMBERS, _FLOATS),
            partial(jit_codes.decode_grid, _CODE, 0, bits, 0.0, 0.0, 0, 0, _FLOATS),
        ]
    book, means, edges = np.zeros(8, np.float32), np.zeros(8), np.empty(9, np.int64)
    return [
        *calls,
        partial(jit_codes.split_at_means, _WIDE, bits - 1, _WIDE, edges, means),
        partial(jit_codes.book_fields, values, book, bits - 1, _NUMBERS, _FLOATS),
        partial(jit_codes.decode_book, _CODE, 0, bits, book, 0, 0, _FLOATS),
    ]


def _slots(need: Need, values: Array) -> _Calls:
    slots, bits = np.empty((0, len(jit_slots.FIELDS)), np.int64), need.value_bits
    sent, received = (slots, slots, 0, 0), (slots, 0, 0)
    result, entries = (values, _CODE, _FLOATS, _NUMBERS), (_CODE, _NUMBERS, _FLOATS, _NUMBERS)
    calls: _Calls = [
        partial(jit_slots.encode_positions, *sent, values, _CODE, _NUMBERS),
        partial(jit_slots.decode_positions, *received, _CODE, _NUMBERS, _NUMBERS, _NUMBERS),
    ]
    if bits == 1:
        calls += [
            partial(jit_slots.encode_signs, *sent, False, *result, _WIDE),
            partial(jit_slots.decode_signs, *received, *entries),
        ]
    elif bits == 32:
        calls += [
            partial(jit_slots.encode_floats, *sent, *result),
            partial(jit_slots.decode_floats, *received, *entries),
        ]
    else:
        rest = _WIDE, _WIDE, _NUMBERS, _WIDE, _NUMBERS
        calls += [
            partial(jit_slots.encode_levels, *sent, bits, _FLOATS, *result, *rest),
            partial(jit_slots.decode_levels, *received, bits, _FLOATS, *entries),
        ]
    return calls


def _step(need: Need) -> Callable[[], object]:
    rows, floats = np.empty((0, 4), np.int64), np.zeros(9, _TYPES[need.dtype])
    items = rows, _NUMBERS, rows, jit_steps.MOVE
    rest = (_WIDE, _NUMBERS, np.empty((0, 2)), floats)
    if need.work == "lamb":
        return partial(jit_steps.lamb, *items, floats, *rest, *scratch(0, floats.dtype))
    return partial(
        jit_steps.lars, *items, jit_steps.PLAIN, floats, *rest, scratch(0, floats.dtype)[0]
    )
