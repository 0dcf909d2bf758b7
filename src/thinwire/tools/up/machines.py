"""The machines of a run, reached by the system's `ssh`, and their jobs, which outlive it."""

import contextlib
import io
import os
import queue
import shlex
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple, Self, TypeVar, cast, final

from thinwire._version import __version__
from thinwire.errors import ThinwireError
from thinwire.tools.run.command import Speaker
from thinwire.tools.up.config import Machine, Run, job_files

_AGAIN_S, _PATIENCE_S, _LAST_S = 3.0, 30.0, 3.0
_LEFT_OUT = {".git", ".venv", "__pycache__", ".thinwire"}
RUNNING = "running"
_RECENT = -1
"""Offset of the last lines of a log."""
T = TypeVar("T")
U = TypeVar("U")


_CONTROL = Path(__file__).with_name("remote.sh")
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_CHUNK_BYTES = 1 << 16
LOST = 255
"""Exit status of `ssh` without a connection; jobs have no such status."""


class MachineError(ThinwireError):
    """A machine cannot be reached, or what it runs has failed."""


@final
class Call:
    """A command that runs on a machine; `ssh` does not outlive the context."""

    def __init__(self, run: Run, machine: Machine, *words: str) -> None:
        if machine.ssh != "localhost":
            options = [word for option in _OPTIONS for word in ("-o", option)]
            words = ("ssh", *run.ssh_options, *options, "--", machine.ssh, shlex.join(words))
        self._machine = machine
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=run.file.parent,
            start_new_session=True,  # Ctrl-C is for the command, which then ends the jobs
        )
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self.stdin, self.stdout, self._stderr = cast("tuple[IO[bytes], ...]", pipes)

    @classmethod
    def control(cls, run: Run, machine: Machine, verb: str, job: str, offset: int = 0) -> Self:
        """Run a verb of `remote.sh`."""
        call = cls(run, machine, "sh", "-s")
        head = f"to={shlex.quote(run.to)} verb={verb} job={job} offset={offset}\n"
        with contextlib.suppress(BrokenPipeError), call.stdin:
            call.stdin.write(head.encode() + _CONTROL.read_bytes())
        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)

    def kill(self) -> None:
        """End `ssh`."""
        self._process.kill()

    def chunks(self) -> Iterator[bytes]:
        """Yield the output as it comes."""
        while chunk := os.read(self.stdout.fileno(), _CHUNK_BYTES):
            yield chunk

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the last line of errors."""
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return self._process.wait(), lines[-1] if lines else ""

    def require_end(self, otherwise: str) -> None:
        """Wait for the end; raise an error with its message, or `otherwise`, if it failed."""
        status, message = self.end()
        if status:
            raise MachineError(f"{self._machine.ssh}: {message or otherwise}")


class Job(NamedTuple):
    """A process group of a machine: "host", the meeting place, "member", or torchrun's "rank"."""

    machine: Machine
    name: str

    def __str__(self) -> str:
        return self.machine.ssh + " host" * (self.name == "host")


class State(NamedTuple):
    """A job as its machine knows it, in words."""

    word: str = "none"
    since: str = ""
    last_line: str = ""


@final
class Machines:
    """All machines of a run. No `ssh` outlives the context; jobs do."""

    def __init__(self, run: Run) -> None:
        self.run = run
        if not all(machine.ssh for machine in run.machines):
            raise ValueError(
                f"{run.file}: machines is a number, which is for --print; to start them by ssh "
                "list their names"
            )
        self.jobs = [Job(run.machines[0], "host")] * bool(run.members)
        self.jobs += [Job(machine, run.job) for machine in run.machines]
        self.over: set[Job] = set()
        """Jobs whose end has been seen."""
        self._threads = ThreadPoolExecutor(3 * len(self.jobs))
        self._calls: set[Call] = set()
        self._closed = threading.Event()
        self._following: list[Future[None]] = []
        self._ended: queue.SimpleQueue[tuple[Job, int, str]] = queue.SimpleQueue()
        self._lost_s: dict[Job, float] = {}

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for call in list(self._calls):
            call.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def at_once(self, work: Callable[[T], U], items: Iterable[T]) -> tuple[dict[T, U], list[str]]:
        """Run `work` for all items at once; return the results by item, and the errors."""
        futures = {item: self._threads.submit(work, item) for item in items}
        done, failed = {}, []
        for item, future in futures.items():
            try:
                done[item] = future.result()
            except MachineError as error:
                failed.append(str(error))
        return done, failed

    def states(self) -> tuple[dict[Job, State], list[str]]:
        """Return the jobs of machines that are reached, and an error for each other one."""
        found, failed = self.at_once(
            lambda machine: self._ask(machine, "status"), self.run.machines
        )
        states = {job: State() for job in self.jobs if job.machine in found}
        for machine, lines in found.items():
            for line in lines.splitlines():
                name, *cells = line.split("\t")
                states[Job(machine, name)] = State(*cells)
        return states, failed

    @cached_property
    def addresses(self) -> list[str]:
        """Addresses of the machines, as numbers where names resolve here."""
        return [_address(self.run, machine) for machine in self.run.machines]

    def prepare(self, machine: Machine) -> None:
        """Copy the folder, run the set-up there, and require thinwire of this version."""
        to = shlex.quote(self.run.to)
        make = f"mkdir -p {to}/.thinwire && chmod 700 {to}/.thinwire"
        unpack = f"cd && {make} && cd {to} && tar -xzof -"
        with self._held(Call(self.run, machine, "sh", "-c", unpack)) as call:
            with (
                contextlib.suppress(BrokenPipeError),  # its message says why
                call.stdin as there,
                tarfile.open(fileobj=there, mode="w|gz") as archive,
            ):
                self._pack(archive, machine)
            call.require_end("the folder cannot be copied")
        speaker = Speaker(machine.ssh, sys.stdout.buffer)
        with self._control(machine, "setup") as call:
            for chunk in call.chunks():
                speaker.hear(chunk)
            speaker.hear(b"")
            call.require_end("; ".join(speaker.last))
        if speaker.last[-1] != __version__:
            raise MachineError(
                f"{machine.ssh}: thinwire is {speaker.last[-1]} there and {__version__} here: "
                "install one version on all machines"
            )

    def _pack(self, archive: tarfile.TarFile, machine: Machine) -> None:
        for name in _files(self.run.source):
            archive.add(self.run.source / name, name)
        rank = self.run.machines.index(machine)
        for name, text in job_files(self.run, rank, self.addresses).items():
            entry = tarfile.TarInfo(f".thinwire/{name}")
            entry.size, entry.mode, entry.mtime = len(text.encode()), 0o600, time.time()
            archive.addfile(entry, io.BytesIO(text.encode()))

    def start(self, job: Job) -> None:
        """Start a job; a host listens when this returns."""
        self._ask(job.machine, "start", job.name)
        if job.name == "host":
            self._ask(job.machine, "listening", job.name)

    def stop(self, job: Job) -> str:
        """End a job; return "ended", "killed", or nothing where it did not run."""
        return self._ask(job.machine, "stop", job.name).strip()

    def follow(self, recent: Collection[Job]) -> Iterator[tuple[Job, int, str]]:
        """Pass logs on until all jobs but the host have ended; yield each with its status and
        last lines. The status is `LOST` for a machine that is not reached again.

        Those in `recent` begin with their last lines.
        """
        self._following = [
            self._threads.submit(self._follow_or_say, job, _RECENT if job in recent else 0)
            for job in self.jobs
        ]
        left = {job for job in self.jobs if job.name != "host"}
        while left:
            job, status, last = self._ended.get()
            left.discard(job)
            yield job, status, last

    def hear_last(self) -> None:
        """Pass on what ended jobs have written last."""
        wait(self._following, timeout=_LAST_S)

    def _follow_or_say(self, job: Job, offset: int) -> None:
        try:
            self._follow(job, offset)
        except (OSError, ValueError) as error:  # such as output that nobody reads any more
            self._ended.put((job, LOST, str(error)))

    def _follow(self, job: Job, offset: int) -> None:
        speaker, status = Speaker(str(job), sys.stdout.buffer), LOST
        while status == LOST:
            with self._control(job.machine, "follow", job.name, offset) as call:
                if begin := call.stdout.readline():
                    offset = int(begin)
                    if self._lost_s.pop(job, None):
                        say(f"{job} is reached again")
                for chunk in call.chunks():
                    offset += len(chunk)
                    speaker.hear(chunk)
                status, message = call.end()
            if status != LOST:
                speaker.hear(b"")
                self.over.add(job)
                self._ended.put((job, status, " / ".join(speaker.last)))
            elif self._gives_up(job, message):
                self._ended.put((job, LOST, message))
                return

    def _gives_up(self, job: Job, message: str) -> bool:
        """Return True for a lost machine without which others have ended, or must end."""
        if job not in self._lost_s:
            say(f"{job} cannot be reached: {message}; trying again")
        since_s = self._lost_s.setdefault(job, time.monotonic())
        others = {other for other in self.jobs if other != job and other.name != "host"}
        # all are lost where it is this machine that has lost its network
        go_on = self.over >= others if self.run.members else not self._lost_s.keys() >= others
        late = time.monotonic() - since_s > _PATIENCE_S
        return (late and go_on and bool(others)) or self._closed.wait(_AGAIN_S)

    @contextlib.contextmanager
    def _held(self, call: Call) -> Iterator[Call]:
        self._calls.add(call)
        try:
            with call:
                yield call
        finally:
            self._calls.discard(call)

    def _control(
        self, machine: Machine, verb: str, job: str = "-", offset: int = 0
    ) -> contextlib.AbstractContextManager[Call]:
        return self._held(Call.control(self.run, machine, verb, job, offset))

    def _ask(self, machine: Machine, verb: str, job: str = "-") -> str:
        with self._control(machine, verb, job) as call:
            answer = b"".join(call.chunks()).decode(errors="replace")
            call.require_end(f"{job} has ended: {answer.strip()}")
        return answer


def say(line: str) -> None:
    """Print a line of this command, not of a machine."""
    print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _address(run: Run, machine: Machine) -> str:
    name = machine.address
    if not name:
        command = ["ssh", *run.ssh_options, "-G", machine.ssh]
        printed = subprocess.check_output(command, text=True, cwd=run.file.parent)
        settings = dict(line.partition(" ")[::2] for line in printed.splitlines())
        name = settings.get("hostname", machine.ssh)
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:  # known to the machines alone
        return name


def _files(folder: Path) -> list[str]:
    """Return the paths of a folder that machines get."""
    git = ["git", "-C", str(folder), "ls-files", "-coz", "--exclude-standard"]
    try:
        listed = subprocess.run(git, capture_output=True, check=True).stdout
        names = {os.fsdecode(name) for name in listed.split(b"\0") if name}
    except (OSError, subprocess.CalledProcessError):
        names = set()
        for at, below, files in os.walk(folder):
            below[:] = [name for name in below if name not in _LEFT_OUT]
            names |= {os.path.relpath(Path(at, name), folder) for name in files}
    return sorted(name for name in names if os.path.lexists(folder / name))
