"""The same commands in files of systems that start them: `thinwire up --print`."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from thinwire.tools.up.config import PATH, Run, export


def write(run: Run, system: str) -> tuple[Path, str]:
    """Write the file for a system beside that of the run; return it, and the command for it."""
    suffix, make, start = {
        "slurm": ("sbatch", _slurm, "sbatch {file}"),
        "skypilot": ("sky.yaml", _skypilot, "sky launch -c {name} {file}{secrets}"),
        "kubernetes": ("k8s.yaml", _kubernetes, "{create}kubectl apply -f {file}"),
        "docker": ("compose.yaml", _docker, "docker compose -f {file} up"),
    }[system]
    file = run.file.with_name(f"{run.name}.{suffix}")
    made = make(run)
    file.write_text(
        made if isinstance(made, str) else yaml.dump_all(made, Dumper=_Dumper, sort_keys=False)
    )
    parts = [f'--from-literal={name}="${name}"' for name in _secrets(run)]
    parts += [f"--from-file=token={run.token_file}"] if run.members else []
    create = f"kubectl create secret generic {_dashed(run)} {' '.join(parts)}\n" if parts else ""
    secrets = "".join(f" --secret {name}" for name in _secrets(run))
    return file, start.format(file=file, name=run.name, secrets=secrets, create=create)


class _Dumper(yaml.SafeDumper):
    """Writes a script of several lines as one."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _secrets(run: Run) -> list[str]:
    """Return the variables whose values are those here; no file has them."""
    return [name for name, value in run.env.items() if value is None]


def _plain(run: Run) -> dict[str, str]:
    return {name: value for name, value in run.env.items() if value is not None}


def _dashed(run: Run) -> str:
    return run.name.lower().replace("_", "-")


def _work(run: Run, rank: str, address: str, token: str) -> str:
    """Return the shell command of a machine; a member waits for the host."""
    command = run.command(rank, run.processes, address)
    if run.torchrun:
        return command
    return (
        f"export THINWIRE_ADDRESS=tcp://{address}:{run.port} THINWIRE_TOKEN_FILE={token}\n"
        f"until (exec 3<>/dev/tcp/{address}/{run.port}) 2>/dev/null; do sleep 1; done\n{command}"
    )


def _slurm(run: Run) -> str:
    """Return a batch script, which runs on the first node."""
    required = "".join(f': "${{{name}:?has no value}}"\n' for name in _secrets(run))
    token = shlex.quote(str(run.token_file.resolve()))
    host = run.host_command(f"$address:{run.port}", token) + " &\ntrap 'kill %1' EXIT\n"
    return f"""#!/bin/bash
#SBATCH --job-name={run.name}
#SBATCH --nodes={len(run.machines)}
#SBATCH --ntasks-per-node=1
#SBATCH --output={run.name}-%j.log
set -eu
cd {shlex.quote(str(run.source.resolve()))}
{required}{export(_plain(run))}{run.setup}
{PATH}address=$(hostname -I | cut -d ' ' -f 1)
export address
{host * bool(run.members)}srun --kill-on-bad-exit={int(not run.members)} bash -c {
        shlex.quote(_work(run, "$SLURM_NODEID", "$address", token))
    }
"""


def _skypilot(run: Run) -> list[dict[str, Any]]:
    token = f"~/.thinwire-{run.name}"
    script = f'{PATH}address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
    if run.members:
        host = run.host_command(f"$address:{run.port}", token)
        on_first = f"{host} &\ntrap 'kill %1' EXIT"
        script += f'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then\n{on_first}\nfi\n'
    task = {
        "name": run.name,
        "workdir": str(run.source.resolve()),
        "num_nodes": len(run.machines),
        "envs": _plain(run),
        "secrets": dict.fromkeys(_secrets(run)),
        "file_mounts": {token: str(run.token_file.resolve())} if run.members else {},
        "setup": run.setup,
        "run": script + _work(run, "$SKYPILOT_NODE_RANK", "$address", token),
    }
    return [{name: value for name, value in task.items() if value}]


def _kubernetes(run: Run) -> list[dict[str, Any]]:
    """Return a TrainJob of the Kubeflow trainer, or a host, its service and a job of members."""
    name, size = _dashed(run), len(run.machines)
    hidden = {key: {"secretKeyRef": {"name": name, "key": key}} for key in _secrets(run)}
    env: list[dict[str, Any]] = [{"name": key, "value": v} for key, v in _plain(run).items()]
    env += [{"name": key, "valueFrom": value} for key, value in hidden.items()]
    shown = {"image": run.image, "command": ["bash", "-c"], "env": env}

    def made(version: str, kind: str, suffix: str, **spec: Any) -> dict[str, Any]:
        meta = {"name": name + suffix}
        return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}

    if run.torchrun:  # its runtime sets what torchrun needs, as variables
        trainer = {"numNodes": size, "numProcPerNode": run.processes, **shown}
        trainer["args"] = [f"torchrun {run.torchrun}"]
        runtime = {"name": "torch-distributed"}
        kind = "trainer.kubeflow.org/v1alpha1", "TrainJob"
        return [made(*kind, "", runtimeRef=runtime, trainer=trainer)]
    labels, folder = {"app": f"{name}-host"}, "/run/secrets/thinwire"

    def pod(role: str, restart: str, command: str) -> dict[str, Any]:
        mount = {"name": "token", "mountPath": folder, "readOnly": True}
        main = {"name": role, **shown, "args": [command], "volumeMounts": [mount]}
        secret = {"secretName": name, "defaultMode": 0o400}
        volumes = [{"name": "token", "secret": secret}]
        spec = {"restartPolicy": restart, "containers": [main], "volumes": volumes}
        return {"metadata": {"labels": {"app": f"{name}-{role}"}}, "spec": spec}

    token = f"{folder}/token"
    host = pod("host", "Always", run.host_command(f"0.0.0.0:{run.port}", token, " --public"))
    member = pod("member", "OnFailure", _work(run, "", f"{name}-host", token))
    once = {"strategy": {"type": "Recreate"}, "selector": {"matchLabels": labels}}
    jobs = {"completions": size, "parallelism": size, "completionMode": "Indexed"}
    return [
        made("v1", "Service", "-host", selector=labels, ports=[{"port": run.port}]),
        made("apps/v1", "Deployment", "-host", replicas=1, **once, template=host),
        made("batch/v1", "Job", "", **jobs, template=member),
    ]


def _docker(run: Run) -> list[dict[str, Any]]:
    token = "/run/secrets/token"

    def service(command: str) -> dict[str, Any]:
        return {
            "image": run.image,
            "command": ["bash", "-c", command.replace("$", "$$")],
            "working_dir": "/work",
            "volumes": [f"{run.source.resolve()}:/work"],
            "environment": dict(run.env),
            **({"secrets": ["token"]} if run.members else {}),
        }

    first = "host" if run.members else "machine0"
    services = {
        f"machine{rank}": service(_work(run, str(rank), first, token))
        for rank in range(len(run.machines))
    }
    if run.torchrun:
        return [{"name": run.name, "services": services}]
    services["host"] = service(run.host_command(f"0.0.0.0:{run.port}", token, " --public"))
    secret = {"token": {"file": str(run.token_file.resolve())}}
    return [{"name": run.name, "services": services, "secrets": secret}]
