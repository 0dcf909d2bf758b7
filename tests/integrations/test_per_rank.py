"""The states of all ranks in one: everybody gets the own back, other numbers of ranks the mean."""

from copy import deepcopy
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.integrations.task import dgc, equal, parameters, residuals, task
from tests.ranks import Pool, Raised
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


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    data = torch.Generator().manual_seed(rank)
    for _ in range(count):
        model(torch.randn(8, 20, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def there_and_back(rank: int, size: int) -> dict[str, Any]:
    model, _ = task()
    optimizer = dgc(model)
    steps(model, optimizer, rank, 8)
    saved = PerRankState(optimizer).state_dict()
    again, _ = task()
    again.load_state_dict(model.state_dict())
    second = dgc(again)
    PerRankState(second).load_state_dict(deepcopy(saved))  # torch keeps the very tensors that it loads
    mine = residuals(optimizer)
    both = (residuals(second), second.position)
    steps(model, optimizer, rank, 3)
    steps(again, second, rank, 3)
    return {"saved": saved, "residuals": mine, "loaded": both, "equal": equal(parameters(model), parameters(again))}


def test_every_rank_gets_its_own_state_back(ranks: Pool) -> None:
    answers = ranks.run(there_and_back)
    assert not equal(answers[0]["residuals"], answers[1]["residuals"])
    for answer in answers:
        assert equal(answer["residuals"], answer["loaded"][0])
        assert answer["loaded"][1] == 8
        assert answer["equal"]


def on_fewer(rank: int, size: int, saved: dict[str, Any]) -> list[torch.Tensor]:
    optimizer = dgc(task()[0])
    PerRankState(optimizer).load_state_dict(saved)
    return residuals(optimizer)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_another_number_of_ranks_keeps_the_mean_of_the_residuals(ranks: Pool, size: int) -> None:
    """And so the update that was still pending."""
    first, second = ranks.run(there_and_back)
    for loaded in ranks.run(on_fewer, first["saved"], size=size):
        for a, b, c in zip(first["residuals"], second["residuals"], loaded, strict=True):
            torch.testing.assert_close((a.double() + b.double()) / 2, c.double(), rtol=1e-6, atol=1e-9)


def test_what_has_no_mean_is_an_error() -> None:
    for first, second in [(1, 2), ("a", "b"), (torch.tensor(1), torch.tensor(2)), ([1.0], [1.0, 2.0]), (None, 1)]:
        saved = {"ranks": [{"value": {"x": first}}, {"value": {"x": second}}]}
        with pytest.raises(ValueError, match=r"2 ranks, value, x.*resume on as many ranks"):
            PerRankState(Box()).load_state_dict(saved)


def test_nested_values_keep_their_kinds() -> None:
    box = Box()
    values = [{"a": (0.1, [torch.full((2,), x, dtype=torch.bfloat16)]), "b": torch.tensor(3)} for x in (1.0, 2.0)]
    PerRankState(box).load_state_dict({"ranks": [{"value": value} for value in values]})
    assert box.value["a"][0] == 0.1
    assert box.value["a"][1][0].tolist() == [1.5, 1.5]
    assert box.value["a"][1][0].dtype == torch.bfloat16
    assert isinstance(box.value["a"], tuple)
    assert box.value["b"].dtype == torch.int64


def failing(rank: int, size: int) -> None:
    PerRankState(Box(OSError("the disk is on fire") if rank == 1 else 0)).state_dict()


def test_an_error_of_one_rank_is_an_error_of_all(ranks: Pool) -> None:
    for answer in ranks.run(failing, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type_name == "ThinwireError"
        assert "rank 1" in answer.text
        assert "the disk is on fire" in answer.text


def local_updates(rank: int, size: int) -> tuple[bool, int]:
    def train(saved: list[dict[str, Any]] | None, *counts: int) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
        model, _ = task()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with tw.local_sgd(model, optimizer, tw.LocalSGD(k_steps=5, begin_step=1)) as sync:
            parts = [PerRankState(sync), PerRankState(optimizer)]
            for part, state in zip(parts, saved or [], strict=False):
                part.load_state_dict(deepcopy(state))
            for count in counts:
                kept = deepcopy([part.state_dict() for part in parts])
                steps(model, optimizer, rank, count)
        return model, kept

    first, halfway = train(None, 3, 4)
    second, _ = train(halfway, 4)
    return equal(parameters(first), parameters(second)), halfway[0]["ranks"][0]["step"]


def test_local_updates_between_two_averagings(ranks: Pool) -> None:
    assert ranks.run(local_updates) == [(True, 3), (True, 3)]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"stateful must have state_dict\(\), got int"):
        PerRankState(3)
    with pytest.raises(ValueError, match="got the keys \\['value'\\]"):
        PerRankState(Box()).load_state_dict({"value": 1})
    with pytest.raises(ValueError, match="under 'ranks'"):
        PerRankState(Box()).load_state_dict({"ranks": []})
