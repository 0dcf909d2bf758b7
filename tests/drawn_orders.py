"""Strings to one receiver that wait for each other, drawn."""

import random
import statistics

__all__ = ["seconds_of_drawn_orders"]


def seconds_of_drawn_orders(ranks: int, speed: float = 1.0) -> float:
    """Mean seconds until all is there, where each rank sends strings of one second to all others,
    one after another in an order that it draws, and a receiver takes `speed` strings in a second.
    """
    drawn, over_s = random.Random(ranks), []
    for _ in range(100):
        queued = [0.0] * ranks
        orders = [
            drawn.sample([r for r in range(ranks) if r != mine], ranks - 1) for mine in range(ranks)
        ]
        for come in zip(*orders, strict=True):
            queued = [max(0, queued[r] + come.count(r) / speed - 1) for r in range(ranks)]
        over_s.append(ranks - 1 + max(queued))
    return statistics.mean(over_s)
