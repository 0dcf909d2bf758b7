"""What ranks have in common beside their strategy: builds, processors, kernels, buffers."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.processes import ran
from tests.ranks import Pool
from thinwire.optim import DGCMomentum

ROOT = Path(__file__).parents[2]


def prepared(rank: int, size: int, way: str, setting: str) -> list[str]:
    """What was warned of."""
    build, body = torch.__version__, os.environ.get("THINWIRE_KERNELS")
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability
    if rank == 1 and setting == "build":
        torch.__version__ = "2.13.0+cu128"
    if rank == 1 and setting == "denormals":
        torch.set_flush_denormal(True)
    if rank == 1 and setting == "instructions":
        torch.backends.cpu.get_cpu_capability = lambda: "SVE256"  # as on another machine
    if setting == "threads":
        torch.set_num_threads(1 + rank)
    if rank == 1 and setting == "kernels":
        os.environ["THINWIRE_KERNELS"] = "reference"
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            start(way)
            start(way)
        return [str(warning.message) for warning in told]
    finally:
        torch.__version__ = build
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        torch.backends.cpu.get_cpu_capability = capability
        os.environ.pop("THINWIRE_KERNELS", None)
        if body is not None:
            os.environ["THINWIRE_KERNELS"] = body


def start(way: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    if way == "DGCMomentum":
        optimizer = DGCMomentum(model.parameters(), 0.1, min_numel=1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    elif "local_sgd" in way:
        config = tw.LocalSGD(2, compression=tw.LowRank(1) if "low rank" in way else None)
        with tw.local_sgd(model, torch.optim.SGD(model.parameters(), 0.1), config):
            pass
    else:
        fields: dict[str, Any] = {
            "lamb": {"lamb": tw.LAMB()},
            "local muon": {"localsgd": tw.LocalSGD(2)},
        }.get(way, {})
        muon = [{"params": list(model.parameters()), "muon": True}]
        optimizer = (
            tw.optim.Muon(muon, 0.1) if "muon" in way else torch.optim.Adam(model.parameters(), 0.1)
        )
        tw.DistributedStrategy(**fields).prepare(model, optimizer).close()


@pytest.mark.fault("another build of torch on one rank")
@pytest.mark.parametrize("way", ["engine", "DGCMomentum", "local_sgd"])
def test_another_build_of_torch_is_a_warning_and_no_error(way: str, ranks: Pool) -> None:
    for told in ranks.run(prepared, way, "build"):
        assert len(told) == 1, told
        assert "2.13.0+cu128" in told[0]
    ranks.close()  # what was warned of once in a process is not warned of again


@pytest.mark.parametrize("way", ["engine", "DGCMomentum", "local_sgd"])
def test_numbers_that_become_zero_on_one_rank_are_a_mismatch(way: str, ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", "set_flush_denormal", prepared, way, "denormals")


@pytest.mark.parametrize("way", ["engine", "DGCMomentum", "local_sgd, low rank"])
def test_another_instruction_set_is_mismatch_where_ranks_round_by_it(way: str, ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", "ATEN_CPU_CAPABILITY", prepared, way, "instructions")


@pytest.mark.parametrize("way", ["local_sgd", "local muon"])
def test_another_instruction_set_is_allowed_in_averagings(way: str, ranks: Pool) -> None:
    assert ranks.run(prepared, way, "instructions") == [[], []]


@pytest.mark.slow
def test_other_instruction_sets_lead_to_equal_anchors() -> None:
    words = ["research.mixed", "--pairs", "default,two threads", "--rounds", "8"]
    done = ran([sys.executable, "-m", *words], cwd=ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 13, done.stderr
    for line in lines:
        assert line["equal"], line
        assert len(line.get("digests", [0] * 4)) == 4, line


def test_another_number_of_threads_is_mismatch_where_muon_updates_ranks_alike(ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", "OMP_NUM_THREADS", prepared, "muon", "threads")
    for way in ("engine", "local muon"):
        assert ranks.run(prepared, way, "threads") == [[], []]


def test_another_body_of_the_kernels_is_a_mismatch_where_it_rounds_otherwise(ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", "THINWIRE_KERNELS=reference", prepared, "lamb", "kernels")
    assert ranks.run(prepared, "engine", "kernels") == [[], []]


class Growing(nn.Module):
    """Batch norm beside a cache that grows by this rank's rows."""

    def __init__(self, rows: int, start: int) -> None:
        super().__init__()
        self.norm, self.out, self.rows = nn.BatchNorm1d(4), nn.Linear(4, 3), rows
        self.register_buffer("cache", torch.zeros(start, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x.detach()[: self.rows]])
        return self.out(self.norm(x))


def grow(rank: int, size: int, rows: tuple[int, int], local: bool) -> Any:
    torch.manual_seed(2)
    model = Growing(rows[rank], 1)
    fields: dict[str, Any] = {"localsgd": tw.LocalSGD(1)} if local else {}
    engine = tw.DistributedStrategy(**fields).prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.cross_entropy
    )
    torch.manual_seed(3 + rank)
    for _ in range(4):
        engine.train_step(torch.randn(6, 4), torch.randint(3, (6,)))
    return model.norm.running_mean.tolist(), tuple(model.cache.shape)


@pytest.mark.parametrize("local", [False, True])
def test_buffer_of_another_shape_on_one_rank_is_a_mismatch(local: bool, ranks: Pool) -> None:
    ranks.raise_alike("ThinwireError" if local else "Mismatch", "cache", grow, (1, 2), local)


def test_a_buffer_that_grows_alike_is_copied(ranks: Pool) -> None:
    first, second = ranks.run(grow, (2, 2), False)
    assert first == second
    assert first[1] == (9, 4)
