"""Groups of ours meet whatever groups the script has made before, on any rank."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.laws.frontends import (
    AttachedStep,
    Case,
    Frontend,
    LocalBlock,
    OwnStep,
    WithEngine,
    bits_of,
)
from tests.ranks import BACKENDS, Pool

STAGES: dict[str, Any] = {"pipeline": tw.Pipeline(2, 2, split_points=("2",))}
WAYS: dict[str, tuple[type[Frontend], Case]] = {
    "prepare": (WithEngine, Case(fields={})),
    "DGCMomentum": (OwnStep, Case()),
    "local_sgd": (LocalBlock, Case()),
    "attach": (AttachedStep, Case()),
    "nodes": (OwnStep, Case(dgc={"node_size": 2})),
    "mesh": (WithEngine, Case(fields={}, sharded=True)),
    "pipeline": (WithEngine, Case(fields=STAGES)),
}


def first_rank_alone(rank: int, size: int) -> None:
    if rank == 0:
        dist.new_group([0])


def subsets(rank: int, size: int) -> None:
    for ranks in ([0], [2, 1], [0, size - 1]):
        dist.new_group(ranks)


def of_each_rank(rank: int, size: int) -> None:
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)


ORDERS = {make.__name__: make for make in (first_rank_alone, subsets, of_each_rank)}


def trained(rank: int, size: int, way: str, before: str) -> list[str]:
    """Train twice, each time after further groups."""
    frontend, case = WAYS[way]
    make_groups = partial(ORDERS[before], rank, size)
    found = []
    for limit_s in (20, 21):
        case = replace(case, options={"timeout": limit_s})
        if case.sharded:  # torch itself needs equal calls before it makes a mesh

            def sgd(params: Any) -> torch.optim.Optimizer:
                make_groups()
                return torch.optim.SGD(params, 0.1)

            case = replace(case, optimizer=sgd)
        else:
            make_groups()
        trainer = frontend(case)
        trainer.train(rank // 2 if "pipeline" in (case.fields or {}) else rank, 0, 2)
        trainer.end()
        found.append(bits_of(trainer.model))
        if case.sharded:
            break
    return found


@pytest.mark.parametrize("before", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_earlier_groups_of_the_script_change_nothing(ranks: Pool, way: str, before: str) -> None:
    backend = BACKENDS[list(WAYS).index(way) % len(BACKENDS)] if way != "mesh" else "gloo"
    found = ranks.run(trained, way, before, size=4, backend=backend)
    if way == "pipeline":  # ranks of one stage hold the same
        assert found[:2] == found[2:]
    else:
        assert found == [found[0]] * 4
