"""`thinwire plan` as a newcomer meets it: one line for what cannot be, files whoever reads."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import thinwire as tw
from tests.api import command
from tests.processes import ran, running
from tests.waiting import PATIENCE_S

NUMBERS = ["--params", "124M", "--step-seconds", "0.35"]
PLAN = [sys.executable, "-m", "thinwire", "plan"]


@pytest.mark.parametrize("more", [[], ["--json"], ["--all"]])
def test_a_reader_that_leaves_early_gets_the_files(more: list[str], tmp_path: Path) -> None:
    words = [*PLAN, *NUMBERS, *more, "--out", "best.yaml", "--html", "plan.html"]
    with running(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert tw.DistributedStrategy.load(tmp_path / "best.yaml").on
    assert (tmp_path / "plan.html").exists()


@pytest.mark.parametrize("workers", [2, 4, 17])
def test_the_first_line_is_python_of_the_recommended_row(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"params": "124M", "step_seconds": 0.35, "workers": workers, "link": "20mbit"}
    made = tw.plan(**given)  # type: ignore[arg-type]
    command.plan(**given)  # type: ignore[arg-type]
    config, _, optimizer = capsys.readouterr().out.splitlines()[0].partition("  # optimizer: ")
    assert (config, optimizer) == (made[made.recommended].python, "thinwire.optim.Muon")
    names = {name: getattr(tw, name) for name in tw.__all__}
    for row in made.strategies:
        if row.document is not None:
            ((tag, _),) = row.document.items() or [("", None)]
            config = eval(row.python, names)
            strategy = tw.DistributedStrategy(**{tag: config}) if tag else config
            assert strategy.to_dict() == tw.DistributedStrategy.from_dict(row.document).to_dict()
        else:
            assert "register_comm_hook" in row.python


def test_a_link_so_fast_that_nothing_helps_says_so_and_why(tmp_path: Path) -> None:
    words = ["--params", "1M", "--step-seconds", "0.5", "--link", "400gbit", "--out", "best.yaml"]
    said = ran([*PLAN, *words], cwd=tmp_path)
    assert said.returncode == 0
    text = " ".join(said.stdout.split())
    begin = "DistributedStrategy() use dense: its step of 0.501 s waits for the network 0 % of the"
    assert text.startswith(begin)
    assert "strategy file of dense: best.yaml" in text
    assert not tw.DistributedStrategy.load(tmp_path / "best.yaml").on


def test_where_a_hook_of_torch_is_best_the_next_one_is_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tw.plan(params="1M", step_seconds=1.0)
    monkeypatch.setattr(command, "predicted", lambda **_: replace(made, recommended="powersgd"))
    command.plan(params="1M", step_seconds=1.0, out=tmp_path / "best.yaml")
    soonest = next(row for row in made.strategies if row.document is not None)
    said = " ".join(capsys.readouterr().out.split())
    assert f"strategy file of {soonest.name}: " in said
    assert said.endswith("; powersgd is a hook of torch")
    assert tw.DistributedStrategy.load(tmp_path / "best.yaml").on
    assert f"# {soonest.name}. Expected: " in (tmp_path / "best.yaml").read_text()


@pytest.mark.parametrize(("link", "named"), [("5mbit", "thinwire.optim.Muon"), ("9gbit", "any")])
def test_the_file_names_the_optimizer_it_is_for(
    link: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.plan(params="1M", step_seconds=1.0, link=link, out=tmp_path / "best.yaml")
    assert f"; optimizer: {named}" in " ".join(capsys.readouterr().out.split())
    assert f"\n# Optimizer: {named}" in (tmp_path / "best.yaml").read_text()


def test_a_file_behind_a_link_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "best.yaml").symlink_to("store/best.yaml")
    for words, there in ((["--link", "fast"], False), ([], True)):
        ran([*PLAN, *NUMBERS, *words, "--out", "best.yaml"], cwd=tmp_path)
        assert (tmp_path / "best.yaml").is_symlink()
        assert (tmp_path / "store" / "best.yaml").exists() == there
    assert tw.DistributedStrategy.load(tmp_path / "store" / "best.yaml").on


def test_whoever_reads_from_a_pipe_gets_the_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with running([*PLAN, *NUMBERS, "--out", "pipe"], stdout=subprocess.PIPE, cwd=tmp_path) as plan:
        text = (tmp_path / "pipe").read_text()
        assert plan.communicate()[0]
        assert plan.returncode == 0
    assert text.startswith("# Written by thinwire plan")


def test_lost_packets_fill_less_of_a_line_and_make_a_step_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line, steps = {"params": "1M", "step_seconds": 0.5, "link": "50mbit", "latency": "40ms"}, []
    for loss in ("0", "0.2", "2", "20"):
        plan = tw.plan(**line, loss=f"{loss}%")  # type: ignore[arg-type]
        steps.append(plan["dense"].step_seconds[0])
        command.plan(**line, loss=f"{loss}%")  # type: ignore[arg-type]
        filled = f"{plan.link['rate_bit_s'] / 1e6:.3g} are filled at {loss} % loss by 32"
        assert (filled in " ".join(capsys.readouterr().out.split())) == (loss != "0")
    assert steps == sorted(steps)
    assert steps[-1] > 2 * steps[0]
