"""Settings that a plan compares."""

from collections.abc import Iterator, Mapping
from typing import Any

from thinwire.layout.traffic import GATHER, SPLIT
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.run.config import Recipe

Document = Mapping[str, Any]
Candidate = tuple[str, Recipe, Document | None]
"""Name, recipe and document of a setting."""

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


def candidates(workers: int) -> Iterator[Candidate]:
    """Every strategy as `thinwire compare` has it, local ones followed by other settings."""
    # no density is below the measured ones: with their loss it would win by that assumption
    for name, recipe in STRATEGIES.items():
        if name in LEFT_OUT:
            continue
        base = recipe.document(_RAMP_STEPS)
        yield name, recipe, base
        if base is not None and "localsgd" in base:
            for words, document in _local(base["localsgd"], workers, recipe.optimizer):
                if document != base:
                    yield f"{name} {words}", recipe, document


def _local(
    own: Mapping[str, Any], workers: int, optimizer: str | None
) -> Iterator[tuple[str, Document]]:
    for words, compression in _compressions(own.get("compression"), workers, optimizer):
        changed = own if compression is None else {**own, "compression": compression}
        for k_steps in _INTERVALS:
            for fragments in _FRAGMENTS:
                distance = k_steps // fragments
                for delay in sorted({0, distance // 4}):
                    name, own_steps = f"k{k_steps}", {"k_steps": k_steps}
                    if delay:
                        name, own_steps = f"{name} d{delay}", {**own_steps, "delay": delay}
                    if fragments > 1:
                        name = f"{name} f{fragments}"
                        own_steps = {**own_steps, "fragments": fragments}
                    yield f"{name}{words}", {"localsgd": {**changed, **own_steps}}


def _compressions(
    base: Mapping[str, Any] | None, workers: int, optimizer: str | None
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Return label and content of each compression; the base comes first."""
    yield "", None
    if base is None:
        return
    ((tag, own),) = base.items()
    choices: list[tuple[str, dict[str, float]]] = [
        (f" {_density(sparsity)} b{bits}", {"sparsity": sparsity, "value_bits": bits})
        for sparsity in _SPARSITIES
        for bits in _SPARSE_BITS
    ]
    if tag == "quantized":
        choices = [(f" b{bits}", {"value_bits": bits}) for bits in _BITS]
    for words, choice in choices:
        for word, more in _exchanges(workers):
            made = {**own, **choice, **more}
            if made != own:
                yield f"{words}{word}", {tag: made}
    for sparsity, bits in _SPARSE_MUON if optimizer == "muon" else ():
        sparse = {"sparsity": sparsity, "value_bits": bits, "decay": 0.9, "mean_over": "all"}
        yield f" {_density(sparsity)} b{bits}", {"sparse": sparse}


def _exchanges(workers: int) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield "", {}
    for way in (GATHER, SPLIT) if workers > 2 else ():
        yield f" {way}", {"exchange": way}


def _density(sparsity: float) -> str:
    return f"{100 * (1 - sparsity):.3g}%"
