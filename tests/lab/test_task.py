"""A task of the user's own: it trains as the built-in one; what is wrong with it is one line."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import api
from tests.lab.configs import config
from tests.lab.test_compare import compared, settings
from tests.processes import ran, torchrun
from tests.ranks import Pool
from tests.toys import refusal

TASK = """
import os, torch, thinwire as tw

def endless(rank, world):
    random = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(8, 6, generator=random)
        yield x, x.sum(1, keepdim=True)

class Late:
    calls = 0
    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls > 3:
            raise ValueError("late")
        return torch.nn.functional.mse_loss(outputs, targets)

def task(seed):
    if (log := os.environ.get("TASK_LOG")) is not None:
        with open(log, "a") as file:
            file.write(f"{seed}\\n")
    torch.manual_seed(seed)
    rank = torch.distributed.get_rank()
    held_out = torch.randn(64, 6)
    return tw.Task(
        model=torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
        loss_fn=torch.nn.functional.mse_loss,
        batches=endless,
        evaluate=lambda m: torch.nn.functional.mse_loss(m(held_out), held_out.sum(1, keepdim=True)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
    )
"""


def file(folder: Path, *changes: tuple[str, str]) -> str:
    text = TASK
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "my_task.py"
    path.write_text(text)
    return f"{path}:task"


@pytest.mark.usefixtures("pooled")
def test_trains_with_its_own_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("TASK_LOG", str(log))
    names = ["dense", "low-rank", "sparse-local", "dgc"]
    task = file(tmp_path, ('os.environ.get("TASK_LOG")', f'"{log}"'))
    results = compared(tmp_path / "out", strategies=names, task=task, steps=40, seed=3)
    for run in results.strategies:
        assert run.parameters == 6 * 16 + 16 + 16 + 1
        assert run.settings["lr"] == 0.02
        assert run.final_loss < 0.7 * run.evaluations[0].loss, run.strategy
    assert results.model["task"] == task
    assert results.settings["optimizer"].startswith("the task's own")
    for run in results.strategies:
        how, _ = api.to_use(results, run)
        assert how.endswith("trained with the task's AdamW and a peak learning rate of 0.02.")
    # once per rank and strategy, with the seed
    assert log.read_text().split() == ["3"] * 2 * len(names)


@pytest.mark.usefixtures("pooled")
def test_seeds_are_means_with_a_range(tmp_path: Path) -> None:
    (run,) = compared(tmp_path / "out", task=file(tmp_path), steps=6, seeds=2).strategies
    ends = [seed.evaluations[-1].loss for seed in run.seeds]
    assert [seed.seed for seed in run.seeds] == [0, 1]
    assert run.final_loss == pytest.approx(sum(ends) / 2)
    assert run.final_loss_range == pytest.approx(max(ends) - min(ends))
    assert ends[0] != ends[1]


RANK = "torch.distributed.get_rank()"
ON_ONE = f"{RANK} / 0 if rank else"
WITH_SCHEDULE = "tw.optim.SGD(params, lr=tw.schedules.CosineDecay(0.0, 0.1, 10))"
WRONG: dict[str, tuple[str, str, str]] = {
    "import": ("import os,", "import nothing_of_this_name, os,", "cannot be imported"),
    "no function": ("def task(", "def other(", "has no function task"),
    "raises": ("    torch.manual_seed(seed)", "    raise KeyError('x')", "KeyError"),
    "no Task": ("return tw.Task(", "return dict(", "must return a thinwire.Task, got dict"),
    "raises later": ("torch.nn.functional.mse_loss,", "Late(),", "loss_fn raised ValueError: late"),
    "exits": ("evaluate=lambda m:", "evaluate=lambda m: exit(0) if rank else", "(on rank 1)"),
    "cannot be moved": ("Linear(6, 16)", 'Linear(6, 16, device="meta")', "model.to(cpu) raised"),
    "no evaluate": ("        evaluate=", "        optimizer=None) or dict(", "evaluate"),
    "ends": ("    while True:", "    for _ in range(3):", "ended after 3 batches"),
    "NaN": ("evaluate=lambda m:", 'evaluate=lambda m: float("nan") *', "returned nan before"),
    "NaN loss": ("torch.nn.functional.mse_loss,", "lambda a, b: (a - b).mean() / 0,", "the loss"),
    "models differ": ("Linear(6, 16)", "Linear(6, 16, bias=rank == 0)", "0.bias of shape [16]"),
    "one rank fails": ("torch.manual_seed(seed)", f"assert not {RANK}", "(on rank 1)"),
    "evaluate on one rank": ("evaluate=lambda m:", f"evaluate=lambda m: {ON_ONE}", "(on rank 1)"),
    "a schedule": ("torch.optim.AdamW(params, lr=0.02)", WITH_SCHEDULE, "has a schedule"),
    "no pairs": ("yield x, x.sum(1, keepdim=True)", "yield x", "pairs (inputs, targets)"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.usefixtures("pooled")
def test_wrong_task_is_one_line_and_nothing_trains(case: str, tmp_path: Path) -> None:
    before, after, told = WRONG[case]
    task = file(tmp_path, (before, after))
    with pytest.raises(api.TaskError) as refused:
        compared(tmp_path / "out", strategies=["dense", "dgc"], task=task, steps=6)
    text = str(refused.value)
    assert told in text
    assert text.startswith(f"task={task!r}: ")
    assert not (tmp_path / "out" / "results.json").exists()


def test_muon_is_compared_only_where_it_has_hidden_matrices(tmp_path: Path) -> None:
    def compared(**more: Any) -> list[str]:
        found = settings(tmp_path / "out", link="loopback", strategies=None, steps=6, **more)
        return [recipe.name for recipe in found.strategies]

    assert compared() == ["dense", "quantized-local", "muon-local"]
    for other in ({"task": file(tmp_path)}, {"model": "convolution"}):
        assert compared(**other) == ["dense", "quantized-local"]


def shapes(rank: int, size: int, word: str) -> list[Any]:
    work = api.work_of(config(task=word))
    inputs, _ = work.next_batch()
    return [list(api.called(work.model, inputs).shape), work.evaluate(work.model)]


def test_inputs_may_be_a_tuple_or_a_mapping(ranks: Pool, tmp_path: Path) -> None:
    plain = ranks.run(shapes, file(tmp_path), size=2)
    (tmp_path / "more").mkdir()
    mapped = file(tmp_path / "more", ("yield x, x", "yield {'input': x}, x"))
    assert ranks.run(shapes, mapped, size=2) == plain
    assert plain[0][1] == plain[1][1]


def test_missing_gpu_is_refused_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    words = ("compare", "--link", "loopback", "--device", "cuda", "--out", str(tmp_path / "o"))
    assert "torch finds no GPU" in refusal(capfd, *words)
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("pooled")
def test_strategies_begin_alike_where_a_task_seeds_nothing(tmp_path: Path) -> None:
    task = file(tmp_path, ("    torch.manual_seed(seed)\n", ""))
    results = compared(tmp_path / "out", strategies=["dense", "dgc"], task=task)
    first, second = (run.evaluations[0].loss for run in results.strategies)
    assert first == second


@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("kind", ["frozen", "double"])
def test_bytes_equal_trained_parameters(kind: str, tmp_path: Path) -> None:
    model = ("torch.nn.Linear(16, 1)),", "torch.nn.Linear(16, 1)).double(),")
    wide = (("generator=random", "generator=random, dtype=torch.float64"),)
    wide += (("torch.randn(64, 6)", "torch.randn(64, 6, dtype=torch.float64)"), model)
    frozen = (("torch.nn.Linear(6, 16)", "torch.nn.Linear(6, 16).requires_grad_(False)"),)
    task = file(tmp_path, *(frozen if kind == "frozen" else wide))
    results = compared(tmp_path / "out", strategies=["dense", "fp16"], task=task)
    entries = {"frozen": 17, "double": 6 * 16 + 16 + 17}[kind]
    dense, half = results.strategies
    assert dense.library_bytes_per_step == entries * {"frozen": 4, "double": 8}[kind]
    assert half.library_bytes_per_step == entries * 2
    assert dense.ratio_to_dense == 1


def modes(rank: int, size: int, word: str) -> tuple[list[bool], str]:
    work = api.work_of(config(task=word))
    work.evaluate(work.model)
    inputs, _ = work.next_batch()
    return [module.training for module in work.model], type(inputs).__name__


def test_modules_in_evaluation_mode_stay_so(ranks: Pool, tmp_path: Path) -> None:
    kept = ("torch.nn.Tanh()", "torch.nn.BatchNorm1d(16).eval()")
    named = ("yield x, x", "yield Pair(x), x")
    made = (
        "import os,",
        "from typing import NamedTuple\nclass Pair(NamedTuple):\n    input: object\nimport os,",
    )
    found = ranks.run(modes, file(tmp_path, kept, named, made), size=2)
    assert found == [([True, False, True], "Pair")] * 2


@pytest.mark.parametrize("more", [{"size": "large"}, {"batch": 64}, {"tune": True}], ids=str)
def test_options_that_a_task_would_ignore_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(more))} is for the built-in task"):
        settings(tmp_path / "out", task=file(tmp_path), **more)


@pytest.mark.slow
def test_under_torchrun_the_ranks_train_over_their_network(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = torchrun("-m", "thinwire", "compare", "--task", file(tmp_path), "--steps", "8")
    more = ["--strategies", "dense", "sparse-local", "--out", str(out), "--quiet"]
    done = ran([*command, *more], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    told = (out / "results.json").read_text(encoding="utf-8")
    assert "2 workers, started by a launcher, over the network between them" in told
    assert "Over this machine's loopback" not in told


@pytest.mark.slow
@pytest.mark.usefixtures("pooled")
def test_the_example_learns_its_digits(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "tasks" / "digits.py"
    names = ["dense", "quantized-local"]
    results = compared(tmp_path, strategies=names, task=f"{example}:task", steps=60)
    for run in results.strategies:
        assert run.final_loss < 0.5 * run.evaluations[0].loss


def buffers_of(rank: int, size: int, word: str) -> tuple[list[float], int]:
    """The running mean, and the state of torch's random numbers, where a task has been made."""
    work = api.work_of(config(task=word))
    own = torch.Generator().manual_seed(api.seed_of(config(task=word).seed, rank))
    assert torch.equal(torch.get_rng_state(), own.get_state())  # as its batches find them
    return work.model[1].running_mean.tolist(), int(work.model[1].num_batches_tracked)


def test_trying_it_out_leaves_no_trace_in_the_model(ranks: Pool, tmp_path: Path) -> None:
    seeded = ("    torch.manual_seed(seed)\n", "")
    drawn = ("held_out = torch.randn(64, 6)", "held_out = torch.ones(64, 6)")
    normed = ("torch.nn.Tanh()", "torch.nn.BatchNorm1d(16), torch.nn.Dropout()")
    model = ("return tw.Task(", "with torch.random.fork_rng(): return tw.Task(")
    assert (
        ranks.run(buffers_of, file(tmp_path, seeded, drawn, normed, model), size=2)
        == [([0.0] * 16, 0)] * 2
    )


DRAWN = ("generator=random)\n        yield", ")\n        yield")


def drawn(rank: int, size: int, word: str) -> tuple[list[float], bool]:
    work = api.work_of(config(task=word))
    inputs, _ = work.next_batch()
    return inputs[0].tolist(), work.alike


def test_ranks_draw_own_batches_where_a_task_seeds_nothing(ranks: Pool, tmp_path: Path) -> None:
    (first, alike), (second, _) = ranks.run(drawn, file(tmp_path, DRAWN), size=2)
    assert first != second
    assert not alike
    # the same ones whenever it is started
    assert ranks.run(drawn, file(tmp_path, DRAWN), size=2)[0][0] == first


@pytest.mark.usefixtures("pooled")
def test_the_verdict_says_that_all_ranks_have_the_same_batches(tmp_path: Path) -> None:
    for own, expected in (("manual_seed(rank)", False), ("manual_seed(5)", True)):
        task = file(tmp_path, ("manual_seed(rank)", own))
        results = compared(tmp_path / own, task=task, steps=2)
        assert ("the same batch" in results.verdict) == expected
        assert results.strategies[0].alike == expected


PENALTY = (
    "    return tw.Task(\n        model=torch.nn.Sequential("
    "torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),\n"
    "        loss_fn=torch.nn.functional.mse_loss,",
    "    model = torch.nn.Linear(6, 1)\n"
    "    return tw.Task(\n        model=model, loss_fn=lambda a, b: "
    "((a - b) ** 2).mean() + sum(p.square().sum() for p in model.parameters()),",
)


def prepared(rank: int, size: int, word: str) -> list[bool]:
    settled = config(task=word)
    work = api.work_of(settled)
    api.BareStep(api.Setup.of(settled, work), work).measure(2)
    api.rehearse(settled, work)
    return [p.grad is None and p.requires_grad for p in work.model.parameters()]


def test_loss_that_reads_the_model_leaves_no_gradient_behind(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(prepared, file(tmp_path, PENALTY), size=2) == [[True, True]] * 2


@pytest.mark.usefixtures("pooled")
def test_muon_that_would_train_nothing_fails_alone(tmp_path: Path) -> None:
    changes = (
        (
            "torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)",
            "torch.nn.Linear(6, 1)",
        ),
        ("        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),\n", ""),
    )
    task = file(tmp_path, *changes)
    results = compared(tmp_path / "out", strategies=["dense", "muon-local"], task=task, steps=4)
    assert [run.strategy for run in results.strategies] == ["dense"]
    (failure,) = results.failures
    assert "Muon trains hidden matrices and this model has none" in failure.error


def test_a_task_has_more_time_and_timeout_says_how_much(tmp_path: Path) -> None:
    built_in, task, given = (
        api.comparison._timeout_s(settings(tmp_path, link="loopback", **more))
        for more in ({}, {"task": file(tmp_path)}, {"task": file(tmp_path), "timeout": 7200.0})
    )
    assert built_in < 100
    assert 600 <= task < given == 7200
    with pytest.raises(ValueError, match="timeout=0 is out of range; it must be at least 1 second"):
        settings(tmp_path, timeout=0)
