"""Start the workers of one strategy through torchrun, watch over them, and end them whatever
happens.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.lab.network import enter
from thinwire.lab.network.netns import Network
from thinwire.lab.run.config import Job
from thinwire.lab.run.events import EventReader

__all__ = [
    "TaskRefused",
    "WorkerError",
    "cores",
    "explain",
    "failure_of",
    "loopback_name",
    "run_workers",
]

_PORT = 29500
_POLL_S, _GRACE_S = 0.1, 3.0
_START_UP_S = 90.0
_MOST_LINES, _LONGEST_LINE = 5, 300
# torchrun's own summary; SIGTERM is what it sends to the others when one has failed
_DEATH = re.compile(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-\d+[^\n]*\((SIG(?!TERM)\w+)\)")


class WorkerError(ThinwireError):
    """A worker of the comparison failed, died or went silent; every worker has been ended."""


class TaskRefused(ValueError):
    """A task of the user's cannot be trained; every worker has been ended."""


def run_workers(
    job: Job, workers: int, network: Network | None, work: Path
) -> Generator[dict[str, Any], None, None]:
    """Run one job and yield rank 0's events as they come; the last one is the result.

    The workers end with the generator, and with the thread that runs it: the kernel kills them when
    it is gone.

    Args:
        job: What each of them does.
        workers: Number of ranks.
        network: Where they run; None is the loopback of this machine.
        work: An empty folder for the job, event logs and output.

    Raises:
        TaskRefused: The job's task is the user's, and a worker refuses it.
        WorkerError: With the first failing worker's error.
    """
    work.mkdir(parents=True, exist_ok=True)
    path = work / "job.json"
    job.write(path)
    readers = [EventReader(work, rank) for rank in range(workers)]
    with _agents(_commands(path, workers, network), network, workers, work) as agents:
        yield from _watch(agents, readers, job.timeout_s, work)


def _watch(
    agents: list[subprocess.Popen[bytes]], readers: list[EventReader], timeout_s: float, work: Path
) -> Iterator[dict[str, Any]]:
    errors: list[dict[str, Any]] = []
    last_news_s = time.monotonic() + _START_UP_S
    failed_s: float | None = None
    finished = False
    while True:
        running = [agent.poll() is None for agent in agents]
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
        if failed_s is None and (errors or not all(running)):
            failed_s = time.monotonic()
        # The worker that fails first is not always the one whose line is read first: its peers fail
        # a moment later.
        if failed_s is not None and time.monotonic() - failed_s > _GRACE_S:
            raise failure_of(errors, work)
        if time.monotonic() - last_news_s > timeout_s + 30:
            raise WorkerError(
                f"the workers have been silent for {timeout_s + 30:.0f} "
                f"s\n{_log_tail(work)}".rstrip()
            )
        time.sleep(_POLL_S)


def _commands(job: Path, workers: int, network: Network | None) -> list[list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=0"]
    script = ["-m", "thinwire.lab.run.worker", str(job)]
    if network is None:
        local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={workers}"]
        return [[*torchrun, *local, *script]]
    node = [f"--nnodes={workers}", "--nproc-per-node=1", f"--master-addr={network.addresses[0]}"]
    return [
        [*torchrun, *node, f"--master-port={_PORT}", f"--node-rank={rank}", *script]
        for rank in range(workers)
    ]


@contextlib.contextmanager
def _agents(
    commands: list[list[str]], network: Network | None, workers: int, work: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    fds = network.namespace_fds if network else (-1,)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, (command, fd) in enumerate(zip(commands, fds, strict=True)):
            with (work / f"agent{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            str(Path(enter.__file__)),
                            str(fd),
                            str(os.getpid()),
                            *command,
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=[fd] if fd >= 0 else [],
                        # Ctrl-C is for the command, which then ends the workers in order
                        start_new_session=True,
                        env=_environment(network, workers),
                    )
                )
        yield started
        for agent in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=_GRACE_S)
    finally:
        for agent in started:
            agent.kill()  # its workers asked the kernel to follow it
        for agent in started:
            agent.wait()


def _environment(network: Network | None, workers: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, cores() // workers)),
        "GLOO_SOCKET_IFNAME": network.interface if network else loopback_name(),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def loopback_name() -> str:
    """The interface by which the processes of this machine reach each other."""
    return "lo" if sys.platform == "linux" else "lo0"


def failure_of(errors: Sequence[Mapping[str, Any]], work: Path) -> WorkerError | TaskRefused:
    """The error to raise for what the workers have told before they ended; see `explain`."""
    refusals = [error["message"] for error in errors if error["kind"] == "TaskError"]
    return TaskRefused(refusals[0]) if refusals else WorkerError(explain(errors, work))


def explain(errors: Sequence[Mapping[str, Any]], work: Path) -> str:
    """The cause, and not its consequences on the other ranks, as far as that can be told.

    Args:
        errors: The `error` events of all ranks, each with its `rank`.
        work: Folder with the agents' logs.
    """
    spoke = {
        str(error["rank"]) for error in errors
    }  # a rank that dies after an error of its own died of that
    deaths = [
        f"worker {rank} was killed by {signal}"
        for rank, signal in _DEATH.findall(_logs(work))
        if rank not in spoke
    ]
    if deaths:
        return "; ".join(deaths)
    if errors:
        first = min(errors, key=lambda error: float(error["unix_s"]))
        lines = str(first["message"]).strip().splitlines() or [""]
        short = [line[:_LONGEST_LINE] for line in lines[:_MOST_LINES]]
        return "\n  ".join(
            [f"worker {first['rank']} failed: {first['kind']}: {short[0]}", *short[1:]]
        )
    return f"a worker ended without a result\n{_log_tail(work)}".rstrip()


def _log_tail(work: Path) -> str:
    """The last lines of the agents' logs that speak of an error."""
    found = [
        line.strip()[:_LONGEST_LINE]
        for line in _logs(work).splitlines()
        if re.search(r"Error|error:", line)
    ]
    return "\n".join(f"  {line}" for line in found[-_MOST_LINES:])


def _logs(work: Path) -> str:
    return "\n".join(
        log.read_text(encoding="utf-8", errors="replace") for log in sorted(work.glob("agent*.log"))
    )
