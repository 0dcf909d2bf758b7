"""Buffers with persistent=False are restored where they fit, else the model keeps its own."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from tests.api import export
from tests.ranks import Pool
from tests.strategy.training import digest, train
from thinwire.errors import CheckpointMismatch

ROWS = 16
"""Of a batch."""
KEEPS = (
    "non-persistent buffers that are missing in the state or the model, or have another shape there"
)


class Cached(nn.Module):
    """Adds a table to its output, which a forward pass makes, or makes longer, where it has to."""

    cache: Tensor

    def __init__(self, rows: int = 0, *, persistent: bool = False) -> None:
        super().__init__()
        self.persistent = persistent
        self.register_buffer("seen", torch.zeros(()))
        self.line = nn.Linear(8, 4)
        if rows:
            self.grow(rows)

    def grow(self, rows: int) -> None:
        table = (torch.arange(rows) / 10)[:, None].repeat(1, 4)
        self.register_buffer("cache", table, persistent=self.persistent)

    def forward(self, x: Tensor) -> Tensor:
        if len(getattr(self, "cache", ())) < len(x):
            self.grow(len(x))
        self.seen += 1
        return self.line(x) + self.cache[: len(x)]


def prepared(rows: int = 0, *, persistent: bool = False, **fields: Any) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(Cached(rows, persistent=persistent))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return tw.DistributedStrategy(**fields).prepare(model, optimizer, nn.functional.cross_entropy)


LOADS: dict[str, Callable[[Any, Path, Any], object]] = {
    "load": lambda engine, folder, state: engine.load(folder),
    "load_state_dict": lambda engine, folder, state: engine.load_state_dict(state),
    "load_parameters": lambda engine, folder, state: engine.load_parameters(folder),
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path, Any]:
    engine = prepared()
    train(engine, (), 0, 3)
    engine.save(tmp_path)
    return engine, tmp_path, engine.state_dict()


@pytest.mark.parametrize("rows", [0, 5, 40])
@pytest.mark.parametrize("kind", LOADS)
def test_a_cache_that_is_not_there_or_of_another_length_stays_as_it_is(
    saved: tuple[Any, Path, Any], kind: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, folder, state = saved
    other = prepared(rows)
    if rows:
        other.model[0].cache += 7
        kept = other.model[0].cache.clone()
    with caplog.at_level(logging.WARNING, "thinwire"):
        LOADS[kind](other, folder, state)
    [line] = caplog.messages
    assert line.startswith(f"0.cache: {KEEPS}")
    assert torch.equal(other.model[0].cache, kept) if rows else not hasattr(other.model[0], "cache")
    assert torch.equal(other.model[0].line.weight, engine.model[0].line.weight)
    assert other.model[0].seen == 3
    if rows == 40:
        return  # its own values count
    if kind != "load_parameters":
        assert train(other, (), 3, 6) == train(engine, (), 3, 6)
        assert digest(other) == digest(engine)


@pytest.mark.parametrize("kind", LOADS)
def test_one_that_fits_is_restored_without_a_word(
    saved: tuple[Any, Path, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, folder, state = saved
    other = prepared(ROWS)
    other.model[0].cache += 7
    with caplog.at_level(logging.WARNING, "thinwire"):
        LOADS[kind](other, folder, state)
    assert torch.equal(other.model[0].cache, engine.model[0].cache)
    assert caplog.messages == []


@pytest.mark.parametrize("kind", LOADS)
def test_one_that_the_checkpoint_lacks_stays(tmp_path: Path, kind: str) -> None:
    engine = prepared()
    engine.save(tmp_path)
    other = prepared(ROWS)
    LOADS[kind](other, tmp_path, engine.state_dict())
    assert torch.equal(other.model[0].cache[:, 0], torch.arange(ROWS) / 10)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ({"persistent": True}, {}, r"0\.cache has shape \(16, 4\) in it and nothing here"),
        ({}, {"rows": 40, "persistent": True}, r"0\.cache has shape \(16, 4\) in it and \(40, 4\)"),
        ({"rows": 16, "persistent": True}, {"rows": 40, "persistent": True}, r"and \(40, 4\) here"),
    ],
)
def test_persistent_ones_have_to_fit(
    tmp_path: Path, kind: str, then: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    engine = prepared(**then)
    engine.model[0].register_buffer("beside", torch.zeros(2), persistent=False)
    train(engine, (), 0, 1)
    engine.save(tmp_path)
    other = prepared(**now)
    before = digest(other)
    error = ValueError if kind == "load_state_dict" else CheckpointMismatch
    with pytest.raises(error, match=told):
        LOADS[kind](other, tmp_path, engine.state_dict())
    assert digest(other) == before


def test_an_exported_model_has_none_of_them(saved: tuple[Any, Path, Any], tmp_path: Path) -> None:
    engine, folder, _ = saved
    export(folder, tmp_path / "model.safetensors")
    for model in (prepared(), prepared(40)):
        model.load_parameters(tmp_path / "model.safetensors")
        assert torch.equal(model.model[0].line.weight, engine.model[0].line.weight)


@pytest.mark.parametrize("delay", [0, 1])
def test_local_updates_go_on_between_two_averagings(tmp_path: Path, delay: int) -> None:
    fields = {"localsgd": tw.LocalSGD(4, delay=delay)}
    engine = prepared(20, **fields)
    train(engine, (), 0, 5)
    engine.save(tmp_path)
    expected = train(engine, (), 5, 12)
    for rows in (ROWS, 40):
        other = prepared(rows, **fields)
        other.load(tmp_path)
        assert len(other.model[0].cache) == rows
        assert train(other, (), 5, 12) == expected


def unlike(rank: int, size: int, folder: str) -> tuple[list[float], list[float], str]:
    engine = prepared()
    train(engine, (), 0, 2)
    engine.save(folder)
    engine.close()
    other = prepared()
    if rank == 1:  # as after an evaluation on this rank alone
        other.model[0].grow(ROWS)
        other.model[0].cache.fill_(7)
    other.load(folder)
    kept = getattr(other.model[0], "cache", torch.empty(0, 4))[:, 0].tolist()
    train(other, (), 2, 4)
    return kept, other.model[0].cache[:, 0].tolist(), digest(other)


def test_all_ranks_leave_out_a_buffer_that_one_leaves_out(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(unlike, str(tmp_path), size=2)
    assert (first[0], second[0]) == ([], [7.0] * ROWS)
    assert first[1] == second[1] == (torch.arange(ROWS) / 10).tolist()
    assert first[2] == second[2]
    alone = prepared()  # another number of ranks
    alone.load(tmp_path)
    assert alone.step == 2


def between_averagings(rank: int, size: int, folder: str) -> list[str]:
    fields = {"localsgd": tw.LocalSGD(4, delay=2)}
    engine = prepared(20, **fields)
    for step in range(5):
        train(engine, (), step, step + 1)
        engine.model[0].cache[-1] += 1 + rank  # so that it travels; no batch has so many rows
    engine.save(folder)
    train(engine, (), 5, 12)
    engine.flush()
    found = [digest_of_line(engine)]
    engine.close()
    other = prepared(ROWS, **fields)
    other.load(folder)
    train(other, (), 5, 12)
    other.flush()
    dist.barrier()
    return [*found, digest_of_line(other)]


def digest_of_line(engine: Any) -> str:
    return str([p.tolist() for p in engine.model.parameters()])


def test_an_averaging_on_its_way_goes_on_without_them(ranks: Pool, tmp_path: Path) -> None:
    answers = ranks.run(between_averagings, str(tmp_path), size=2)
    assert len({each for answer in answers for each in answer}) == 1
