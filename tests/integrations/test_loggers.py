"""Real trackers get the numbers under their names, and are read back by their own means.

Those of Accelerate and Lightning come with `make test-integrations`; tests/test_logs.py checks what
every other tracker is called with.
"""

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.integrations.packages import needs
from tests.strategy.training import batch, make_engine

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
Numbers = dict[str, float]


@pytest.fixture(autouse=True)
def without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is written into the test's folder; warnings of the packages are not ours."""
    monkeypatch.chdir(tmp_path)
    offline = {"COMET_MODE": "OFFLINE", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    folders = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_DIR": str(tmp_path)}
    for name, value in {**offline, **folders, "GIT_PYTHON_REFRESH": "quiet"}.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def engine() -> Any:
    engine = make_engine((), plain=True)
    for step in range(3):
        engine.train_step(*batch(step, 0))
    return engine


def same(found: Numbers, written: Numbers) -> bool:
    """Whether a tracker has all numbers; some have a finite one in place of infinity."""
    return found.keys() >= written.keys() and all(
        found[name] == value or value == float("inf") for name, value in written.items()
    )


@needs("accelerate")
def test_a_tracker_of_accelerate(engine: Any) -> None:
    from accelerate.tracking import GeneralTracker

    rows: list[tuple[Numbers, int | None]] = []

    class Own(GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: Numbers, step: int | None = None, **_: Any) -> None:
            rows.append((values, step))

    written = tw.log_stats(engine, Own())
    assert rows == [(written, 3)]


@needs("lightning")
def test_a_logger_of_lightning(engine: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(str(tmp_path))
    written = tw.log_stats(engine, logger)
    logger.save()
    with Path(logger.log_dir, "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert int(row.pop("step")) == 3
    assert same({name: float(value) for name, value in row.items()}, written)


@needs("tensorboard")
def test_curves_are_in_the_file_of_tensorboard(engine: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in range(3, 6):
            engine.train_step(*batch(step, 0))
            written = tw.log_stats(engine, writer)
    curves = EventAccumulator(str(tmp_path))
    curves.Reload()
    assert set(curves.Tags()["scalars"]) == written.keys()
    dense = curves.Scalars("thinwire/bytes_dense")
    assert [point.step for point in dense] == [4, 5, 6]
    assert dense[-1].value == written["thinwire/bytes_dense"]
