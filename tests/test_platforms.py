"""What runs on macOS and Windows, in a process that lacks what these systems lack."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.launched import free_port
from tests.members.test_code import SCRIPT
from tests.processes import ran, running
from tests.waiting import PATIENCE_S, until

ELSEWHERE = """
import contextlib, io, json, sys, torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import thinwire as tw
from thinwire.cli import main

def prepare():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Linear(2, 1)
    tw.DistributedStrategy().prepare(model, torch.optim.SGD(model.parameters(), 0.1))

calls = {"prepare": prepare, "join": lambda: tw.join("tcp://127.0.0.1:1", run="a run")}
for line in sys.argv[1:]:
    out, errors, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            calls.get(line, lambda: main(line.split()))()
        except SystemExit as end:
            status = end.code or 0
        except NotImplementedError as error:
            status = 1
            print(error, file=sys.stderr)
    print(json.dumps([line, status, out.getvalue(), errors.getvalue()]))
"""
RANKS = """
import os, sys, torch, thinwire as tw

OPTIONS = {
    "dense": {},
    "compressed": {"dgc": tw.DGC()},
    "local": {"localsgd": tw.LocalSGD(4, compression=tw.Quantized(1))},
}

def made(options):
    torch.manual_seed(0)
    layers = torch.nn.Linear(24, 4000), torch.nn.ReLU(), torch.nn.Linear(4000, 24)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    strategy = tw.DistributedStrategy(**options)
    return strategy.prepare(model, optimizer, loss_fn=torch.nn.functional.mse_loss, streams=2)

torch.distributed.init_process_group("gloo")
for name, options in OPTIONS.items():
    engine = made(options)
    data = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(12):
        if step == 6:
            engine.save(name)
            engine.close()
            engine = made(options)
            engine.load(name)
        x = torch.randn(8, 24, generator=data)
        engine.train_step(x, x)
    engine.flush()
    print(name, [p.sum().item() for p in engine.model.parameters()])
    engine.close()
print(sys.platform)
"""
STRATEGY = "localsgd: {k_steps: 4, compression: {quantized: {value_bits: 1}}}\n"
PLAN = (
    "plan --params 124M --step-seconds 0.35 --workers 8 --link 100mbit --out o.yaml --html o.html"
)
HERE = (
    "--version",
    "--help",
    "compare --help",
    PLAN,
    "explain s.yaml",
    "export saved m.safetensors",
)
ON_LINUX = ("run -- train.py", "compare", "doctor")
ON_MACOS_TOO = ("host --bind 10.0.0.1:1", "prepare", "join")


def lacking(system: str, folder: Path) -> dict[str, str]:
    """The environment of a process that lacks what a system lacks; of Linux, nothing."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")])]
    if system != "linux":
        there = folder / f"lacking_{system}"
        there.mkdir(exist_ok=True)
        code = f"from tests.elsewhere import take_away; take_away({system!r})"
        (there / "sitecustomize.py").write_text(code)
        paths += [str(there), str(Path(__file__).parents[1])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    ("system", "refused"), [("darwin", ON_LINUX), ("win32", ON_LINUX + ON_MACOS_TOO)]
)
def test_commands_on_other_systems_answer_or_name_linux(
    system: str, refused: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(STRATEGY)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tw.DistributedStrategy().prepare(model, optimizer).save(tmp_path / "saved")
    words = [sys.executable, "-c", ELSEWHERE, *HERE, *refused]
    done = ran(words, cwd=tmp_path, env=lacking(system, tmp_path))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in answers] == [*HERE, *refused]
    for line, status, printed, errors in answers:
        if line in HERE:
            assert (status, errors) == (0, ""), line
            assert printed
        else:
            assert status in (1, 2)
            assert errors.count("\n") == 1
            needed = "Linux or macOS" if line in ON_MACOS_TOO else "Linux"
            assert f"needs {needed}, and this is {system}" in errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with scripts: of two ranks, and of members."""
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "members.py").write_text(f"{SCRIPT}\nimport sys; print(sys.platform)")
    return tmp_path


def lines_of(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], cwd: Path
) -> list[list[str]]:
    """The lines of processes that run at the same time, and end well."""
    with contextlib.ExitStack() as ends:
        both = [
            ends.enter_context(running(words, env=env, cwd=cwd, stdout=subprocess.PIPE, text=True))
            for words, env in zip(commands, environments, strict=True)
        ]
        printed = [process.communicate(timeout=2 * PATIENCE_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return [text.splitlines() for text in printed]


def trained(folder: Path, system: str) -> list[list[str]]:
    """The lines of two ranks."""
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [lacking(system, folder) | common | {"RANK": rank} for rank in "01"]
    cwd = folder / system
    cwd.mkdir()
    return lines_of([[sys.executable, "../ranks.py"]] * 2, environments, cwd)


def joined(folder: Path, system: str) -> list[list[str]]:
    """The lines of two members that join by the code of a host."""
    state = folder / f"state of {system}"
    env = lacking(system, folder) | {"XDG_STATE_HOME": str(state)}
    thinwire = [sys.executable, "-m", "thinwire"]
    host = [*thinwire, "host", "--bind", "127.0.0.1:0", "--run", "llm"]
    with running(host, env=env, stdout=subprocess.DEVNULL):
        until(lambda: any(text.read_text().endswith("\n") for text in state.rglob("*.code")))
        [code] = state.rglob("*.code")
        join = [*thinwire, "join", "--code-file", str(code), "--", sys.executable, "members.py"]
        return lines_of([join] * 2, [env] * 2, folder)


@pytest.mark.parametrize("train", [trained, joined])
def test_training_on_a_system_like_macos_ends_as_on_linux(
    train: Callable[[Path, str], list[list[str]]], folder: Path
) -> None:
    lines, of_macos = train(folder, "linux"), train(folder, "darwin")
    assert lines[0][-1] == "linux"
    assert of_macos[0].pop() == of_macos[1].pop() == "darwin"
    assert of_macos == [own[:-1] for own in lines]
    assert of_macos[0] == of_macos[1]
