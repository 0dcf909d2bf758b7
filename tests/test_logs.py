"""The numbers of `stats()` reach each kind of writer under their names."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.strategy.training import batch, make_engine
from tests.test_stats import NAMES

PAGE = Path(__file__).parent.parent / "docs" / "logging.md"


class Scalars:
    """As TensorBoard's writer."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.lines.append((name, value, step))


class Run:
    """As a run of wandb."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self.rows.append((numbers, step))


class Metrics(Run):
    """As the module mlflow, an experiment of Comet or a logger of Lightning."""

    log: Any = None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((metrics, step))


class Tracked(Scalars):
    """As a Run of Aim."""

    def track(self, value: float, name: str | None = None, step: int | None = None) -> None:
        assert name is not None and step is not None
        self.lines.append((name, value, step))

    add_scalar: Any = None


class Client(Scalars):
    """As a client of MLflow, which is told the run in every call."""

    add_scalar: Any = None

    def log_metric(self, run_id: str, key: str, value: float, *, step: int) -> None:
        assert run_id == "a run"
        self.lines.append((key, value, step))


class Odd:
    """Says more than numbers."""

    def stats(self) -> dict[str, Any]:
        return {"step": 3, "name": "dense", "rate": None, "on": True, "ratio": math.inf, "at": 0.5}


def test_every_kind_of_writer_gets_the_same_numbers() -> None:
    engine = make_engine((), plain=True)
    for step in range(3):
        engine.train_step(*batch(step, 0))
    expected = {f"thinwire/{name}": value for name, value in engine.stats().items()}
    scalars, run, rows = Scalars(), Run(), []
    assert tw.log_stats(engine, scalars) == expected
    tw.log_stats(engine, run)
    tw.log_stats(engine, lambda numbers, step: rows.append((numbers, step)))
    assert scalars.lines == [(name, value, 3) for name, value in expected.items()]
    assert run.rows == rows == [(expected, 3)]
    metrics, tracked, client, bound = Metrics(), Tracked(), Client(), Client()
    bound.run_id = "a run"  # type: ignore[attr-defined]
    for writer in (metrics, tracked, (client, "a run"), bound):
        assert tw.log_stats(engine, writer) == expected
    assert metrics.rows == run.rows
    assert tracked.lines == client.lines == bound.lines == scalars.lines


def test_own_step_that_is_no_number_is_refused() -> None:
    run = Run()
    assert tw.log_stats(Odd(), run, step=70) == {
        "thinwire/step": 3,
        "thinwire/ratio": math.inf,
        "thinwire/at": 0.5,
    }
    assert [step for _, step in run.rows] == [70]


def test_object_neither_source_nor_writer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"source must have stats\(\).* got a Linear"):
        tw.log_stats(torch.nn.Linear(1, 1), print)
    with pytest.raises(TypeError, match=r"writer must have add_scalar.* got a str"):
        tw.log_stats(Odd(), "runs/a")
    with pytest.raises(TypeError, match=r"MLflow client and its run_id.* got a Client"):
        tw.log_stats(Odd(), Client())
    with pytest.raises(ValueError, match="step must be"):
        tw.log_stats(Odd(), print, step=-1)


def test_the_page_has_every_name_and_no_other() -> None:
    told = re.findall(r"^\| `thinwire/(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(told) == sorted(NAMES)
