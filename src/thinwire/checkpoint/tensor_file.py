"""Tensors in a file of the safetensors format: written as a stream, hashed on the way, read one by
one.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.checkpoint.files import note_progress, write_pieces
from thinwire.checkpoint.manifest import tensor_file
from thinwire.checkpoint.tree import TensorRef
from thinwire.errors import CheckpointCorrupt

__all__ = [
    "PLAIN",
    "TensorReader",
    "bytes_of",
    "digest",
    "readable",
    "restored",
    "write_tensors",
]

_HASHED_BYTES = 64 << 20
PLAIN = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that every version of safetensors knows; other dtypes are written as bytes and named
in the rank's JSON file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a new safetensors file and force it to the disk, holding no more than one tensor on the
    CPU at a time.

    Args:
        path: Must not exist.
        tensors: By name; dense, on any device, of any strides; read only.
        metadata: Text by key, for the header of the file.

    Returns:
        The size in bytes and the SHA-256 in hex of what was written.

    Raises:
        OSError: Of the file system.
    """
    return write_pieces(path, chain([_header(tensors, metadata)], map(_memory, tensors.values())))


class TensorReader:
    """The tensors of a checkpoint's folder, one by one; each file is opened once, until the context
    is left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, ref: TensorRef) -> Tensor:
        """One tensor, on the CPU, in memory of its own.

        Raises:
            CheckpointCorrupt: It is not there, or is another one.
        """
        where = f"{self._folder / tensor_file(ref.rank)}, tensor {ref.name!r}"
        note_progress()
        try:
            stored: Tensor = self._opened(ref.rank).get_tensor(ref.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointCorrupt(f"{where} cannot be read: {error}") from error
        return restored(stored, ref, where)

    def _opened(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._folder / tensor_file(rank)
            file = safe_open(readable(path, self._stack), framework="pt", device="cpu")
            self._files[rank] = self._stack.enter_context(file)
        return self._files[rank]


def restored(stored: Tensor, ref: TensorRef, where: str) -> Tensor:
    """The tensor that was written, from the one that safetensors made of it, in memory of its own.

    Raises:
        CheckpointCorrupt: It is another tensor; begins with `where`.
    """
    if ref.dtype not in PLAIN and stored.numel() == math.prod(ref.shape) * ref.dtype.itemsize:
        # a clone is aligned for any dtype, a view into a file need not be
        return stored.clone().view(ref.dtype).reshape(ref.shape)
    if stored.dtype != ref.dtype or tuple(stored.shape) != ref.shape:
        raise CheckpointCorrupt(
            f"{where} is {stored.dtype} of {tuple(stored.shape)}, not {ref.dtype} of {ref.shape}"
        )
    return stored.clone()


def readable(path: Path, stack: ExitStack) -> str | Path:
    """A name by which safetensors can open a file: it takes text only, and a name on Linux is any
    bytes.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        return f"/proc/self/fd/{descriptor}"
    return path


def digest(tensor: Tensor) -> str:
    """SHA-256 in hex of dtype, shape and every byte: equal where two tensors are
    indistinguishable.
    """
    hasher = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    content = _memory(tensor)
    for start in range(0, len(content), _HASHED_BYTES):
        hasher.update(content[start : start + _HASHED_BYTES])
        note_progress()
    return hasher.hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Its elements in order as bytes on the CPU: uint8, one dimension; shares memory with `tensor`
    where it can.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # one element counts as contiguous whatever its stride, and a view as bytes wants 1
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _memory(tensor: Tensor) -> memoryview:
    return bytes_of(tensor).numpy().data


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        code, shape = PLAIN.get(tensor.dtype), list(tensor.shape)
        if code is None:
            code, shape = "U8", [size]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return struct.pack("<Q", len(text)) + text
