"""Ranks in different calls get `Mismatch` on all sides at once; slow ranks do not."""

import contextlib
import re
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.ranks import Pool, Raised
from tests.toys import bits, engine_of

NEVER_S = 60.0


Batch = tuple[torch.Tensor, torch.Tensor]


def loss_of(engine: tw.Engine, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(engine.model(batch[0]), batch[1])


CALLS: dict[str, Callable[[tw.Engine, Batch, str], Any]] = {
    "train_step": lambda engine, batch, _: engine.train_step(*batch),
    "minimize": lambda engine, batch, _: engine.minimize(loss_of(engine, batch)),
    "flush": lambda engine, *_: engine.flush(),
    "save": lambda engine, _, folder: engine.save(folder),
    "load": lambda engine, _, folder: engine.load(folder),
    "load_parameters": lambda engine, _, folder: engine.load_parameters(folder),
    "mean_loss": lambda engine, *_: engine.mean_loss(1.0),
}
STEPS = "Engine.train_step|Engine.minimize|agreeing on step"
NAMES = {
    "train_step": STEPS,
    "minimize": STEPS,
    "flush": r"Engine.flush|engine.flush\(\)|flushing",
    "save": "Engine.save|saving",
    "load": "Engine.load |looking for checkpoints",
    "load_parameters": "Engine.load_parameters|looking for checkpoints",
    "mean_loss": "Engine.mean_loss|the mean loss",
}
"""Names of each call in errors."""
SAME = {("train_step", "minimize"), ("load", "load_parameters")}
"""Pairs that exchange the same."""
PAIRS = [pair for pair in combinations(CALLS, 2) if pair not in SAME]
FIELDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dgc": {"dgc": tw.DGC(sparsity=(0.75,), min_numel=16)},
    "local": {"localsgd": tw.LocalSGD(1, begin_step=0)},
}


def apart(
    rank: int,
    size: int,
    fields: str,
    names: tuple[str, ...],
    folder: str,
    late_s: float,
    width: int,
) -> None:
    """Make some steps on all ranks, then one call for each rank; the last one comes later."""
    torch.manual_seed(0)
    engine = engine_of(nn.Linear(width, width), options={"timeout": NEVER_S}, **FIELDS[fields])
    torch.manual_seed(rank)
    batch = torch.randn(4, width), torch.randn(4, width)
    for _ in range(0 if "load_parameters" in names or width > 8 else 4):
        engine.train_step(*batch)
    time.sleep(late_s if rank == size - 1 else 0.0)
    CALLS[names[rank]](engine, batch, folder)


CASES = [
    *(("dense", names[:: 1 - 2 * (at % 2)], 0.0, 8) for at, names in enumerate(PAIRS)),
    *((fields, ("train_step", "flush"), 0.0, 8) for fields in ("dgc", "local")),
    ("dense", ("train_step", "flush"), 0.0, 800),  # its connections are not there yet
    *(("dense", ("train_step", "flush", last), 3.0, 8) for last in ("train_step", "mean_loss")),
]


@pytest.mark.fault("ranks in different calls")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_calls_are_named_on_all_ranks(ranks: Pool, tmp_path: Path, case: Any) -> None:
    fields, names, *how = case
    options = {"size": len(names), "expect_errors": True}
    for answer in ranks.run(apart, fields, names, str(tmp_path), *how, **options):
        assert isinstance(answer, Raised), answer
        assert answer.type_name == "Mismatch", answer.traceback
        for name in names[:2]:
            assert re.search(NAMES[name], answer.text), answer.text


def slow(rank: int, size: int, fields: str, folder: str) -> str:
    """Make every call on all ranks; each time some of them are late, also inside `busy`."""
    torch.manual_seed(0)
    engine = engine_of(nn.Linear(8, 8), options={"timeout": NEVER_S}, **FIELDS[fields])
    torch.manual_seed(rank)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    for at, name in enumerate(["train_step", *CALLS, "train_step"]):
        if (at + rank) % 3 == 0:
            with tw.busy(60) if at % 2 else contextlib.nullcontext():
                time.sleep(1.4)
        if name != "load_parameters":
            CALLS[name](engine, batch, folder)
    with engine.join():
        for _ in range(1 + 2 * rank):
            time.sleep(0.6)
            engine.train_step(*batch)
    engine.flush()
    return bits(engine.model.parameters())


@pytest.mark.fault("slow ranks")
@pytest.mark.parametrize("fields", FIELDS)
def test_slow_ranks_are_waited_for(ranks: Pool, tmp_path: Path, fields: str) -> None:
    first, *others = ranks.run(slow, fields, str(tmp_path), size=3)
    assert others == [first] * 2
