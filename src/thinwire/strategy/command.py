"""`thinwire explain`: the file is read before torch is, so that a bad one is answered at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from thinwire.strategy.yaml_reader import read_file

__all__ = ["EXAMPLE", "explain"]

EXAMPLE = "Example: thinwire explain examples/strategies/one_bit_local.yaml"


def explain(file: Path, /, *, quiet: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Say what a training step under the strategy in FILE does, in order, and what its parts mean
    together.

    Args:
        file: A strategy in YAML, as DistributedStrategy.save writes it.
        quiet: Print nothing: the exit status says whether the file is a strategy.
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
