"""The same commands in files of systems that start them: `thinwire up --print`."""

import json
import shlex
from importlib.resources import files
from pathlib import Path

from thinwire.tools.up.config import PATH, Run, export

_SYSTEMS = {
    "slurm": ("sbatch", "sbatch {file}"),
    "skypilot": ("sky.yaml", "sky launch -c {name} {file}{secrets}"),
    "kubernetes": ("k8s.yaml", "{create}kubectl apply -f {file}"),
    "docker": ("compose.yaml", "docker compose -f {file} up"),
}
"""End of the file's name, and the command that starts it."""


def write(run: Run, system: str) -> tuple[Path, str]:
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
