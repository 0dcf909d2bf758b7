"""What compiled loops need below numba's own functions: arrays over an address, and bits of a word."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from thinwire.core.kernels.jit import jit

__all__ = ["array_at", "trailing_zeros"]


def _pointer_code(context: Any, address: Any, like: Any) -> Any:
    """How the number `address` becomes a pointer to entries of the type of the array `like`."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(address, like), generate


def _trailing_zeros_code(context: Any, word: Any) -> Any:
    """One instruction; zero, for which it is undefined, is left to the caller."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


_pointer: Any = intrinsic(_pointer_code)
_trailing_zeros: Any = intrinsic(_trailing_zeros_code)


@jit
def array_at(address: int, length: int, like: Any) -> Any:
    """A flat array of `length` entries at `address`, of the type of `like`; nobody checks that they are there."""
    return carray(_pointer(address, like), (length,))


@jit
def trailing_zeros(word: Any) -> Any:
    """How many bits below the lowest one that is set, of an unsigned integer other than zero."""
    return _trailing_zeros(word)
