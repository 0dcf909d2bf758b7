"""Nodes as sources: dense inside, sparse between; as one rank with the mean of each node."""

import copy
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import Group, node_size_of
from tests.ranks import Pool
from tests.toys import descend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(12, 40), nn.Linear(40, 30), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(50_000 + 100 * step + rank))
    return x, x[:, :5].sin()


def dgc(model: nn.Module, **options: Any) -> tw.optim.DGCMomentum:
    settings = {
        "lr": 0.05,
        "min_numel": 200,
        "sparsity": (0.9, 0.97),
        "rampup_begin_step": 2,
        "rampup_step": 4,
    }
    return tw.optim.DGCMomentum(model.named_parameters(), **{**settings, **options})


def from_flat_to_nodes(rank: int, size: int) -> dict[str, Any]:
    model = Net()
    flat = dgc(model, node_size=1)
    for step in range(4):
        x, y = batch(step, rank)
        descend(flat, (model(x) - y).square().mean())
    grouped = dgc(model, node_size=2)
    grouped.load_state_dict(copy.deepcopy(flat.state_dict()))
    before = [flat.state[p]["residual"].clone() for p in model.parameters() if p.numel() >= 200]
    exchange = grouped._joined()
    assert exchange.sources.size == 2
    after = [grouped.state[p]["residual"].clone() for p in model.parameters() if p.numel() >= 200]
    x, y = batch(9, rank)
    (model(x) - y).square().mean().backward()
    grouped.step()
    return {"before": before, "after": after, "params": [p.detach() for p in model.parameters()]}


def test_state_of_single_ranks_becomes_the_mean_of_their_node(ranks: Pool) -> None:
    answers = ranks.run(from_flat_to_nodes, size=4)
    for node in (0, 2):
        for a, b, mean, same in zip(
            *(answers[node + i][k] for k in ("before", "after") for i in (0, 1)), strict=True
        ):
            assert torch.equal(mean, same)
            torch.testing.assert_close(mean, (a + b) / 2, rtol=0, atol=1e-6)
    assert all(
        torch.equal(a, b)
        for o in answers
        for a, b in zip(o["params"], answers[0]["params"], strict=True)
    )


def launched(
    rank: int, size: int, environment: dict[str, str], given: int | None
) -> tuple[int, str]:
    with patch.dict(os.environ):
        for key in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"):
            os.environ.pop(key, None)
        os.environ.update(environment)
        return node_size_of(Group().global_ranks, given)


@pytest.mark.parametrize(
    ("environment", "given", "found", "word"),
    [
        ({}, None, 1, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "2"}, None, 2, "2 machines"),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 1, "do not fill two machines"),
        ({"LOCAL_WORLD_SIZE": "1"}, None, 1, "no second rank"),
        ({"LOCAL_WORLD_SIZE": "nonsense"}, None, 1, "no second rank"),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "4"}, None, 1, "3 mach"),
        ({"LOCAL_WORLD_SIZE": "2"}, 1, 1, "given"),
        ({}, 4, 4, "given"),
    ],
)
def test_launcher_sets_the_node_size(
    ranks: Pool, environment: dict[str, str], given: int | None, found: int, word: str
) -> None:
    for size, why in ranks.run(launched, environment, given, size=4):
        assert size == found
        assert word in why


def some_ranks_of_a_machine(rank: int, size: int) -> tuple[int, str] | None:
    members = torch.distributed.new_group([0, 2, 3])
    if rank == 1:
        return None
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        return node_size_of(Group(members).global_ranks, None)


def test_ranks_that_are_no_whole_machines_stay_flat(ranks: Pool) -> None:
    answers = ranks.run(some_ranks_of_a_machine, size=4)
    assert answers[1] is None
    assert {answer[0] for answer in answers if answer} == {1}
