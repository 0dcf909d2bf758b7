"""Reads parameters and buffers from foreign files: safetensors, and torch's pickles."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from thinwire._names import named_buffers, named_parameters, plain_names
from thinwire.checkpoint import on_all_ranks
from thinwire.checkpoint.files import checksum
from thinwire.checkpoint.loading import METADATA
from thinwire.checkpoint.manifest import MANIFEST
from thinwire.checkpoint.shards import rows_of
from thinwire.core.sharded import is_sharded, reshard_, shard_of
from thinwire.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
)
from thinwire.strategy.checkpoints import discard_pending
from thinwire.strategy.parts import Parts

_PREFIXES = ("", "model.")
"""Prefixes of a model's names in a checkpoint of torch, which joins the keys of nested dicts."""
_Tensors = Mapping[str, Tensor]


@torch.no_grad()
def load_model_file(path: Path, parts: Parts) -> Path:
    """Load parameters and buffers, each rank its own part; see `Engine.load_parameters`.

    Communication: an agreement. If a rank cannot read the file, nothing has changed on any rank.
    """
    model = parts.model
    reshard_(model)
    known = set(parts.facts["state_dict"])
    # such a file has no buffer that is not persistent
    kept = set(parts.facts["state_dict"].values())
    tensors = dict(named_parameters(model)) | dict(named_buffers(model))
    tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    taken: dict[str, Tensor] = {}
    is_folder = path.is_dir()
    if path.suffix == ".safetensors":
        take = _from_safetensors
    else:
        take = _from_folder if is_folder else _from_pickle

    def read() -> str:
        first = path / METADATA if take is _from_folder else path
        try:
            if take is not _from_safetensors:
                _require_no_checkpoint(path if is_folder else path.parent)
            if not first.is_file():  # opening a pipe may never end
                raise CheckpointMissing(f"there is no file {first}, or it is a pipe or a device")
            taken.update(take(path, tensors, known, parts.part))
            files = [path] if first == path else sorted(f for f in path.iterdir() if f.is_file())
            return " ".join(map(checksum, files))
        except (OSError, SafetensorError, UnpicklingError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error

    answers = on_all_ranks(parts.group, "reading a model", read)
    for rank, answer in enumerate(answers):  # the same on all ranks
        if answer != answers[0]:
            raise CheckpointError(
                f"{path} differs between rank 0 and rank {rank}: copy the same file to all ranks"
            )
    for name, tensor in tensors.items():
        shard_of(tensor).copy_(taken[name])
    discard_pending(parts)
    return path


def _from_safetensors(
    path: Path, tensors: _Tensors, known: set[str], part: int
) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        stored = _by_plain_name(file.keys())
        shapes = {name: tuple(file.get_slice(key).get_shape()) for name, key in stored.items()}
        _require_fit(path, shapes, tensors, known)
        return {
            name: file.get_slice(stored[name])[rows.start : rows.stop]
            if (rows := _rows(tensor, part)) is not None
            else file.get_tensor(stored[name])
            for name, tensor in tensors.items()
        }


def _require_no_checkpoint(folder: Path) -> None:
    """Raise `CheckpointError` if `engine.save` writes here: such a folder must never run code."""
    if (folder / MANIFEST).exists() or any(map(Path.is_dir, folder.glob("step_*"))):
        raise CheckpointError(
            f"{folder} has checkpoints of engine.save, so pickled files in it are not read. Omit "
            "torch_checkpoint to load those checkpoints, or move torch's files to another folder"
        )


def _from_pickle(path: Path, tensors: _Tensors, known: set[str], part: int) -> dict[str, Tensor]:
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, Mapping):
        raise CheckpointMismatch(f"{path} holds a {type(found).__name__}, not a state_dict")
    found = nested if isinstance(nested := found.get("model"), Mapping) else found
    stored = _by_plain_name(key for key, value in found.items() if isinstance(value, Tensor))
    own = {name: found[key] for name, key in stored.items()}
    _require_fit(path, {name: tuple(own[name].shape) for name in own}, tensors, known)
    for name, tensor in tensors.items():
        if (rows := _rows(tensor, part)) is not None:
            own[name] = own[name][rows.start : rows.stop]
    return own


def _from_folder(path: Path, tensors: _Tensors, known: set[str], part: int) -> dict[str, Tensor]:
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    sizes = {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}
    stored = _by_plain_name(sizes)
    shapes = {name: sizes[key] for name, key in stored.items()}
    prefix = max(_PREFIXES, key=lambda start: sum(start + name in shapes for name in tensors))
    own = {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix) and (prefix or name in known)
    }
    _require_fit(path, own, tensors, known)
    values = {stored[prefix + name]: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():  # no_dist warns; each rank reads its own rows
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load_dcp(values, storage_reader=FileSystemReader(path), no_dist=True)
    return {name: shard_of(values[stored[prefix + name]]) for name in tensors}


def _by_plain_name(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys of a file by their names without the prefix of a compiled model."""
    given = list(keys)
    return dict(zip(plain_names(given), given, strict=True))


def _rows(tensor: Tensor, part: int) -> range | None:
    """Return the rows of a tensor that this rank holds; None for all of them."""
    if not is_sharded(tensor):
        return None
    return rows_of(tensor.shape, tensor.device_mesh.size(), part)  # type: ignore[attr-defined]


def _require_fit(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: _Tensors, known: set[str]
) -> None:
    missing = [name for name in tensors if name not in shapes]
    strange = [name for name in shapes if name not in known]
    others = [
        f"{name} has shape {shapes[name]} in the file and {tuple(tensor.shape)} in this model"
        for name, tensor in tensors.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    problems = [f"it lacks {', '.join(missing[:3])}"] if missing else []
    problems += [f"the model has no {', '.join(strange[:3])}"] if strange else []
    problems += others[:3]
    if problems:
        raise CheckpointMismatch(f"{path} does not fit this model: {'; '.join(problems)}")
