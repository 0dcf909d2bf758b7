"""The file of `thinwire up`, and the shell commands that follow from it: no process, no machine."""

import hashlib
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from thinwire._files import read_regular
from thinwire._version import __version__
from thinwire._wording import closest_or_all, host_port, shown

_MOST_BYTES = 1 << 18
_KINDS = {"machines": (list, int), "processes": (int,), "port": (int,), "env": (dict,)}
"""Types of a field's value in the file, if it is not text."""
_MOST = {"machines": 10_000, "processes": 10_000, "port": 65_535}
_SCRIPTS = {"setup", "members", "torchrun"}
"""Fields that may have several lines."""
_DEEPEST = 20
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """A machine, as `ssh` takes its name, or "localhost" for this one."""

    ssh: str = ""
    address: str = ""
    """Where the others reach it; the address to which `ssh` connects by default."""
    processes: int = 0
    """Ranks of torchrun; 0 for those of the file."""
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A file of `thinwire up`. One of `members` and `torchrun` is set."""

    file: Path
    machines: Sequence[Machine]
    name: str = ""
    folder: str = "."
    to: str = ""
    setup: str = ""
    members: str = ""
    torchrun: str = ""
    processes: int = 1
    port: int = 29400
    token: str = ".thinwire/token"
    host: str = ""
    env: Mapping[str, str | None] = field(default_factory=dict)
    ssh: str = ""
    image: str = f"thinwire:{__version__}"

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file; raise ValueError that names what is wrong with it."""
        try:
            return cls._of(file, _plain_yaml(read_regular(file, _MOST_BYTES)))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror or error}") from None
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{file}: {' '.join(str(error).split())}") from None

    @classmethod
    def _of(cls, file: Path, document: object) -> Self:
        values = _checked(cls, "the file", document)
        listed = values.pop("machines", [])
        if isinstance(listed, int):  # for --print, where others choose them
            listed = [{"ssh": ""}] * listed
        if not listed:
            raise ValueError("machines is missing: a list of names as ssh takes them")
        given = [item if isinstance(item, dict) else {"ssh": item} for item in listed]
        machines = [
            Machine(**_checked(Machine, f"machines[{i}]", item)) for i, item in enumerate(given)
        ]
        names = [machine.ssh for machine in machines]
        if twice := {name for name in names if name and names.count(name) > 1}:
            raise ValueError(f"machines: {', '.join(twice)} is listed twice")
        if bool(values.get("members")) == bool(values.get("torchrun")):
            raise ValueError("give one of members (a command) and torchrun (a script, arguments)")
        name = values.pop("name", file.stem)
        ident = hashlib.blake2b(os.fsencode(file.parent.resolve()), digest_size=4).hexdigest()
        values["to"] = values.get("to", f"thinwire/{name}-{ident}").removeprefix("~/")
        run = cls(file=file, machines=machines, name=name, **values)
        if not run.source.is_dir():
            raise ValueError(f"folder: {run.source} is not a folder")
        return run

    @property
    def source(self) -> Path:
        """The folder that all machines get."""
        return self.file.parent / self.folder

    @property
    def token_file(self) -> Path:
        """The secret of all members."""
        return self.file.parent / self.token

    @property
    def job(self) -> str:
        """What each machine runs."""
        return "member" if self.members else "rank"

    @property
    def ssh_options(self) -> list[str]:
        """Further options of `ssh`; paths in them are relative to the file."""
        return shlex.split(self.ssh)

    def environment(self, *machines: Machine) -> dict[str, str]:
        """Return the variables of the file and of a machine; None is the value of this process."""
        given = {**self.env, **{k: v for machine in machines for k, v in machine.env.items()}}
        missing = [
            name for name, value in given.items() if value is None and name not in os.environ
        ]
        if missing:
            raise ValueError(f"env: {', '.join(missing)} has no value in the file, nor here")
        return {k: os.environ[k] if v is None else v for k, v in given.items()}

    @property
    def owner(self) -> str:
        """The project: a folder of a machine."""
        return f"{socket.gethostname()}:{self.file.parent.resolve()}"

    def host_command(self, bind: str, token: str, more: str = "") -> str:
        """Return the shell command of the meeting place."""
        where = "" if "--bind" in self.host.split() else f'--bind "{bind}"{more} '
        return f"python -m thinwire host {where}--token-file {token} {self.host}".rstrip()

    def command(self, rank: str, processes: int, address: str) -> str:
        """Return what machine `rank` runs; `address` is that of the first machine."""
        if self.members:
            return self.members
        return (
            f"torchrun --nnodes {len(self.machines)} --node-rank {rank} --nproc-per-node "
            f"{processes} --master-addr {address} --master-port {self.port} {self.torchrun}"
        )


def job_files(run: Run, rank: int, addresses: Sequence[str]) -> dict[str, str]:
    """Return the files of `.thinwire` on a machine by name."""
    machine = run.machines[rank]
    first = addresses[0]
    processes = machine.processes or run.processes
    named = {"THINWIRE_NAME": machine.ssh[:64]} if run.members else {}
    files = {"setup.sh": run.setup, "env": export(named | run.environment(machine)) + PATH}
    files |= {"owner": run.owner, "machine": machine.ssh}
    files[f"{run.job}.sh"] = _script(run.job, run.command(str(rank), processes, first))
    if run.members:
        token = ".thinwire/token"
        files["token"] = run.token_file.read_text(encoding="ascii")
        files["env"] += export({"THINWIRE_ADDRESS": f"tcp://{host_port(first, run.port)}"})
        files["env"] += f'export THINWIRE_TOKEN_FILE="$PWD/{token}"\n'
        command = run.host_command(host_port(first, run.port), f"{token} --journal .thinwire/runs")
        files["host.sh"] = _script("host", f"rm -f .thinwire/runs; {command}")  # of an earlier run
    else:
        files["env"] += interface(addresses[rank])
    return files


def export(variables: Mapping[str, str]) -> str:
    """Return lines of a shell that set variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


PATH = """export PYTHONUNBUFFERED=1
[ ! -d .venv ] || export PATH="$PWD/.venv/bin:$PATH"
"""


def interface(own: str) -> str:
    """Return lines of a shell that let gloo use the interface with this address."""
    # gloo's default is the address of the host's name, often 127.0.1.1
    return f"""at=$(ip -o addr show to {own} 2>/dev/null | awk '{{print $2; exit}}')
[ -n "$GLOO_SOCKET_IFNAME" ] || [ -z "$at" ] || export GLOO_SOCKET_IFNAME="$at"
"""


def _script(job: str, command: str) -> str:
    """Return a script that runs a command and keeps its exit status, also after SIGTERM."""
    waiting = "trap : TERM INT\n"  # until the command has ended
    return f"""cd .. && . .thinwire/env
{waiting}sh -c {shlex.quote(waiting + command)}
status=$?
[ $status -ne 255 ] || status=1 # that of ssh without a connection
echo $status >.thinwire/{job}.status
"""


def _plain_yaml(text: bytes) -> object:
    """Read YAML without aliases, of little depth: what is short stays short."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*name): write the value out")
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
    return yaml.safe_load(text)


def _checked(kind: type[Any], where: str, document: object) -> dict[str, Any]:
    """Return the fields of a mapping by name; raise ValueError for unknown ones and other types."""
    if not isinstance(document, dict):
        raise ValueError(f"{where} must be a mapping of names to values, got {shown(document)}")
    known = [item.name for item in fields(kind) if item.name != "file"]
    for name, value in document.items():
        if name not in known:
            hint = closest_or_all(name, known)
            raise ValueError(f"{where} has an unknown key {shown(name)}{hint}")
        kinds = _KINDS.get(name, (str,))
        if not isinstance(value, kinds) or isinstance(value, bool):
            names = " or ".join(allowed.__name__ for allowed in kinds)
            raise ValueError(f"{where}: {name} must be {names}, got {shown(value)}")
        if isinstance(value, int) and not 1 <= value <= _MOST[name]:
            raise ValueError(f"{where}: {name} must be 1 to {_MOST[name]:,}, got {shown(value)}")
        if isinstance(value, str) and name not in _SCRIPTS and not value.isprintable():
            raise ValueError(f"{where}: {name} must be one line, got {shown(value)}")
    for key, value in document.get("env", {}).items():
        plain = value is None or type(value) in (str, int, float)
        if not _VARIABLE.fullmatch(str(key)) or not plain:
            raise ValueError(
                f"{where}: env has {shown(key)}: {shown(value)}; it must be a name, and text, a "
                "number or null: quote true and false"
            )
    texts = {k: v if v is None else str(v) for k, v in document.get("env", {}).items()}
    return {**document, "env": texts}
