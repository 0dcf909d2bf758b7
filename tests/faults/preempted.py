"""A script as torchrun starts it, that is told to end, or killed: `FOLDER STEPS STEP_S`."""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire as tw
from tests.toys import bits

_PR_SET_PDEATHSIG = 1
EVERY = 4
"""Steps from one checkpoint to the next."""


def main(folder: Path, steps: int, step_s: float) -> None:
    """Train from the newest checkpoint on, as docs/resume.md says."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the launcher's end is mine
    told = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: told.fill_(1))
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    strategy = tw.DistributedStrategy(dgc=tw.DGC(sparsity=(0.9,), min_numel=100))
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)
    engine.load(folder / "checkpoints", if_any=True)
    (folder / f"begin{rank}").write_text(str(engine.step))
    while engine.step < steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * engine.step + rank))
        engine.train_step(x, x[:, :4].argmax(1))
        (folder / f"pid{rank}").write_text(f"{os.getpid()} {engine.step}")
        time.sleep(step_s)
        ends = told.clone()
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends.item() or engine.step % EVERY == 0:
            engine.save(folder / "checkpoints", keep=1)
        if ends.item():
            engine.close()
            sys.exit(128 + signal.SIGTERM)
    residuals = engine.state_dict()["exchange"]["residuals"]
    digest = bits([*model.state_dict().values(), *residuals.values()])
    (folder / f"end{rank}").write_text(digest)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
