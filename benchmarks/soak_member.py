"""Member of `benchmarks.soak`: train, and report the state after every averaging.

It is told what to do by files in the folder of the run (`end`, `die-giving`) and by signals:
SIGUSR1 lets it leave after the running round.
"""

import contextlib
import gc
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm.member_groups import Channel
from thinwire.errors import ThinwireError
from thinwire.local.averaging import Averaging, PendingAveraging
from thinwire.local.joiners import JoinerState
from thinwire.members.members import member_of
from thinwire.members.transfer import Recipient, StateMessage
from thinwire.tools.run.launch import event_log

RUN = "soak"
_OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5, "outer_nesterov": True}
CONFIGS = {
    "sparse": tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9)),
    "momentum": tw.LocalSGD(4, begin_step=1, **_OUTER),
}
_WIDTH, _HIDDEN, _BATCH = 24, 40, 8
_STEP_S = 0.02
_SETTLE_S = 2.0


@dataclass(frozen=True)
class Part:
    """Start arguments of one member."""

    number: int
    """Of the process: its seed, and the name of its files."""
    folder: str
    address: str
    config: str
    start_members: int
    timeout_s: float
    dies_taking: int = 0
    """The message of its donor, from 1, before which it dies; 0 for none."""


class Trainee:
    """A small model that learns to shift its input, with data of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(_WIDTH, _HIDDEN),
            nn.BatchNorm1d(_HIDDEN),
            nn.Tanh(),
            nn.Linear(_HIDDEN, _WIDTH),
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 2e-3)
        self._batches = torch.Generator().manual_seed(seed)

    def step(self) -> float:
        """One local step; its loss."""
        x = torch.randn(_BATCH, _WIDTH, generator=self._batches)
        loss: Tensor = (self.net(x) - x.roll(1, 1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def held_out_loss(self, samples: int) -> float:
        """On data that no seed of a member gives; random numbers of this process stay."""
        x = torch.randn(samples, _WIDTH, generator=torch.Generator().manual_seed(1 << 32))
        self.net.eval()
        loss: Tensor = (self.net(x) - x.roll(1, 1)).square().mean()
        self.net.train()
        return loss.item()


def digest(averaging: Averaging, net: nn.Module) -> str:
    """Of all that members must hold alike after an averaging."""
    found = hashlib.blake2b(digest_size=8)
    buffers = {name: buffer for name, buffer in net.named_buffers() if buffer.is_floating_point()}
    for tensors in (averaging.anchors, averaging.momentum, buffers):
        for name, tensor in sorted(tensors.items()):
            found.update(name.encode() + tensor.detach().numpy().tobytes())
    return found.hexdigest()


def live(part: Part) -> None:
    """Be this member until the driver says how the run ends, or until a fault."""
    _Member(part).live()


class _Member:
    def __init__(self, part: Part) -> None:
        self._part, self._folder = part, Path(part.folder)
        self._tell = event_log(self._folder, part.number).write
        self._me = Trainee(part.number)
        self._member: Any = None
        self._committed: dict[str, Any] | None = None
        self._losses: list[float] = []

    def live(self) -> None:
        before = resources()
        self._tell("started")
        error: Exception | None = None
        with self._watched():
            try:
                step, left = self._trained()
            except ThinwireError as refusal:
                error, step, left = refusal, -1, False
        error_row = {"error": "", "text": ""}
        if error is not None:
            error_row = {"error": type(error).__name__, "text": str(error)}
            error.__traceback__ = error.__cause__ = error.__context__ = None
        self._member = None
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what was there holds on to the members
        after = self._settled(before)
        self._tell("end", step=step, left=left, before=before, after=after, **error_row)

    def _trained(self) -> tuple[int, bool]:
        part, me = self._part, self._me
        with tw.join(
            part.address,
            run=RUN,
            start_members=part.start_members,
            rejoin=False,
            timeout=part.timeout_s,
        ) as members:
            self._member = member_of(members)
            signal.signal(signal.SIGUSR1, lambda *_: members.leave())
            self._tell("joined", id=members.id, joiner=members.generation < 0)
            config = CONFIGS[part.config]
            with tw.local_sgd(me.net, me.optimizer, config, members=members) as sync:
                self._tell("entered", id=members.id, step=sync.step)
                while not members.left and sync.step < self._last_step():
                    self._losses.append(me.step())
                    self._tell_of_averaging()
                    time.sleep(_STEP_S)
            self._tell_of_averaging()
            return sync.step, members.left

    def _last_step(self) -> float:
        path = self._folder / "end"
        return int(path.read_text()) if path.exists() else float("inf")

    def _tell_of_averaging(self) -> None:
        about, self._committed = self._committed, None
        if about is not None:
            gives = self._member.records(compressed=False)
            loss = sum(self._losses) / max(1, len(self._losses))
            self._losses.clear()
            self._tell("averaged", **about, loss=loss, gives=gives, **resources())

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Look at what is applied, and die where the driver wants it."""
        commit, take, send = Averaging.commit_, Recipient.receive, Channel.send
        inherit = JoinerState.add_handoff
        taken = 0

        def committed(averaging: Averaging, pending: PendingAveraging, *others: Any) -> None:
            commit(averaging, pending, *others)
            about = {"step": pending.step, "digest": digest(averaging, self._me.net)}
            if self._member.joiner:
                self._tell("received", **about)
                return
            # the generation of the exchange, which may have been left since
            group = self._member.group
            number, ids = self._member.present()
            self._committed = {**about, "generation": number, "ids": ids, "size": group.size}

        def taking(recipient: Recipient, at_most: int) -> Any:
            nonlocal taken
            taken += 1
            if taken == self._part.dies_taking:
                os.kill(os.getpid(), signal.SIGKILL)
            return take(recipient, at_most)

        def giving(line: Channel, *message: Any) -> None:
            with contextlib.suppress(FileNotFoundError):  # only one of them finds the file
                (self._folder / "die-giving").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            send(line, *message)

        def inherited(work: JoinerState, given: StateMessage, factor: float) -> None:
            inherit(work, given, factor)
            about = {"id": self._member.id, "step": self._member.step(), "factor": factor}
            self._tell("inherited", of=given.plain["of"], **about)

        Averaging.commit_ = committed  # type: ignore[assignment, method-assign]
        Recipient.receive = taking  # type: ignore[assignment, method-assign]
        Channel.send = giving  # type: ignore[assignment, method-assign]
        JoinerState.add_handoff = inherited  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Averaging.commit_, Recipient.receive, Channel.send = commit, take, send  # type: ignore[method-assign]
            JoinerState.add_handoff = inherit  # type: ignore[method-assign]

    def _settled(self, before: dict[str, int]) -> dict[str, int]:
        """Return the resources of this process after it left; pending waits end by the time-out."""
        until = time.monotonic() + self._part.timeout_s + _SETTLE_S
        while True:
            gc.collect()
            now = resources()
            over = all(now[kind] <= before[kind] for kind in ("sockets", "descriptors"))
            if over or time.monotonic() > until:
                return now
            time.sleep(0.1)


def resources() -> dict[str, int]:
    """Threads, sockets and descriptors of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of the listing itself
            found.append(str(entry.readlink()))
    sockets = sum(name.startswith("socket:") for name in found)
    threads = len(list(Path("/proc/self/task").iterdir()))
    return {"threads": threads, "sockets": sockets, "descriptors": len(found)}
