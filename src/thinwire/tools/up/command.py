"""`thinwire up`, `down` and `status`; torch is not imported."""

import contextlib
import functools
import json
import operator
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from thinwire._wording import shown
from thinwire.tools.report.page import templates
from thinwire.tools.up.config import PATH, Run, export, interface
from thinwire.tools.up.machines import LOST, RUNNING, Job, MachineError, Machines, State, say

EXAMPLES = """Examples:

thinwire up two.yaml

thinwire up two.yaml --print slurm
"""

_THREADS = 4
"""Of a process, if the file does not set OMP_NUM_THREADS."""
_SYSTEMS = {
    "slurm": ("sbatch", "sbatch {file}", r"[A-Za-z0-9][\w.-]*"),
    "skypilot": ("sky.yaml", "sky launch -c {name} {file}{secrets}", r"(?i)[a-z]([\w.-]*[a-z\d])?"),
    "kubernetes": ("k8s.yaml", "{create}kubectl apply -f {file}", "[a-z]([a-z0-9-]{,48}[a-z0-9])?"),
    "docker": ("compose.yaml", "docker compose -f {file} up", "[a-z0-9][a-z0-9-]*"),
}
"""End of the file's name, the command that starts it, and the names that the system takes."""


def up(
    file: Path,
    /,
    *,
    printed: Annotated[
        Literal["slurm", "skypilot", "kubernetes", "docker"] | None, Parameter(name="--print")
    ] = None,
) -> None:
    """Start a training on the machines of FILE by ssh, and show their output; Ctrl-C ends all.

    Copies the folder, runs the set-up, and starts `members` (with a host) or `torchrun`. Processes
    go on if this terminal is closed: the same command then shows their output again, and starts
    members that have failed. docs/machines.md has the file.

    Args:
        file: Machines and commands in YAML.
        printed: Write files for this system beside FILE instead, and start nothing.
    """
    run = Run.read(file)
    run.environment(*run.machines)  # what is missing is known before anything starts
    if printed is not None:
        _require_token(run)
        written, start = write(run, printed)
        print(f"{written} is written; start it by\n{start}")
        return
    with Machines(run) as machines:
        known, lost = machines.states()
        running = known.keys() - machines.over
        if not running:
            _require_none(lost)
        starting = [
            job
            for job, state in known.items()
            # a member that has failed, or is new, while others run
            if not running or (job.name == "member" and state.word not in (RUNNING, "status 0"))
        ]
        if starting:
            _require_token(run)
        if running:
            say(f"{run.name} runs; following it. thinwire down {file} ends it")
        try:
            _start(machines, starting, running)
            failed = _follow(machines, starting)
        finally:
            if isinstance(sys.exception(), KeyboardInterrupt):
                left = ", ".join(str(job) for job in known if job not in machines.over)
                say(f"ending {left}; Ctrl-C again leaves running what has not ended by then")
            _stop(machines, known)
            machines.hear_last()
    _require_none(failed)


def down(file: Path, /) -> None:
    """End all processes that `thinwire up FILE` has started, from any terminal.

    Args:
        file: The file of up.
    """
    with Machines(Run.read(file)) as machines:
        known, lost = machines.states()
        running = known.keys() - machines.over
        _stop(machines, known)
    _require_none(lost)
    if not running:
        say("nothing runs")


def status(file: Path, /) -> None:
    """Show what `thinwire up FILE` has started: its state, since when, and its last line.

    Args:
        file: The file of up.
    """
    with Machines(Run.read(file)) as machines:
        known, lost = machines.states()
    rows = [("process", *State("state", "since", "last line"))]
    rows += [(str(job), *known.get(job, State("not reached"))) for job in machines.jobs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    _require_none(lost)


def _require_none(failed: list[str]) -> None:
    """Raise one error for all machines that have failed."""
    if failed:
        raise MachineError("; ".join(failed))


def write(run: Run, system: str) -> tuple[Path, str]:
    """Write the file for a system beside that of the run; return it, and the command for it."""
    suffix, start, names = _SYSTEMS[system]
    # these two have no capitals and underscores
    dashed = run.name.lower().replace("_", "-")
    name = dashed if system in {"kubernetes", "docker"} else run.name
    if not re.fullmatch(names, name, re.ASCII):
        raise ValueError(f"name: {system} takes {names}, got {shown(run.name)}: set another one")
    if any(machine.env or machine.processes for machine in run.machines):
        raise ValueError("machines: --print has one env and one number of processes for all")
    file = run.file.with_name(f"{run.name}.{suffix}")
    hidden = [name for name, value in run.env.items() if value is None]  # no file has their values
    plain = {name: value for name, value in run.env.items() if value is not None}
    # docker and kubernetes read one as the beginning of a variable
    dollars = operator.methodcaller("replace", "$", "$$")
    as_json = functools.partial(json.dumps, ensure_ascii=False)
    threads = plain.get("OMP_NUM_THREADS", "")
    text = (
        templates("thinwire.tools.up", q=shlex.quote, json=as_json, export=export, dollars=dollars)
        .get_template(f"{system}.j2")
        .render(
            run=run,
            hidden=hidden,
            plain=plain,
            dashed=dashed,
            folder=str(run.source.resolve()),
            token=str(run.token_file.resolve()),
            cpus=run.processes * int(threads if threads.isdecimal() else _THREADS),
            path=PATH,
            work=_work,
            interface=interface,
        )
    )
    file.write_text(text.rstrip() + "\n", encoding="utf-8")
    # from a pipe of the shell: others see the words of a command
    parts = [f'--from-file={name}=<(printf %s "${name}")' for name in hidden]
    parts += [f"--from-file=token={shlex.quote(str(run.token_file))}"] if run.members else []
    create = f"kubectl create secret generic {dashed} {' '.join(parts)}\n" if parts else ""
    secrets = "".join(f" --secret {name}" for name in hidden)
    start = start.format(file=shlex.quote(str(file)), name=name, secrets=secrets, create=create)
    return file, start


def _work(run: Run, rank: str, address: str, token: str) -> str:
    """Return the shell command of a machine; a member waits for the host."""
    command = run.command(rank, run.processes, address)
    if run.torchrun:
        return command
    return (
        f"export THINWIRE_ADDRESS=tcp://{address}:{run.port} THINWIRE_TOKEN_FILE={token}\n"
        f"until (exec 3<>/dev/tcp/{address}/{run.port}) 2>/dev/null; do sleep 1; done\n{command}"
    )


def _start(machines: Machines, jobs: list[Job], running: Set[Job]) -> None:
    """Copy the folder to the machines of these jobs and start them, the host first."""
    ready, failed = machines.at_once(machines.prepare, dict.fromkeys(job.machine for job in jobs))
    for name in ("host", "member", "rank", ""):  # none: only those that failed
        if not running:
            _require_none(failed)
        part = [job for job in jobs if job.name == name and job.machine in ready]
        failed += machines.at_once(machines.start, part)[1]
    for error in failed:
        say(error)


def _require_token(run: Run) -> None:
    """Make the token of members if it is missing, where git ignores it."""
    if not run.members:
        return
    folder = run.token_file.parent
    if folder.name == ".thinwire":
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")
    ignored = ["git", "-C", str(folder), "check-ignore", "-q", run.token_file.name]
    with contextlib.suppress(OSError):  # no git, no folder
        if subprocess.run(ignored, capture_output=True, check=False).returncode == 1:
            raise ValueError(f"token: git does not ignore {run.token_file}: add it to .gitignore")
    if not run.token_file.exists():
        make = [sys.executable, "-m", "thinwire", "host", "--new-token", str(run.token_file)]
        if made := subprocess.run(make, capture_output=True, text=True, check=False).stderr:
            raise ValueError(f"token: {made.removeprefix('thinwire: ').strip()}")


def _follow(machines: Machines, fresh: list[Job]) -> list[str]:
    """Pass logs on to the end; return one line for each job that failed."""
    failed = []
    for job, status, last in machines.follow(fresh):
        end = f"{job} is lost" if status == LOST else f"{job} has ended with status {status}"
        say(f"{end}; nobody can join" if job.name == "host" else end)
        if status and job.name != "host":
            failed.append(f"{end}: {last}")
            if job.name == "rank":
                break
    return failed


def _stop(machines: Machines, jobs: Iterable[Job]) -> None:
    """End jobs whose end has not been seen, the host last, and say so."""
    machines.abandon()
    left = [job for job in jobs if job not in machines.over]
    for host in (False, True):
        part = [job for job in left if (job.name == "host") == host]
        ended, failed = machines.at_once(machines.stop, part)
        for job, word in ended.items():
            say(f"{job}: {word or 'had ended'}")
        for error in failed:
            say(f"{error}; what runs there goes on: thinwire down {machines.run.file}")
