"""Does something to one rank at a named point of a named step, by hooks at the seam of `comm`.

Only this process is patched, and only until `injected` ends.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.api import Group, Pending, connections, shut_down
from tests.faults.training import Trainer
from tests.members.training import die, stop, stop_for
from tests.waiting import time_out

__all__ = ["HOWS", "PHASES", "Fault", "injected"]

PHASES = (
    "forward",
    "backward",
    "before sending",
    "once sent",
    "second sending",
    "before the last agreement",
    "before it is applied",
)


@dataclass(frozen=True)
class Fault:
    """How (`HOWS`), to which rank, and in which step and phase (`PHASES`) of `Trainer.step`."""

    how: str
    rank: int
    step: int
    phase: str


class Injected(RuntimeError):
    """What the fault "raise" raises."""


def segfault() -> None:
    ctypes.string_at(0)


def leave_quietly() -> None:
    os._exit(0)


def hold_the_interpreter() -> None:
    """Its lock, for longer than any time-out here: no other thread of this process goes on."""
    ctypes.PyDLL(None).sleep(round(time_out(12)))


def raise_error() -> None:
    raise Injected("told so by the test")


def reset() -> None:
    """Close all connections of this process, which lives on."""
    for each in connections():
        shut_down(each)


def grow() -> None:
    """Take memory until the kernel ends this process, which its cgroup limits."""
    taken = []
    while True:
        taken.append(bytearray(b"x") * (64 << 20))


HOWS: dict[str, Callable[[], None]] = {
    "kill": die,
    "segfault": segfault,
    "quiet exit": leave_quietly,
    "stop": stop,
    "stop for 2 s": lambda: stop_for(2),
    "hold the lock": hold_the_interpreter,
    "raise": raise_error,
    "reset": reset,
    "out of memory": grow,
    "slow": lambda: time.sleep(1),
}


@contextlib.contextmanager
def injected(fault: Fault, trainer: Trainer, rank: int) -> Iterator[list[str]]:
    """While this holds, the trainer's step meets the fault; yields what was done so far."""
    done: list[str] = []
    if rank != fault.rank:
        yield done
        return
    now, data, votes = -1, 0, 0
    step, launched, control = trainer.step, Group._launched, Group.launch_bytes

    def at(phase: str) -> None:
        if phase == fault.phase and now == fault.step and not done:
            done.append(fault.how)
            HOWS[fault.how]()

    def stepped(number: int) -> None:
        nonlocal now, data, votes
        now, data, votes = number, 0, 0
        step(number)

    def launch(self: Group, *args: Any, control: bool = False, **kwargs: Any) -> Pending[Tensor]:
        nonlocal data
        if not control:
            data += 1
            at("before sending")
            if data == 2:
                at("second sending")
        pending = launched(self, *args, control=control, **kwargs)
        if not control:
            at("once sent")
        return pending

    def agree(self: Group, payload: bytes, **kwargs: Any) -> Pending[Sequence[bytes | None]]:
        nonlocal votes
        if data:
            at("before the last agreement")
        return control(self, payload, **kwargs)

    def forward(*_: Any) -> None:
        at("forward")

    def apply(*_: Any) -> None:
        at("before it is applied")

    first = next(p for p in trainer.model.parameters() if p.requires_grad)
    handles = [
        trainer.model.register_forward_pre_hook(forward),
        first.register_hook(lambda _: at("backward")),
        register_optimizer_step_pre_hook(apply),
    ]
    trainer.step = stepped  # type: ignore[method-assign]
    Group._launched, Group.launch_bytes = launch, agree  # type: ignore[method-assign]
    try:
        yield done
    finally:
        Group._launched, Group.launch_bytes = launched, control  # type: ignore[method-assign]
        trainer.step = step  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()
