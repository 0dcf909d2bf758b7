"""Format of a message: a header of 32 bytes, then positions and values of each tensor in order.

There is one message per bucket. Header, little-endian: magic (4 bytes), version (1), flags (1),
bucket (2), step (8), layout (8), number of entries (4), CRC-32 (4) of the whole message with this
field zero. Flag bit 0: a gradient was not finite; the payload is then the number of the tensor (4
bytes) and zeros. Entries whose value is 0 are not sent. The length follows from the layout, so the
messages of all ranks are equally long and one all-gather moves them.

A message of whole tensors (`pack_whole`) has the code of each by `wire.whole`: every entry in few
bits, without positions, flag and count of entries.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire._devices import copies_pinned
from thinwire.errors import PayloadCorrupt
from thinwire.layout.message import CULPRIT, HEADER, HEADER_BYTES, Layout, WholeLayout, whole_bytes
from thinwire.wire import codes
from thinwire.wire.bucket import spans
from thinwire.wire.whole import WholeReader, encode_whole, scale_bytes

WIRE_VERSION = 2
_MAGIC = b"thwr"
_FLAG_NONFINITE = 1


Form = Layout | WholeLayout
"""What is known of a message before it arrives; equal on all ranks."""


Run = tuple[Sequence[int], Iterable[Tensor]]
"""Numbers of entries of some tensors, and their entries as `encode_whole` takes them."""


class Unpacked(NamedTuple):
    """Content of a message."""

    culprit: int | None
    """Number of the tensor whose gradient was not finite, or None."""
    parts: list[tuple[Tensor, Tensor]]
    """Per slot (indices, values), int64 and float32; empty if there is a culprit."""


def pack(
    layout: Layout, step: int, bucket: int, parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Return the message, uint8 (layout.nbytes,), and the values that receivers will decode.

    All are on the CPU. `parts`: per slot indices, int64, strictly ascending, and finite values,
    shape (j,), j at most the slot's k. Per slot the sent values are float32, 0 where it was 0.

    >>> layout = Layout.of([1000], sparsity=0.99, value_bits=1)
    >>> part = torch.tensor([3, 500]), torch.tensor([1.0, -1.0])
    >>> message, _ = pack(layout, 0, 0, [part])
    >>> unpack(layout, message, step=0, bucket=0, source=1).parts[0][0]
    tensor([  3, 500])
    """
    raw = np.zeros(layout.nbytes, np.uint8)
    if not parts:
        return _stamped(raw, layout, step, bucket), []
    table = layout.slot_table
    # spare room of a part does not count
    over = np.zeros_like(table[:, 1]) if layout.part else table[:, 1]
    all_sent, carried = codes.encode_slots(table, list(parts), layout.value_bits, over, raw)
    return _stamped(raw, layout, step, bucket, carried=carried), all_sent


def pack_nonfinite(layout: Layout, step: int, bucket: int, culprit: int) -> Tensor:
    """Return a message on the CPU that reports a gradient that was not finite.

    >>> layout = Layout.of([10], sparsity=0.5, value_bits=8)
    >>> unpack(layout, pack_nonfinite(layout, 0, 0, 3), step=0, bucket=0, source=1).culprit
    3
    """
    raw = np.zeros(layout.nbytes, np.uint8)
    CULPRIT.pack_into(raw.data, HEADER_BYTES, culprit)
    return _stamped(raw, layout, step, bucket, flags=_FLAG_NONFINITE)


def unpack(layout: Layout, message: Tensor, *, step: int, bucket: int, source: int) -> Unpacked:
    """Return the content of a message after all checks."""
    with _refusing(step, bucket, source):
        raw, flags, carried = _opened(layout, message, step, bucket)
        if flags == _FLAG_NONFINITE:
            return Unpacked(CULPRIT.unpack(raw[HEADER_BYTES : HEADER_BYTES + CULPRIT.size])[0], [])
        if flags:
            raise PayloadCorrupt(f"flags {flags} came, expected 0")
        table = layout.slot_table
        code = np.frombuffer(raw, np.uint8)
        parts = codes.decode_slots(table, code, layout.value_bits)
        if (k := sum(indices.numel() for indices, _ in parts)) != carried:
            raise PayloadCorrupt(f"number of entries (k) {k} came, expected {carried}")
        return Unpacked(None, parts)


@contextmanager
def _refusing(step: int, bucket: int, source: int) -> Iterator[None]:
    """Add the sending rank, and the expected step and bucket, to a refusal."""
    try:
        yield
    except PayloadCorrupt as refusal:
        message = f"the message of rank {source} for bucket {bucket} of step {step}"
        text = f"{message} was refused and nothing applied: {refusal}"
        raise PayloadCorrupt(text) from None


def _stamped(
    raw: NDArray[np.uint8], form: Form, step: int, bucket: int, *, flags: int = 0, carried: int = 0
) -> Tensor:
    """Write the header into the space reserved at the beginning of `raw`; return the message."""
    fields = (_MAGIC, WIRE_VERSION, flags, bucket, step, form.digest, carried)
    checksum = zlib.crc32(raw[HEADER_BYTES:].data, zlib.crc32(HEADER.pack(*fields, 0)))
    HEADER.pack_into(raw.data, 0, *fields, checksum)
    return torch.from_numpy(raw)


def _opened(form: Form, message: Tensor, step: int, bucket: int) -> tuple[memoryview, int, int]:
    """Return the bytes of a message on the CPU, its flags and its number of entries."""
    if message.numel() != form.nbytes:
        raise PayloadCorrupt(f"length in bytes {message.numel()} came, expected {form.nbytes}")
    raw = message.contiguous().numpy().data
    *fields, came = HEADER.unpack(raw[:HEADER_BYTES])
    magic, version, flags, its_bucket, its_step, digest, carried = fields
    checksum = zlib.crc32(raw[HEADER_BYTES:], zlib.crc32(HEADER.pack(*fields, 0)))
    for field, own, expected in (
        ("magic", magic, _MAGIC),
        ("wire version", version, WIRE_VERSION),
        ("checksum", came, checksum),
        ("step", its_step, step),
        ("bucket", its_bucket, bucket),
        ("layout", digest, form.digest),
    ):
        if own != expected:
            raise PayloadCorrupt(f"{field} {own!r} came, expected {expected!r}")
    return raw, flags, carried


def pack_whole(
    layout: WholeLayout, step: int, bucket: int, tensors: Iterable[Tensor | Run]
) -> Tensor:
    """Return the message of finite tensors on any device: (n,), float32 or float64.

    A run has the entries of tensors that are computed together, in the order of the layout. Other
    arguments as in `pack`.

    >>> layout = WholeLayout((4,), 1)
    >>> message = pack_whole(layout, 0, 0, [torch.tensor([1.0, 3.0, -2.0, -4.0])])
    >>> (code,) = unpack_whole(layout, message, step=0, bucket=0, source=1)
    >>> code.part(0, 4)
    tensor([ 2.,  2., -3., -3.])
    """
    runs = (_whole_run(run) if isinstance(run, Tensor) else run for run in tensors)
    coded = (encode_whole(chunks, layout.value_bits, numels) for numels, chunks in runs)
    first = next(coded)
    pinned = copies_pinned(first.device)
    raw = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    at = HEADER_BYTES
    for code in chain([first], coded):
        raw[at : at + code.numel()].copy_(code, non_blocking=True)
        at += code.numel()
    raw[-1] = code[-1]  # waits for this copy and all before it
    return _stamped(raw.numpy(), layout, step, bucket)


def _whole_run(tensor: Tensor) -> Run:
    numel = tensor.numel()
    return [numel], [tensor[start:end] for start, end in spans(numel, tensor.device)]


def unpack_whole(
    layout: WholeLayout, message: Tensor, *, step: int, bucket: int, source: int
) -> list[WholeReader]:
    """Return what reads each tensor of a message, after all checks; else as `unpack`."""
    with _refusing(step, bucket, source):
        _, flags, carried = _opened(layout, message, step, bucket)
        if (flags, carried) != (0, 0):
            raise PayloadCorrupt(f"flags {flags} and {carried} entries came, expected 0 and 0")
        lengths = [whole_bytes(numel, layout.value_bits) for numel in layout.numels]
        whole = torch.split(message[HEADER_BYTES:], lengths)
        scales = torch.cat([code[: scale_bytes(layout.value_bits)] for code in whole])
        if not bool(scales.view(torch.float32).isfinite().all()):
            raise PayloadCorrupt("scales came that are not finite")
    return [WholeReader(code, layout.value_bits) for code in whole]
