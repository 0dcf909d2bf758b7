"""A file for each rank beside a checkpoint: its own, or the mean on another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api import write_rank_file
from tests.integrations.task import dgc, equal, parameters, residuals, task
from tests.optim.test_provenance import steps
from tests.ranks import Pool
from thinwire.errors import CheckpointError
from thinwire.integrations import PerRankState


class Box:
    """Holds whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def there_and_back(rank: int, size: int, folder: str) -> dict[str, Any]:
    model, _ = task()
    optimizer = dgc(model)
    steps(model, optimizer, rank, 8)
    saved = PerRankState(optimizer, folder=folder).state_dict()
    own = [residual.clone() for residual in residuals(optimizer)]
    again, _ = task()
    again.load_state_dict(model.state_dict())
    second = dgc(again)
    PerRankState(second, folder=folder).load_state_dict(saved)
    assert second.position == 8
    for net, each in ((model, optimizer), (again, second)):
        steps(net, each, rank, 3)
    assert equal(parameters(model), parameters(again))
    return {"saved": saved, "residuals": own}


def sent_for(rank: int, size: int, folder: str, numel: int) -> tuple[int, int]:
    part = PerRankState(Box(torch.zeros(numel)), folder=folder)
    saved = part.state_dict()
    part.load_state_dict(saved)
    group = part._group
    return group.bytes_sent + group.bytes_received, len(repr(saved))


def test_bytes_do_not_grow_with_the_state(ranks: Pool, tmp_path: Path) -> None:
    """45 M parameters went over the wire once for every rank."""
    for numel in (10, 5_000_000):
        for travelled, kept in ranks.run(sent_for, str(tmp_path), numel):
            assert travelled < 2000
            assert kept < 1000


def on_fewer(rank: int, size: int, saved: dict[str, Any], folder: str) -> list[torch.Tensor]:
    optimizer = dgc(task()[0])
    PerRankState(optimizer, folder=folder).load_state_dict(saved)
    return residuals(optimizer)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_another_number_of_ranks_keeps_the_mean(ranks: Pool, size: int, tmp_path: Path) -> None:
    """And so the update that was still pending; the same number gets its own back."""
    folder = str(tmp_path / "new" / "folder")
    first, second = ranks.run(there_and_back, folder)
    assert first["saved"] == second["saved"], "any rank may be the one that writes it"
    assert not equal(first["residuals"], second["residuals"])
    for loaded in ranks.run(on_fewer, first["saved"], folder, size=size):
        for a, b, c in zip(first["residuals"], second["residuals"], loaded, strict=True):
            torch.testing.assert_close(
                (a.double() + b.double()) / 2, c.double(), rtol=1e-6, atol=1e-9
            )


def of_two(folder: Path, *values: Any) -> dict[str, Any]:
    """What two ranks would have saved."""
    files = [folder / f"per_rank.rank_{rank:05d}.safetensors" for rank in range(len(values))]
    return {
        "name": "per_rank",
        "sha256": [
            write_rank_file(file, {"value": value})
            for file, value in zip(files, values, strict=True)
        ],
    }


def test_values_without_a_mean_are_an_error(tmp_path: Path) -> None:
    for first, second in [
        (1, 2),
        ("a", "b"),
        (torch.tensor(1), torch.tensor(2)),
        ([1.0], [1.0, 2.0]),
        (None, 1),
    ]:
        saved = of_two(tmp_path, {"x": first}, {"x": second})
        with pytest.raises(
            CheckpointError, match=r"2 ranks, value, x.*resume with the number of ranks"
        ):
            PerRankState(Box(), folder=tmp_path).load_state_dict(saved)


@pytest.mark.parametrize("harm", ["missing", "damaged", "of another save"])
def test_file_that_is_not_of_the_checkpoint_is_an_error(tmp_path: Path, harm: str) -> None:
    part = PerRankState(Box({"x": torch.ones(3)}), folder=tmp_path)
    saved = part.state_dict()
    [file] = tmp_path.iterdir()
    if harm == "missing":
        file.unlink()
    elif harm == "damaged":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    else:
        for _ in range(2):  # the file of one save before stays
            PerRankState(Box({"x": torch.zeros(3)}), folder=tmp_path).state_dict()
    box = Box("before")
    with pytest.raises(
        CheckpointError,
        match=r"per_rank\.rank_00000\.safetensors is "
        rf"{'not there' if harm == 'missing' else 'damaged'}",
    ):
        PerRankState(box, folder=tmp_path).load_state_dict(saved)
    assert box.value == "before"


def test_framework_killed_before_it_wrote_goes_on_from_the_save_before(tmp_path: Path) -> None:
    def begun(saved: dict[str, Any] | None = None) -> tuple[Box, PerRankState]:
        box = Box({"x": torch.zeros(3)})
        part = PerRankState(box, folder=tmp_path)
        if saved is not None:
            part.load_state_dict(saved)
        return box, part

    box, part = begun()
    first = part.state_dict()
    for attempt in range(3):  # each killed between the two writings
        box, part = begun(first)
        assert box.value["x"].tolist() == [0.0] * 3, attempt
        box.value["x"] += 1
        lost = part.state_dict()
    box, part = begun(lost)  # the last one was only late
    assert box.value["x"].tolist() == [1.0] * 3
    saved = []
    for value in (2.0, 3.0):
        box.value["x"].fill_(value)
        saved.append(part.state_dict())
    assert begun(saved[1])[0].value["x"].tolist() == [3.0] * 3
    assert begun(saved[0])[0].value["x"].tolist() == [2.0] * 3
    part.remove(tmp_path, "per_rank")
    assert list(tmp_path.iterdir()) == []


def test_nested_values_keep_their_kinds(tmp_path: Path) -> None:
    box = Box()
    values = [
        {"a": (0.1, [torch.full((2,), x, dtype=torch.bfloat16)]), "b": torch.tensor(3)}
        for x in (1.0, 2.0)
    ]
    PerRankState(box, folder=tmp_path).load_state_dict(of_two(tmp_path, *values))
    assert box.value["a"][0] == 0.1
    assert box.value["a"][1][0].tolist() == [1.5, 1.5]
    assert box.value["a"][1][0].dtype == torch.bfloat16
    assert isinstance(box.value["a"], tuple)
    assert box.value["b"].dtype == torch.int64


def test_numbers_that_differ_become_their_mean_and_bytes_sent_the_first(tmp_path: Path) -> None:
    box = Box()
    values = [
        {"observed": [x, 0.1], "traffic": {"bytes_sent": int(100 * x)}, "step": 3}
        for x in (1.0, 2.0)
    ]
    PerRankState(box, folder=tmp_path).load_state_dict(of_two(tmp_path, *values))
    assert box.value == {"observed": [1.5, 0.1], "traffic": {"bytes_sent": 100}, "step": 3}


def failing(rank: int, size: int, folder: str) -> None:
    PerRankState(
        Box(OSError("the disk is on fire") if rank == 1 else 0), folder=folder
    ).state_dict()


def test_an_error_of_one_rank_is_an_error_of_all(ranks: Pool, tmp_path: Path) -> None:
    ranks.raise_alike("CheckpointError", ["rank 1", "the disk is on fire"], failing, str(tmp_path))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"stateful must be Stateful, got"):
        PerRankState(3)
    with pytest.raises(ValueError, match="got the keys \\['value'\\]"):
        PerRankState(Box()).load_state_dict({"value": 1})
    with pytest.raises(ValueError, match=r"does not know where.*register\(accelerator\)"):
        PerRankState(Box()).state_dict()
