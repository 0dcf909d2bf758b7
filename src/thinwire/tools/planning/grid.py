"""Settings that a plan compares."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinwire.layout.traffic import GATHER, SPLIT
from thinwire.tools.run.config import Recipe

if TYPE_CHECKING:
    from thinwire.local.config import LocalSGD
    from thinwire.strategy.distributed_strategy import DistributedStrategy

_RAMP_STEPS = 100
"""Warm-up steps of methods that ramp up."""
LEFT_OUT = ("adaptive-localsgd", "dense-muon", "fp16-muon")
"""Strategies of `thinwire compare` without a fixed interval, or that differ only in the
optimizer.
"""
_INTERVALS = (4, 8, 16, 32, 64, 128)
_FRAGMENTS = (1, 4)
_SPARSITIES, _SPARSE_BITS = (0.9, 0.75), (2, 4)
"""Compression settings of parameter changes."""
_SPARSE_MUON = ((0.9, 1), (0.95, 1), (0.97, 2))
"""Sparsity and bits of changes by Muon, averaged over all ranks: below one bit an entry."""
_BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """Setting of a strategy, by its name."""

    name: str
    recipe: Recipe
    strategy: "DistributedStrategy"


def candidates(workers: int, recipes: Iterable[Recipe]) -> Iterator[Candidate]:
    """Yield strategies as `thinwire compare` has them, its own local ones with other settings."""
    from thinwire.strategy.distributed_strategy import DistributedStrategy

    # no density is below the measured ones: with their loss it would win by that assumption
    for recipe in recipes:
        base = DistributedStrategy.from_dict(recipe.document(_RAMP_STEPS) or {})
        planned = (base.gradient_compression, base.localsgd)
        others = [field for field, config in base.on.items() if config not in planned]
        if others:
            raise ValueError(
                f"strategies={recipe.file or recipe.name!r}: a plan cannot predict "
                f"{', '.join(others)}; remove it"
            )
        name = recipe.name.replace(" ", "_")  # what follows a space is a setting
        yield Candidate(name, recipe, base)
        if base.localsgd is not None and recipe.file is None:
            for words, local in _local(base.localsgd, workers, recipe.optimizer):
                if local != base.localsgd:
                    yield Candidate(f"{name} {words}", recipe, replace(base, localsgd=local))


def _local(
    own: "LocalSGD", workers: int, optimizer: str | None
) -> Iterator[tuple[str, "LocalSGD"]]:
    for words, change in _changes(own.compression, workers, optimizer):
        for k_steps in _INTERVALS:
            for fragments in _FRAGMENTS:
                distance = k_steps // fragments
                for delay in sorted({0, distance // 4}):
                    name = f"k{k_steps}" + f" d{delay}" * (delay > 0)
                    name += f" f{fragments}" * (fragments > 1) + words
                    yield (
                        name,
                        replace(
                            own,
                            k_steps=k_steps,
                            fragments=fragments,
                            delay=delay,
                            compression=change,
                        ),
                    )


def in_groups(own: "LocalSGD", node_size: int) -> Iterator[tuple[str, "LocalSGD"]]:
    """Yield local updates of groups of near ranks, which also average inside between two rounds."""
    grouped = replace(own, node_size=node_size)
    yield "", grouped
    for steps in _INTERVALS[:2] if own.delay == 0 and own.fragments == 1 else ():
        if 2 * steps <= own.k_steps:
            yield f" m{steps}", replace(grouped, node_steps=steps)


def _changes(base: Any, workers: int, optimizer: str | None) -> Iterator[tuple[str, Any]]:
    """Return label and config of each compression; the base comes first."""
    from thinwire.compress.sparse_change import Sparse

    yield "", base
    if base is None:
        return
    choices: list[tuple[str, dict[str, Any]]] = [
        (f" {_density(sparsity)} b{bits}", {"sparsity": sparsity, "value_bits": bits})
        for sparsity in _SPARSITIES
        for bits in _SPARSE_BITS
    ]
    if not isinstance(base, Sparse):
        choices = [(f" b{bits}", {"value_bits": bits}) for bits in _BITS]
    ways = ("", GATHER, SPLIT) if workers > 2 else ("",)
    for words, choice in choices:
        for way in ways:
            made = replace(base, **choice, **({"exchange": way} if way else {}))
            if made != base:
                yield f"{words} {way}".rstrip(), made
    for sparsity, bits in _SPARSE_MUON if optimizer == "muon" else ():
        yield f" {_density(sparsity)} b{bits}", Sparse(sparsity, bits, 0.9, "all")


def _density(sparsity: float) -> str:
    return f"{100 * (1 - sparsity):.3g}%"
