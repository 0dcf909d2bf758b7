"""Which rank works on which tensor, where tensors lie in shards and each is needed whole."""

from collections.abc import Sequence

__all__ = ["dealt", "shard_lengths"]


def dealt(costs: Sequence[int], ranks: int) -> list[list[int | None]]:
    """Rounds in which every rank has one tensor at most, the dearest ones first.

    In each round the dearest goes to the rank that had the least before it, so that all of them
    work about as long.

    Args:
        costs: Of the tensors, in any unit.
        ranks: At least 1.

    Returns:
        By round and rank, which tensor; None for none.
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
    """How much of a dimension each rank holds, cut as by `torch.chunk`: the last ones may have
    less, or nothing.
    """
    most = -(-length // ranks)
    return [min(max(length - rank * most, 0), most) for rank in range(ranks)]
