"""Versions of a model while the publisher and its followers are killed again and again.

python -m benchmarks.stream_kills --versions 1000 --kills 30

The publisher notes the SHA-256 of each version's bytes, followers that of what they read: as a
model in place, as a state dict, and from a start in the middle. Both are processes that SIGKILL
ends at random times. Every version that was read must be one that was noted under this number.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import thinwire as tw

RESULTS = Path(__file__).parent / "results" / "stream_kills.json"
WIDTH = 256


def _model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(500, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    return model.bfloat16()


def _digest(state: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(state):
        hasher.update(state[name].detach().contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def write(where: str, log: Path, seed: int) -> None:
    """Publish versions for ever; note each before it is published, and its number after it."""
    torch.manual_seed(seed)
    model = _model()
    publisher = tw.publish(where, model, every=40)
    with log.open("a") as file:
        for step in range(1 << 30):
            with torch.no_grad():
                for param in model.parameters():
                    chosen = torch.rand(param.shape) < random.choice((0.01, 0.3, 1.0))
                    param.add_((torch.randn(param.shape) * 1e-3 * chosen).to(param.dtype))
            print("before", _digest(dict(model.state_dict())), file=file, flush=True)
            print(publisher.update(step), file=file, flush=True)


def read(where: str, log: Path, seed: int) -> None:
    """Follow versions for ever; note the number and bytes of each."""
    model = _model() if seed % 2 else None
    with log.open("a") as file:
        for version in tw.follow(where, model, poll=0.01):
            state = version.state_dict() if model is None else dict(model.state_dict())
            print(version.number, _digest(state), file=file, flush=True)


def _noted(logs: list[Path]) -> dict[int, set[str]]:
    """Return digests by number. A publisher that was killed may have written its last version."""
    found: dict[int, set[str]] = {}
    last = 0
    for log in logs:
        digest = ""
        for line in log.read_text().split("\n")[:-1]:
            if line.startswith("before"):
                digest = line.split()[1]
                found.setdefault(last + 1, set()).add(digest)
            else:
                last = int(line)
                found.setdefault(last, set()).add(digest)
    return found


def _started(kind: str, where: str, log: Path, seed: int) -> "subprocess.Popen[bytes]":
    words = [kind, "--where", where, "--log", str(log), "--seed", str(seed)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.stream_kills", *words])


def run(versions: int, kills: int, folder: Path) -> dict[str, int]:
    """Kill one of the three processes at random until both numbers are reached."""
    where, draw, killed = str(folder / "versions"), random.Random(1), 0
    logs: dict[str, list[Path]] = {"write": [], "read": []}
    running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(kind: str) -> None:
        log = folder / f"{kind}-{len(logs[kind])}"
        log.touch()
        logs[kind].append(log)
        running.append((kind, _started(kind, where, log, len(logs[kind]))))

    for kind in ("write", "read", "read"):
        start(kind)
    while (newest := max(_noted(logs["write"]), default=0)) < versions or killed < kills:
        time.sleep(1.0)
        if failed := [kind for kind, process in running if process.poll() is not None]:
            raise RuntimeError(f"{failed[0]} ended by itself")
        if newest * kills > killed * versions and killed < kills:
            kind, process = running.pop(draw.randrange(len(running)))
            process.kill()
            process.wait()
            killed += 1
            start(kind)
    for _, process in running:
        process.kill()
        process.wait()
    noted = _noted(logs["write"])
    lines = [line for log in logs["read"] for line in log.read_text().split("\n")[:-1]]
    pairs = [(int(number), digest) for number, digest in map(str.split, lines)]
    wrong = sum(digest not in noted.get(number, set()) for number, digest in pairs)
    return {
        "versions": max(noted),
        "kills": killed,
        "read": len(pairs),
        "different versions read": len({number for number, _ in pairs}),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", default="run", choices=("run", "write", "read"))
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--where")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.kind != "run":
        {"write": write, "read": read}[given.kind](given.where, given.log, given.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(given.versions, given.kills, Path(folder))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
