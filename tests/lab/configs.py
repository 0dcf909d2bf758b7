"""Configurations of runs for the tests."""

from typing import Any

from tests.api import STRATEGIES, ModelSize, RunConfig


def config(**fields: Any) -> RunConfig:
    """A small run of dense, but for the fields that are given."""
    some: dict[str, Any] = {
        "recipe": STRATEGIES["dense"],
        "model": ModelSize(32, 1, context=8),
        "seed": 0,
        "optimizer": "sgd",
        "lr": None,
        "task": None,
        "device": "cpu",
        "steps": 4,
        "seconds": None,
        "evaluations": 2,
        "ramp_steps": 1,
        "train_file": __file__,
        "held_out_file": __file__,
        "held_out_sequences": 2,
        "batch": 2,
        "interface": None,
        "launched_unix_s": 0.0,
    }
    return RunConfig(**{**some, **fields})
