"""Exchanges whose messages carry proofs: the same results, 16 bytes a message more; and what was
altered on its way is refused on all ranks, by the vote."""

import pytest
import torch
from torch import Tensor

from tests.api import FoldRule, Group, Proposed, Round, propose
from tests.ranks import Pool
from tests.sync.means import launch
from thinwire.errors import PayloadCorrupt

KEY = b"a key of this generation........"
NUMEL, K = 1000, 10


def sparse(rank: int, key: int) -> Proposed:
    grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + key))
    return Proposed(propose(grad, torch.zeros_like(grad), None, K, FoldRule(0.0)), NUMEL, K)


def exchange(rank: int, size: int, way: str, key: bytes | None) -> tuple[list[Tensor], int]:
    group = Group()
    if key is not None:
        group.authenticate(key)
    means = []
    for step in range(3):
        one_round = Round(group, step)
        dense = {"small": torch.full((8,), float(rank)), "large": torch.full((60_000,), rank + 0.5)}
        launch(one_round, 0, {"a": sparse(rank, step)}, {"large": dense["large"]}, exchange=way)
        launch(one_round, 1, {}, {"small": dense["small"]})
        one_round.finish()
        means += [one_round.arrived[name].mean(name, param) for name, param in dense.items()]
        means.append(one_round.arrived["a"].mean("a", torch.zeros(NUMEL)))
    group.gather_bytes(b"the same on all", action="agreeing")
    return means, group.bytes_sent


@pytest.mark.parametrize(("way", "messages"), [("gather", 2), ("split", 5)])
@pytest.mark.parametrize("size", [0, 4])
def test_the_results_are_the_same_and_every_message_is_sixteen_bytes_longer(
    ranks: Pool, way: str, messages: int, size: int
) -> None:
    """A step sends the small dense sum and the entries by a gather each; split, the entries go to
    three others and then to all."""
    plain = ranks.run(exchange, way, None, size=size)
    proven = ranks.run(exchange, way, KEY, size=size)
    if size == 0:
        messages = 1  # alone entries are gathered, and sums are not sealed
    for (means, sent), (proven_means, proven_sent) in zip(plain, proven, strict=True):
        for one, other in zip(means, proven_means, strict=True):
            assert torch.equal(one, other)
        assert proven_sent - sent == 16 * (3 * messages + 1)


def damaged_votes(rank: int, size: int) -> str:
    group = Group()
    group.authenticate(KEY if rank else KEY[::-1])
    try:
        group.gather_bytes(b"the same on all", action="agreeing")
    except PayloadCorrupt as error:
        return str(error)
    return "taken"


@pytest.mark.fault
def test_an_agreement_of_somebody_with_another_key_is_refused(ranks: Pool) -> None:
    answers = ranks.run(damaged_votes, size=2)
    assert "agreeing: the message from rank 1 was refused because its MAC is wrong" in answers[0]
    assert "rank 0" in answers[1]
