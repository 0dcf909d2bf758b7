"""The split exchange of W sources in one process: loops over positions, float64, 32-bit values."""

from fractions import Fraction

import numpy as np

Sparse = dict[int, float]


def split_exchange(
    numels: list[int], counts: list[int], proposals: list[list[Sparse]]
) -> tuple[list[Sparse], list[list[Sparse]], list[list[Sparse]]]:
    """Per tensor what arrives; per source and tensor what it gave, and keeps as an owner."""
    sources = len(proposals)
    total = sum(numels)
    delivered: list[Sparse] = [{} for _ in numels]
    given: list[list[Sparse]] = [[{} for _ in numels] for _ in range(sources)]
    kept: list[list[Sparse]] = [[{} for _ in numels] for _ in range(sources)]
    offset = 0
    for tensor, (n, k) in enumerate(zip(numels, counts, strict=True)):
        owner_of = [
            max(o for o in range(sources) if o * total // sources <= offset + position)
            for position in range(n)
        ]
        offset += n
        for owner in sorted(set(owner_of)):
            piece = [position for position in range(n) if owner_of[position] == owner]
            share = Fraction(k * len(piece), n)
            room = min(len(piece), -((-2 * share).__floor__()))
            sums: Sparse = {}
            for source in range(sources):
                mine = [p for p in proposals[source][tensor] if owner_of[p] == owner]
                mine.sort(key=lambda p: (-abs(proposals[source][tensor][p]), p))
                for p in sorted(mine[:room]):
                    value = float(np.float32(proposals[source][tensor][p]))
                    given[source][tensor][p] = value
                    sums[p] = sums.get(p, 0.0) + value
            first, last = piece[0], piece[-1] + 1
            room = (Fraction(k * last, n) + Fraction(1, 2)).__floor__()
            room -= (Fraction(k * first, n) + Fraction(1, 2)).__floor__()
            room = min(len(piece), max(1, room))
            best = sorted(sums, key=lambda p: (-abs(sums[p]), p))[:room]
            for p, value in sums.items():
                told = float(np.float32(value)) if p in best else 0.0
                if p in best:
                    delivered[tensor][p] = told
                kept[owner][tensor][p] = value - told
    return delivered, given, kept
