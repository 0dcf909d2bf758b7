"""Reads parameters and buffers from foreign files: safetensors, and torch's pickles."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from thinwire._names import named_buffers, named_parameters, plain_names
from thinwire.checkpoint import on_all_ranks
from thinwire.checkpoint.loading import METADATA
from thinwire.checkpoint.manifest import MANIFEST
from thinwire.checkpoint.shards import rows_of
from thinwire.checkpoint.tensor_file import bytes_of, checksum
from thinwire.core.sharded import is_sharded, reshard_, shard_of
from thinwire.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
)
from thinwire.strategy.checkpoints import discard_pending
from thinwire.strategy.updates import Steps

_PREFIXES = ("", "model.")
"""Prefixes of a model's names in a checkpoint of torch, which joins the keys of nested dicts."""
_Tensors = Mapping[str, Tensor]
_Opened = tuple[dict[str, tuple[int, ...]], Callable[[_Tensors], _Tensors]]
"""Shapes by key, and a function that reads this rank's part for the model's tensor of each key."""


@torch.no_grad()
def load_model_file(path: Path, steps: Steps) -> Path:
    """Load parameters and buffers, each rank its own part; see `Engine.load_parameters`."""
    model = steps.model
    reshard_(model)
    tensors = dict(named_parameters(model)) | dict(named_buffers(model))
    # of each key; a tied tensor has several, a buffer that is not persistent none
    names: dict[str, str | None] = steps.facts["state_dict"]
    taken: dict[str, Tensor] = {}
    is_folder = path.is_dir()
    opened = _safetensors if path.suffix == ".safetensors" else _folder if is_folder else _pickle

    def read() -> str:
        first = path / METADATA if opened is _folder else path
        try:
            if opened is not _safetensors:
                folder = path if is_folder else path.parent
                # such a folder must never run code
                if (folder / MANIFEST).exists() or any(map(Path.is_dir, folder.glob("step_*"))):
                    raise CheckpointError(
                        f"{folder} has checkpoints of engine.save, so pickled files in it are not "
                        "read. Omit torch_checkpoint to load those checkpoints, or move torch's "
                        "files to another folder"
                    )
            if not first.is_file():  # opening a pipe may never end
                raise CheckpointMissing(f"there is no file {first}, or it is a pipe or a device")
            taken.update(_taken(path, names, tensors, *opened(path, names, steps.part)))
            files = [path] if first == path else sorted(f for f in path.iterdir() if f.is_file())
            return " ".join(map(checksum, files))
        except (OSError, SafetensorError, UnpicklingError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error.__cause__

    answers = on_all_ranks(steps.group, "reading a model", read)
    for rank, answer in enumerate(answers):  # the same on all ranks
        if answer != answers[0]:
            raise CheckpointError(
                f"{path} differs between rank 0 and rank {rank}: copy the same file to all ranks"
            )
    for name, value in taken.items():
        shard_of(tensors[name]).copy_(value)
    discard_pending(steps)
    return path


def _safetensors(path: Path, known: Collection[str], part: int) -> _Opened:
    file: Any = safe_open(path, framework="pt")
    stored = {name: file.get_slice(key) for name, key in _by_plain_name(file.keys()).items()}
    shapes = {name: tuple(entry.get_shape()) for name, entry in stored.items()}
    return shapes, partial(_indexed, stored, part)


def _pickle(path: Path, known: Collection[str], part: int) -> _Opened:
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, Mapping):
        raise CheckpointMismatch(f"{path} holds a {type(found).__name__}, not a state_dict")
    found = nested if isinstance(nested := found.get("model"), Mapping) else found
    keys = _by_plain_name(key for key, value in found.items() if isinstance(value, Tensor))
    stored = {name: found[key] for name, key in keys.items()}
    shapes = {name: tuple(entry.shape) for name, entry in stored.items()}
    return shapes, partial(_indexed, stored, part)


def _indexed(stored: Mapping[str, Any], part: int, wanted: _Tensors) -> _Tensors:
    """Return the rows of each wanted tensor that this rank holds."""

    def rows(tensor: Any) -> Any:
        if not is_sharded(tensor):
            return ...
        own = rows_of(tensor.shape, tensor.device_mesh.size(), part)
        return slice(own.start, own.stop)

    return {name: stored[name][rows(tensor)] for name, tensor in wanted.items()}


def _folder(path: Path, known: Collection[str], part: int) -> _Opened:
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}
    stored = _by_plain_name(sizes)
    prefix = max(_PREFIXES, key=lambda start: sum(start + name in stored for name in known))
    shapes = {
        name.removeprefix(prefix): sizes[key]
        for name, key in stored.items()
        if name.startswith(prefix) and (prefix or name in known)
    }

    def read(wanted: _Tensors) -> _Tensors:
        values = {stored[prefix + name]: torch.empty_like(t) for name, t in wanted.items()}
        with warnings.catch_warnings():  # no_dist warns; each rank reads its own rows
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_dcp(values, storage_reader=FileSystemReader(path), no_dist=True)
        return {name: shard_of(values[stored[prefix + name]]) for name in wanted}

    return shapes, read


def _by_plain_name(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys of a file by their names without the prefix of a compiled model."""
    given = list(keys)
    return dict(zip(plain_names(given), given, strict=True))


def _taken(
    path: Path,
    names: Mapping[str, str | None],
    tensors: _Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[_Tensors], _Tensors],
) -> _Tensors:
    """Return the values of the model's tensors by name, each under any of its keys."""
    wanted = {key: tensors[name] for key, name in names.items() if name and key in shapes}
    found = {None, *(names[key] for key in wanted)}
    missing = [key for key, name in names.items() if name not in found]
    strange = [key for key in shapes if key not in names]
    others = [
        f"{key} has shape {shapes[key]} in the file and {tuple(tensor.shape)} in this model"
        for key, tensor in wanted.items()
        if shapes[key] != tuple(tensor.shape)
    ]
    problems = [f"it lacks {', '.join(missing[:3])}"] if missing else []
    problems += [f"the model has no {', '.join(strange[:3])}"] if strange else []
    problems += others[:3]
    taken: dict[str, Tensor] = {}
    for key, value in ({} if problems else read(wanted)).items():
        first = taken.setdefault(names[key] or key, value)
        if first is not value and not torch.equal(bytes_of(first), bytes_of(value)):
            tied = " and ".join(other for other in wanted if names[other] == names[key])
            problems.append(f"{tied} are one tensor in this model and differ in the file")
    if problems:
        raise CheckpointMismatch(f"{path} does not fit this model: {'; '.join(problems)}")
    return taken
