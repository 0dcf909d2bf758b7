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
_RANKS = (2, 4, 8)
_SPARSITIES, _SPARSE_BITS = (0.9, 0.75), (2, 4)
"""Compression settings of parameter changes."""
_SPARSE_MUON = ((0.9, 1), (0.95, 1), (0.97, 2))
"""Sparsity and bits of changes by Muon, averaged over all ranks: below one bit an entry."""
_RAMP_ENDS, _RAMP_BITS = (0.999, 0.99), (1, 4)
"""Compression settings of gradients, whose sparsity ramps up."""
_BITS = (1, 2, 4, 8)


def candidates(workers: int, node_size: int = 1) -> Iterator[Candidate]:
    """Every strategy as `thinwire compare` has it, each followed by other settings of it."""
    # no density and no rank is below the measured ones: with their loss it would win by that
    # assumption
    for name, recipe in STRATEGIES.items():
        if name in LEFT_OUT:
            continue
        base = recipe.document(_RAMP_STEPS)
        yield name, recipe, base
        for words, document in _variants(base or {}, workers, node_size, recipe.optimizer):
            if document != base:
                yield f"{name} {words}", recipe, document


def _variants(
    base: Document, workers: int, node_size: int, optimizer: str | None
) -> Iterator[tuple[str, Document]]:
    for field, own in base.items():
        if field == "localsgd":
            yield from _local(own, workers, optimizer)
        elif "sparsity" in own:
            for words, changed in _ramped(own, workers, node_size):
                yield words, {field: changed}
        elif "rank" in own:
            for rank in _RANKS:
                yield f"r{rank}", {field: {**own, "rank": rank}}


def _ramped(own: Document, workers: int, node_size: int) -> Iterator[tuple[str, Document]]:
    first = own["sparsity"][:-1]
    for sparsity in _RAMP_ENDS:
        for bits in _RAMP_BITS:
            for word, more in _exchanges(workers):
                levels = [*(level for level in first if level < sparsity), sparsity]
                changed = {**own, "sparsity": levels, "value_bits": bits, **more}
                words = f"{_density(sparsity)} b{bits}{word}"
                yield words, changed
                if node_size > 1:
                    yield f"{words} n1", {**changed, "node_size": 1}


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
