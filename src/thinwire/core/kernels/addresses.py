"""Arrays over memory whose address is a number, so that one call can take any number of tensors."""

from typing import Any

from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from thinwire.core.kernels.threads import jit

__all__ = ["array_at"]


def _pointer_code(context: Any, address: Any, like: Any) -> Any:
    """How the number `address` becomes a pointer to entries of the type of the array `like`."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(address, like), generate


_pointer: Any = intrinsic(_pointer_code)


@jit
def array_at(address: int, length: int, like: Any) -> Any:
    """A flat array of `length` entries at `address`, of the type of `like`; nobody checks that they are there."""
    return carray(_pointer(address, like), (length,))
