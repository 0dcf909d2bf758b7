"""`thinwire explain` and `thinwire export`; a bad file is reported before torch is imported."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire._wording import listed
from thinwire.strategy.yaml_reader import read_file

if TYPE_CHECKING:
    from thinwire.checkpoint import Exported


EXAMPLE = "Example: thinwire explain examples/strategies/one_bit_local.yaml"


def explain(file: Path, /, *, quiet: bool = False) -> None:
    """Explain a training step under the strategy in FILE, in order, and how its fields combine.

    Args:
        file: Strategy in YAML, as DistributedStrategy.save writes it.
        quiet: Print nothing; the exit status shows whether the file is a strategy.
    """
    try:
        read_file(file)
        from thinwire.strategy.distributed_strategy import DistributedStrategy

        strategy = DistributedStrategy.load(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not quiet:
        strategy.explain()


EXAMPLES = """Examples:

thinwire export checkpoints model.safetensors

thinwire export checkpoints/step_0000001200 model.safetensors --force
"""


def export(checkpoint: Path, file: Path, /, *, force: bool = False, quiet: bool = False) -> None:
    """Export the model of a checkpoint as one safetensors file, which loads without thinwire.

    The file has the names of model.state_dict(), with buffers. Every byte of the checkpoint is
    verified first. No process group is needed.

    Args:
        checkpoint: Folder of one checkpoint, or its parent, whose newest intact one is used.
        file: File to write, such as model.safetensors.
        force: Replace an existing file.
        quiet: Print nothing.
    """
    from thinwire import checkpoint as checkpoints
    from thinwire.errors import CheckpointError

    with warnings.catch_warnings(record=True) as caught, _bar(f"exporting {file}", quiet=quiet):
        warnings.simplefilter("always", UserWarning)
        try:
            made = checkpoints.export(checkpoint, file, force=force)
        except (CheckpointError, FileExistsError) as error:
            raise ValueError(str(error)) from None
    for warning in caught:
        sys.stderr.write(f"thinwire: {warning.message}\n")
    if not quiet:
        print("\n".join(_lines(made)))


def _bar(text: str, *, quiet: bool) -> AbstractContextManager[Any]:
    """Show a progress bar on a terminal; clear it at the end."""
    if quiet or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(text, total=None)
    return progress


def _lines(made: Exported) -> list[str]:
    ranks = "1 rank" if made.ranks == 1 else f"{made.ranks} ranks"
    lines = [
        f"{made.checkpoint} (step {made.step}, saved by {ranks}): {made.tensors} "
        f"tensors, {made.size_bytes:,} bytes in {made.file}"
    ]
    if made.tied:
        pairs = [f"{key} is {name}" for key, name in made.tied.items()]
        lines.append(f"tied, written under both names: {listed(pairs)}")
    if made.averaged:
        lines.append(f"mean over ranks that had different values: {listed(made.averaged)}")
    if made.left_out:
        lines.append(f"in the model's state_dict, but not in the file: {listed(made.left_out)}")
    return lines
