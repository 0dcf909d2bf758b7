"""Ranks as processes of this machine or of emulated networks, and a host of members."""

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.tools.network import enter
from thinwire.tools.network.netns import Network, inside
from thinwire.tools.run.launch import environments, signal_group, start

HOST_PORT = 29_400
_CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ("thinwire.kernels.cpu", "thinwire.strategy.prepare", "torch._dynamo")
"""Modules that every process of `started` has from its beginning."""


def on_ranks(
    work: Callable[..., Any], size: int, *given: Any, net: Network | None = None, group: bool = True
) -> list[Any]:
    """Return what `work(rank, size, *given)` returns, by rank, in fresh processes of one thread.

    Args:
        work: A function of a module that processes can import.
        size: Number of ranks.
        given: Further arguments.
        net: Networks, of which the ranks have the last ones; None for this machine's.
        group: Whether the ranks are a group of gloo.

    Raises:
        RuntimeError: A rank failed; the others are killed.
    """
    answers, found = _CONTEXT.Queue(), dict[int, Any]()
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store" if group else None
        try:
            for rank in range(size):
                fd = None if net is None else net.namespace_fds[rank - size]
                processes.append(started(fd, _rank, work, rank, size, given, store, answers))
            while len(found) < size:
                with contextlib.suppress(queue.Empty):
                    rank, answer = answers.get(timeout=1)
                    found[rank] = answer
                if any(process.exitcode for process in processes):
                    raise RuntimeError(f"a rank of {size} failed; what it said is above")
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
    return [found[rank] for rank in range(size)]


def started(
    namespace_fd: int | None,
    work: Callable[..., object],
    *given: Any,
    log: Path | None = None,
    imports: bool = False,
) -> BaseProcess:
    """Start `work(*given)` in a process of one thread.

    Args:
        namespace_fd: Its network; None for this machine's.
        work: A function of a module that processes can import.
        given: Its arguments.
        log: File for what it prints and logs.
        imports: Whether it imports torch and the library itself, as a script does.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store has no name for addresses
    _CONTEXT.set_forkserver_preload(list(PRELOADED))
    where = None if namespace_fd is None else f"/proc/{os.getpid()}/fd/{namespace_fd}"
    context: Any = multiprocessing.get_context("spawn") if imports else _CONTEXT
    process: BaseProcess = context.Process(
        target=_begun, args=(where, log, work, given), daemon=True
    )
    process.start()
    return process


def _begun(
    where: str | None, log: Path | None, work: Callable[..., object], given: tuple[Any, ...]
) -> None:
    enter.die_with_parent(os.getppid())
    torch.set_num_threads(1)
    if log is not None:
        with log.open("a") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if where is not None:
        with Path(where).open() as namespace:
            enter.enter_network(namespace.fileno())
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    work(*given)


def _rank(
    work: Callable[..., Any],
    rank: int,
    size: int,
    given: tuple[Any, ...],
    store: str | None,
    answers: Any,
) -> None:
    if store is not None:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    answers.put((rank, work(rank, size, *given)))
    if store is not None:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def host(net: Network | None, *options: str, port: int = 0) -> Iterator[tuple[str, int]]:
    """`thinwire host` in the first of the networks; its address, and the id of its process."""
    fd = -1 if net is None else net.namespace_fds[0]
    bind = f"127.0.0.1:{port}" if net is None else f"{net.addresses[0]}:{port or HOST_PORT}"
    trampoline = [sys.executable, "-P", str(Path(enter.__file__)), str(fd), str(os.getpid())]
    command = [sys.executable, "-m", "thinwire", "host", "--quiet", "--bind", bind, *options]
    passed = () if net is None else (fd,)
    with subprocess.Popen(
        [*trampoline, *command], stdout=subprocess.PIPE, text=True, pass_fds=passed
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.kill()


def cut(net: Network, index: int, command: str) -> None:
    """Add or delete ("add", "del") the rules by which the packets of a network vanish both ways."""
    address = net.addresses[index]

    def change() -> None:
        from pyroute2 import IPRoute

        with IPRoute() as ip:
            for end in ("src", "dst"):
                rule = {end: address, f"{end}_len": 32, "action": "FR_ACT_BLACKHOLE"}
                ip.rule(command, priority=10, **rule)

    inside(net.hub_fd, change)


class RanksLate(TimeoutError):
    """The ranks took too long.

    Attributes:
        printed: What each of them had printed.
    """

    def __init__(self, limit_s: float, printed: list[str]) -> None:
        super().__init__(f"the ranks took more than {limit_s:.0f} s")
        self.printed = printed


class RanksFailed(RuntimeError):
    """A rank failed; the text is what those have printed that ended before they were killed.

    Attributes:
        printed: What each of them had printed.
    """

    def __init__(self, printed: list[str], failed: list[int]) -> None:
        super().__init__("\n".join(printed[rank][-2000:] for rank in failed))
        self.printed = printed


def run_on_ranks(
    command: Sequence[str],
    count: int,
    limit_s: float,
    *,
    net: Network | None = None,
    paths: Sequence[Path] = (),
) -> list[str]:
    """Run a command on ranks, with the variables of torchrun; return what each of them printed.

    Args:
        command: Starts a rank.
        count: Number of ranks.
        limit_s: Seconds after which all are ended; all are ended too where one fails.
        net: Networks that the ranks run in; None for this machine's.
        paths: Folders that Python imports from, before those of the environment.

    Raises:
        RanksFailed: A rank failed.
        RanksLate: The ranks took longer than `limit_s`.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    late, end_s = False, time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.log") for rank in range(count)]
        try:
            for file, (fd, environment) in zip(files, environments(count, net), strict=True):
                known = filter(None, [environment.get("PYTHONPATH")])
                own = environment | {"PYTHONPATH": os.pathsep.join([*map(str, paths), *known])}
                with file.open("wb") as log:
                    ranks.append(start(command, own, fd, log, subprocess.STDOUT))
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                if late := time.monotonic() > end_s:
                    break
                time.sleep(0.1)
        finally:
            for rank in ranks:
                signal_group(rank.pid, signal.SIGKILL)
                rank.wait()
        printed = [file.read_text() for file in files]
    if late:
        raise RanksLate(limit_s, printed)
    if failed := [rank for rank, code in enumerate(codes) if code]:
        raise RanksFailed(printed, failed)
    return printed
