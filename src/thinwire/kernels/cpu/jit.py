"""How the loops for the CPU are compiled.

Compiling is expensive, and every first user of a machine waits for it. What keeps it cheap: no
array functions of numba's inside a loop (`np.empty` and a view cost 0.1 s each, a minimum 0.5 s,
assigning to a slice 2 s, once for each type), so scratch comes as an argument; one type for one
argument, so counts that a loop passes on are `i64`; and nothing in a loop that is needed rarely,
such as the codes of several bits in the loop for one.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

__all__ = ["Int", "i64", "jit", "jit_inline", "u64"]

Int: TypeAlias = Any
"""An int64, which Python's and NumPy's integers both become."""
i64: Any = np.int64
u64: Any = np.uint64
"""Indices of arrays are unsigned in hot loops: a signed one might count from the end, which costs a
comparison."""
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compiled by numba without the GIL, cached on disk where a folder for it can be written; see
    `jit_cache`.

    Division is the processor's: raising an error on zero, as Python does, would keep loops from
    being vectorised.
    """
    import numba

    from thinwire.kernels.cpu.jit_cache import LoopCache

    compiled: Any = numba.njit(**_OPTIONS)(function)
    compiled._cache = LoopCache(f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}")
    return cast("F", compiled)


def jit_inline(function: F) -> F:
    """Compiled into each of its callers, which costs less than a function of its own where there is
    one caller.
    """
    import numba

    return cast("F", numba.njit(inline="always", **_OPTIONS)(function))
