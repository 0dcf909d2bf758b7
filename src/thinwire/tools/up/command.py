"""`thinwire up`, `down` and `status`; torch is not imported."""

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from thinwire.tools.up.config import Run
from thinwire.tools.up.machines import Job, Machines, State, say
from thinwire.tools.up.printed import write
from thinwire.tools.up.ssh import LOST, MachineError

EXAMPLES = """Examples:

thinwire up two.yaml

thinwire up two.yaml --print slurm
"""


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
    if printed is not None:
        _require_token(run)
        written, start = write(run, printed)
        print(f"{written} is written; start it by\n{start}")
        return
    with _machines(run) as machines:
        known, unreachable = _looked_at(machines)
        running = _running(known)
        if unreachable and not running:
            raise MachineError("; ".join(map(str, unreachable)))
        starting = [job for job in machines.jobs if not running or _restarts(job, known, run)]
        if running:
            say(f"{run.name} runs; following it. thinwire down {file} ends it")
        try:
            _start(machines, starting)
            failed = _follow(machines, starting)
        finally:
            _stop(machines, [*running, *starting])
            machines.hear_last()
    if failed:
        raise MachineError("; ".join(failed))


def down(file: Path, /) -> None:
    """End all processes that `thinwire up FILE` has started, from any terminal.

    Args:
        file: The file of up.
    """
    with _machines(Run.read(file)) as machines:
        known, unreachable = _looked_at(machines)
        running = _running(known)
        _stop(machines, running)
    if unreachable:
        raise MachineError("; ".join(map(str, unreachable)))
    if not running:
        say("nothing runs")


def status(file: Path, /) -> None:
    """Show what `thinwire up FILE` has started: running or the exit status, since when, its last
    line.

    Args:
        file: The file of up.
    """
    with _machines(Run.read(file)) as machines:
        known, unreachable = _looked_at(machines)
        rows = [("process", "state", "since", "last line")]
        for job in machines.jobs:
            state = known.get(job)
            if state is None:
                rows.append((str(job), "none" if job in known else "unknown", "", ""))
                continue
            word = "running" if state.status is None else f"status {state.status}"
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.since_s))
            rows.append((str(job), word, since, state.last_line))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())
    if unreachable:
        raise MachineError("; ".join(map(str, unreachable)))


def _machines(run: Run) -> Machines:
    if not all(machine.ssh for machine in run.machines):
        raise ValueError(
            f"{run.file}: machines is a number, which is for --print; to start them by ssh list "
            "their names"
        )
    return Machines(run)


def _looked_at(machines: Machines) -> tuple[dict[Job, State | None], list[MachineError]]:
    """Return the jobs of machines that are reached, and an error for each other machine."""
    found, failed = machines.at_once(machines.states, machines.run.machines)
    return {job: state for jobs in found.values() for job, state in jobs.items()}, [*failed]


def _running(known: Mapping[Job, State | None]) -> list[Job]:
    return [job for job, state in known.items() if state is not None and state.status is None]


def _restarts(job: Job, known: Mapping[Job, State | None], run: Run) -> bool:
    """Return True for a member that has failed, or is new, while others run."""
    if job.name == "host" or run.torchrun or job not in known:
        return False
    state = known[job]
    return state is None or bool(state.status)


def _start(machines: Machines, jobs: list[Job]) -> None:
    """Copy the folder to the machines of these jobs and start them, the host first."""
    run = machines.run
    run.environment(*run.machines)  # a missing variable is known before anything starts
    _require_token(run)
    _all(machines.at_once(machines.prepare, dict.fromkeys(job.machine for job in jobs)))
    for name in ("host", "run"):
        _all(machines.at_once(machines.start, [job for job in jobs if job.name == name]))


def _require_token(run: Run) -> None:
    """Make the token of members if it is missing."""
    if run.members and not run.token_file.exists():
        make = [sys.executable, "-m", "thinwire", "host", "--new-token", str(run.token_file)]
        if made := subprocess.run(make, capture_output=True, text=True, check=False).stderr:
            raise ValueError(f"token: {made.removeprefix('thinwire: ').strip()}")


def _all(answers: tuple[object, list[MachineError]]) -> None:
    if answers[1]:
        raise MachineError("; ".join(map(str, answers[1])))


def _follow(machines: Machines, fresh: list[Job]) -> list[str]:
    """Pass logs on to the end; return one line for each job that failed."""
    failed = []
    for job, status, last in machines.follow([job for job in machines.jobs if job not in fresh]):
        end = f"{job} is lost" if status == LOST else f"{job} has ended with status {status}"
        say(f"{end}; nobody can join" if job.name == "host" else end)
        if status and job.name == "run":
            failed.append(f"{end}: {last}")
            if machines.run.torchrun:
                break
    return failed


def _stop(machines: Machines, jobs: Iterable[Job]) -> None:
    """End jobs whose end has not been seen, the host last, and say so."""
    left = [job for job in jobs if job not in machines.over]
    for name in ("run", "host"):
        ended, failed = machines.at_once(machines.stop, [job for job in left if job.name == name])
        for job, word in ended.items():
            if word:
                say(f"{job}: {word}")
        for error in failed:
            say(f"{error}; what runs there goes on: thinwire down {machines.run.file}")
