"""Local updates of nodes: their ranks average densely, count as one source, and keep the same."""

import copy
import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests.api import Members
from tests.local.test_laws import Bag, bag, digest, noise, one_step, start_values
from tests.ranks import Pool

COMPRESSIONS = {
    "sparse": tw.Sparse(0.75),
    "sparse, split": tw.Sparse(0.75, 4, 1.0, "all", exchange="split"),
    "quantized": tw.Quantized(2),
    "quantized, split": tw.Quantized(exchange="split"),
    "low rank": tw.LowRank(2, begin_step=0, min_numel=10),
    "dense": None,
}


def conserved(
    rank: int, size: int, compression: Any, loaded: Any, node_steps: int | None = None
) -> dict[str, Any]:
    """Gradients that depend on step and rank alone, in nodes of two."""
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    node_size = 2 if size == 4 else 1
    config = tw.LocalSGD(2, begin_step=0, node_size=node_size, compression=compression)
    if node_steps is not None:
        config = replace(config, k_steps=4, node_steps=node_steps)
    sync = tw.local_sgd(model, optimizer, config)
    with sync:
        if loaded is not None:
            sync.load_state_dict(loaded[rank % len(loaded)])
        for step in range(sync.step + 1, sync.step + 9):
            for name, p in model.named_parameters():
                p.grad = noise(step, rank, name)
            optimizer.step()
        state = sync.state_dict()
        sync.close()
    del state["provenance"]
    return {**state, "digest": digest(model)}


@pytest.mark.slow
@pytest.mark.parametrize("node_steps", [None, 1, 3])
@pytest.mark.parametrize("name", ["sparse, split", "quantized", "quantized, split", "low rank"])
def test_node_changes_lose_nothing(ranks: Pool, name: str, node_steps: int | None) -> None:
    """What all ranks changed on the mean is what the anchors moved by and what nodes keep, float64;
    1e-6 for what owners passed on in float32. Then the same ranks, in no nodes and again in
    nodes."""
    start, compression = start_values(), COMPRESSIONS[name]
    first = ranks.run(conserved, compression, None, node_steps, size=4)
    assert len({state["digest"] for state in first}) == 1
    for state in first:
        state.pop("digest")
    for node in (0, 2):
        for key, error in first[node]["residuals"].items():
            assert torch.equal(error, first[node + 1]["residuals"][key]), "one state for a node"
            assert error.any()
    for name_of, value in start.items():
        changed = sum(noise(step, rank, name_of) for step in range(1, 9) for rank in range(4)) / 4
        kept = sum(state["residuals"].get(name_of, torch.zeros(())) for state in first) / 4
        moved = value - first[0]["anchors"][name_of]
        torch.testing.assert_close(moved + kept, changed, rtol=0, atol=1e-6)


def pulled(rank: int, size: int, halfway: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients that pull to zero, in nodes of two that take their mean every two steps of six."""
    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = tw.LocalSGD(6, begin_step=0, node_size=2, node_steps=2)
    found = []
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, 15):
            for name, p in model.named_parameters():
                p.grad = p.detach() + noise(step, rank, name)
            optimizer.step()
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
            if halfway and step == 9:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                sync.load_state_dict(copy.deepcopy(sync.state_dict()))
        sync.close()
    return found


def test_nodes_take_their_mean_between_averagings_of_all(ranks: Pool) -> None:
    """By hand: every rank's parameters after each step; a save and a load change no bit."""
    answers = ranks.run(pulled, False, size=4)
    values = [{name: value.clone() for name, value in start_values().items()} for _ in range(4)]
    for step in range(1, 15):
        for rank, own in enumerate(values):
            for name, value in own.items():
                own[name] = value - 0.1 * (value + noise(step, rank, name))
        sizes = 4 if step % 6 == 0 else 2 if step % 2 == 0 else 1
        for first in range(0, 4, sizes):
            together = values[first : first + sizes]
            for name in together[0]:
                mean = sum(own[name] for own in together) / sizes
                for own in together:
                    own[name] = mean
        for own, answer in zip(values, answers, strict=True):
            for name, value in own.items():
                torch.testing.assert_close(answer[step - 1][name], value, rtol=1e-5, atol=1e-6)
    again = ranks.run(pulled, True, size=4)
    for first, second in zip(answers, again, strict=True):
        assert all(torch.equal(first[-1][name], second[-1][name]) for name in first[-1])


@pytest.mark.parametrize(
    "wrong",
    [{"node_size": None}, {"node_size": 1}, {"k_steps": 2}, {"delay": 1}, {"node_steps": 0}],
)
def test_node_steps_need_a_node_and_a_longer_interval(wrong: dict[str, Any]) -> None:
    given = {"k_steps": 6, "node_size": 2, "node_steps": 2} | wrong
    with pytest.raises(ValueError, match="node_steps"):
        tw.LocalSGD(**given)


def joined(rank: int, size: int, first: Any, then: Any) -> tuple[str, dict[str, Any], Any]:
    """Ranks on their own, whose state then goes into nodes."""
    states, before = [], None
    for config in (first, then):
        model, optimizer = bag()
        with tw.local_sgd(model, optimizer, config) as sync:
            if states:
                sync.load_state_dict(states[-1])
            for step in range(sync.step + 1, sync.step + 5):
                one_step(model, optimizer, step, rank)
            states.append(sync.state_dict())
            before = before or {n: e.clone() for n, e in states[-1]["residuals"].items()}
            sync.close()
    return digest(model), states[-1]["residuals"], before


@pytest.mark.parametrize("name", ["sparse", "quantized, split", "low rank"])
def test_ranks_on_their_own_become_nodes(ranks: Pool, name: str) -> None:
    first = tw.LocalSGD(2, begin_step=0, node_size=1, compression=COMPRESSIONS[name])
    answers = ranks.run(joined, first, replace(first, node_size=2), size=4)
    assert len({answer[0] for answer in answers}) == 1
    for node in (0, 2):
        (_, one, own), (_, other, theirs) = answers[node : node + 2]
        assert any(not torch.equal(own[key], theirs[key]) for key in own)
        assert all(torch.equal(one[key], other[key]) for key in one)


def width(rank: int, size: int, config: Any, local: int) -> int:
    launcher = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": size, "GROUP_WORLD_SIZE": size // local}
    model, optimizer = bag()
    with (
        patch.dict(os.environ, {name: str(value) for name, value in launcher.items()}),
        tw.local_sgd(model, optimizer, config) as sync,
    ):
        return sync._averager.sources.node_size


@pytest.mark.slow
def test_launcher_sets_the_node_size_where_changes_are_compressed(ranks: Pool) -> None:
    for config, expected in [
        (tw.LocalSGD(2, compression=tw.Sparse(0.5)), 2),
        (tw.LocalSGD(2, compression=tw.Sparse(0.5), node_size=1), 1),
        (tw.LocalSGD(2), 1),
        (tw.LocalSGD(2, node_size=4), 4),
    ]:
        assert ranks.run(width, config, 2, size=4) == [expected] * 4


def test_members_that_come_and_go_share_no_nodes() -> None:
    model, optimizer = bag()
    members = Members(object())
    with pytest.raises(ValueError, match="node_size and members were both given"):
        tw.local_sgd(model, optimizer, tw.LocalSGD(2, node_size=2), members=members)
