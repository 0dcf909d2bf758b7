"""Start the workers of one strategy, monitor them, and end them in any case."""

import contextlib
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, final

from thinwire.errors import ThinwireError
from thinwire.tools.network import enter
from thinwire.tools.network.netns import Network
from thinwire.tools.run.config import Job, TaskError

Event = dict[str, Any]
News = Generator[Event, None, None]
"""Events of rank 0 as they come."""
_GO = "go"
_SECONDS_BETWEEN_EVENTS = 0.2
_RELEASE_POLL_S = 0.02


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def release(folder: Path) -> None:
    """Release the ranks with logs in `folder` from `Events.wait_for_release`."""
    (folder / _GO).touch()


@final
class Events:
    """Event log of a rank, written to `put`; `release` of a folder lets training begin."""

    def __init__(self, put: Callable[[Event], object], folder: Path | None = None) -> None:
        self._put = put
        self._folder = folder
        self._last_s = 0.0

    def write(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._put({"event": event, "unix_s": time.time(), **fields})

    def write_sometimes(self, event: str, **fields: Any) -> None:
        """Write an event, at most five times a second."""
        if time.monotonic() - self._last_s >= _SECONDS_BETWEEN_EVENTS:
            self._last_s = time.monotonic()
            self.write(event, **fields)

    def wait_for_release(self) -> None:
        """Wait until training may begin."""
        while self._folder is not None and not (self._folder / _GO).exists():
            time.sleep(_RELEASE_POLL_S)


def event_log(folder: Path, rank: int) -> Events:
    """Return an event log as JSON lines in a file, which the command reads as it grows."""
    file = _file_of(folder, rank).open("a", encoding="utf-8", buffering=1)
    return Events(lambda event: file.write(json.dumps(event) + "\n"), folder)


@dataclass
class EventReader:
    """Reader of an event log, in the command."""

    folder: Path
    rank: int
    offset: int = 0

    def read(self) -> list[Event]:
        """Read the complete lines appended since the last call."""
        path = _file_of(self.folder, self.rank)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


_PORT, _PORTS_TRIED = 29500, 1000


def environments(workers: int, network: Network | None) -> list[tuple[int, dict[str, str]]]:
    """Return the namespace of each rank, -1 for our own, and our environment with torchrun's."""
    machines = 1 if network is None else len(network.addresses)
    local = workers // machines
    default = {"OMP_NUM_THREADS": threads_of(workers), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    common = {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_WORLD_SIZE": machines,
        "MASTER_ADDR": "127.0.0.1" if network is None else network.addresses[0],
        "MASTER_PORT": free_port() if network is None else _PORT,
        "GLOO_SOCKET_IFNAME": "lo" if network is None else network.interface,
        "TORCHELASTIC_RUN_ID": "thinwire",  # for torch.distributed.is_torchelastic_launched()
        "PYTHONUNBUFFERED": 1,
    }
    fds = (-1,) if network is None else network.namespace_fds
    found = []
    for rank in range(workers):
        machine = rank // local
        own = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": machine}
        given = {**default, **os.environ, **common, **own}
        found.append((fds[machine], {key: str(value) for key, value in given.items()}))
    return found


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_of(workers: int) -> int:
    """Return the threads for each of this many ranks on this machine."""
    return max(1, cores() // workers)


def free_port() -> int:
    """Return a free port."""
    # the kernel gives none of this range to a connection, so it stays free until a rank takes it
    for _ in range(_PORTS_TRIED):
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port between 15,000 and 32,000 on this machine")


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    fd: int,
    stdout: IO[bytes] | int,
    stderr: int,
) -> "subprocess.Popen[bytes]":
    """Start a rank as leader of a process group; the kernel ends it with this thread."""
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(enter.__file__)), str(fd), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[fd] if fd >= 0 else [],
        env=dict(environment),
        # Ctrl-C is for the command, which then ends the ranks in order
        start_new_session=True,
    )


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a rank and its children that still run."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(leader, number)


_POLL_S, _GRACE_S = 0.1, 3.0


def end(
    ranks: Collection["subprocess.Popen[bytes]"], wait: Callable[[float], object] = time.sleep
) -> None:
    """End ranks and their children, at first by a signal that they can act on."""
    try:
        for rank in ranks:
            signal_group(rank.pid, signal.SIGTERM)
        end_s = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end_s:
            wait(_POLL_S / 5)
    finally:
        for rank in ranks:
            signal_group(rank.pid, signal.SIGKILL)
            rank.wait()


_START_UP_S = 90.0
_MOST_LINES, _LONGEST_LINE = 5, 300


class WorkerError(ThinwireError):
    """A worker of the comparison failed, died or fell silent; all workers were ended."""


def run_workers(job: Job, workers: int, network: Network | None, work: Path) -> News:
    """Run one job and yield rank 0's events as they come; the last one is the result."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "job.json"
    job.write(path)
    command = [sys.executable, "-m", "thinwire.tools.run.worker", str(path)]
    # whatever the shell says, since figures of one machine are compared with those of another
    threads = {"OMP_NUM_THREADS": str(threads_of(workers))}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, (fd, environment) in enumerate(environments(workers, network)):
            with (work / f"worker{rank}.log").open("wb") as log:
                started.append(start(command, environment | threads, fd, log, subprocess.STDOUT))
        yield from _watch(started, job.timeout_s, work)
    finally:
        end(started)


def _watch(workers: list["subprocess.Popen[bytes]"], timeout_s: float, work: Path) -> News:
    readers = [EventReader(work, rank) for rank in range(len(workers))]
    errors: list[Event] = []
    last_news_s = time.monotonic() + _START_UP_S
    failed_s: float | None = None
    finished = False
    while True:
        statuses = [worker.poll() for worker in workers]
        for rank, reader in enumerate(readers):
            for event in reader.read():
                last_news_s = max(last_news_s, time.monotonic())
                if event["event"] == "error":
                    errors.append({"rank": rank, **event})
                elif rank == 0:
                    yield event
                    finished = event["event"] == "result"
        if finished:
            return
        if failed_s is None and (errors or any(status is not None for status in statuses)):
            failed_s = time.monotonic()
        # The worker that fails first is not always the one whose line is read first: its peers fail
        # a moment later.
        if failed_s is not None and time.monotonic() - failed_s > _GRACE_S:
            raise failure_of(errors, statuses, work)
        if time.monotonic() - last_news_s > timeout_s + 30:
            raise WorkerError(
                f"the workers were silent for {timeout_s + 30:.0f} s; if a step or an "
                f"evaluation takes longer, raise --timeout\n{_log_tail(work)}".rstrip()
            )
        time.sleep(_POLL_S)


def failure_of(
    errors: Sequence[Mapping[str, Any]], statuses: Sequence[int | None], work: Path
) -> WorkerError | TaskError:
    """Return the cause of a failure, without its consequences on other ranks."""
    refusals = [error["message"] for error in errors if error["kind"] == "TaskError"]
    if refusals:
        return TaskError(refusals[0])
    # a rank that dies after an error of its own died of that
    spoke = {error["rank"] for error in errors}
    silent = {rank: s for rank, s in enumerate(statuses) if s and rank not in spoke}
    names = {number.value: number.name for number in signal.Signals}  # all but real-time ones
    killed = [
        f"worker {rank} was killed by {names.get(-status, f'signal {-status}')}"
        for rank, status in silent.items()
        if status < 0
    ]
    if killed:
        return WorkerError("; ".join(killed))
    if errors and not silent:
        first = min(errors, key=lambda error: float(error["unix_s"]))
        lines = str(first["message"]).strip().splitlines() or [""]
        short = [line[:_LONGEST_LINE] for line in lines[:_MOST_LINES]]
        head = f"worker {first['rank']} failed: {first['kind']}: {short[0]}"
        return WorkerError("\n  ".join([head, *short[1:]]))
    ended = "; ".join(f"worker {r} ended with status {s}" for r, s in silent.items())
    text = f"{ended or 'a worker ended'}, without a result\n{_log_tail(work)}"
    return WorkerError(text.rstrip())


def _log_tail(work: Path) -> str:
    """Return the last lines of the workers' logs that mention an error."""
    found = [
        line.strip()[:_LONGEST_LINE]
        for log in sorted(work.glob("worker*.log"))
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if re.search(r"Error|error:", line)
    ]
    return "\n".join(f"  {line}" for line in found[-_MOST_LINES:])


def everyones(own: Any) -> list[Any]:
    """Return a value of every rank."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


@contextlib.contextmanager
def joined(shared: Mapping[str, Any], timeout_s: float) -> Iterator[None]:
    """Join the process group of all ranks; raise ValueError if their settings differ."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        everyone = everyones(shared)
        for rank, other in enumerate(everyone):
            for key, value in everyone[0].items():
                if other[key] != value:
                    raise ValueError(
                        f"ranks were started with different settings: {key} is {value!r} on "
                        f"rank 0 and {other[key]!r} on rank {rank}; start all of them alike"
                    )
        yield
    finally:
        dist.destroy_process_group()


def by_first(check: Callable[[], None]) -> None:
    """Run a check on rank 0; raise its ValueError on all ranks."""
    problem = ""
    try:
        if int(os.environ["RANK"]) == 0:
            check()
    except ValueError as error:
        problem = str(error)
    if problem := everyones(problem)[0]:
        raise ValueError(problem)


def run_here(job: Job) -> News:
    """Run one job as this rank of the process group; yields and raises like `run_workers`."""
    queued: queue.SimpleQueue[Event] = queue.SimpleQueue()
    events = Events(queued.put)

    def work() -> None:
        try:
            result = resolve_name(job.task)(job.config, events).train()
            events.write("result", **result)
        except BaseException as error:
            events.write("error", kind=type(error).__name__, message=str(error))

    threading.Thread(target=work, name="thinwire-training", daemon=True).start()
    while True:
        event = queued.get()
        if event["event"] == "error":
            raise failure_of([{"rank": os.environ["RANK"], **event}], (), Path())
        yield event
        if event["event"] == "result":
            return
