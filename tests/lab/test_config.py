import json
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import pytest

from tests.api import STRATEGIES, Job, RunConfig
from tests.lab.configs import config


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_is_read_as_it_was_written(name: str) -> None:
    run = config(recipe=STRATEGIES[name])
    assert RunConfig.from_dict(json.loads(json.dumps(asdict(run)))) == run


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(task="module:Class", config=asdict(config()), timeout_s=3.5)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        config().seed = 1  # type: ignore[misc]
