"""Writes the whole model of a checkpoint as one safetensors file, without ranks or a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire._files import replacing
from thinwire._wording import listed, warn_user
from thinwire.checkpoint.combine import combine
from thinwire.checkpoint.files import sync_directory, write_pieces
from thinwire.checkpoint.loading import CheckpointReader
from thinwire.checkpoint.manifest import MANIFEST, found, found_at
from thinwire.checkpoint.tensor_file import PLAIN, TensorReader, bytes_of, pieces_of
from thinwire.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

_KINDS = ("parameters", "buffers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of `export`.

    Example::

        exported = export("checkpoints", "model.safetensors")
        print(exported.step, exported.tensors, exported.size_bytes)
    """

    file: Path
    """The safetensors file."""
    checkpoint: Path
    """The folder of the checkpoint."""
    step: int
    """Updates that its model had been trained for."""
    ranks: int
    """Number of ranks that saved it."""
    tensors: int
    """Tensors in the file."""
    size_bytes: int
    """Size of the file."""
    tied: dict[str, str]
    """Names of tied tensors. The file has each tensor under all of its names."""
    averaged: tuple[str, ...]
    """Names of tensors whose values differed between ranks; the file has their mean."""
    left_out: tuple[str, ...]
    """Keys of the model's `state_dict` that are neither parameter nor buffer, such as the extra
    state of modules. Such a file cannot hold them.
    """


def export(
    folder: str | PathLike[str], file: str | PathLike[str], *, force: bool = False
) -> Exported:
    """Write the model of a checkpoint of `engine.save` as one file that needs no thinwire.

    The names are those of `model.state_dict()`, buffers included; stages of a pipeline and shards
    of a site are joined. Tied weights are written under each of their names, so that the file
    has every key of a strict `load_state_dict`. The file's metadata lists them ("tied"). If ranks
    have different values, as between two averagings of local updates, the file has their mean, as
    `engine.load` gives another number of ranks.

    Needs no process group. Every byte that is read is verified; the whole model is held in memory.

    Example::

        from safetensors.torch import load_file

        export("checkpoints", "model.safetensors")
        model.load_state_dict(load_file("model.safetensors"))

    Args:
        folder: Folder of one checkpoint, or the argument of `engine.save`: then the newest whole
            one counts.
        file: Where to write, `.safetensors`; its folder must exist.
        force: True to replace an existing file. It is unchanged until the new one is complete.

    Returns:
        Facts about the written file and its checkpoint.

    Warns:
        UserWarning: A later checkpoint is damaged.

    Raises:
        ValueError: `file` cannot be the name of such a file.
        FileExistsError: The file exists, and `force` is false.
        CheckpointMissing, CheckpointCorrupt: There is no checkpoint, or none that is whole.
        CheckpointError: The checkpoint is not one of an engine, was saved with frozen=False, has a
            newer format, or holds a dtype that some versions of safetensors cannot read.
        OSError: Writing failed.
    """
    source = Path(folder)
    target = Path(file)
    _require_writable(target, force=force)
    stages = _verified(source)
    first = stages[0]
    values, averaged = _joined(stages)
    names, left_out = _names(first, values)
    keys = {name: key for key, name in reversed(names.items())}  # the first of each tensor
    tied = {key: keys[name] for key, name in names.items() if key != keys[name]}
    metadata = {
        "format": "pt",
        "thinwire_checkpoint": first.path.name,
        "thinwire_step": str(first.manifest.step),
        "tied": json.dumps(tied),
    }
    with replacing(target) as aside:
        named = {key: values[name] for key, name in names.items()}
        size_bytes = write_pieces(aside, pieces_of(named, metadata))
    sync_directory(target.parent)
    return Exported(
        file=target,
        checkpoint=first.path,
        step=first.manifest.step,
        ranks=len(first.manifest.parts),
        tensors=len(names),
        size_bytes=size_bytes,
        tied=tied,
        averaged=tuple(key for key, name in names.items() if name in averaged),
        left_out=left_out,
    )


def _require_writable(file: Path, *, force: bool) -> None:
    if file.suffix != ".safetensors":
        raise ValueError(f"file={str(file)!r} must end in .safetensors, the format of the file")
    if not file.parent.is_dir():
        raise ValueError(f"file={str(file)!r}: there is no folder {file.parent}: create it first")
    if file.is_dir():
        raise ValueError(f"file={str(file)!r} is a folder: name a file in it")
    if file.exists() and not force:
        raise FileExistsError(
            f"{file} exists: name another file, or pass force=True (--force) to replace it"
        )


def _verified(source: Path) -> list[CheckpointReader]:
    """Return the readers of the newest whole checkpoint, one for each stage of a pipeline."""
    if not source.is_dir():
        raise CheckpointMissing(f"there is no folder {source}: pass the folder of a checkpoint")
    entries = [found_at(source)] if (source / MANIFEST).exists() else found(source)
    for entry in entries:
        if entry.problem and not isinstance(entry.problem, CheckpointCorrupt):
            raise entry.problem  # a newer format: never fall back to an older checkpoint
    problems = [str(entry.problem) for entry in entries if entry.problem]
    whole = [(entry.path, entry.manifest) for entry in entries if entry.manifest is not None]
    for path, manifest in sorted(whole, key=lambda entry: entry[1].serial, reverse=True):
        parts = sorted(set(manifest.parts))
        stages = [
            CheckpointReader(path, manifest, parts, rank, combined=True)
            for rank in range(len(parts))
        ]
        try:
            for stage in stages:
                stage.verify()
        except CheckpointCorrupt as error:
            problems.append(str(error))
            continue
        if problems:
            warn_user(f"exporting {path}; other checkpoints are damaged: {'; '.join(problems)}")
        return stages
    if problems:
        raise CheckpointCorrupt(f"no checkpoint is intact: {'; '.join(problems)}")
    raise CheckpointMissing(
        f"there is no checkpoint in {source}: pass the directory given to engine.save, or a "
        "folder that it made there"
    )


def _joined(stages: list[CheckpointReader]) -> tuple[dict[str, Tensor], set[str]]:
    """Return all tensors by name, shards joined, and the names of those that differ by rank."""
    values: dict[str, Tensor] = {}
    averaged: set[str] = set()
    shards: dict[str, list[Tensor]] = {}
    strategy = stages[0].manifest.plain_facts.get("strategy")
    pipeline = strategy.get("pipeline") if isinstance(strategy, Mapping) else None
    sharded = len(stages) > 1 and pipeline is None
    for rank, stage in enumerate(stages):
        with TensorReader(stage.path) as reader:
            for kind in _KINDS:
                if sharded and rank and kind == "buffers":
                    continue  # all shards have it; the first one counts, as in `load`
                replicas = [_kept(tree, kind, stage.path) for tree in stage.trees]
                values |= combine(replicas, read=reader.read)
                if kind == "parameters" and sharded:
                    for name in replicas[0]:
                        shards.setdefault(name, []).append(values[name])
                averaged |= {
                    name
                    for name, ref in replicas[0].items()
                    if any(other[name] != ref for other in replicas[1:])
                    and not torch.equal(bytes_of(values[name]), bytes_of(reader.read(ref)))
                }
    values |= {name: torch.cat(rows) for name, rows in shards.items()}
    return values, averaged


def _kept(tree: Any, kind: str, path: Path) -> Mapping[str, Any]:
    kept = tree.get(kind) if isinstance(tree, Mapping) else None
    if not isinstance(kept, Mapping):
        raise CheckpointError(
            f"{path} is not a checkpoint of an engine: its state has no {kind}. Only checkpoints "
            "written by engine.save hold a model"
        )
    return kept


def _names(
    stage: CheckpointReader, values: Mapping[str, Tensor]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the tensor's name for each key of the file, and the keys that have no tensor."""
    by_key = stage.manifest.plain_facts.get("state_dict")
    frozen = stage.trees[0].get("frozen")
    if frozen is not None:
        lacking = listed(list(frozen["digests"]), 3)
        raise CheckpointError(
            f"{stage.path} was saved with frozen=False, so it lacks {lacking}: load it into an "
            "engine that has these weights, save that with frozen=True, and export the result"
        )
    if not isinstance(by_key, Mapping) or not set(by_key.values()) <= {None, *values}:
        raise CheckpointError(
            f"{stage.path} lacks tensors that its own list of names has: engine.save did not "
            "write it"
        )
    names = {key: name for key, name in by_key.items() if name is not None}
    for key, name in names.items():
        if values[name].dtype not in PLAIN:
            raise CheckpointError(
                f"{key} is {values[name].dtype}, which some versions of safetensors cannot read: "
                "convert the model before you save it"
            )
    return names, tuple(key for key, name in by_key.items() if name is None)
