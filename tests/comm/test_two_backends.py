"""A job whose backend is another than gloo: who carries what, and what holds after a fault."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from tests.api import Group, sites_of
from tests.ranks import Lost, Pool, Raised
from tests.waiting import time_out

LIMIT_S = time_out(1.0)
_made: list[Any] = []


class _Other(ProcessGroupGloo):
    """A backend of the CPU that the library does not know, as nccl is one of GPUs."""

    def name(self) -> str:
        return "other"


def _make(store: Any, rank: int, size: int, timeout: Any) -> Any:
    _made.append(_Other(store, rank, size, timeout))
    return _made[-1]


if "other" not in dist.Backend.backend_list:
    dist.Backend.register_backend("other", _make, devices=["cpu"])


def _calls() -> dict[int, int]:
    """Collectives of the job's backend in this process, by the number of ranks."""
    found: dict[int, int] = {}
    for backend in _made:
        number = backend._get_sequence_number_for_group()
        found[backend.size()] = found.get(backend.size(), 0) + number
    return found


def _averaged(rank: int, **given: Any) -> tuple[float, dict[int, int]]:
    """Mean of a weight after two averagings, and the calls that they made of the job's backend."""
    model = torch.nn.Linear(40, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = _calls()
    with tw.local_sgd(model, optimizer, tw.LocalSGD(k_steps=1, **given.pop("config", {})), **given):
        torch.nn.init.zeros_(model.weight)
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight.sum() * rank).backward()
            optimizer.step()
    return model.weight.mean().item(), {n: c - before.get(n, 0) for n, c in _calls().items()}


def flat(rank: int, size: int) -> tuple[float, dict[int, int]]:
    return _averaged(rank)


def test_local_updates_travel_by_gloo_whatever_the_backend_is(ranks: Pool) -> None:
    for mean, calls in ranks.run(flat, backend="other"):
        assert mean == pytest.approx(-1.0)
        assert not any(calls.values())


def named(rank: int, size: int, backend: str) -> tuple[float, dict[int, int]]:
    return _averaged(rank, process_group=dist.new_group(range(size), backend=backend))


@pytest.mark.parametrize("backend", ["other", "gloo"])
def test_a_group_that_the_user_names_keeps_its_backend(ranks: Pool, backend: str) -> None:
    for mean, calls in ranks.run(named, backend, backend="other"):
        assert mean == pytest.approx(-1.0)
        assert any(calls.values()) == (backend == "other")


def nodes(rank: int, size: int) -> tuple[float, dict[int, int]]:
    return _averaged(rank, config={"node_size": 2})


def test_nodes_sum_by_the_backend_inside_and_by_gloo_between(ranks: Pool) -> None:
    for mean, calls in ranks.run(nodes, size=4, backend="other"):
        assert mean == pytest.approx(-3.0)
        assert calls[2]
        assert not calls[4]


def sites(rank: int, size: int) -> tuple[list[dict[int, int]], float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = sites_of(mesh)
    assert group.shards is not None
    assert group.replicas is not None
    seen = []
    for one in (group.shards, group.replicas, group):
        before = _calls()
        total = one.all_reduce_(torch.full((100,), float(rank)), action="adding").wait()[0].item()
        one.gather_bytes(bytes([rank]), action="agreeing")
        seen.append({n: c - before.get(n, 0) for n, c in _calls().items()})
    return seen, total


def test_a_site_uses_its_backend_inside_and_gloo_to_the_others(ranks: Pool) -> None:
    for (inside, between, every), total in ranks.run(sites, size=4, backend="other"):
        assert inside[2] == 1
        assert not any({**between, 0: sum(every.values())}.values())
        assert total == 6.0


def gradients(rank: int, size: int) -> dict[int, int]:
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(model, optimizer)
    before = _calls()
    engine.minimize(model(torch.ones(1, 200)).sum())
    return {n: c - before.get(n, 0) for n, c in _calls().items()}


def test_gradients_of_flat_ranks_travel_by_the_backend_and_agreements_by_gloo(
    ranks: Pool,
) -> None:
    for calls in ranks.run(gradients, backend="other"):
        assert calls[2] == 1


def stops(rank: int, size: int, how: int) -> None:
    group = Group(timeout=LIMIT_S)
    group.all_reduce_(torch.ones(3), action="adding").wait()
    if rank == 1:
        os.kill(os.getpid(), how)
    group.gather_bytes(b"after", action="agreeing")


@pytest.mark.fault("SIGKILL in the middle of an exchange")
@pytest.mark.parametrize(
    ("how", "kind"), [(signal.SIGKILL, "PeerLost"), (signal.SIGSTOP, "PeerStalled")]
)
def test_a_rank_that_ends_is_named_whatever_the_backend_is(
    ranks: Pool, how: int, kind: str
) -> None:
    answers = ranks.run(stops, how, size=3, expect_errors=True, backend="other")
    assert isinstance(answers[1], Lost | None)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised)
        assert answer.type_name == kind
        assert "rank 1 " in answer.text


def busy(rank: int, size: int) -> int:
    group = Group(timeout=LIMIT_S)
    group.gather_bytes(b"", action="warming up")
    if rank:
        with tw.busy(60):
            time.sleep(1.5 * LIMIT_S)
    return len(group.gather_bytes(b"x", action="agreeing"))


def test_a_busy_rank_is_waited_for_whatever_the_backend_is(ranks: Pool) -> None:
    assert ranks.run(busy, backend="other") == [2, 2]
