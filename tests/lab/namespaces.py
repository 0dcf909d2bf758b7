"""What the tests need to look at namespaces and processes from outside."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api import Job, Link, enter_network, network, release, run_workers, why_unavailable

_REASON = why_unavailable()
NETNS = [
    pytest.mark.netns,
    pytest.mark.skipif(_REASON is not None, reason=f"network namespaces: {_REASON}"),
]


def needs_netns(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs network namespaces, and skips it where there are none."""
    for mark in NETNS:
        test = mark(test)
    return test


def result_over(link: Link, task: str, folder: Path) -> dict[str, Any]:
    """The result of two workers with this task; the line is slow once both are prepared."""
    job, result = Job(task=task, config={}, timeout_s=60.0), {}
    with (
        network(2, link) as emulated,
        contextlib.closing(run_workers(job, 2, emulated, folder)) as news,
    ):
        for event in news:
            if event["event"] == "prepared":
                emulated.limit()
                release(folder)
            elif event["event"] == "result":
                result = event
    return result


@contextlib.contextmanager
def entered(path: str) -> Iterator[None]:
    """This thread is in the network namespace behind a path while the block runs."""
    home, there = (os.open(each, os.O_RDONLY) for each in ("/proc/self/ns/net", path))
    try:
        enter_network(there)
        yield
    finally:
        enter_network(home)
        os.close(home)
        os.close(there)


def processes_in(namespace: str) -> list[int]:
    """Processes whose network namespace is `namespace` ("net:[...]"), or that hold it open."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            links = [str((folder / "ns" / "net").readlink())]
            links += [str(link.readlink()) for link in (folder / "fd").iterdir()]
        except OSError:  # it has ended meanwhile
            continue
        if namespace in links:
            found.append(int(folder.name))
    return found


def namespace_of(pid: int) -> str | None:
    """The network namespace of a process; None when it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None
