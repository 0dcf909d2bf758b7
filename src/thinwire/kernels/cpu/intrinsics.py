"""Intrinsics for compiled loops: few instructions each, so they compile at once."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

_make_array: Any = arrayobj.make_array
_populate_array: Any = arrayobj.populate_array


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


def _trailing_zeros_code(context: Any, word: Any) -> Any:
    """Count the zero bits below the lowest set bit of an unsigned integer other than zero."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


def _wide_code(context: Any, entry: Any) -> Any:
    """Convert an entry to the type of the computation: bfloat16, passed as uint16, to float32."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if entry != types.uint16:
            return arguments[0]
        word = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(word, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return (types.float32 if entry == types.uint16 else entry)(entry), generate


def _bits_code(context: Any, number: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _magnitude_code(context: Any, key: Any, like: Any) -> Any:
    """Convert the bits `key`, int64, to a float of the array `like`'s type."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like.dtype == types.float64:
            return builder.bitcast(arguments[0], ir.DoubleType())
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return like.dtype(types.int64, like), generate


def _float_at(target: Any, builder: Any, kind: Any, code: Any, at: Any) -> Any:
    """Return a pointer to a float32 at byte `at` of the array `code`, unaligned and unchecked."""
    data = _make_array(kind)(target, builder, value=code).data
    return builder.bitcast(builder.gep(data, [at]), ir.FloatType().as_pointer())


def _read_code(context: Any, code: Any, at: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_float_at(target, builder, signature.args[0], *arguments), align=1)

    return types.float32(code, types.int64), generate


def _write_code(context: Any, code: Any, at: Any, number: Any) -> Any:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *indices, value = arguments
        builder.store(value, _float_at(target, builder, signature.args[0], *indices), align=1)
        return target.get_dummy_value()

    return types.void(code, types.int64, types.float32), generate


array_at: Any = intrinsic(_array_code)
bits_of: Any = intrinsic(_bits_code)
magnitude_of: Any = intrinsic(_magnitude_code)
read_float: Any = intrinsic(_read_code)
trailing_zeros: Any = intrinsic(_trailing_zeros_code)
wide: Any = intrinsic(_wide_code)
write_float: Any = intrinsic(_write_code)
