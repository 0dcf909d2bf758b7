"""Tensors in the safetensors format: written as a stream, hashed meanwhile, and read one by one.
Also a rank's whole state in one such file, for checkpoints that a framework writes.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.checkpoint.files import (
    is_regular,
    make_directory,
    note_progress,
    sync_directory,
    write_pieces,
)
from thinwire.checkpoint.manifest import tensor_file
from thinwire.checkpoint.tree import (
    UNREADABLE,
    TensorRef,
    decoded,
    encoded,
    parsed_table,
    table_entry,
)
from thinwire.core.checksum import checksum as checksum_of
from thinwire.errors import CheckpointCorrupt, CheckpointError

_PIECE_BYTES = 1 << 20
_READERS = 4
"""Number of threads; the SHA-256 of one tensor keeps a core busy."""
PREFIX = struct.Struct("<Q")
"""Length of the header."""
_T = TypeVar("_T")
_R = TypeVar("_R")
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
"""Dtypes that every version of safetensors knows; others are written as bytes."""


Hash = tuple[bytes, list[int]]
"""SHA-256 of the bytes of a tensor, and a cheaper sum of each piece."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None,
    hashes: Mapping[str, Hash],
) -> tuple[int, str]:
    """Write a new safetensors file and force it to the disk, with at most one tensor on the
    CPU at a time; return its size in bytes and its `checksum`. Raise `CheckpointError` if the
    bytes of a tensor are not those of its hash.
    """
    header = _header(tensors, metadata)
    size = write_pieces(path, chain([header], _compared(tensors, hashes)))
    return size, _combined(header, (hashes[name][0] for name in tensors))


def _compared(tensors: Mapping[str, Tensor], hashes: Mapping[str, Hash]) -> Iterator[memoryview]:
    """Yield the bytes of each tensor; raise if they are not those of its hash."""
    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu")
    for name, tensor in tensors.items():
        for piece, known in zip(_pieces(tensor), hashes[name][1], strict=True):
            # a copy: another thread may change the tensor between its sum and the disk
            copied = buffer[: len(piece)].copy_(piece)
            if checksum_of([copied]) != known:
                raise CheckpointError(
                    f"{name} was changed during the save, so it failed: stop the thread that "
                    "changes it, or save with wait=False, which copies everything first"
                )
            yield copied.numpy().data


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(bytes_of(tensor), _PIECE_BYTES)


def pieces_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: its header, then each tensor in turn."""
    yield _header(tensors, metadata)
    yield from (bytes_of(tensor).numpy().data for tensor in tensors.values())


def by_name(act: Callable[[Tensor], _R], tensors: Mapping[str, Tensor]) -> dict[str, _R]:
    """Return the digest or the hash of each tensor, by its name."""
    return dict(zip(tensors, by_threads(act, tensors.values()), strict=True))


def hash_of(tensor: Tensor) -> Hash:
    """Return the hash of a tensor."""
    content = bytes_of(tensor)  # once: a device copies it
    # sums first: what changes between both differs from them when it is written
    sums = [checksum_of([piece]) for piece in _pieces(content)]
    return digest(content), sums


def checksum(path: Path) -> str:
    """Return a checksum of a file in hex, read piece by piece: its SHA-256, or for tensors the
    SHA-256 of the header and of the SHA-256 of each, which several threads compute.
    """
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return _digest_of_range(path, (0, size)).hex()
    with path.open("rb") as file:
        prefix = file.read(PREFIX.size)
        header = prefix + file.read(min(int.from_bytes(prefix, "little"), size))
    try:
        entries = json.loads(header[PREFIX.size :])
        entries.pop("__metadata__", None)
        at = [[len(header) + int(end) for end in e["data_offsets"]] for e in entries.values()]
        return _combined(header, by_threads(partial(_digest_of_range, path), at))
    except UNREADABLE:  # the header is damaged, so that its checksum alone differs
        return _combined(header, [])


def damage_of(path: Path, size: int, sha256: str) -> str | None:
    """Return how a file differs from what was written, by its `checksum`; None if it does not."""
    try:
        if not is_regular(path):
            return "is not there"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes, but {size} were written"
        same = checksum(path) == sha256
    except OSError as error:
        return f"cannot be read: {error}"
    return None if same else "is damaged: its checksum differs from the one that was recorded"


def _combined(header: bytes, digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join([header, *digests])).hexdigest()


def by_threads(act: Callable[[_T], _R], items: Iterable[_T], threads: int = _READERS) -> list[_R]:
    """Return the results of work that leaves the interpreter to other threads, in order."""
    # an executor refuses work once the script has ended, while its last save may still run
    with ThreadPool(threads) as pool:
        return pool.map(act, items)


def _digest_of_range(path: Path, ends: Sequence[int]) -> bytes:
    """Return the SHA-256 of a part of a file."""
    hasher = hashlib.sha256()
    at, end = ends
    with path.open("rb") as file:
        file.seek(at)
        while at < end and (chunk := file.read(min(_PIECE_BYTES, end - at))):
            hasher.update(chunk)
            at += len(chunk)
            note_progress()
    return hasher.digest()


class TensorReader:
    """Reads the tensors of a checkpoint's folder one by one. Files stay open in the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[int, Any] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, ref: TensorRef) -> Tensor:
        """Return one tensor on the CPU, in its own memory."""
        where = f"{self._folder / tensor_file(ref.rank)}, tensor {ref.name!r}"
        note_progress()
        try:
            stored: Tensor = self._opened(ref.rank).get_tensor(ref.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointCorrupt(f"{where} cannot be read: {error}") from error.__cause__
        return restored(stored, ref, where)

    def _opened(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._folder / tensor_file(rank)
            file = safe_open(path, framework="pt", device="cpu")
            self._files[rank] = self._stack.enter_context(file)
        return self._files[rank]


def restored(stored: Tensor, ref: TensorRef, where: str) -> Tensor:
    """Return the tensor that was written, from the one that safetensors read, in its own memory."""
    if ref.dtype not in PLAIN and stored.numel() == math.prod(ref.shape) * ref.dtype.itemsize:
        # a clone is aligned for any dtype, a view into a file need not be
        return stored.clone().view(ref.dtype).reshape(ref.shape)
    if stored.dtype != ref.dtype or stored.shape != ref.shape:
        raise CheckpointCorrupt(
            f"{where} is {stored.dtype} of {tuple(stored.shape)}, not {ref.dtype} of {ref.shape}"
        )
    return stored.clone()


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait until the tensors are computed: another thread does not know the caller's streams."""
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        torch.accelerator.synchronize(device)


def digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of every byte."""
    hasher = hashlib.sha256()
    for piece in _pieces(tensor):
        hasher.update(piece.numpy().data)
        note_progress()
    return hasher.digest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements as bytes on the CPU: uint8, one dimension; a view if possible."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # one element counts as contiguous whatever its stride, but a view as bytes needs stride 1
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        code = PLAIN.get(tensor.dtype)
        shape = list(tensor.shape)
        if code is None:
            code = "U8"
            shape = [size]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    return PREFIX.pack(len(text)) + text


def write_rank_file(path: Path, state: Any) -> str:
    """Write a state as a safetensors file, plain values in its header; return its `checksum`.

    An existing file is replaced atomically; missing folders are made.
    """
    tensors: dict[str, Tensor] = {}
    tree = encoded(state, tensors)
    synchronize(tensors.values())
    table = {name: table_entry(tensor, 0, name) for name, tensor in tensors.items()}
    make_directory(path.parent)
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    try:
        metadata = {"tree": json.dumps(tree), "tensors": json.dumps(table)}
        _, sha256 = write_tensors(aside, tensors, metadata, by_name(hash_of, tensors))
        aside.replace(path)
    except (OSError, CheckpointError):
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return sha256


def read_rank_file(path: Path, sha256: str) -> Any:
    """Return the state of such a file, tensors on the CPU, or raise `CheckpointCorrupt`."""
    try:
        if not is_regular(path):
            raise CheckpointCorrupt(
                f"{path} is not there: the files of all ranks must be beside the checkpoint"
            )
        if checksum(path) != sha256:
            raise CheckpointCorrupt(
                f"{path} is damaged, or belongs to another checkpoint: its checksum differs"
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata()
            table = parsed_table(json.loads(metadata["tensors"]), 1)

            def leaf(name: str) -> Tensor:
                return restored(file.get_tensor(name), table[name], f"{path}, tensor {name!r},")

            return decoded(json.loads(metadata["tree"]), leaf)
    except (OSError, SafetensorError, *UNREADABLE) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error.__cause__
