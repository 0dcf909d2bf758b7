"""Starts the workers of one strategy through torchrun, watches over them, and ends them whatever
happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.lab import enter
from thinwire.lab.diagnosis import explain, log_tail
from thinwire.lab.netns import Network

__all__ = ["WorkerError", "run_workers"]

_PORT = 29500
_POLL_S, _GRACE_S = 0.1, 3.0
_START_UP_S = 90.0


class WorkerError(ThinwireError):
    """A worker of the comparison failed, died or went silent; every worker has been ended."""


@dataclass
class _Reader:
    """Reads the new whole lines of one rank's diary."""

    path: Path
    offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def run_workers(
    config: Mapping[str, Any], workers: int, network: Network | None, work: Path
) -> Generator[dict[str, Any], None, None]:
    """Runs one strategy and yields rank 0's events as they come; the last one is the result.

    The workers end with the generator, and with the thread that runs it: the kernel kills them when
    it is gone.

    Args:
        config: Written as JSON and read by every worker.
        workers: Number of ranks.
        network: Where they run; None is the loopback of this machine.
        work: An empty folder for configuration, events and logs.

    Raises:
        WorkerError: With the first failing worker's error.
    """
    work.mkdir(parents=True, exist_ok=True)
    config_path = work / "config.json"
    config_path.write_text(json.dumps({**config, "events": str(work)}), encoding="utf-8")
    readers = [_Reader(work / f"rank{rank}.jsonl") for rank in range(workers)]
    with _agents(_commands(config_path, workers, network), network, workers, work) as agents:
        yield from _watch(agents, readers, config["timeout_s"], work)


def _watch(
    agents: list[subprocess.Popen[bytes]], readers: list[_Reader], timeout_s: float, work: Path
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
            raise WorkerError(explain(errors, work))
        if time.monotonic() - last_news_s > timeout_s + 30:
            raise WorkerError(
                f"the workers have been silent for {timeout_s + 30:.0f} "
                f"s\n{log_tail(work)}".rstrip()
            )
        time.sleep(_POLL_S)


def _commands(config_path: Path, workers: int, network: Network | None) -> list[list[str]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=0"]
    script = ["-m", "thinwire.lab.worker", str(config_path)]
    if network is None:
        local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={workers}"]
        return [[*torchrun, *local, *script]]
    place = [f"--nnodes={workers}", "--nproc-per-node=1", f"--master-addr={network.addresses[0]}"]
    return [
        [*torchrun, *place, f"--master-port={_PORT}", f"--node-rank={rank}", *script]
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
    threads = max(
        1,
        len(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1))
        // workers,
    )
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": network.interface if network else _loopback_name(),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }


def _loopback_name() -> str:
    return "lo" if sys.platform == "linux" else "lo0"
