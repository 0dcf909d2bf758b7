"""Cutting a list of tensors into contiguous parts of nearly equal size."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["cut"]


def cut(sizes: Sequence[int], parts: int) -> list[range]:
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
    if not 1 <= parts <= len(sizes):
        raise ValueError(
            f"fragments is {parts}; it must be between 1 and the {len(sizes)} tensors there are"
        )
    ends = list(accumulate(sizes))  # ends[i]: elements in the tensors up to i
    cuts = [0]
    for part in range(1, parts):
        share = ends[-1] * part / parts
        allowed = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(allowed, key=lambda at: abs(ends[at - 1] - share)))
    cuts.append(len(sizes))
    return [range(first, last) for first, last in pairwise(cuts)]
