"""Network namespaces as the machines of a job: commands run in each, and what rank 0 finds."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.api import enter
from tests.api import netns_Network as Network
from tests.processes import running

__all__ = ["doctors", "in_hosts", "shell", "worst"]

ROOT = Path(__file__).parent.parent.parent
PORT = 29500
CLEARED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def in_hosts(
    net: Network, commands: list[str], environments: list[Mapping[str, str]], limit_s: float = 200
) -> list[subprocess.CompletedProcess[str]]:
    """Runs one bash command in each host at once."""
    base = {key: value for key, value in os.environ.items() if key not in CLEARED}
    base["PATH"] = f"{Path(sys.executable).parent}:{base['PATH']}"
    base["OMP_NUM_THREADS"] = "1"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with contextlib.ExitStack() as ends:
        started, done = [], []
        for fd, command, own in zip(net.namespace_fds, commands, environments, strict=True):
            there = [sys.executable, enter.__file__, str(fd), str(os.getpid())]
            words, place = [*there, "bash", "-c", command], {**base, **own}
            started.append(ends.enter_context(running(words, pass_fds=[fd], env=place, **pipes)))
        for process, command in zip(started, commands, strict=True):
            out, err = process.communicate(timeout=limit_s)
            done.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return done


def doctors(
    net: Network,
    environments: list[Mapping[str, str]],
    options: str = "",
    *,
    etc_hosts: Path | None = None,
) -> tuple[dict[str, Any], list[subprocess.CompletedProcess[str]]]:
    """One rank in each host, as under torchrun; what rank 0 finds, and what became of all."""
    size = len(net.addresses)
    places = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": net.addresses[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": net.interface,
            **own,
        }
        for rank, own in enumerate(environments)
    ]
    command = f"python -m thinwire doctor --json {options}"
    if etc_hosts is not None:
        command = f"unshare -m bash -c 'mount --bind {etc_hosts} /etc/hosts && exec {command}'"
    done = in_hosts(net, [command] * size, places)
    assert done[0].stdout, done[0].stderr
    return json.loads(done[0].stdout), done


def worst(found: Mapping[str, Any]) -> list[str]:
    """What is wrong, each as "check: found -> advice"."""
    return [
        f"{one['check']}: {one['found']} -> {one['advice']}"
        for one in found["findings"]
        if one["level"] == "wrong"
    ]


def shell(command: str) -> None:
    """Runs a command of the system; for `inside` a namespace."""
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
