"""A method that the tools have never heard of is planned and compared by what its config says."""

from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests import api
from tests.api import network_Network as Network
from tests.api import work_Work as Work
from tests.one_bit import OneBit

NUMBERS: dict[str, Any] = {"params": "1M", "step_seconds": 0.1, "link": "20mbit"}
OF_CHANGES = "localsgd:\n  k_steps: 16\n  compression:\n    one_bit: {}\n"
OF_GRADIENTS = "compression:\n  one_bit: {}\n"


def file(folder: Path, text: str, name: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("workers", [2, 8, 100])
def test_files_of_a_registered_method_are_rows(tmp_path: Path, workers: int) -> None:
    files = [
        file(tmp_path, OF_CHANGES, "my bits.yaml"),
        file(tmp_path, OF_GRADIENTS, "gradients.yaml"),
    ]
    plan = tw.plan(**NUMBERS, workers=workers, strategies=files)
    dense, local, gradients = (plan[name] for name in ("dense", "my_bits", "gradients"))
    assert len(plan.strategies) == 3
    copies, votes = workers - 1, 256 * (workers - 1)
    assert 0 <= local.bytes_per_step - copies * 125_000 / 16 - votes / 16 < copies * 200 / 16
    assert 0 <= gradients.bytes_per_step - copies * 125_000 - votes < copies * 200
    assert local.python == "LocalSGD(16, compression=OneBit())"
    assert dense.measured == (workers < 17)
    for row in (local, gradients):
        low, mid, high = row.loss_gap
        assert not row.measured
        assert 0 <= 6 * low < mid <= high / 6
        assert "not measured: " in row.loss_gap_source
    assert "OneBit" in local.loss_gap_source


def test_files_of_a_registered_method_are_compared_at_the_rates_of_dense(tmp_path: Path) -> None:
    for text in (OF_CHANGES, OF_GRADIENTS):
        (recipe,) = api.choose([file(tmp_path, text, "mine.yaml")])
        assert recipe.rates == api.STRATEGIES["dense"].rates


def test_tensors_that_a_method_leaves_travel_densely() -> None:
    work, line = Work(512 * 513, ((512, 512), (512,)), 0.1), Network(1e8, 0.0, 4)
    strategy = tw.DistributedStrategy(compression=OneBit(min_numel=1000))
    cost = api.cost_of(strategy, "", work, line)
    message = 8 + 4 + 512 * 512 // 8
    assert cost.bytes == 3 * message + 3 * 4 * 512 + 3 * 256  # and the vector, and the vote
    assert (cost.state_bytes, cost.exchange_bytes) == (4 * 512 * 512, 4 * 512 * 513)


@pytest.mark.parametrize("text", ["gradient_merge:\n  k_steps: 2\n", "lars: {}\n"])
def test_field_without_a_prediction_is_refused(text: str, tmp_path: Path) -> None:
    path = file(tmp_path, text, "more.yaml")
    with pytest.raises(ValueError, match=rf"more\.yaml.*{text.partition(':')[0]}"):
        tw.plan(**NUMBERS, strategies=[path])


def test_hooks_and_muon_are_predicted_by_their_names() -> None:
    named = ("dense-muon", "fp16-muon", "powersgd")
    plan = tw.plan(**NUMBERS, strategies=named)
    assert {row.name for row in plan.strategies} == {"dense", *named}
    assert plan["fp16-muon"].bytes_per_step == plan["dense-muon"].bytes_per_step / 2
    assert plan["dense-muon"].loss_gap == (0, 0, 0)
