"""A plan for a task of the user's own: its shapes, its step measured here, and errors."""

from pathlib import Path

import pytest

import thinwire as tw
from tests.api import Plan
from tests.planning.test_probe import TASK
from tests.processes import ran_code
from tests.toys import refusal

PARAMETERS = 6 * 16 + 16 + 16 * 6 + 6


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TASK)
    return f"{tmp_path / 'mine.py'}:task"


def test_its_shapes_and_a_measured_step_equal_the_plan(task: str) -> None:
    plan = tw.plan(task=task, workers=4, link="1gbit", device="cpu")
    assert plan["dense"].bytes_per_step == 2 * 3 / 4 * 4 * PARAMETERS
    assert 0 < plan["dense"].step_seconds[1] < 5
    assert plan.link["measured"] is False


def test_with_seconds_given_nothing_is_computed(task: str, tmp_path: Path) -> None:
    broken = TASK.replace("loss_fn=torch.nn.functional.mse_loss", "loss_fn=lambda a, b: 1 / 0")
    (tmp_path / "mine.py").write_text(broken)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        tw.plan(task=task, device="cpu")
    plan = tw.plan(task=task, step_seconds=0.5, link="400gbit")
    assert plan["dense"].step_seconds[1] == pytest.approx(0.5, rel=0.01)


def test_parameters_without_sides_or_entries_are_planned(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        """
import torch, thinwire as tw

class Scaled(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.none = torch.nn.Parameter(torch.ones(0, 3))

    def forward(self, x):
        return self.scale * super().forward(x)

def task(seed):
    x = torch.randn(8, 4)
    loss = torch.nn.functional.mse_loss
    return tw.Task(model=Scaled(), loss_fn=loss, evaluate=lambda m: loss(m(x), x[:, :3]),
                   batches=lambda rank, world: iter(lambda: (x, x[:, :3]), None))
"""
    )
    plan = tw.plan(task=f"{tmp_path / 'odd.py'}:task", device="cpu")
    assert plan["dense"].bytes_per_step == 4 * (4 * 3 + 3 + 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--params", "1M"], "params='1M' and task="),
        (["--task", "nothing.py:task"], "nothing.py does not exist"),
        (["--task", "mine"], "is not FILE.py:NAME"),
        (["--task", "HERE/mine.py:other"], "has no function other"),
        (["--task", "HERE/broken.py:task"], "cannot be imported: SyntaxError"),
        (["--task", "HERE/script.py:task"], "cannot be imported: SystemExit"),
        (["--step-seconds", "0"], "step_seconds=0"),
        (["--device", "tpu"], "device='tpu'"),
    ],
)
def test_impossible_arguments_are_one_line(
    task: str, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("def task(seed:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script.py DATA')\n")
    words = [word.replace("HERE", str(tmp_path)) for word in words]
    told = words if "--task" in words else ["--task", task, *words]
    assert says in refusal(capsys, "plan", *told)


def test_process_that_belongs_to_a_group_is_reported_to_probe(task: str) -> None:
    code = (
        "import torch.distributed as dist, thinwire as tw; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); "
        f"tw.plan(task={task!r})"
    )
    said = ran_code(code)
    assert "ValueError: task is measured in a single process" in said.stderr


def planned(folder: Path, model: str) -> Plan:
    # Python takes a file of the same size and second for the same
    path = folder / f"own{len(list(folder.iterdir()))}.py"
    path.write_text(
        f"""
import torch, thinwire as tw

def task(seed):
    return tw.Task(model={model}, loss_fn=print, batches=print, evaluate=print)
"""
    )
    return tw.plan(task=f"{path}:task", step_seconds=0.1, workers=2, link="20mbit")


def test_gradients_of_half_the_width_are_half_of_the_bytes(tmp_path: Path) -> None:
    layers = "torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))"
    wide, narrow = planned(tmp_path, layers), planned(tmp_path, f"{layers}.bfloat16()")
    for name, share in (("dense", 0.5), ("powersgd", 0.5), ("fp16", 1.0), ("localsgd", 1.0)):
        assert narrow[name].bytes_per_step == pytest.approx(share * wide[name].bytes_per_step)
    for part in ("weights and gradients", "optimizer"):
        assert narrow["dense"].memory[part] == wide["dense"].memory[part] / 2


def test_muon_is_planned_only_where_it_has_hidden_matrices(tmp_path: Path) -> None:
    convolutions = "torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Linear(8, 10))"
    names = {row.strategy for row in planned(tmp_path, convolutions).strategies}
    assert "quantized-local" in names
    assert "muon-local" not in names
    hidden = "torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))"
    assert "muon-local" in {row.strategy for row in planned(tmp_path, hidden).strategies}
