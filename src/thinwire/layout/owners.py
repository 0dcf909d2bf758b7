"""Assignment of sharded tensors to the ranks that process them as a whole."""

from collections.abc import Sequence


def assign_owners(costs: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Return rounds in which every rank has one tensor at most, the most expensive ones first."""
    # in each round the most expensive tensor goes to the rank with the least cost so far
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    load, rounds = [0] * ranks, []
    for at in range(0, len(order), ranks):
        owned: list[int | None] = [None] * ranks
        for i, rank in zip(
            order[at : at + ranks], sorted(range(ranks), key=load.__getitem__), strict=False
        ):
            owned[rank] = i
            load[rank] += costs[i]
        rounds.append(owned)
    return rounds


def shard_lengths(length: int, ranks: int) -> list[int]:
    """Return the length of a dimension on each rank, cut as by `torch.chunk`."""
    most = -(-length // ranks)
    return [min(max(length - rank * most, 0), most) for rank in range(ranks)]
