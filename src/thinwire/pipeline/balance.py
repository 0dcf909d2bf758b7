"""Cutting a row of sizes into contiguous parts."""

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["balanced_cut"]


def balanced_cut(sizes: Sequence[int], parts: int) -> list[int]:
    """Where to cut so that the largest part is as small as it can be; among those cuts, one with
    the most even parts.

    Exact, by dynamic programming over prefixes, O(parts · n²). Even means the least sum of squares.

    Args:
        sizes: n sizes, >= 0, in order.
        parts: 1 to n.

    Returns:
        The index at which each part begins, the first of them 0; no part is empty.
    """
    ends = [0, *accumulate(sizes)]
    n = len(sizes)
    limit = _prefixes(ends, parts, limit=ends[n], even=False)[-1][n][0]
    rows = _prefixes(ends, parts, limit=limit, even=True)
    begins, end = [], n
    for row in reversed(rows):
        end = row[end][1]
        begins.append(end)
    return begins[::-1]


def _prefixes(
    ends: list[int], parts: int, *, limit: float, even: bool
) -> list[dict[int, tuple[float, int]]]:
    """Per number of parts and length of a prefix: the least cost, and where the last part
    begins.
    """
    rows: list[dict[int, tuple[float, int]]] = []
    before: dict[int, tuple[float, int]] = {0: (0, 0)}
    for _ in range(parts):
        row = {}
        for end in range(1, len(ends)):
            options = [
                (
                    cost + (ends[end] - ends[begin]) ** 2
                    if even
                    else max(cost, ends[end] - ends[begin]),
                    begin,
                )
                for begin, (cost, _) in before.items()
                if begin < end and ends[end] - ends[begin] <= limit
            ]
            if options:
                row[end] = min(options)
        rows.append(row)
        before = row
    return rows
