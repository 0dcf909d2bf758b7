"""Worker of `benchmarks.goodput`: train with steps that sleep, and write what happened.

The model predicts the next byte of an English text from the last four.
"""

import hashlib
import os
import pydoc_data.topics
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.tools.run.launch import event_log

MEMBERS = 4
HALF_SPEED = 3
"""Number of the worker whose steps take twice as long."""
STEP_S, ROUND_S, TIMEOUT_S = 0.2, 30.0, 60.0
SLOWER = 10
"""Times as long as before a step takes while the file `slow-NUMBER` is in the folder."""
_JITTER, _LATE_S = 0.1, 1.0
_BYTES, _WIDTH, _HIDDEN, _BATCH = 4, 8, 64, 16


def step_seconds(number: int) -> float:
    """Return the mean seconds of a step of a worker."""
    return STEP_S * (2 if number == HALF_SPEED else 1)


class Worker:
    """One process."""

    def __init__(self, folder: Path, number: int, seed: int) -> None:
        self.folder, self.number = folder, number
        self.tell = event_log(folder, number).write
        self._dice = random.Random(os.getpid())
        self._due_s = 0.0
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            *(nn.Embedding(256, _WIDTH), nn.Flatten(), nn.Linear(_BYTES * _WIDTH, _HIDDEN)),
            *(nn.Tanh(), nn.Linear(_HIDDEN, 256)),
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01, momentum=0.9)
        text = bytearray(Path(pydoc_data.topics.__file__).read_bytes())
        self._spans = torch.frombuffer(text, dtype=torch.uint8).unfold(0, _BYTES + 1, 1)
        self._known = len(self._spans) * 9 // 10
        self._held_out = self._spans[self._known + _BYTES :: 8].long()
        torch.manual_seed(MEMBERS * seed + number)

    def train(self, address: str, scale: float, joins: dict[str, Any]) -> None:
        """Train until the driver ends the run."""
        self.tell("begin", pid=os.getpid())
        options = {"start_members": MEMBERS, "timeout": TIMEOUT_S / scale, **joins}
        with tw.join(address, run="goodput", **options) as members:
            self._rounds(members, ROUND_S / scale)

    def _batch(self) -> tuple[Tensor, Tensor]:
        spans = self._spans[torch.randint(self._known, (_BATCH,))].long()
        return spans[:, :-1], spans[:, -1]

    def _loss(self, found: Tensor, y: Tensor) -> Tensor:
        """Return the loss, after as long as the step of a GPU takes.

        A step that ends late on this busy machine shortens the next ones, as a GPU has them queued.
        """
        loss = nn.functional.cross_entropy(found, y)
        slower = SLOWER if (self.folder / f"slow-{self.number}").exists() else 1
        step_s = slower * step_seconds(self.number) * self._dice.uniform(1 - _JITTER, 1 + _JITTER)
        self._due_s = max(self._due_s, time.monotonic() - _LATE_S) + step_s
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return loss

    @torch.no_grad()
    def _state(self) -> dict[str, Any]:
        """Return a digest of the parameters, and their loss on the part that is held out."""
        found = hashlib.blake2b(digest_size=8)
        for p in self.net.parameters():
            found.update(p.numpy().tobytes())
        loss = nn.functional.cross_entropy(self.net(self._held_out[:, :-1]), self._held_out[:, -1])
        return {"digest": found.hexdigest(), "loss": loss.item()}

    def _rounds(self, members: tw.Members, round_s: float) -> None:
        config = tw.LocalSGD(
            1 << 20, begin_step=0, round_seconds=round_s, compression=tw.Quantized(4)
        )
        engine = tw.DistributedStrategy(localsgd=config).prepare(
            self.net, self.optimizer, self._loss, members=members
        )
        sync = engine.sync
        assert sync is not None, "local updates"
        self.tell("in")
        self._due_s = time.monotonic()
        while not (self.folder / "end").exists():
            engine.train_step(*self._batch())
            self.tell("step")
            if sync.synced:
                self._due_s = time.monotonic()
                if self.number == 0:
                    engine.save(self.folder / "checkpoints", wait=False)
                self.tell("round", step=sync.step, stats=engine.stats(), **self._state())
        engine.close()


def train(folder: Path, number: int, address: str, seed: int, scale: float, joins: Any) -> None:
    """Be this worker; `joins` are options of `tw.join`."""
    Worker(folder, number, seed).train(address, scale, joins)
