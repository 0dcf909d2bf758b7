"""Commands on a machine through the system's `ssh`."""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self, cast, final

from thinwire.errors import ThinwireError
from thinwire.tools.up.config import Machine, Run

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
