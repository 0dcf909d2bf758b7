"""The split exchange over real ranks: an oracle, its conservation law, and what it sends."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests import api
from tests.ranks import Pool
from tests.reference.split_exchange import split_exchange
from tests.sync.means import launch

NUMELS, COUNTS = [300, 7, 120, 1], [30, 2, 11, 1]


def proposal(source: int, tensor: int, *, lopsided: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * source + tensor)
    n, k = NUMELS[tensor], COUNTS[tensor]
    positions = torch.arange(n) if lopsided else torch.randperm(n, generator=generator)
    return positions[:k].sort().values, torch.randn(k, generator=generator, dtype=torch.float64)


def sparse(source: int, tensor: int, *, lopsided: bool = False) -> api.Proposed:
    found = api.Proposal(*proposal(source, tensor, lopsided=lopsided), finite=True)
    return api.Proposed(found, NUMELS[tensor], COUNTS[tensor])


class Given(dict[str, Tensor], api.Computed):
    """Of which nothing is left but what owners keep."""

    def leave_(self, name: str, sent: Any, kept: api.Kept) -> None:
        assert self[name] is kept[api.RESIDUAL][name]


def exchange(rank: int, size: int, lopsided: bool) -> list[Any]:
    one_round = api.Round(api.Group(), 3)
    proposed = {str(t): sparse(rank, t, lopsided=lopsided) for t in range(4)}
    launch(one_round, 0, proposed, {"9": torch.ones(3) * rank}, exchange="split")
    one_round.finish()
    assert one_round.arrived["9"].mean("9", torch.ones(3)).tolist() == [(size - 1) / 2] * 3
    kept = {str(t): torch.zeros(n, dtype=torch.float64) for t, n in enumerate(NUMELS)}
    arrived = one_round.arrived["0"]
    assert isinstance(arrived, api.ArrivedEntries)
    means = [arrived.take_(name, Given(kept), {api.RESIDUAL: kept}) for name in kept]
    return [means, [arrived.given[str(t)] for t in range(4)], [*kept.values()]]


def dense(entries: Any, numel: int) -> Tensor:
    indices, values = (
        (list(entries), list(entries.values())) if isinstance(entries, dict) else entries
    )
    return torch.zeros(numel, dtype=torch.float64).index_put_(
        (torch.as_tensor(indices, dtype=torch.int64),), torch.as_tensor(values, dtype=torch.float64)
    )


@pytest.mark.parametrize("lopsided", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_oracle_agrees(ranks: Pool, size: int, lopsided: bool) -> None:
    answers = ranks.run(exchange, lopsided, size=size)
    pairs = [[proposal(s, t, lopsided=lopsided) for t in range(4)] for s in range(size)]
    proposals = [
        [dict(zip(i.tolist(), v.tolist(), strict=True)) for i, v in mine] for mine in pairs
    ]
    delivered, given, kept = split_exchange(NUMELS, COUNTS, proposals)
    for rank, (means, sent, mine) in enumerate(answers):
        for t, n in enumerate(NUMELS):
            assert torch.equal(means[t], dense(delivered[t], n) / size)
            assert torch.equal(dense(sent[t], n), dense(given[rank][t], n))
            assert torch.equal(mine[t], dense(kept[rank][t], n))


def narrow(rank: int, size: int) -> dict[str, Tensor]:
    p = nn.Parameter(torch.zeros(4000))
    optimizer = tw.optim.DGCMomentum(
        [p],
        lr=1.0,
        min_numel=1,
        sparsity=(0.98,),
        state_dtype="bfloat16",
        node_size=2,
        exchange="split",
        momentum=0.0,
    )
    given = torch.zeros(4000)
    for step in range(20):
        p.grad = torch.randn(4000, generator=torch.Generator().manual_seed(100 * step + rank)) + 1
        given += p.grad
        optimizer.step()
    return {"p": p.detach(), "v": optimizer.state[p]["residual"], "given": given}


def test_state_in_bfloat16_stays_common_to_a_node_and_right_on_average(ranks: Pool) -> None:
    """A residual of about 20 has steps of 2^-3; the mean of 4,000 errs by far less."""
    answers = ranks.run(narrow, size=4)
    for rank, answer in enumerate(answers):
        assert torch.equal(answer["p"], answers[0]["p"])
        assert torch.equal(answer["v"], answers[rank // 2 * 2]["v"])
        assert answer["v"].dtype == torch.bfloat16
    kept = (answers[0]["v"].double() + answers[2]["v"].double()).mean()
    given = sum(answer["given"].double() for answer in answers).mean() / 2
    assert abs(float(kept - 2 * answers[0]["p"].double().mean() - given)) < 0.02
