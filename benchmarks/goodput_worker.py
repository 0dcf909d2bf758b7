"""Worker of `benchmarks.goodput`: train with steps that sleep, and write what happened.

    python -m benchmarks.goodput_worker MODE FOLDER NUMBER ADDRESS

`members` joins a run. `rounds` makes the same rounds under torchrun and `ddp` averages gradients in
every step; both load the last checkpoint at the start.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

MEMBERS = 4
HALF_SPEED = 3
"""Number of the worker whose steps take twice as long."""
STEP_S = 0.2
ROUND_S = 30.0
DDP_SAVES = 100
"""Steps between two checkpoints under `ddp`."""
_JITTER = 0.1
_WIDTH, _HIDDEN, _BATCH = 32, 128, 8
_DATA_SEED = 7


def step_seconds(number: int) -> float:
    """Return the mean seconds of a step of a worker."""
    return STEP_S * (2 if number == HALF_SPEED else 1)


class Worker:
    """One process."""

    def __init__(self, mode: str, folder: Path, number: int, address: str) -> None:
        self.mode, self.folder, self.number, self.address = mode, folder, number, address
        self._file = (folder / f"{number}.jsonl").open("a")
        self._dice = random.Random(os.getpid())
        self._due_s = self._computed_s = 0.0
        torch.manual_seed(_DATA_SEED)
        self.net = nn.Sequential(nn.Linear(_WIDTH, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _WIDTH))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def tell(self, what: str, **about: Any) -> None:
        """Write one event."""
        line = {"what": what, "time": time.time(), "number": self.number, **about}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @property
    def _over(self) -> bool:
        return (self.folder / "end").exists()

    def train(self) -> None:
        """Train until the driver ends the run."""
        self.tell("begin", pid=os.getpid())
        if self.mode == "members":
            with tw.join(self.address, run="goodput", start_members=MEMBERS) as members:
                self.tell("joined")
                self._rounds(members)
        else:
            dist.init_process_group("gloo")
            self.tell("joined")
            self._ddp() if self.mode == "ddp" else self._rounds()

    def _batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(_BATCH, _WIDTH)
        return x, x.roll(1, 1)

    def _loss(self, found: Tensor, y: Tensor) -> Tensor:
        """Return the loss, after as long as the step of a GPU takes.

        A step that ends late on this busy machine shortens the next one of the round, as a GPU has
        the next step queued.
        """
        loss = (found - y).square().mean()
        self._due_s += step_seconds(self.number) * self._dice.uniform(1 - _JITTER, 1 + _JITTER)
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._computed_s = time.monotonic()
        return loss

    def _rounds(self, members: tw.Members | None = None) -> None:
        config = tw.LocalSGD(
            1 << 20, begin_step=0, round_seconds=ROUND_S, compression=tw.Quantized(4)
        )
        engine = tw.DistributedStrategy(localsgd=config).prepare(
            self.net, self.optimizer, self._loss, members=members
        )
        checkpoints = self.folder / "checkpoints"
        if members is None:  # members that come back get the state from the others
            engine.load(checkpoints, if_any=True)
        sync = engine.sync
        assert sync is not None, "local updates"
        self.tell("in", step=sync.step)
        steps = 0
        self._due_s = begun_s = time.monotonic()
        while not self._over:
            engine.train_step(*self._batch())
            steps += 1
            if not sync.synced:
                self.tell("step")
                continue
            synced_s = time.monotonic()
            if members is None or self.number == 0:
                engine.save(checkpoints, wait=False)
            self.tell(
                "round",
                step=sync.step,
                steps=steps,
                computed_s=self._computed_s - begun_s,
                exchange_s=synced_s - self._computed_s,
                saving_s=time.monotonic() - synced_s,
                size=MEMBERS if members is None else members.size,
                stats=engine.stats(),
            )
            steps = 0
            self._due_s = begun_s = time.monotonic()
        engine.close()

    def _ddp(self) -> None:
        model, path = DistributedDataParallel(self.net), self.folder / "ddp.pt"
        first = 0
        if path.exists():
            saved = torch.load(path)
            first = saved["step"]
            self.net.load_state_dict(saved["model"])
        self.tell("in", step=first)
        for step in itertools.count(first + 1):
            self._due_s = begun_s = time.monotonic()
            x, y = self._batch()
            loss = self._loss(model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            synced_s = time.monotonic()
            if step % DDP_SAVES == 0 and self.number == 0:
                torch.save({"step": step, "model": self.net.state_dict()}, f"{path}.new")
                Path(f"{path}.new").replace(path)
            self.tell(
                "round",
                step=step,
                steps=1,
                computed_s=self._computed_s - begun_s,
                exchange_s=synced_s - self._computed_s,
                saving_s=time.monotonic() - synced_s,
                size=MEMBERS,
            )
            if self._over:
                return


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    mode, folder, number, address = sys.argv[1:]
    worker = Worker(mode, Path(folder), int(number), address)
    with contextlib.ExitStack() as stack:
        if mode != "members":
            stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        worker.train()


if __name__ == "__main__":
    main()
