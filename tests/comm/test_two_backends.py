"""A job whose backend is another than gloo: who carries what, and what holds after a fault."""

import os
import signal
import time
from collections import Counter
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


def _make(*given: Any) -> Any:
    _made.append(_Other(*given))
    return _made[-1]


if "other" not in dist.Backend.backend_list:
    dist.Backend.register_backend("other", _make, devices=["cpu"])


def _calls() -> Counter[int]:
    """Collectives of the job's backend in this process, by the number of ranks."""
    found = Counter[int]()
    for backend in _made:
        found[backend.size()] += backend._get_sequence_number_for_group()
    return found


def averaged(rank: int, size: int, named: str) -> tuple[float, Counter[int]]:
    """Mean of a weight after two averagings, and the calls that they made of the job's backend."""
    group = dist.new_group(range(size), backend=named) if named else None
    model = torch.nn.Linear(40, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before, local = _calls(), tw.LocalSGD(1, node_size=2 if size == 4 else None)
    with tw.local_sgd(model, optimizer, local, process_group=group):
        torch.nn.init.zeros_(model.weight)
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight.sum() * rank).backward()
            optimizer.step()
    return model.weight.mean().item(), _calls() - before


@pytest.mark.parametrize("named", ["", "other", "gloo"])
def test_local_updates_travel_by_gloo_unless_users_name_a_group(ranks: Pool, named: str) -> None:
    for mean, calls in ranks.run(averaged, named, backend="other"):
        assert mean == pytest.approx(-1.0)
        assert bool(calls) == (named == "other")


def test_nodes_sum_by_the_backend_inside_and_by_gloo_between(ranks: Pool) -> None:
    for mean, calls in ranks.run(averaged, "", size=4, backend="other"):
        assert mean == pytest.approx(-3.0)
        assert calls.keys() == {2}


def sites(rank: int, size: int) -> list[Counter[int]]:
    job, seen = sites_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), []
    assert job.shards is not None
    assert job.replicas is not None
    for one in (job.shards, job.replicas, job):
        before, part = _calls(), torch.full((100,), float(rank))
        part = one.all_reduce_(part, action="adding").wait()
        one.gather_bytes(bytes([rank]), action="agreeing")
        assert part[0].item() == sum(one.global_ranks)
        seen.append(_calls() - before)
    return seen


def test_a_site_uses_the_backend_inside_and_gloo_to_the_others(ranks: Pool) -> None:
    for answer in ranks.run(sites, size=4, backend="other"):
        assert answer == [Counter({2: 1}), Counter(), Counter()]


def gradients(rank: int, size: int) -> Counter[int]:
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = tw.DistributedStrategy().prepare(model, optimizer)
    before = _calls()
    engine.minimize(model(torch.ones(1, 200)).sum())
    return _calls() - before


def test_gradients_of_flat_ranks_travel_by_the_backend_alone(ranks: Pool) -> None:
    for calls in ranks.run(gradients, backend="other"):
        assert calls == Counter({2: 1})


def stops(rank: int, size: int, how: int) -> None:
    group = Group(timeout=LIMIT_S)
    group.all_reduce_(torch.ones(3), action="adding").wait()
    if rank:
        with tw.busy(60):
            time.sleep(1.5 * LIMIT_S)
    group.gather_bytes(b"", action="waiting for busy ranks")
    if rank == 1:
        os.kill(os.getpid(), how)
    group.gather_bytes(b"after", action="agreeing")


@pytest.mark.fault("SIGKILL in the middle of an exchange")
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (signal.SIGKILL, "PeerLost"),
        pytest.param(signal.SIGSTOP, "PeerStalled", marks=pytest.mark.slow),
    ],
)
def test_busy_rank_is_awaited_and_a_dead_one_named(ranks: Pool, how: int, kind: str) -> None:
    answers = ranks.run(stops, how, size=3, expect_errors=True, backend="other")
    assert isinstance(answers[1], Lost | None)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised)
        assert answer.type_name == kind
        assert "agreeing: rank 1 " in answer.text
