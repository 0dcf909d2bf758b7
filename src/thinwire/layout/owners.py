"""Assignment of sharded tensors to the ranks that process them as a whole."""

from collections.abc import Sequence


def assign_owners(costs: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Return rounds in which every rank has one tensor at most, the most expensive ones first.

    In each round the most expensive tensor goes to the rank with the least cost so far, which
    balances the total cost per rank.

    Args:
        costs: Of the tensors, in any unit.
        ranks: At least 1.

    Returns:
        By round and rank, the index of the tensor; None for none.

    >>> assign_owners([5, 1, 4], 2)
    [[0, 2], [None, 1]]
    """
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
    """Return the length of a dimension on each rank, cut as by `torch.chunk`.

    The last ranks may have less, or nothing.

    >>> shard_lengths(10, 4)
    [3, 3, 3, 1]
    """
    most = -(-length // ranks)
    return [min(max(length - rank * most, 0), most) for rank in range(ranks)]
