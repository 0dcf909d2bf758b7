"""The cost of a model of which nothing but the number of parameters is known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, isqrt
from typing import Any

from thinwire.tools.planning.methods import Cost, cost_of
from thinwire.tools.planning.network import Network
from thinwire.tools.planning.work import Work, matrices

__all__ = ["MOST_PARAMS", "cost_by_number", "grown"]

MOST_PARAMS = 10**13
_NEAR = 1.2
"""Sizes so near to each other that a straight line between them will do."""


def cost_by_number(document: Mapping[str, Any], hook: str, work: Work, network: Network) -> Cost:
    """As `cost_of`, for shapes that are assumed; seconds of a step never fall as the number grows.

    Bytes and state are those of the assumed shapes.
    """
    step_s = [cost_of(document, hook, each, network).step_s for each in _works(work)]
    return replace(
        cost_of(document, hook, work, network),
        step_s=grown(list(zip(_sizes(work.numel), step_s, strict=True)), work.numel),
    )


def grown(step_s: Sequence[tuple[int, float]], numel: int) -> float:
    """Seconds at a number of parameters, from sizes and their seconds, coarse to fine."""
    # Larger models can be faster: a bucket begins earlier, a tensor is large enough to be
    # compressed, sums are shared out. With shapes of our own that says nothing of a user's model,
    # so a number is sought like a word in a dictionary, from 1 to 10^13: what a size costs is kept
    # between the costs of the two that enclose it, and between the last two there is a straight
    # line. Numbers meet the same sizes on their way until they part, hence no number costs less
    # than a smaller one; and on a slower network none costs less.
    low, low_s, high, high_s = 0, 0.0, MOST_PARAMS, inf
    for size, seconds in step_s:
        kept_s = min(max(seconds, low_s), high_s)
        if size <= numel:
            low, low_s = size, kept_s
        else:
            high, high_s = size, kept_s
    if numel == low:
        return low_s
    return min(high_s, low_s + (high_s - low_s) * ((numel - low) / (high - low)))


@lru_cache(maxsize=64)
def _sizes(numel: int) -> tuple[int, ...]:
    """Those that enclose a number closer and closer."""
    low, high, found = 1, MOST_PARAMS, list[int]()
    while high > low * _NEAR and high - low > 1:
        middle = max(low + 1, isqrt(low * high))
        found.append(middle)
        low, high = (middle, high) if middle <= numel else (low, middle)
    # nothing lies beyond the ends, so they need no look unless they are next to the number
    return tuple(found + [end for end in (1, MOST_PARAMS) if end in (low, high)])


@lru_cache(maxsize=4)
def _works(work: Work) -> tuple[Work, ...]:
    return tuple(replace(work, numel=numel, shapes=matrices(numel)) for numel in _sizes(work.numel))
