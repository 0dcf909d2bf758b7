"""Strategy files as strategies of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.lab.recipe import Recipe

if TYPE_CHECKING:
    from thinwire.strategy.distributed_strategy import DistributedStrategy

__all__ = ["is_file_name", "recipe_of_file"]

# That of dense and of the local strategies. LAMB and LARS scale their updates by the parameters;
# theirs are the best of 0.01, 0.03 and 0.1, and of 1, 2 and 4, in 60 steps of the tiny model: a
# place to start from.
_LR, _LARS_LR, _LAMB_LR = 0.1, 4.0, 0.03


def is_file_name(word: str) -> bool:
    """Whether a word of the command line means a file, not a strategy by name."""
    return Path(word).suffix.lower() in (".yaml", ".yml")


def recipe_of_file(word: str) -> Recipe:
    """The strategy in a file, called by the file's stem.

    Raises:
        ValueError: The file cannot be read, is no strategy, or is one that `compare` cannot
            measure.
    """
    from thinwire.strategy.distributed_strategy import DistributedStrategy

    try:
        strategy = DistributedStrategy.load(word)
    except OSError as error:
        raise ValueError(
            f"strategies={word!r} cannot be read: {error.strerror or error}; name a file that is"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"strategies={word!r}: {error}") from error
    if strategy.pipeline is not None:
        raise ValueError(
            f"strategies={word!r} has a pipeline, and every worker of a comparison trains a whole "
            "model: leave pipeline out"
        )
    return Recipe(
        Path(word).stem,
        f"strategy file {Path(word).name}: {', '.join(strategy.on) or 'no field set'}",
        "thinwire.lab.strategy_trainer:Prepared",
        _rate(strategy),
        "engine.stats()",
        {"document": strategy.to_dict()},
        file=word,
    )


def _rate(strategy: DistributedStrategy) -> float:
    if strategy.lamb is not None:
        return _LAMB_LR
    if strategy.lars is not None:
        return _LARS_LR
    return _LR
