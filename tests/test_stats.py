"""`stats()` has one set of flat names everywhere, numbers only; the log says what takes long and
what matters."""

import logging
import math
import time
from numbers import Real
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import FIELDS, batch, make_engine, make_model

NAMES = {
    "step",
    "microsteps",
    "dropped_steps",
    "averagings",
    "k_steps",
    "sparsity",
    "loss_scale",
    "applied_share",
    "bytes_sent",
    "bytes_received",
    "bytes_between_nodes",
    "bytes_between_stages",
    "bytes_dense",
    "ratio",
    "wait_s",
    "rate_bit_s",
    "waiting_share",
}
cross_entropy = nn.functional.cross_entropy


def require_flat(stats: dict[str, Any]) -> None:
    assert set(stats) == NAMES
    for name, value in stats.items():
        assert isinstance(value, Real), name
        assert not isinstance(value, bool), name
    assert stats["ratio"] == (
        stats["bytes_dense"] / stats["bytes_sent"] if stats["bytes_sent"] else math.inf
    )


@pytest.mark.parametrize("field", [None, *(name for name in FIELDS if name != "pipeline")])
def test_an_engine_has_the_names(field: str | None) -> None:
    engine = make_engine(() if field is None else (field,), plain=True)
    require_flat(engine.stats())
    for step in range(3):
        engine.train_step(*batch(step, 0))
    require_flat(engine.stats())
    assert isinstance(engine.pending, str)
    ratios = engine.trust_ratios()
    assert bool(ratios) == (field in ("lars", "lamb"))


def everywhere(rank: int, size: int) -> list[dict[str, Any]]:
    found = []
    engine = make_engine(("dgc",), plain=True)
    for step in range(3):
        engine.train_step(*batch(step, rank))
    found.append(engine.stats())
    engine.close()
    model = make_model(plain=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(2, compression=tw.Sparse(0.5))) as sync:
        for step in range(4):
            optimizer.zero_grad()
            cross_entropy(model(batch(step, rank)[0]), batch(step, rank)[1]).backward()
            optimizer.step()
        found.append(sync.stats())
    model = make_model(plain=True)
    dgc = tw.optim.DGCMomentum(
        model.parameters(), lr=0.1, sparsity=(0.75,), rampup_begin_step=2, min_numel=64
    )
    found.append(dgc.stats())
    ddp = DistributedDataParallel(model)
    handle = dgc.attach(ddp)
    for step in range(3):
        dgc.zero_grad()
        cross_entropy(ddp(batch(step, rank)[0]), batch(step, rank)[1]).backward()
        dgc.step()
        found.append(handle.stats())
    assert handle.stats() == dgc.stats()
    handle.remove()
    return found


def test_local_updates_an_optimizer_and_its_handle_have_the_names_too(ranks: Pool) -> None:
    for found in ranks.run(everywhere):
        for stats in found:
            require_flat(stats)
        engine, local, _, *attached = found
        assert engine["sparsity"] == 0.75
        assert local["sparsity"] == 0.5
        assert local["averagings"] == 2
        assert [stats["sparsity"] for stats in attached] == [0.0, 0.75, 0.75]
        for stats in (engine, local, attached[-1]):
            assert stats["bytes_received"] > 0
            assert stats["wait_s"] > 0


def late(rank: int, size: int, field: str) -> tuple[float, float]:
    engine = make_engine((field,) if field else (), plain=True)
    for step in range(4):
        engine.train_step(*batch(step, rank))
    before = engine.stats()["wait_s"]
    if rank:
        time.sleep(0.6)
    for step in range(4, 6):
        engine.train_step(*batch(step, rank))
    return engine.stats()["wait_s"] - before, engine.stats()["bytes_received"]


@pytest.mark.parametrize("field", ["", "dgc", "localsgd"])
def test_the_time_of_waiting_is_that_for_the_others(field: str, ranks: Pool) -> None:
    (early, got), (slow, _) = ranks.run(late, field)
    assert 0.5 < early < 30
    assert slow < early
    assert got > 0


def test_bytes_received_count_what_came(ranks: Pool) -> None:
    """Dense gradients as a whole, and agreements."""
    (stats, *_) = ranks.run(dense)
    whole = stats["bytes_dense"]
    assert whole < stats["bytes_received"] < whole + 2000


def dense(rank: int, size: int) -> dict[str, Any]:
    engine = make_engine((), plain=True)
    for step in range(3):
        engine.train_step(*batch(step, rank))
    return dict(engine.stats())


# ---- the log


def test_without_a_set_up_of_logging_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("thinwire").warning("nobody asked")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert any(
        isinstance(handler, logging.NullHandler)
        for handler in logging.getLogger("thinwire").handlers
    )


def logged(rank: int, size: int) -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    log, handler = logging.getLogger("thinwire"), Kept()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        fields = ("localsgd",)
        engine = make_engine(fields, plain=True)
        for step in range(4):
            engine.train_step(*batch(step, rank))
        engine.close()
        engine = make_engine(("amp",), plain=True)
        x, y = batch(0, rank)
        engine.train_step(x * float("inf"), y)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return records


def test_the_log_says_what_matters(ranks: Pool) -> None:
    for records in ranks.run(logged):
        text = "\n".join(f"{level} {message}" for level, message in records)
        assert "INFO the engine is ready" in text
        assert "DEBUG averaged after local step 3" in text
        assert "INFO step 0 was dropped for an overflow" in text
        assert "loss scale" in text
