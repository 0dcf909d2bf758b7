"""`thinwire up`, `down` and `status`; torch is not imported."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from thinwire.tools.up.config import PATH, Run, export
from thinwire.tools.up.machines import LOST, RUNNING, Job, MachineError, Machines, State, say

EXAMPLES = """Examples:

thinwire up two.yaml

thinwire up two.yaml --print slurm
"""

_SYSTEMS = {
    "slurm": ("sbatch", "sbatch {file}"),
    "skypilot": ("sky.yaml", "sky launch -c {name} {file}{secrets}"),
    "kubernetes": ("k8s.yaml", "{create}kubectl apply -f {file}"),
    "docker": ("compose.yaml", "docker compose -f {file} up"),
}
"""End of the file's name, and the command that starts it."""


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
        written, start = _write(run, printed)
        print(f"{written} is written; start it by\n{start}")
        return
    with Machines(run) as machines:
        known, lost = machines.states()
        running = _running(known)
        if lost and not running:
            raise MachineError("; ".join(lost))
        reached = [job for job in machines.jobs if job in known]
        starting = [job for job in reached if not running or _restarts(job, known[job])]
        if starting:
            _require_token(run)
        if running:
            say(f"{run.name} runs; following it. thinwire down {file} ends it")
        try:
            _start(machines, starting, running)
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
    with Machines(Run.read(file)) as machines:
        known, lost = machines.states()
        running = _running(known)
        _stop(machines, running)
    if lost:
        raise MachineError("; ".join(lost))
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
    if lost:
        raise MachineError("; ".join(lost))


def _write(run: Run, system: str) -> tuple[Path, str]:
    """Write the file for a system beside that of the run; return it, and the command for it."""
    import jinja2  # torch brings it; not every command needs it

    suffix, start = _SYSTEMS[system]
    file = run.file.with_name(f"{run.name}.{suffix}")
    hidden = [name for name, value in run.env.items() if value is None]  # no file has their values
    plain = {name: value for name, value in run.env.items() if value is not None}
    dashed = run.name.lower().replace("_", "-")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"q": shlex.quote, "json": json.dumps, "export": export}
    source = files("thinwire.tools.up").joinpath(f"{system}.j2").read_text(encoding="utf-8")
    folder, token = str(run.source.resolve()), str(run.token_file.resolve())
    paths = {"folder": folder, "token": token, "path": PATH}
    text = environment.from_string(source).render(
        run=run, hidden=hidden, plain=plain, dashed=dashed, work=_work, **paths
    )
    file.write_text(text.rstrip() + "\n")
    parts = [f'--from-literal={name}="${name}"' for name in hidden]
    parts += [f"--from-file=token={run.token_file}"] if run.members else []
    create = f"kubectl create secret generic {dashed} {' '.join(parts)}\n" if parts else ""
    secrets = "".join(f" --secret {name}" for name in hidden)
    return file, start.format(file=file, name=run.name, secrets=secrets, create=create)


def _work(run: Run, rank: str, address: str, token: str) -> str:
    """Return the shell command of a machine; a member waits for the host."""
    command = run.command(rank, run.processes, address)
    if run.torchrun:
        return command
    return (
        f"export THINWIRE_ADDRESS=tcp://{address}:{run.port} THINWIRE_TOKEN_FILE={token}\n"
        f"until (exec 3<>/dev/tcp/{address}/{run.port}) 2>/dev/null; do sleep 1; done\n{command}"
    )


def _running(known: Mapping[Job, State]) -> list[Job]:
    return [job for job, state in known.items() if state.word == RUNNING]


def _restarts(job: Job, state: State) -> bool:
    """Return True for a member that has failed, or is new, while others run."""
    return job.name == "member" and state.word not in (RUNNING, "status 0")


def _start(machines: Machines, jobs: list[Job], running: list[Job]) -> None:
    """Copy the folder to the machines of these jobs and start them, the host first."""
    ready, failed = machines.at_once(machines.prepare, dict.fromkeys(job.machine for job in jobs))
    for name in ("host", "member", "rank"):
        if failed and not running:
            raise MachineError("; ".join(failed))
        part = [job for job in jobs if job.name == name and job.machine in ready]
        failed += machines.at_once(machines.start, part)[1]
    for error in failed:
        say(error)


def _require_token(run: Run) -> None:
    """Make the token of members if it is missing."""
    if run.members and not run.token_file.exists():
        make = [sys.executable, "-m", "thinwire", "host", "--new-token", str(run.token_file)]
        if made := subprocess.run(make, capture_output=True, text=True, check=False).stderr:
            raise ValueError(f"token: {made.removeprefix('thinwire: ').strip()}")


def _follow(machines: Machines, fresh: list[Job]) -> list[str]:
    """Pass logs on to the end; return one line for each job that failed."""
    failed = []
    for job, status, last in machines.follow([job for job in machines.jobs if job not in fresh]):
        end = f"{job} is lost" if status == LOST else f"{job} has ended with status {status}"
        say(f"{end}; nobody can join" if job.name == "host" else end)
        if status and job.name != "host":
            failed.append(f"{end}: {last}")
            if job.name == "rank":
                break
    return failed


def _stop(machines: Machines, jobs: Iterable[Job]) -> None:
    """End jobs whose end has not been seen, the host last, and say so."""
    left = [job for job in jobs if job not in machines.over]
    for host in (False, True):
        part = [job for job in left if (job.name == "host") == host]
        ended, failed = machines.at_once(machines.stop, part)
        for job, word in ended.items():
            say(f"{job}: {word or 'had ended'}")
        for error in failed:
            say(f"{error}; what runs there goes on: thinwire down {machines.run.file}")
