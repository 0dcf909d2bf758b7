"""Processes that a test starts, and their ends: also where it fails or runs out of time."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def kill_all(process: "subprocess.Popen[Any]") -> None:
    """Kills a process and those below it, also a worker of torchrun with its own session."""
    if process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """`subprocess.Popen` that waits for nobody when a test fails or runs out of time."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            kill_all(process)


def ran(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` makes of a command, with its output as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with running(command, **pipes, **options) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(*words: str, ranks: int = 2) -> list[str]:
    """The command by which torchrun starts so many ranks of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, f"--nproc-per-node={ranks}", *words]


def ran_code(code: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`ran` of Python with this program."""
    return ran([sys.executable, "-c", code], **options)


def ran_thinwire(*words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`ran` of the command line with these words."""
    return ran([sys.executable, "-m", "thinwire", *words], **options)
