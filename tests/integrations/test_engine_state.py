"""An engine's folder in the checkpoint of a framework: there and back, also on fewer ranks."""

from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from tests.integrations.task import STRATEGIES, adamw, own_batches, task
from tests.ranks import Pool
from thinwire.integrations import EngineState


def trained(rank: int, steps: int) -> Any:
    model, data = task()
    engine = STRATEGIES["localsgd"].prepare(model, adamw(model))
    batches = own_batches(data, rank, of_batches=True)
    for x, y in [next(batches) for _ in range(steps)]:
        engine.minimize(cross_entropy(model(x), y))
    return engine


def saved(rank: int, size: int, folder: Path) -> tuple[dict[str, Any], list[float]]:
    engine = trained(rank, 8)  # the last averaging was after the seventh step
    state = EngineState(engine, folder=folder).state_dict()
    values = [float(p.detach().double().sum()) for p in engine.model.parameters()]
    again = trained(rank, 3)
    EngineState(again, folder=folder).load_state_dict(state)
    assert again.step == 8
    assert values == [float(p.detach().double().sum()) for p in again.model.parameters()]
    return state, values


def on_fewer(rank: int, size: int, folder: Path, state: dict[str, Any]) -> list[float]:
    engine = trained(rank, 2)
    EngineState(engine, folder=folder).load_state_dict(state)
    return [float(p.detach().double().sum()) for p in engine.model.parameters()]


def test_there_and_back_on_another_number_of_ranks_too(ranks: Pool, tmp_path: Path) -> None:
    (state, first), (same, second) = ranks.run(saved, tmp_path)
    assert state == same == {"name": "thinwire", "step": 8}
    assert first != second
    [mean] = ranks.run(on_fewer, tmp_path, state, size=1)
    expected = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert mean == pytest.approx(expected, abs=1e-4)


def goes_on(rank: int, size: int, folder: Path, state: dict[str, Any] | None) -> Any:
    """Three more updates and the engine's part of the next checkpoint."""
    engine = trained(rank, 0)
    part = EngineState(engine, folder=folder)
    if state is not None:
        part.load_state_dict(state)
    begun = engine.step
    batches = own_batches(task()[1], rank, of_batches=True)
    for x, y in [next(batches) for _ in range(3)]:
        engine.minimize(cross_entropy(engine.model(x), y))
    return begun, part.state_dict()


def test_framework_killed_before_it_wrote_goes_on_where_it_was(ranks: Pool, tmp_path: Path) -> None:
    begun, first = ranks.run(goes_on, tmp_path, None)[0]
    assert begun == 0
    begun, lost = ranks.run(goes_on, tmp_path, first)[0]
    assert (begun, lost["step"]) == (3, 6)
    begun, again = ranks.run(goes_on, tmp_path, first)[0]  # `lost` has never been written
    assert (begun, again) == (3, lost)
    begun, last = ranks.run(goes_on, tmp_path, again)[0]
    assert (begun, last["step"]) == (6, 9)
    ranks.raise_alike(
        "CheckpointMismatch",
        "has checkpoints of step 6, 9, but none of step 3",
        goes_on,
        tmp_path,
        first,
    )


def misused(rank: int, size: int, folder: Path, how: str) -> None:
    engine = trained(rank, 1)
    if how == "no folder":
        EngineState(engine).state_dict()
    elif how == "another state":
        EngineState(engine, folder=folder).load_state_dict({"step": 3})
    else:
        EngineState(engine, folder=folder).load_state_dict({"name": "gone", "step": 3})


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("no folder", "ValueError", "register(accelerator)"),
        ("another state", "ValueError", "pass the result of EngineState.state_dict()"),
        ("gone", "CheckpointMissing", "gone"),
    ],
)
def test_user_error_has_a_remedy(
    ranks: Pool, tmp_path: Path, how: str, kind: str, text: str
) -> None:
    ranks.raise_alike(kind, text, misused, tmp_path, how)
