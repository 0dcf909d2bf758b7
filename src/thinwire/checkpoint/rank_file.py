"""The state of one rank in one file, for checkpoints that somebody else writes."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.checkpoint.files import checksum, is_regular, make_directory, sync_directory
from thinwire.checkpoint.tensor_file import readable, restored, write_tensors
from thinwire.checkpoint.tree import decoded, encoded, parsed_table, table_entry
from thinwire.errors import CheckpointCorrupt

__all__ = ["read_rank_file", "write_rank_file"]


def write_rank_file(path: Path, state: Any) -> str:
    """Write a state as a safetensors file, plain values in its header; one that is there is
    replaced as a whole.

    Args:
        path: Its folder and the parents of that are made.
        state: As `thinwire.checkpoint.save` takes it; read only.

    Returns:
        The SHA-256 of the file in hex.

    Raises:
        TypeError: The state holds what no checkpoint does.
        OSError: Of the file system.
    """
    tensors: dict[str, Tensor] = {}
    tree = encoded(state, tensors)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        # this may be another thread, which knows nothing of the streams of the caller's
        torch.cuda.synchronize(device)
    table = {name: table_entry(tensor, 0, name) for name, tensor in tensors.items()}
    make_directory(path.parent)
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    try:
        _, sha256 = write_tensors(
            aside, tensors, {"tree": json.dumps(tree), "tensors": json.dumps(table)}
        )
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return sha256


def read_rank_file(path: Path, sha256: str) -> Any:
    """The state that was written, tensors on the CPU; every byte is compared with the checksum
    first.

    Raises:
        CheckpointCorrupt: It is not there, or is not the file with this checksum.
    """
    try:
        if not is_regular(path):
            raise CheckpointCorrupt(
                f"{path} is not there: every rank's file must lie beside the checkpoint"
            )
        if checksum(path) != sha256:
            raise CheckpointCorrupt(
                f"{path} is damaged, or belongs to another checkpoint: its checksum differs"
            )
        with ExitStack() as stack:
            file = stack.enter_context(
                safe_open(readable(path, stack), framework="pt", device="cpu")
            )
            metadata = file.metadata()
            table = parsed_table(json.loads(metadata["tensors"]), 1)

            def leaf(name: str) -> Tensor:
                return restored(file.get_tensor(name), table[name], f"{path}, tensor {name!r},")

            return decoded(json.loads(metadata["tree"]), leaf)
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
