"""Real trackers get the numbers under their names, and are read back by their own means.

Those of Accelerate and Lightning come with `make test-integrations`. The others run where they are
installed: `.venv-integrations/bin/pip install aim comet-ml mlflow-skinny trackio wandb`.
"""

import csv
import json
import warnings
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.integrations.packages import needs
from tests.strategy.training import batch, make_engine

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
Numbers = dict[str, float]


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


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


@installed("mlflow")
def test_mlflow_the_module_and_a_client(engine: Any, tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        written = tw.log_stats(engine, mlflow)
    client = mlflow.MlflowClient()
    other = client.create_run("0").info.run_id
    assert tw.log_stats(engine, (client, other)) == written
    for run_id in (run.info.run_id, other):
        assert same(client.get_run(run_id).data.metrics, written)
        (point,) = client.get_metric_history(run_id, "thinwire/bytes_dense")
        assert point.step == 3


@installed("aim")
def test_aim(engine: Any, tmp_path: Path) -> None:
    from aim import Run

    run = Run(repo=str(tmp_path), log_system_params=False, system_tracking_interval=None)
    written = tw.log_stats(engine, run)
    found = {each.name: each.values.last()[1] for each in run.metrics()}
    run.close()
    assert same(found, written)


@installed("comet_ml")
def test_comet(engine: Any, tmp_path: Path) -> None:
    import comet_ml

    experiment = comet_ml.OfflineExperiment(
        api_key="none", project_name="p", workspace="w", offline_directory=str(tmp_path)
    )
    written = tw.log_stats(engine, experiment)
    experiment.end()
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        lines = file.read("messages.json").decode().splitlines()
    metrics = [
        each["payload"]["metric"] for each in map(json.loads, lines) if each["type"] == "metric_msg"
    ]
    found = {each["metricName"]: float(each["metricValue"]) for each in metrics}
    assert same(found, written)
    assert {each["step"] for each in metrics if each["metricName"] in written} == {3}


@installed("trackio")
def test_trackio_a_run_and_the_module(engine: Any) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="p", name="r", embed=False)
    written = tw.log_stats(engine, run)
    assert tw.log_stats(engine, trackio, step=4) == written
    trackio.finish()
    rows = SQLiteStorage.get_logs("p", "r")
    assert [row["step"] for row in rows] == [3, 4]
    assert all(same(row, written) for row in rows)


@installed("wandb")
def test_wandb_a_run_and_the_module(engine: Any) -> None:
    import wandb

    with wandb.init(project="p", mode="offline") as run:
        written = tw.log_stats(engine, run)
        assert tw.log_stats(engine, wandb, step=4) == written
        assert same({name: run.summary[name] for name in written}, written)


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
