"""Whole comparisons with real workers: what comes out, and what is left when they fail."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import api
from tests.lab.namespaces import namespace_of, needs_netns, processes_in
from tests.lab.pooled import run_workers_in
from tests.processes import alive, descendants, kill_all, ran
from tests.ranks import Pool
from tests.waiting import PATIENCE_S, until

BAD = ("Raises", "Diverges", "Dies")
Start = Callable[[list[str]], "subprocess.Popen[str]"]


def settings(out: Path, **changes: Any) -> api.Settings:
    typed: dict[str, Any] = {
        "workers": 2,
        "link": "100mbit",
        "latency": "0ms",
        "strategies": ["dense"],
        "steps": 12,
        "seconds": None,
        "size": "tiny",
        "text": None,
        "out": out,
        "batch": 2,
        "seed": 0,
        "lr": None,
        "tune": False,
    }
    if "task" in changes:  # which has a model and data of its own
        typed |= {"size": None, "batch": None}
    return api.Settings.check(**{**typed, **changes})


def compared(out: Path, **changes: Any) -> api.Results:
    """What comes of a comparison on this machine, where nothing limits a link."""
    return api.compare(settings(out, **{"link": "loopback", **changes}), api.Display())


def command(out: Path, *more: str) -> list[str]:
    fixed = ["--size", "tiny", "--batch", "2", "--quiet", "--out", str(out)]
    return [sys.executable, "-m", "thinwire", "compare", *fixed, *more]


@pytest.mark.slow
@needs_netns
def test_the_command_trains_over_a_shaped_link_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--link", "100mbit", "--strategies", "dense", "dgc", "--steps", "16"]
    done = ran(command(out, *more))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(out / "report.html") in done.stdout
    # the winner's strategy too, where one of the two is ahead
    assert {path.name for path in out.iterdir()} - {"best-strategy.yaml"} == {
        "report.html",
        "results.json",
    }
    results = json.loads((out / "results.json").read_text())
    assert results["link"]["emulated"]
    dense, dgc = results["strategies"]
    assert dense["steps"] == dgc["steps"] == 16
    assert dense["evaluations"][0]["loss"] == dgc["evaluations"][0]["loss"]
    # 2 (W - 1) / W = 1 for two workers
    assert dense["library_bytes_per_step"] == 4 * dense["parameters"]
    assert 1.0 <= dense["kernel_sent_bytes_per_step"] / dense["library_bytes_per_step"] < 1.25
    assert dgc["library_bytes_per_step"] < dense["library_bytes_per_step"] / 3
    assert dgc["kernel_sent_bytes_per_step"] < dense["kernel_sent_bytes_per_step"] / 3


@pytest.mark.parametrize("strategy", ["fp16", "powersgd"])
@pytest.mark.usefixtures("pooled")
def test_torchs_own_hooks_run_without_hanging(strategy: str, tmp_path: Path) -> None:
    (run,) = compared(tmp_path, strategies=[strategy]).strategies
    assert run.final_loss < run.evaluations[0].loss
    assert run.library_bytes_per_step <= 2 * run.parameters


@needs_netns
def test_sites_shard_the_model_and_share_a_link(tmp_path: Path) -> None:
    """Bytes are those of a site's interface: nothing inside a site is among them."""
    names = ["dense", "muon-local"]
    shards = {"workers": 4, "shard": 2, "strategies": names, "steps": 33, "batch": 1}
    results = compared(tmp_path, link="100mbit", **shards)
    assert results.failures == []
    assert results.headline.startswith("2 sites of 2 ranks that shard the model, each in a network")
    dense, local = results.strategies
    assert dense.library_bytes_per_step == 4 * dense.parameters
    assert 1 < dense.kernel_sent_bytes_per_step / dense.library_bytes_per_step < 1.25
    # 1 bit for each parameter and 16 steps, scales and agreements, and headers of few messages
    assert local.library_bytes_per_step < 2 * local.parameters / 8 / 16
    assert local.kernel_sent_bytes_per_step < 3 * local.parameters / 8 / 16
    assert "--workers 4" in results.command
    assert "--shard 2" in results.command
    for run in results.strategies:
        assert run.final_loss < run.evaluations[0].loss


@pytest.mark.usefixtures("pooled")
def test_strategies_for_whole_models_are_refused_before_training(tmp_path: Path) -> None:
    refused = {"fp16": "is a hook of DDP, which needs whole models", "low-rank": "StrategyError"}
    names = ["dense", *refused]
    with pytest.raises(ValueError, match="nothing has been trained") as error:
        compared(tmp_path, workers=4, shard=2, strategies=names, batch=1)
    for name, reason in refused.items():
        assert re.search(
            f"strategies='{name}' does not work with the model: .*{reason}", str(error.value)
        )
    assert "'dense' does not" not in str(error.value)


@pytest.mark.usefixtures("pooled")
def test_without_permission_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(api.netns, "new_namespace", refuse)
    results = compared(tmp_path, link="20mbit", steps=6)
    assert "NOT emulated" in results.headline
    assert "Operation not permitted" in results.headline
    run = results.strategies[0]
    on_the_wire_s = 8 * 4 * run.parameters * 6 / 20e6
    assert run.seconds_on_asked_link == pytest.approx(run.seconds + on_the_wire_s)
    assert run.kernel_sent_bytes_per_step is None


@pytest.mark.usefixtures("pooled")
def test_a_budget_of_seconds_is_used_up(tmp_path: Path) -> None:
    (run,) = compared(tmp_path, steps=None, seconds=2.0).strategies
    assert run.seconds >= 2.0
    assert run.steps == len(run.step_ms)


@pytest.mark.usefixtures("pooled")
def test_local_updates_are_evaluated_where_all_ranks_are_equal(tmp_path: Path) -> None:
    (run,) = compared(tmp_path, strategies=["sparse-local"], steps=None, seconds=3.0).strategies
    local = run.settings["localsgd"]
    k_steps = local["k_steps"]
    assert local["compression"]["sparse"]["value_bits"] == 2
    assert all(point.step % k_steps == 1 for point in run.evaluations[1:-1])
    assert run.final_loss < run.evaluations[0].loss
    # after step 1, every k_steps-th from there, and the last one
    averagings = 2 + (run.steps - 2) // k_steps
    elsewhere = 2 * averagings * 24  # agreements
    dense = 4 * run.parameters
    sent = run.evaluations[-1].library_bytes - elsewhere
    assert dense / 100 < sent / averagings < dense / 10


@pytest.mark.usefixtures("pooled")
def test_strategy_files_take_part(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    dgc = "dgc: {sparsity: [0.99], min_numel: 1024}\n"
    plan.write_text(f"{dgc}localsgd: {{k_steps: 4}}\ngradient_merge: {{k_steps: 2}}\n")
    (run,) = compared(tmp_path / "out", strategies=[str(plan)], steps=30).strategies
    assert run.strategy == "plan"
    assert run.settings["localsgd"]["k_steps"] == 4
    assert run.settings["lr"] > 0
    assert "once per receiver" in run.library_bytes_counted_by
    # an averaging after the first update of two microsteps, then every fourth update
    assert {point.step for point in run.evaluations} == {0, 2, 10, 18, 26, 30}
    assert run.final_loss < run.evaluations[0].loss
    assert 0 < run.library_bytes_per_step < 4 * run.parameters / 20


def test_settings_are_chosen_on_other_text_than_is_reported_on(tmp_path: Path) -> None:
    corpus = api.Corpus(b"train", b"valid", b"held", 1, "a test")
    for tune, text in ((True, b"valid"), (False, b"held")):
        files = api.comparison._write_corpus(corpus, tmp_path, tune=tune)
        assert Path(files["held_out_file"]).read_bytes() == text
        assert Path(files["train_file"]).read_bytes() == b"train"


@pytest.mark.slow
def test_a_failing_worker_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    done = ran(
        command(tmp_path / "out", "--link", "loopback", "--strategies", "dense", "--lr", "1e30")
    )
    assert done.returncode == 1
    assert "diverged" in done.stderr
    assert done.stderr.count("\n") <= 6
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.usefixtures("pooled")
def test_measurements_before_a_failure_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_one = api.comparison._run

    def first_fails(config: api.RunConfig, *rest: Any) -> dict[str, Any]:
        if config.recipe.name == "dgc":
            raise api.WorkerError("worker 1 failed: it was a test")
        return run_one(config, *rest)

    monkeypatch.setattr(api.comparison, "_run", first_fails)
    results = compared(tmp_path, strategies=["dgc", "dense"], steps=5)
    assert [run.strategy for run in results.strategies] == ["dense"]
    assert results.failures == [api.Failure("dgc", "worker 1 failed: it was a test")]
    assert results.interrupted is None


@pytest.mark.slow
@pytest.mark.fault
def test_a_strategy_that_raises_diverges_or_dies_does_not_stop_the_others(
    tmp_path: Path, ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, in_pool = api.comparison.run_workers, run_workers_in(ranks)

    def run_workers(job: api.Job, *rest: Any) -> Iterator[dict[str, Any]]:
        dies = job.config["recipe"]["name"] == "Dies"  # which a process can alone
        return (real if dies else in_pool)(job, *rest)

    monkeypatch.setattr(api.comparison, "run_workers", run_workers)
    (good,) = api.choose(["dense"])
    bad = [
        api.Recipe(
            name, "of the tests", f"tests.lab.bad_trainers:{name}", {"adamw": 0.01}, "nobody"
        )
        for name in BAD
    ]
    asked = replace(settings(tmp_path, link="loopback", steps=12), strategies=(*bad, good))
    kept: list[dict[str, Any]] = []
    results = api.compare(asked, api.Display(), kept.append)
    assert kept == []  # nothing had finished before the last one
    assert [run.strategy for run in results.strategies] == ["dense"]
    why = {failure.strategy: failure.error for failure in results.failures}
    assert why.keys() == set(BAD)
    assert "worker 1 failed: RuntimeError: of the tests" in why["Raises"]
    assert "the training diverged: held-out loss nan" in why["Diverges"]
    assert "worker 1 was killed by SIGKILL" in why["Dies"]


@pytest.mark.slow
def test_file_that_does_not_go_with_the_model_is_refused_before_training(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.yaml", tmp_path / "good.yaml"
    bad.write_text('lamb: {exclude_from_weight_decay: ["*.bias"]}\n')
    good.write_text("gradient_merge: {k_steps: 2}\n")
    out = tmp_path / "out"
    more = ["--link", "loopback", "--steps", "4", "--strategies", "dense", str(good), str(bad)]
    done = ran(command(out, *more))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"strategies='{bad}' does not work with the model: StrategyError" in done.stderr
    assert "'*.bias'" in done.stderr
    assert "good" not in done.stderr
    assert not out.exists()


@pytest.mark.slow  # numba compiles every kernel of DGC
def test_no_strategy_compiles_on_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (run,) = compared(tmp_path / "out", strategies=["dgc"], steps=8).strategies
    assert run.preparation_seconds > run.seconds
    assert max(run.step_ms) < 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "by"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_finished_strategies_survive_an_interruption(
    number: int, status: int, by: str, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "out"
    more = ["--link", "loopback", "--seconds", "1", "--strategies", "dense", "localsgd", "fp16"]
    process = start(command(out, *more))
    until(lambda: (out / ".work" / "localsgd" / "job.json").exists() or process.poll() is not None)
    before = json.loads((out / "results.json").read_text())
    nothing = {"by": None, "during": None, "progress": None}
    assert before["interrupted"] == {**nothing, "not_begun": ["localsgd", "fp16"]}
    family = descendants(process.pid)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status
    assert errors == (
        "thinwire: interrupted; every worker has been ended\n" if by == "Ctrl-C" else ""
    )
    until(lambda: not any(alive(pid) for pid in family))
    results = json.loads((out / "results.json").read_text())
    assert [run["strategy"] for run in results["strategies"]] == ["dense"]
    reached = {"by": by, "during": "localsgd", "progress": 0.0}
    assert results["interrupted"] == {**reached, "not_begun": ["fp16"]}
    page = (out / "report.html").read_text()
    for text in (printed, page):
        assert f"interrupted by {by}" in text
        assert "localsgd" in text
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".yaml") == [
        "report.html",
        "results.json",
    ]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command that Ctrl-C reaches, in the background too; what a test leaves is killed."""
    begun = []

    def started(words: list[str]) -> subprocess.Popen[str]:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            begun.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        finally:
            signal.signal(signal.SIGINT, before)
        return begun[-1]

    yield started
    for process in begun:
        kill_all(process)
        process.communicate()


def workers_below(pid: int) -> list[int]:
    return [
        child
        for child in descendants(pid)
        if b"thinwire.tools.run.worker" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]


class Running:
    """The command at work, in a namespace each, with all that belongs to it."""

    def __init__(self, start: Start, out: Path, *more: str) -> None:
        self.out = out
        self.process = start(
            command(out, "--link", "20mbit", "--strategies", "dense", "--steps", "100000", *more)
        )
        until(lambda: list(out.glob(".work/*/rank0.jsonl")) and "step" in self._events())
        self.family = descendants(self.process.pid)
        mine = namespace_of(os.getpid())
        self.namespaces = {
            space for pid in self.family if (space := namespace_of(pid)) not in (mine, None)
        }
        assert len(self.namespaces) == 2

    def _events(self) -> str:
        return next(self.out.glob(".work/*/rank0.jsonl")).read_text()

    def all_gone(self) -> None:
        until(lambda: not any(alive(pid) for pid in self.family))
        assert [processes_in(space) for space in self.namespaces] == [[], []]

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@pytest.mark.usefixtures("pooled")
def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    second = command(tmp_path, "--link", "loopback", "--strategies", "dense", "--steps", "4")
    with api.comparison._work_folder(settings(tmp_path)) as work:
        (work / "mine").touch()
        refused = ran(second)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert (
            "is in use by another comparison; wait for it, or choose another folder"
            in refused.stderr
        )
        assert (work / "mine").exists()
    assert compared(tmp_path, steps=4).strategies


@pytest.mark.slow
@needs_netns
@pytest.mark.parametrize(
    ("number", "status", "text"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGINT, 130, "thinwire: interrupted; every worker has been ended\n"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_nothing_survives_a_command_that_is_ended(
    number: int, status: int, text: str, tmp_path: Path, start: Start
) -> None:
    # a latency adds a process that carries the packets to all that there is without one
    running = Running(start, tmp_path / "out", "--latency", "1ms")
    running.process.send_signal(number)
    ended, errors = running.end()
    assert ended == status
    running.all_gone()
    assert number == signal.SIGKILL or (errors == text and not running.out.exists())


@pytest.mark.slow
@pytest.mark.fault
def test_silent_worker_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.comparison, "_SHORTEST_TIMEOUT_S", 3.0)
    stopped: list[int] = []

    def stop_one(*_: object) -> None:
        if not stopped:
            stopped.append(workers_below(os.getpid())[-1])
            os.kill(stopped[0], signal.SIGSTOP)

    monkeypatch.setattr(api.Display, "update", stop_one)
    with pytest.raises(api.WorkerError, match=r"worker \d failed: .*\n?.*Timed out"):
        compared(tmp_path, steps=100_000)
    until(lambda: not alive(stopped[0]))


def test_one_strategy_into_a_folder_that_is_new(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    more = ("--strategies", "dense", "--steps", "2", "--link", "loopback", "--workers", "2")
    ended = ran(command(out, *more))
    assert ended.returncode == 0, ended.stderr
    [measured] = json.loads((out / "results.json").read_text())["strategies"]
    assert measured["strategy"] == "dense"
    assert (out / "report.html").exists()
