"""What runs on macOS and Windows, in a process that lacks what these systems lack."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.processes import ran

# Python and torch are those of Linux: they are loaded before names and modules are taken away
ELSEWHERE = """
import asyncio, concurrent.futures, contextlib, ctypes, io, json, multiprocessing.pool, os
import selectors, signal, socket, subprocess, sys, tempfile, uuid
import cyclopts, jinja2, numba, psutil, rich.console, rich.table, torch.distributed.tensor
import torch.distributed.checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

system, *lines = sys.argv[1:]
modules, names = ["pyroute2"], {
    os: "sched_getaffinity pidfd_open setns unshare O_TMPFILE",
    signal: "SIGRTMIN pthread_sigmask",
    socket: "AF_NETLINK TCP_INFO TCP_USER_TIMEOUT TCP_CONGESTION TCP_KEEPIDLE SO_BINDTODEVICE",
}
if system == "win32":
    modules += ["fcntl", "resource", "pwd", "grp", "termios", "_posixsubprocess"]
    names[os] += " fork setsid killpg geteuid getuid O_NONBLOCK O_CLOEXEC register_at_fork"
    names[signal] += " SIGKILL SIGHUP SIGSTOP SIGCONT"
    names[socket] += " AF_UNIX MSG_DONTWAIT"
    class CDLL(ctypes.CDLL):
        def __init__(self, name, *rest, **more):
            if name is None:
                raise TypeError("a DLL has a name")
            super().__init__(name, *rest, **more)
    ctypes.CDLL = CDLL
for module, some in names.items():
    for name in set(some.split()) & vars(module).keys():
        delattr(module, name)
class Refuses:
    def find_spec(name, *_):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"{name} is not on {system}")
sys.meta_path.insert(0, Refuses)
for name in modules:
    sys.modules.pop(name, None)
sys.platform = system
assert not any(name.startswith("thinwire") for name in sys.modules)

import thinwire as tw
from thinwire.cli import main

def prepare():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Linear(2, 1)
    tw.DistributedStrategy().prepare(model, torch.optim.SGD(model.parameters(), 0.1))

calls = {"prepare": prepare, "join": lambda: tw.join("tcp://127.0.0.1:1", run="a run")}
for line in lines:
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
ON_LINUX = ("run -- train.py", "compare", "host --bind 10.0.0.1:1", "doctor", "prepare", "join")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_commands_on_other_systems_answer_or_name_linux(system: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(STRATEGY)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tw.DistributedStrategy().prepare(model, optimizer).save(tmp_path / "saved")
    done = ran([sys.executable, "-c", ELSEWHERE, system, *HERE, *ON_LINUX], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in answers] == [*HERE, *ON_LINUX]
    for line, status, printed, errors in answers:
        if line in HERE:
            assert (status, errors) == (0, ""), line
            assert printed
        else:
            assert status in (1, 2)
            assert errors.count("\n") == 1
            assert f"needs Linux, and this is {system}" in errors
