"""How the loops for the CPU are compiled, and when what was compiled earlier may be used again."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

__all__ = ["Int", "i64", "jit", "jit_inline", "u64"]

Int: TypeAlias = Any
"""An int64, which Python's and NumPy's integers both become."""
i64: Any = np.int64
u64: Any = np.uint64
"""Indices of arrays are unsigned in hot loops: a signed one might count from the end, which costs a comparison."""
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compiled by numba without the GIL, cached on disk where any cache folder can be written.

    Division is the processor's: raising an error on zero, as Python does, would keep loops from being vectorised.
    """
    import numba

    known = _with_the_state_of_its_sources(function)
    try:
        return cast("F", numba.njit(cache=True, **_OPTIONS)(known))
    except RuntimeError:  # numba found no folder for its cache
        return cast("F", numba.njit(**_OPTIONS)(known))


def jit_inline(function: F) -> F:
    """Compiled into each of its callers, which costs less than a function of its own where there is one caller."""
    import numba

    return cast("F", numba.njit(inline="always", **_OPTIONS)(function))


def _with_the_state_of_its_sources(function: F) -> F:
    """The same function, which must be a module's own, with a closure that becomes part of its key in numba's cache.

    Numba by itself notices a change in the function's own file only, although all that it calls is compiled into it.
    """
    code = function.__code__.replace(co_freevars=("sources",))
    closure = (CellType(_sources_digest()),)
    known = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    known.__qualname__, known.__doc__ = function.__qualname__, function.__doc__
    return cast("F", known)


@functools.cache
def _sources_digest() -> str:
    """Of this folder's files; of nothing where they are not on disk, in which case numba caches nothing either."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
