"""Which tensors belong to which part of a model, where parts are averaged in turn."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["partition", "strided"]


def partition(sizes: Sequence[int], parts: int) -> list[range]:
    """Contiguous ranges of positions that cover `sizes`, each ended where it comes closest to its
    share.

    Args:
        sizes: Elements of each tensor, in order.
        parts: How many ranges, between 1 and len(sizes); none of them is empty.

    Returns:
        `parts` ranges in order; a function of the two arguments only.

    Raises:
        ValueError: There are fewer tensors than parts.
    """
    _require_enough(len(sizes), parts)
    ends = list(accumulate(sizes))  # ends[i]: elements in the tensors up to i
    cuts = [0]
    for part in range(1, parts):
        share = ends[-1] * part / parts
        allowed = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(allowed, key=lambda at: abs(ends[at - 1] - share)))
    cuts.append(len(sizes))
    return [range(first, last) for first, last in pairwise(cuts)]


def strided(names: Sequence[str], parts: int) -> list[list[str]]:
    """Layers dealt out in turn: layer l belongs to part l mod `parts`.

    A layer is all tensors whose names share what goes up to their first integer, such as
    `blocks.3` of `blocks.3.qkv.weight`; layers are counted from 0 in the order of their first
    tensors. The tensors in no layer follow, each on its own, and go on with the count. Where
    layers and these are fewer than `parts`, every tensor counts on its own.

    Args:
        names: Of all tensors, in the model's order.
        parts: How many parts, between 1 and len(names).

    Returns:
        `parts` lists that cover the names, none empty, each in the model's order; a function of
        the two arguments only.

    Raises:
        ValueError: There are fewer tensors than parts.

    Source: Streaming DiLoCo, 2025, arXiv 2501.18512. Differs: what is in no layer is dealt out
    too.
    """
    _require_enough(len(names), parts)
    unit_of = {name: _layer(name) or name for name in names}
    layers = [name for name in unit_of.values() if _layer(name)]
    units = list(dict.fromkeys([*layers, *unit_of.values()]))
    if len(units) < parts:
        unit_of, units = {name: name for name in names}, list(names)
    part_of = {unit: number % parts for number, unit in enumerate(units)}
    return [[name for name in names if part_of[unit_of[name]] == part] for part in range(parts)]


def _layer(name: str) -> str | None:
    """The name up to its first integer; None where it has none."""
    words = name.split(".")
    places = [i for i, word in enumerate(words) if word.isdecimal()]
    return ".".join(words[: places[0] + 1]) if places else None


def _require_enough(tensors: int, parts: int) -> None:
    if not 1 <= parts <= tensors:
        raise ValueError(
            f"fragments is {parts}; it must be between 1 and the {tensors} tensors there are"
        )
