import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tests.api import STRATEGIES, Job, RunConfig
from tests.lab.configs import config


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_is_read_as_it_was_written(name: str) -> None:
    run = config(recipe=STRATEGIES[name])
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(task="module:Class", config=config().to_dict(), timeout_s=3.5)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_wrong_keys_are_all_named() -> None:
    values = config().to_dict()
    del values["seed"]
    with pytest.raises(ValueError, match="RunConfig: 'sede' is unknown, 'seed' is missing; its "):
        RunConfig.from_dict({**values, "sede": 1})


@pytest.mark.parametrize(("key", "name"), [("recipe", "Recipe"), ("model", "ModelSize")])
def test_wrong_keys_inside_are_named_too(key: str, name: str) -> None:
    values = config().to_dict()
    values[key] = {**values[key], "colour": "red"}
    with pytest.raises(ValueError, match=f"{name}: 'colour' is unknown; its keys are "):
        RunConfig.from_dict(values)


def test_a_job_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"task": "module:Class", "config": {}}')
    with pytest.raises(ValueError, match="Job: 'timeout_s' is missing"):
        Job.read(tmp_path / "job.json")


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        config().seed = 1  # type: ignore[misc]
