"""The machines of a run, reached by the system's `ssh`, and their jobs, which outlive it."""

import contextlib
import gzip
import io
import os
import queue
import re
import secrets
import shlex
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar, cast, final

from thinwire._version import __version__
from thinwire.errors import ThinwireError
from thinwire.tools.doctor.interfaces import is_loopback, resolved, source_towards
from thinwire.tools.run.command import Speaker
from thinwire.tools.up.config import Machine, Run, job_files

_AGAIN_S, _PATIENCE_S, _LAST_S = 3.0, 30.0, 3.0
_SAY_S, _MB = 2.0, 1e6
_LEFT_OUT = {".git", ".venv", "__pycache__", ".thinwire"}
RUNNING = "running"
_RECENT = -1
"""Offset of the last lines of a log."""
T = TypeVar("T")
U = TypeVar("U")


_CONTROL = Path(__file__).with_name("remote.sh")
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_CHUNK_BYTES = 1 << 16
_ADVICE = {
    r"Permission denied \(": "ssh has to get in without a question: ssh-copy-id copies your key, "
    "and ssh-add unlocks one with a passphrase",
    "IDENTIFICATION HAS CHANGED": "its key is not the one that is known here: if it was set up "
    "anew, ssh-keygen -R removes the old one",
    "Host key verification failed": "its key is not known here: run ssh {} once, and confirm it",
    "python3?: .*not found": "install Python 3.11 or newer there, and let setup make .venv by it",
    "No module named '?thinwire": "let setup install thinwire there, as docs/machines.md does",
}
"""What to do, by what `ssh` or a machine says."""
LOST = 255
"""Exit status of `ssh` without a connection; jobs have no such status."""


class MachineError(ThinwireError):
    """A machine cannot be reached, or what it runs has failed."""


@final
class Call:
    """A command that runs on a machine; `ssh` does not outlive the context."""

    def __init__(self, run: Run, machine: Machine, verb: str, *words: str) -> None:
        if machine.ssh != "localhost":
            options = [word for option in _OPTIONS for word in ("-o", option)]
            words = ("ssh", *run.ssh_options, *options, "--", machine.ssh, shlex.join(words))
        self.verb = verb
        self._machine = machine
        self._mark = f"{secrets.token_hex(16)} "
        # a pipe stays open with the master of `ssh`
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # closed by __exit__
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if verb != "copy" else subprocess.DEVNULL,  # nobody reads it
            stderr=self._errors,
            cwd=run.file.parent,
            start_new_session=True,  # Ctrl-C is for the command, which then ends the jobs
        )
        pipes = (self._process.stdin, self._process.stdout)
        self.stdin, self._stdout = cast("tuple[IO[bytes], BufferedReader]", pipes)

    @classmethod
    def control(cls, run: Run, machine: Machine, verb: str, job: str, offset: int = 0) -> Self:
        """Run a verb of `remote.sh`."""
        call = cls(run, machine, verb, "sh", "-s")
        words = {"to": run.to, "owner": run.owner, "machine": machine.ssh, "mark": call._mark}
        words |= {"verb": verb, "job": job, "offset": str(offset)}
        head = " ".join(f"{name}={shlex.quote(word)}" for name, word in words.items()) + "\n"
        with contextlib.suppress(BrokenPipeError), call.stdin:
            call.stdin.write(head.encode() + _CONTROL.read_bytes())
        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError), self._errors:
            self._process.__exit__(None, None, None)

    def kill(self) -> None:
        """End `ssh`."""
        self._process.kill()

    def begin(self) -> None:
        """Wait for the answer; keep the rest of its first line, empty where there is none."""
        lines = (line.decode(errors="replace") for line in self._stdout)
        # before the mark is what a login shell prints
        marked = (line.partition(self._mark)[2] for line in lines if self._mark in line)
        self.head = next(marked, "").strip()

    def chunks(self) -> Iterator[bytes]:
        """Yield the answer behind its first line as it comes."""
        return iter(self._stdout.read1, b"")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the last line of errors, with advice."""
        status = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _CHUNK_BYTES))
        text = self._errors.read().decode(errors="replace").strip()
        return status, self.advised(text.rpartition("\n")[2].strip(), text)

    def advised(self, message: str, text: str) -> str:
        """Return a message, and the advice for a text."""
        advice = [line for cause, line in _ADVICE.items() if re.search(cause, text)]
        return " -> ".join([message, *advice[:1]]).replace("{}", self._machine.ssh)

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
            raise ValueError(f"{run.file}: machines has no names: a number of them is for --print")
        self.jobs = [Job(run.machines[0], "host")] * bool(run.members)
        self.jobs += [Job(machine, run.job) for machine in run.machines]
        self.over: set[Job] = set()
        """Jobs that are known not to run."""
        self._threads = ThreadPoolExecutor(3 * len(self.jobs))
        self._calls: set[Call] = set()
        self._pending: list[Future[Any]] = []
        self._abandoned, self._closed = threading.Event(), threading.Event()
        self._following: list[Future[None]] = []
        self._ended: queue.SimpleQueue[tuple[Job, int, str]] = queue.SimpleQueue()
        self._lost_s: dict[Job, float] = {}
        # with a lock, unlike that of PYTHONUNBUFFERED: no line of a thread ends inside another
        self._output = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._closed.set()
        for call in list(self._calls):
            call.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if kind is KeyboardInterrupt:  # name the jobs that may still run
            left = ", ".join(str(job) for job in self.jobs if job not in self.over)
            words = f"{left} may still run: thinwire down {self.run.file} ends it" if left else ""
            raise KeyboardInterrupt(words) from None

    def at_once(self, work: Callable[[T], U], items: Iterable[T]) -> tuple[dict[T, U], list[str]]:
        """Run `work` for all items at once; return the results by item, and the errors."""
        futures = {item: self._threads.submit(work, item) for item in items}
        self._pending += futures.values()
        done = {}
        failed = []
        for item, future in futures.items():
            try:
                done[item] = future.result()
            except MachineError as error:
                failed.append(str(error))
        return done, failed

    def abandon(self) -> None:
        """End what `at_once` still does, after any start that is on its way."""
        self._abandoned.set()
        end_s = time.monotonic() + _PATIENCE_S
        while wait(self._pending, 0.1).not_done and time.monotonic() < end_s:
            for call in list(self._calls):
                if call.verb != "start":
                    call.kill()

    def states(self) -> tuple[dict[Job, State], list[str]]:
        """Ask all machines for their jobs; return those, and an error for each one not reached."""
        found, failed = self.at_once(
            lambda machine: self._ask(machine, "status"), self.run.machines
        )
        states = {job: State() for job in self.jobs if job.machine in found}
        for machine, lines in found.items():
            for line in lines.splitlines():
                name, *cells = line.split("\t")
                states[Job(machine, name)] = State(*cells)
        self.over |= {job for job, state in states.items() if state.word != RUNNING}
        return states, failed

    @cached_property
    def addresses(self) -> list[str]:
        """Addresses of the machines for each other, as numbers where names resolve here."""
        found = [_address(self.run, machine) for machine in self.run.machines]
        outer = [address for address in found if not is_loopback(address)]
        if outer and len(outer) < len(found):
            own = source_towards(outer[0])
            if not own:
                raise MachineError(f"no way from here to {outer[0]}: give addresses in the file")
            found = [own if is_loopback(address) else address for address in found]
        return found

    def prepare(self, machine: Machine) -> None:
        """Copy what differs of the folder, run the set-up there, and require our version."""
        self._copy(machine)
        speaker = Speaker(machine.ssh, self._output)
        say(f"{machine.ssh}: setup")
        with self._control(machine, "setup") as call:
            for chunk in call.chunks():
                speaker.hear(chunk)
            speaker.hear(b"")
            status, message = call.end()
            why = message if status == LOST else call.advised(speaker.reason, speaker.reason)
        if status:
            raise MachineError(f"{machine.ssh}: {why} (setup, status {status})")
        version = self._ask(machine, "version").strip()
        if version != __version__:
            raise MachineError(
                f"{machine.ssh}: thinwire is {version} there and {__version__} here: "
                "install one version on all machines"
            )

    def _copy(self, machine: Machine) -> None:
        source = self.run.source
        names = _files(self.run.source)
        there = _states(self._ask(machine, "files", errors="surrogateescape"))
        differing = [name for name in names if there.get(name) != _state(source / name)]
        progress = _Progress(machine, sum((source / name).lstat().st_size for name in differing))
        say(f"{machine.ssh}: {len(differing)} of {len(names)} files to copy, {progress.whole}")
        to = shlex.quote(self.run.to)
        unpack = f"mkdir -p {to}/.thinwire && chmod 700 {to}/.thinwire && cd {to} && tar -xzof -"
        with self._held(Call(self.run, machine, "copy", "sh", "-c", f"cd && {unpack}")) as call:
            with (
                contextlib.suppress(BrokenPipeError),  # its message says why
                call.stdin as pipe,
                gzip.open(pipe, "wb", compresslevel=1) as packed,
                tarfile.open(fileobj=packed, mode="w|") as archive,
            ):
                for name in differing:
                    progress.add(archive, source / name, name)
                rank = self.run.machines.index(machine)
                for name, text in job_files(self.run, rank, self.addresses).items():
                    entry = tarfile.TarInfo(f".thinwire/{name}")
                    entry.size = len(text.encode())
                    entry.mode = 0o600
                    entry.mtime = time.time()
                    archive.addfile(entry, io.BytesIO(text.encode()))
            call.require_end("the folder cannot be copied")

    def start(self, job: Job) -> None:
        """Start a job; a host listens when this returns."""
        say(f"{job}: start")
        for verb in ("start", "listening") if job.name == "host" else ("start",):
            if not self._abandoned.is_set():
                self.over.discard(job)
                self._ask(job.machine, verb, job.name)

    def stop(self, job: Job) -> str:
        """End a job; return "ended", "killed", or nothing where it did not run."""
        word = self._ask(job.machine, "stop", job.name).strip()
        self.over.add(job)
        return word

    def follow(self, fresh: Collection[Job]) -> Iterator[tuple[Job, int, str]]:
        """Pass logs on until all jobs but the host have ended; yield each with its status and
        last lines. The status is `LOST` for a machine that is not reached again.

        Those not in `fresh` begin with their last lines.
        """
        self._following = [
            self._threads.submit(self._follow, job, 0 if job in fresh else _RECENT)
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

    def _follow(self, job: Job, offset: int) -> None:
        speaker = Speaker(str(job), self._output)
        status = LOST
        try:
            while status == LOST:
                with self._control(job.machine, "follow", job.name, offset) as call:
                    if call.head:
                        offset = int(call.head)
                        if self._lost_s.pop(job, None):
                            say(f"{job} is reached again")
                    for chunk in call.chunks():
                        offset += len(chunk)
                        speaker.hear(chunk)
                    status, why = call.end()
                if status == LOST and self._gives_up(job, why):
                    break
                if status != LOST:
                    speaker.hear(b"")
                    self.over.add(job)
                    why = speaker.reason
        except Exception as error:  # such as output that nobody reads any more
            status = LOST
            why = str(error)
        self._ended.put((job, status, why))

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
        if self._closed.is_set():  # whose calls have been ended
            call.kill()
        try:
            with call:
                yield call
        finally:
            self._calls.discard(call)

    @contextlib.contextmanager
    def _control(
        self, machine: Machine, verb: str, job: str = "-", offset: int = 0
    ) -> Iterator[Call]:
        with self._held(Call.control(self.run, machine, verb, job, offset)) as call:
            call.begin()
            yield call

    def _ask(self, machine: Machine, verb: str, job: str = "-", *, errors: str = "replace") -> str:
        with self._control(machine, verb, job) as call:
            answer = b"".join(call.chunks()).decode(errors=errors)
            call.require_end(f"{job} has ended: {answer.strip()}")
        return answer


def say(line: str) -> None:
    """Print a line of this command, not of a machine."""
    print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _address(run: Run, machine: Machine) -> str:
    name = machine.address or "127.0.0.1" * (machine.ssh == "localhost")
    if not name:
        command = ["ssh", *run.ssh_options, "-G", machine.ssh]
        printed = subprocess.check_output(command, text=True, cwd=run.file.parent)
        settings = dict(line.partition(" ")[::2] for line in printed.splitlines())
        name = settings.get("hostname", machine.ssh)
    return next(iter(resolved(name).addresses), name)  # known to the machines alone


@final
class _Progress:
    """Bytes of a copy to a machine, reported every few seconds."""

    def __init__(self, machine: Machine, whole_bytes: int) -> None:
        self._name = machine.ssh
        self.whole = f"{whole_bytes / _MB:.1f} MB"
        self._bytes = 0
        self._reported_s = time.monotonic()

    def add(self, archive: tarfile.TarFile, path: Path, name: str) -> None:
        """Add a file to an archive."""
        entry = archive.gettarinfo(path, name)
        with path.open("rb") if entry.isreg() else io.BytesIO() as self._file:
            archive.addfile(entry, self)

    def read(self, size: int = -1, /) -> bytes:
        """Read on in the file."""
        chunk = self._file.read(size)
        self._bytes += len(chunk)
        if time.monotonic() - self._reported_s > _SAY_S:
            self._reported_s = time.monotonic()
            say(f"{self._name}: {self._bytes / _MB:.1f} of {self.whole} copied")
        return chunk


def _state(path: Path) -> object:
    """Return what tells a file from an older one: where a link leads, or size, time and mode."""
    if path.is_symlink():
        return str(path.readlink())
    found = path.stat()
    return found.st_size, found.st_mtime, found.st_mode & 0o100


def _states(listed: str) -> dict[str, object]:
    """Return `_state` of the files that `remote.sh` lists, by name."""
    states: dict[str, object] = {}
    cells = listed.split("\0")
    for head, target in zip(cells[::2], cells[1::2], strict=False):
        kind, size, seconds, mode, name = head.split(" ", 4)
        file = int(size), float(seconds), int(mode, 8) & 0o100
        states[name] = target if kind == "l" else file
    return states


def _files(folder: Path) -> list[str]:
    """Return the paths of a folder that machines get; those of a repository in it too."""
    git = ["git", "-C", str(folder), "ls-files", "-coz", "--exclude-standard"]
    try:
        listed = subprocess.run(git, capture_output=True, check=True).stdout
        names = {os.fsdecode(name) for name in listed.split(b"\0") if name}
    except (OSError, subprocess.CalledProcessError):
        names = set()
        for at, below, files in os.walk(folder):
            below[:] = [name for name in below if name not in _LEFT_OUT]
            names |= {os.path.relpath(Path(at, name), folder) for name in files}
    kept = set()
    for path in (folder / name for name in names):
        if path.is_symlink() or path.is_file():
            kept.add(os.path.relpath(path, folder))
        elif (path / ".git").exists():
            kept |= {os.path.relpath(path / name, folder) for name in _files(path)}
    return sorted(kept)
