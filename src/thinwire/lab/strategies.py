"""The strategies by name. Light on purpose: bad names must be refused before torch is imported."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from thinwire.lab.trainers import Setup, Trainer

__all__ = ["STRATEGIES", "Recipe", "check_names", "register"]


@dataclass(frozen=True)
class Recipe:
    """One strategy that can be compared.

    Attributes:
        name: What the command line calls it.
        summary: One line for the help and the report.
        trainer: Where its class is, as "module:Class"; imported in the workers only.
        lr: Peak learning rate, the best of the same grid for every strategy.
        counted_by: How the bytes of the library's column come about.
    """

    name: str
    summary: str
    trainer: str
    lr: float
    counted_by: str

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        """Imports the trainer and wraps the model, on every rank at the same time."""
        module, _, attribute = self.trainer.partition(":")
        return getattr(importlib.import_module(module), attribute)(model, setup)  # type: ignore[no-any-return]


STRATEGIES: dict[str, Recipe] = {}


def register(recipe: Recipe) -> None:
    """Adds a strategy.

    Raises:
        ValueError: The name is taken.
    """
    if recipe.name in STRATEGIES:
        raise ValueError(f"strategy {recipe.name!r} is registered already; choose another name")
    STRATEGIES[recipe.name] = recipe


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, if all of them are known and none comes twice.

    Raises:
        ValueError: Names the first wrong one, with the nearest that exists.
    """
    checked: list[str] = []
    for name in names:
        if name.lower().endswith((".yaml", ".yml")):
            raise ValueError(
                f"strategies={name!r}: strategy files are not supported by this version; "
                f"choose from {', '.join(STRATEGIES)}"
            )
        if name not in STRATEGIES:
            near = difflib.get_close_matches(name.lower(), STRATEGIES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"strategies={name!r} is unknown; {hint}choose from {', '.join(STRATEGIES)}")
        if name in checked:
            raise ValueError(f"strategies={name!r} is given twice; name every strategy once")
        checked.append(name)
    if not checked:
        raise ValueError(f"strategies is empty; choose from {', '.join(STRATEGIES)}")
    return tuple(checked)


_RING = "formula of the ring all-reduce, 2(W-1)/W times the message"
_OWN = "optimizer.stats()"
_HERE = "thinwire.lab.trainers"
# The rates are the better of 0.07 and 0.15 for each method, at as many steps as 90 s over 100 Mbit/s allow (dense 70,
# fp16 130, powersgd and dgc 280; size medium, two workers, batch 8, seed 1). dense takes the smaller one all the same:
# the larger won by 0.03 nats there, but 0.2 overshoots where the warm-up is short.
register(Recipe("dense", "DDP, every gradient in float32", f"{_HERE}:Dense", 0.07, _RING))
register(Recipe("fp16", "DDP with torch's hook, gradients in float16", f"{_HERE}:HalfPrecision", 0.07, _RING))
register(Recipe("powersgd", "DDP with torch's PowerSGD hook, rank 2", f"{_HERE}:PowerSGD", 0.15, _RING))
register(Recipe("dgc", "deep gradient compression, 0.1 % of the entries at one bit", f"{_HERE}:DGC", 0.15, _OWN))
