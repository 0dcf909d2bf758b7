"""Real restarts by torchrun: ranks kill themselves at random moments, and the run has to end as the
undisturbed one.

    python -m tests.field.restarts --restarts 30

prints how many of the restarts were good: all ranks met, loaded the same checkpoint and trained on.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from tests import processes
from tests.toys import bits, engine_of

WORKAROUND = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ROOT = Path(__file__).parent.parent.parent
SAVE_EVERY, LONGEST_LIFE_STEPS = 2, 6


def start(folder: Path, restarts: int, seed: int, apart_s: float) -> None:
    """One rank of one incarnation, as torchrun starts it."""
    if os.environ["RANK"] != "0":
        time.sleep(apart_s)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    train(folder, restarts, seed, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


def train(folder: Path, restarts: int, seed: int, incarnation: int) -> str:
    """Train from the newest checkpoint to the end; with a seed >= 0 one rank kills itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    dgc = tw.DGC(sparsity=(0.99,), min_numel=1000)
    engine = engine_of(model, torch.nn.functional.cross_entropy, lr=0.05, momentum=0.9, dgc=dgc)
    engine.load(folder / "checkpoints", if_any=True)
    begin = engine.step
    chance = random.Random(1000 * seed + incarnation)
    victim, life, moment_s = (
        chance.randrange(size),
        chance.randint(2, LONGEST_LIFE_STEPS),
        chance.random() * 0.01,
    )
    for step in range(begin, LONGEST_LIFE_STEPS * restarts + 10):
        generator = torch.Generator().manual_seed(step * size + rank)
        x = torch.randn(16, 64, generator=generator)
        if seed >= 0 and incarnation < restarts and step == begin + life and rank == victim:
            threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if chance.random() < 0.5:  # while the others wait for this rank
                time.sleep(5)
        engine.train_step(x, x.abs().argmax(1) % 10)
        if step == begin:
            note(folder, rank, incarnation=incarnation, begin=begin)
        if engine.step % SAVE_EVERY == 0:
            engine.save(folder / "checkpoints")
    residuals = engine.state_dict()["exchange"]["residuals"]
    digest = bits([*model.state_dict().values(), *residuals.values()])
    note(folder, rank, digest=digest)
    engine.close()
    return digest


def note(folder: Path, rank: int, **fields: Any) -> None:
    """A line that a kill does not take back."""
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


def torchrun(
    folder: Path, *, restarts: int, seed: int, apart_s: float = 0.0, workaround: bool = True
) -> dict[str, Any]:
    """Run to the end, or until torchrun gives up; first steps by incarnation, digests and log."""
    folder.mkdir(parents=True, exist_ok=True)
    allowed = str(2 * restarts)  # those that fail by themselves take one, too
    agent = ["--max-restarts", allowed, "--monitor-interval", "0.1"]
    mine = ["-m", "tests.field.restarts", "--worker", str(folder), "--restarts", str(restarts)]
    mine += ["--seed", str(seed), "--apart", str(apart_s)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    environment.pop(WORKAROUND, None)
    if workaround:
        environment[WORKAROUND] = "1"
    command = processes.torchrun(*agent, *mine)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
        )
        try:
            process.wait(timeout=90 + 30 * restarts)
        except subprocess.TimeoutExpired:
            print(f"torchrun had not ended after {90 + 30 * restarts} s", flush=True)
        finally:
            # torchrun ends its workers, which have sessions of their own, on SIGTERM
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=40)
                process.kill()
                process.wait()
    begins: dict[int, dict[int, int]] = {}
    digests = []
    for rank in range(2):
        notes = folder / f"rank{rank}.jsonl"
        for line in notes.read_text().splitlines() if notes.exists() else []:
            fields = json.loads(line)
            if "digest" in fields:
                digests.append(fields["digest"])
            else:
                begins.setdefault(fields["incarnation"], {})[rank] = fields["begin"]
    return {
        "begins": begins,
        "digests": digests,
        "log": (folder / "log").read_text(errors="replace"),
    }


def good_restarts(result: dict[str, Any], restarts: int) -> list[int]:
    """The incarnations after the first one in which both ranks trained on from the same step."""
    begins = result["begins"]
    return [
        i
        for i in range(1, restarts + 1)
        if len(begins.get(i, {})) == 2 and len(set(begins[i].values())) == 1
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--restarts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", type=float, default=0.0, help="seconds that rank 1 starts later")
    parser.add_argument(
        "--without", action="store_true", help=f"leave {WORKAROUND} out, to see what it is for"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        start(given.worker, given.restarts, given.seed, given.apart)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that torchrun is ended too
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.monotonic()
        settings = {"seed": given.seed, "apart_s": given.apart, "workaround": not given.without}
        result = torchrun(Path(folder, "disturbed"), restarts=given.restarts, **settings)
        good = good_restarts(result, given.restarts)
        # the same number of steps, and nobody is killed
        undisturbed = Path(folder, "undisturbed")
        undisturbed.mkdir()
        alone = torchrun(undisturbed, restarts=given.restarts, **{**settings, "seed": -1})
        equal = bool(result["digests"]) and result["digests"] == alone["digests"]
    print(
        f"{len(good)} of {given.restarts} restarts good, {time.monotonic() - begin_s:.0f} s; ",
        end="",
    )
    print("ended as undisturbed" if equal else "did NOT end as undisturbed")
    causes = Counter(
        line.strip()[:160]
        for line in result["log"].splitlines()
        if "Error: " in line and "frame #" not in line
    )
    for cause, count in causes.most_common(8):
        print(f"  {count:3} x {cause}")
    return 0 if len(good) == given.restarts and equal else 1


if __name__ == "__main__":
    sys.exit(main())
