"""Ranks of pipelines side by side: who is with whom."""

import pytest
import torch
import torch.distributed as dist

from tests.api import Grid, Group
from tests.api import private as private_module
from tests.ranks import Pool
from thinwire import StrategyError
from thinwire.errors import ThinwireError


def neighbours(
    rank: int, size: int, stages: int
) -> tuple[tuple[int, int, int, int], list[int], list[int], list[bytes]]:
    grid = Grid(stages)
    members = [
        dist.get_process_group_ranks(group) for group in (grid.stage_group, grid.replica_group)
    ]
    told = grid.peers.gather_bytes(bytes([rank]), action="test")
    assert Group(grid.replica_group).size == grid.replicas
    assert Group(grid.stage_group).timeout_s == Group().timeout_s
    return (grid.stages, grid.replicas, grid.stage, grid.replica), members[0], members[1], told


@pytest.mark.parametrize(
    ("size", "stages", "backend"),
    [(4, 2, "gloo"), (4, 1, "cpu:gloo,cuda:gloo"), (4, 4, "cpu:gloo"), (3, 1, None)],
)
def test_stages_of_a_replica_are_consecutive_ranks(
    ranks: Pool, size: int, stages: int, backend: str | None
) -> None:
    answers = ranks.run(neighbours, stages, size=size, backend=backend)
    for rank, (facts, pipeline, replicas, told) in enumerate(answers):
        stage, replica = rank % stages, rank // stages
        assert facts == (stages, size // stages, stage, replica)
        assert pipeline == [other for other in range(size) if other // stages == replica]
        assert replicas == [other for other in range(size) if other % stages == stage]
        assert told == [bytes([other]) for other in pipeline]


def test_one_process_is_a_grid_of_one() -> None:
    grid = Grid(1)
    assert (grid.stages, grid.replicas, grid.stage, grid.replica) == (1, 1, 0, 0)
    assert grid.stage_group is None and grid.replica_group is None
    assert grid.peers.size == 1
    told = "of 3 stages needs a multiple of 3 ranks, there are 1: start 3 ranks, or change stages"
    with pytest.raises(StrategyError, match=told):
        Grid(3)


def uneven(rank: int, size: int) -> None:
    dist.barrier()  # else another one may still be connecting when the first has failed
    Grid(2)


def test_ranks_must_be_a_multiple_of_the_stages(ranks: Pool) -> None:
    ranks.raise_alike(
        "StrategyError",
        "2 stages needs a multiple of 2 ranks, there are 3: start 2 or 4 ranks",
        uneven,
        size=3,
    )


def made_twice_then_released(rank: int, size: int) -> str:
    first, second = Grid(2), Grid(2)
    assert first.stage_group is second.stage_group
    assert Grid(1).stage_group is not first.stage_group
    dist.all_reduce(torch.ones(1), group=first.stage_group)
    private_module._release_all()
    with pytest.raises(ThinwireError, match="released") as caught:
        _ = second.stage_group
    with pytest.raises(ThinwireError, match="released"):
        second.peers.gather_bytes(b"", action="test")
    return str(caught.value)


def test_groups_are_made_once_and_released_at_exit(ranks: Pool) -> None:
    assert len(set(ranks.run(made_twice_then_released))) == 1


def two_worlds(rank: int, size: int) -> int:
    old = Grid(2).stage_group
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert Grid(1).stage_group is not old
    return Grid(1).peers.size


def test_a_new_world_gets_new_groups(ranks: Pool) -> None:
    assert ranks.run(two_worlds) == [1, 1]
