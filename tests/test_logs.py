"""The numbers of `stats()` reach each kind of writer under their names."""

import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock, NonCallableMock

import pytest
import torch

import thinwire as tw
from tests.strategy.training import batch, make_engine
from tests.test_stats import NAMES
from tests.toys import warned

PAGE = Path(__file__).parent.parent / "docs" / "logging.md"


class Odd:
    """Says more than numbers."""

    def stats(self) -> dict[str, Any]:
        return {"step": 3, "name": "dense", "rate": None, "on": True, "ratio": math.inf, "at": 0.5}


def test_every_kind_of_writer_gets_the_same_numbers() -> None:
    engine = make_engine((), plain=True)
    for step in range(3):
        engine.train_step(*batch(step, 0))
    expected = {f"thinwire/{name}": value for name, value in engine.stats().items()}
    # as TensorBoard's, a run of wandb, the module mlflow, a run of Aim, and a client of MLflow,
    # which is told the run in every call
    names = ("add_scalar", "log", "log_metrics", "track", "log_metric")
    scalars, run, metrics, tracked, client = (Mock(spec=[name]) for name in names)
    bound, function = Mock(spec=["log_metric", "run_id"], run_id="a run"), Mock(spec=["__call__"])
    for writer in (scalars, run, metrics, tracked, (client, "a run"), bound, function):
        assert tw.log_stats(engine, writer) == expected
    function.assert_called_once_with(expected, 3)
    for method in (run.log, metrics.log_metrics):
        method.assert_called_once_with(expected, step=3)
    for name, value in expected.items():
        scalars.add_scalar.assert_any_call(name, value, 3)
        tracked.track.assert_any_call(value, name=name, step=3)
        for method in (client.log_metric, bound.log_metric):
            method.assert_any_call("a run", name, value, step=3)


def test_own_step_that_is_no_number_is_refused() -> None:
    run = Mock(spec=["log"])
    assert tw.log_stats(Odd(), run, step=70) == {
        "thinwire/step": 3,
        "thinwire/ratio": math.inf,
        "thinwire/at": 0.5,
    }
    assert run.log.call_args.kwargs == {"step": 70}


def test_object_neither_source_nor_writer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"source must have stats\(\).* got a Linear"):
        tw.log_stats(torch.nn.Linear(1, 1), print)
    with pytest.raises(TypeError, match=r"writer must have add_scalar.* got 'runs/a'"):
        tw.log_stats(Odd(), "runs/a")
    with pytest.raises(TypeError, match=r"MLflow client and its run_id.* type NonCallableMock"):
        tw.log_stats(Odd(), NonCallableMock(spec=["log_metric"]))
    with pytest.raises(ValueError, match="step must be"):
        tw.log_stats(Odd(), print, step=-1)


@pytest.mark.parametrize("fields", [(), ("localsgd",)])
def test_a_dropped_step_is_reported_once(
    fields: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(fields, plain=True)
    inputs, targets = batch(0, 0)
    with warned() as texts:
        engine.train_step(inputs * math.nan, targets)
    told = [*texts, *caplog.messages]
    assert engine.stats()["dropped_steps"] == sum("not finite" in text for text in told) == 1, told


def test_the_page_has_every_name_and_no_other() -> None:
    told = re.findall(r"^\| `thinwire/(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(told) == sorted(NAMES)
