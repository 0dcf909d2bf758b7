"""A member that is a site of shards comes and goes as a whole."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.api import Averaging, ElasticGroup, PendingAveraging
from tests.members.places import meeting_place, met
from tests.members.training import PHASES, TIMEOUT_S, deaf, digest, faulty, model, wait_for
from tests.ranks import Lost, Pool, Raised
from tests.sharded.models import mesh_of
from tests.toys import arriving, descend, engine_of
from tests.waiting import PATIENCE_S
from thinwire.errors import ThinwireError

SHARDS = 2
SPARSE = tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9))
CONFIGS = {
    "whole": tw.LocalSGD(4, begin_step=0),
    "one bit, late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=2),
    "one bit, three steps late": tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1), delay=3),
    "outer momentum, parts": tw.LocalSGD(
        4, begin_step=1, fragments=2, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    ),
    "split, with state": tw.LocalSGD(
        4, begin_step=1, average_state=True, compression=tw.Sparse(0.9, exchange="split")
    ),
    "adaptive": tw.AdaptiveLocalSGD(init_k_steps=4, begin_step=1),
}


def net_of(site: int, mesh: Any) -> torch.nn.Module:
    net = model(site)
    fully_shard(net, mesh=mesh["shard"])
    return net


def optimizer_of(net: torch.nn.Module, config: Any) -> torch.optim.Optimizer:
    muon = isinstance(config.compression, tw.Quantized)
    return (tw.optim.Muon if muon else torch.optim.AdamW)(net.parameters(), 2e-3)


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(8, 24, generator=generator)


@contextmanager
def as_site(folder: str, name: str, shard: int, shards: int = SHARDS) -> Iterator[DeviceMesh]:
    """A process group of one site while the block runs, and its mesh."""
    store = dist.FileStore(f"{folder}/site-{name}", shards)
    dist.init_process_group("gloo", store=store, rank=shard, world_size=shards)
    dist.barrier()  # a rank that ends at once would break off the other one's connecting
    try:
        yield mesh_of(1, shards)
    finally:
        dist.destroy_process_group()


def site(
    rank: int,
    size: int,
    address: str,
    folder: str,
    config: Any,
    *,
    steps: int = 24,
    founders: int | None = None,
    flag_at: int = 4,
    fault: dict[str, Any] | None = None,
    leave_at: dict[int, int] | None = None,
    end_at: dict[int, int] | None = None,
    step_s: float = 0.0,
    one_start: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """A rank of a site; `size` counts the processes of all of them, as `rank` does."""
    number, shard = divmod(rank, SHARDS)
    founders = size // SHARDS if founders is None else founders
    steps = (end_at or {}).get(number, steps)
    flag = Path(folder, "go")
    wait_for(str(flag) if number >= founders else "")
    with as_site(folder, f"{number}", shard) as mesh:
        net = net_of(0 if one_start else number, mesh)
        optimizer = optimizer_of(net, config)
        batches = torch.Generator().manual_seed(number)
        rounds: dict[int, tuple[str, int]] = {}
        longest_s = 0.0
        options = {"min_members": 1, "start_members": founders, "timeout": timeout_s, "mesh": mesh}
        with faulty(rank, fault), tw.join(address, run="test", **options) as members:
            with tw.local_sgd(net, optimizer, config, members=members, mesh=mesh) as sync:
                entered, place = sync.step, members.rank
                while sync.step < steps and not members.left:
                    x = batch(batches)
                    loss = (net(x) - x.roll(1, 1)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    if sync.step == (leave_at or {}).get(rank):
                        members.leave()
                    if rank == 0 and sync.step == flag_at:
                        flag.touch()
                    begun = time.monotonic()
                    sync.observe(loss)
                    optimizer.step()
                    longest_s = max(longest_s, time.monotonic() - begun)
                    if sync.synced and not members.left:
                        rounds[sync.step] = digest(sync), members.size
                    time.sleep(step_s)
                left = members.left
            values = {n: p.detach().full_tensor().clone() for n, p in net.named_parameters()}
            stats = {} if left else sync.stats()
            return {
                "step": sync.step,
                "entered": entered,
                "place": place,
                "rounds": rounds,
                "longest_s": longest_s,
                "left": left,
                "values": values,
                "stats": stats,
            }


def run_sites(
    ranks: Pool, folder: Path, config: Any, *, size: int, errors: bool = False, **options: Any
) -> list[Any]:
    """What the ranks of each site gave, site by site."""
    found = met(ranks, _site_with, str(folder), config, options, size=size, errors=errors)
    return [found[at : at + SHARDS] for at in range(0, size, SHARDS)]


def _site_with(
    rank: int, size: int, address: str, folder: str, config: Any, options: Any
) -> dict[str, Any]:
    return site(rank, size, address, folder, config, **options)


def alike(sites: list[Any], steps: int) -> dict[int, tuple[str, int]]:
    """That all who went on to the end hold the same of each shard after every averaging."""
    for shard in range(SHARDS):
        first, *others = (each[shard]["rounds"] for each in sites)
        assert first
        for other in others:
            assert {step: first[step] for step in other} == other
    for each in sites:
        assert {one["step"] for one in each} == {steps}
        assert len({tuple(one["rounds"]) for one in each}) == 1
    return sites[0][0]["rounds"]


def together(rank: int, size: int, config: Any, steps: int, sites: list[int]) -> dict[str, Tensor]:
    """The same training in one job, with a mesh of all sites in this order."""
    mesh = mesh_of(size // SHARDS, SHARDS)
    number = sites[rank // SHARDS]
    net = net_of(0, mesh)
    optimizer = optimizer_of(net, config)
    batches = torch.Generator().manual_seed(number)
    with tw.local_sgd(net, optimizer, config, mesh=mesh) as sync:
        for _ in range(steps):
            x = batch(batches)
            loss = (net(x) - x.roll(1, 1)).square().mean()
            sync.observe(loss)
            descend(optimizer, loss)
    return {n: p.detach().full_tensor().clone() for n, p in net.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_nobody_comes_or_goes_and_bits_are_of_a_job(ranks: Pool, tmp_path: Path, name: str) -> None:
    # whoever comes first gives the others its model
    sites = run_sites(ranks, tmp_path, CONFIGS[name], size=4, one_start=True)
    alike(sites, 24)
    # members count as they come, and shares of a split exchange are those of their numbers
    order = sorted(range(len(sites)), key=lambda number: sites[number][0]["place"])
    whole = ranks.run(together, CONFIGS[name], 24, order, size=4)
    for place, number in enumerate(order):
        for key, value in whole[place * SHARDS].items():
            assert torch.equal(sites[number][0]["values"][key], value), key


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), zip([1, 4] * 3, PHASES, strict=True))
def test_lost_rank_is_a_lost_site(ranks: Pool, tmp_path: Path, phase: str, rank: int) -> None:
    fault = {"rank": rank, "phase": phase, "at": 3}
    sites = run_sites(ranks, tmp_path, SPARSE, size=6, errors=True, fault=fault)
    lost = sites.pop(rank // SHARDS)
    assert isinstance(lost[rank % SHARDS], Lost)
    assert isinstance(lost[1 - rank % SHARDS], Raised)
    rounds = alike(sites, 24)
    assert set(rounds) == {1, 5, 9, 13, 17, 21}
    assert [size for _, size in rounds.values()][-1] == 2
    assert max(one["longest_s"] for each in sites for one in each) < 2 * TIMEOUT_S + 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "one bit, late", "split, with state"])
def test_site_that_comes_has_bits_of_the_others(ranks: Pool, tmp_path: Path, name: str) -> None:
    sites = run_sites(ranks, tmp_path, CONFIGS[name], size=6, founders=2, steps=100, step_s=0.05)
    rounds = alike(sites, 100)
    assert [size for _, size in rounds.values()][-1] == 3
    joiners = sites[2]
    assert len({one["entered"] for one in joiners}) == 1
    assert joiners[0]["entered"] > 1
    assert len(joiners[0]["rounds"]) > 3
    for key, value in sites[0][0]["values"].items():
        if name != "one bit, late":  # else local steps since the last averaging are each site's
            assert torch.equal(joiners[1]["values"][key], value), key


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_leaves_takes_its_site_with_it(ranks: Pool, tmp_path: Path, rank: int) -> None:
    # nobody can have waited for such a time-out
    options = {"leave_at": {rank: 10}, "timeout_s": 4 * PATIENCE_S}
    sites = run_sites(ranks, tmp_path, SPARSE, size=6, **options)
    gone = sites.pop(rank // SHARDS)
    assert [one["left"] for one in gone] == [True, True]
    assert [one["step"] for one in gone] == [13, 13]
    rounds = alike(sites, 24)
    assert [size for _, size in rounds.values()] == [3, 3, 3, 3, 2, 2]


def test_a_site_that_ends_before_the_others_leaves(ranks: Pool, tmp_path: Path) -> None:
    sites = run_sites(ranks, tmp_path, SPARSE, size=6, end_at={1: 10})
    gone = sites.pop(1)
    assert [one["step"] for one in gone] == [13, 13]
    rounds = alike(sites, 24)
    assert [size for _, size in rounds.values()] == [3, 3, 3, 3, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2])
def test_site_that_dies_while_it_comes_stops_nobody(ranks: Pool, tmp_path: Path, at: int) -> None:
    """One of its ranks dies before or after the site counts as ready."""
    options = {"founders": 2, "steps": 140, "step_s": 0.05}
    fault = {"rank": 5, "phase": "taking", "at": at}
    sites = run_sites(ranks, tmp_path, SPARSE, size=6, errors=True, fault=fault, **options)
    dead = sites.pop()
    assert isinstance(dead[1], Lost)
    assert isinstance(dead[0], Raised)
    rounds = alike(sites, 140)
    assert [size for _, size in rounds.values()][-1] == 2


@pytest.mark.slow
def test_one_of_two_sites_goes_on(ranks: Pool, tmp_path: Path) -> None:
    fault = {"rank": 3, "phase": "once sent", "at": 3}
    sites = run_sites(ranks, tmp_path, SPARSE, size=4, errors=True, fault=fault)
    assert isinstance(sites.pop()[1], Lost)
    assert [size for _, size in alike(sites, 24).values()][-1] == 1


def test_facts_missing_on_one_shard_are_reported_to_it(ranks: Pool, tmp_path: Path) -> None:
    """Nobody is lost: one rank gives the generation of its shard up before it goes along."""
    found = met(ranks, _deaf, str(tmp_path), size=6)
    sites = [found[at : at + SHARDS] for at in range(0, 6, SHARDS)]
    rounds = alike(sites, 24)
    assert set(rounds) == {1, 5, 9, 13, 17, 21}
    assert found[3]["deaf"] == 1


def _deaf(rank: int, size: int, address: str, folder: str) -> Any:
    with deaf(at=9 if rank == 3 else 0) as times:
        return {**site(rank, size, address, folder, SPARSE), "deaf": len(times)}


def one_bad_message(rank: int, size: int, address: str, folder: str) -> tuple[str, bool]:
    """Of one shard, at one site: nothing is applied anywhere."""
    before: dict[str, Any] = {}

    def flipped(rows: Tensor, _: str) -> Tensor:
        rows = rows.clone()
        if rank == 3 and rows.shape[1] > 40:
            rows[0, 40] ^= 1
        return rows

    def measured(averaging: Averaging, pending: PendingAveraging, **options: Any) -> None:
        before.update({n: a.clone() for n, a in averaging.anchors.items()})
        before["now"] = averaging.anchors
        launch(averaging, pending, **options)

    launch = Averaging.launch
    with (
        arriving(ElasticGroup, "all_gather", flipped),
        patch.object(Averaging, "launch", measured),
        pytest.raises(ThinwireError) as caught,
    ):
        site(rank, size, address, folder, tw.LocalSGD(4, compression=tw.Quantized(4)))
    now = before.pop("now")
    return caught.typename, all(torch.equal(now[n], a) for n, a in before.items())


def test_a_bad_message_of_one_shard_stops_all(ranks: Pool, tmp_path: Path) -> None:
    found = met(ranks, one_bad_message, str(tmp_path), size=4)
    assert found == [("PayloadCorrupt", True)] * 4


def engine(rank: int, size: int, address: str, folder: str, part: str) -> Any:
    """A run to step 20, of which one site saves at step 10; or how it begins anew from there."""
    number, shard = divmod(rank, SHARDS)
    wait_for(f"{folder}/{part}" if number == 2 else "")
    with as_site(folder, f"{number}-{part}", shard) as mesh:
        net = net_of(number, mesh)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        fields = {"localsgd": SPARSE, "gradient_merge": tw.GradientMerge(2)}
        fields["amp"] = tw.AMP(dtype="bfloat16")
        data = torch.randn(64, 24, generator=torch.Generator().manual_seed(9))
        options = {"run": "sites", "start_members": 2, "timeout": TIMEOUT_S}
        with tw.join(address, mesh=mesh, **options) as members:
            told = {"members": members, "mesh": mesh}
            trained = engine_of(net, optimizer=optimizer, options=told, **fields)
            loaded = trained.load(f"{folder}/copies", if_any=True)
            entered = members.step
            sampler = tw.ShardedSampler(data, members=members)
            samples = chain.from_iterable(repeat(sampler))
            while members.step < (20 if part == "first" else 60):
                x = data[list(islice(samples, 8))]
                trained.train_step(x, x.roll(1, 1))
                if members.step == 10 and members.rank == 1 and part == "first":
                    trained.save(f"{folder}/copies")
                if rank == 0 and members.step == 14:
                    Path(folder, part).touch()
                time.sleep(0.03)
            trained.flush()
            text = digest(trained.sync)
            trained.close()
        return loaded is not None, entered, text


@pytest.mark.slow
def test_an_engine_takes_sites_and_saves(ranks: Pool, tmp_path: Path) -> None:
    with meeting_place(None) as address:
        first = ranks.run(engine, address, str(tmp_path), "first", size=4, group=False)
        again = ranks.run(engine, address, str(tmp_path), "second", size=6, group=False)
    assert first[0][2] == first[2][2]
    assert first[1][2] == first[3][2]
    assert [each[0] for each in again] == [True] * 4 + [False] * 2
    assert [each[1] for each in again[:4]] == [10] * 4
    assert again[4][1] == again[5][1] > 10, "it took over what the others held"
    assert len({each[2] for each in again[::2]}) == 1
    assert len({each[2] for each in again[1::2]}) == 1


def refused(rank: int, size: int, address: str, folder: str, what: str) -> str:
    """The error of a site beside one that is well."""
    number, shard = divmod(rank, SHARDS)
    if what == "other shards" and number == 1:
        number, shard = rank, 0
    own = 1 if number > 1 or (what == "other shards" and number) else SHARDS
    if number:
        wait_for(f"{folder}/joined")
    with as_site(folder, f"{number}", shard, own) as site_mesh:
        mesh = mesh_of(2, 1) if what == "sites" else site_mesh
        try:
            with tw.join(address, run="test", timeout=TIMEOUT_S, mesh=mesh) as members:
                Path(folder, "joined").touch()
                net = net_of(0, mesh)
                optimizer = torch.optim.SGD(net.parameters(), 0.1)
                given = None if what == "no mesh" else mesh
                with tw.local_sgd(net, optimizer, SPARSE, members=members, mesh=given):
                    return "no error"
        except (ThinwireError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


def test_state_that_does_not_fit_is_one_clear_error(ranks: Pool, tmp_path: Path) -> None:
    def said(what: str, size: int = SHARDS) -> list[str]:
        folder = tmp_path / what
        folder.mkdir()
        found: list[str] = met(ranks, refused, str(folder), what, size=size)
        return found

    assert all("a member is one" in each for each in said("sites"))
    assert all("mesh=None was given with members" in each for each in said("no mesh"))
    found = said("other shards", 3)
    assert found[:2] == ["no error"] * 2
    assert found[2].startswith("Mismatch: ")
    assert "shards of a site is 1 here and 2 there" in found[2]
