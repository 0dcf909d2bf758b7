"""A resumed run knows which buffers ranks last held alike: those are neither sent nor averaged."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import LocalModel
from tests.local.test_laws import digest
from tests.ranks import Pool
from tests.toys import engine_of
from thinwire.integrations import PerRankState

STEPS, STOP = 14, 6


class WithTables(nn.Module):
    """Mask and table stay, all move the mean, rank 0 the count; `filled` has other values."""

    def __init__(self, rank: int, *, filled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        mask, table = torch.full((4,), -torch.inf), torch.rand(300)
        self.register_buffer("mask", mask if filled else torch.zeros(4))
        self.register_buffer("table", table if filled else torch.zeros(300))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.3)
        if self.rank == 0:
            self.count += 0.1
        return self.linear(x) * self.table[:8]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


def prepared(rank: int, *, filled: bool, **more: Any) -> tw.Engine:
    config = tw.LocalSGD(4, begin_step=0, **more)
    return engine_of(WithTables(rank, filled=filled), localsgd=config)


def run(engine: tw.Engine, rank: int, first: int, last: int) -> tuple[str, float]:
    for step in range(first, last):
        engine.train_step(*batch(step, rank))
    engine.flush()
    told = digest(engine.model), engine.stats()["bytes_sent"]
    engine.close()
    return told


def by_engine(rank: int, size: int, folder: str, stop: int, delay: int) -> list[Any]:
    engine = prepared(rank, filled=True, delay=delay)
    for step in range(stop):
        engine.train_step(*batch(step, rank))
    engine.save(folder)
    straight = run(engine, rank, stop, STEPS)
    resumed = prepared(rank, filled=False, delay=delay)
    resumed.load(folder)
    return [straight, run(resumed, rank, stop, STEPS)]


@pytest.mark.parametrize(("stop", "delay"), [(STOP, 0), (8, 0), (9, 3)])
def test_an_engine_goes_on_bit_for_bit(stop: int, delay: int, ranks: Pool, tmp_path: Path) -> None:
    """Between averagings, at one, and with a result on its way, which travels twice."""
    for straight, resumed in ranks.run(by_engine, str(tmp_path), stop, delay, size=3):
        assert resumed[0] == straight[0]
        assert delay or resumed[1] == straight[1]


def leave(rank: int, size: int, folder: str) -> None:
    engine = prepared(rank, filled=True)
    for step in range(STOP):
        engine.train_step(*batch(step, rank))
    engine.save(folder)
    sync = engine.sync
    assert sync is not None
    state = PerRankState(sync, name="own")
    state.folder = folder
    torch.save(state.state_dict(), Path(folder, f"rank_{rank}.pt"))
    engine.close()


def enter(rank: int, size: int, folder: str, way: str) -> tuple[str, bool, dict[str, float]]:
    """What ranks have at the end, if mask and table stayed, and what the state told of buffers."""
    engine = prepared(rank, filled=False)
    assert engine.sync is not None
    if way == "engine":
        engine.load(folder)
    else:
        state = PerRankState(engine.sync, name="own")
        state.folder = folder
        state.load_state_dict(torch.load(Path(folder, "rank_0.pt")))
    told = engine.sync.state_dict()["unchanged_buffers"]
    known = WithTables(rank, filled=True)
    run(engine, rank, STOP, 12)
    same = all(
        torch.equal(engine.model.get_buffer(name), known.get_buffer(name))
        for name in ("mask", "table")
    )
    return digest(engine.model), same, told


@pytest.mark.parametrize("way", ["engine", "each rank's own"])
@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_leaves_them_alone_too(
    before: int, now: int, way: str, ranks: Pool, tmp_path: Path
) -> None:
    ranks.run(leave, str(tmp_path), size=before)
    found = ranks.run(enter, str(tmp_path), way, size=now)
    assert len({after for after, *_ in found}) == 1
    for _, same, told in found:
        assert same
        assert told == {
            "buffer mask": 1.0,
            "buffer table": 1.0,
            "buffer mean": 0.0,
            "buffer count": 0.0,  # of rank 0 alone before
        }


def changed_without_a_step(rank: int, size: int, folder: str) -> list[str]:
    """As by `update_bn` after an averaging, right before the save."""
    found = []
    for filled in (True, False):
        engine = prepared(rank, filled=filled)
        if filled:
            for step in range(4):
                engine.train_step(*batch(step, rank))
            engine.model(batch(50, rank)[0])
            engine.save(folder)
        else:
            engine.load(folder)
        engine.flush()
        found.append(digest(engine.model))
        engine.close()
    return found


def test_change_without_a_step_is_still_averaged(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run(changed_without_a_step, str(tmp_path), size=2)
    assert len({after for each in found for after in each}) == 1


def test_buffer_facts_are_checked_before_anything_changes() -> None:
    engine = prepared(0, filled=True)
    assert engine.sync is not None
    state = engine.sync.state_dict()
    for wrong, text in (([1.0], "unchanged_buffers must be"), ({"buffer mask": "1"}, "mask")):
        with pytest.raises(TypeError, match=text):
            engine.sync.load_state_dict({**state, "step": 5, "unchanged_buffers": wrong})
    assert engine.sync.step == 0
    engine.close()


def test_unknown_buffers_stay_unknown() -> None:
    """As of a joiner among members before its first averaging; a mean over ranks keeps it."""
    model = WithTables(0, filled=True)
    known, other = (
        LocalModel(model, torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)
    )
    known.made_common()
    known.forget_common()
    told = known.unchanged_buffers()
    assert all(math.isnan(share) for share in told.values())
    other.made_common()
    assert set(other.unchanged_buffers().values()) == {1.0}
    other.load_unchanged({name: (share + 1.0) / 2 for name, share in told.items()})
    assert other.changed_buffers() == dict.fromkeys(told, False)
