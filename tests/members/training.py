"""Members that train, for tests: each in a process of its own, with a fault where it is told."""

import hashlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import thinwire as tw
from tests.api import Averager, Averaging, Channel, Membership, Recipient, Round
from tests.waiting import time_out, until

TIMEOUT_S = time_out(6.0)
MOST_STEPS = 4000
"""Where a joiner is waited for."""
PHASES: dict[str, tuple[type, str, bool]] = {
    "before the first agreement": (Averager, "_measure", True),
    "before sending": (Averaging, "launch", True),
    "once sent": (Averaging, "launch", False),
    "before the last agreement": (Round, "finish", False),
    "before it is applied": (Averaging, "commit_", True),
    "once applied": (Averaging, "commit_", False),
}
"""By name what to interrupt, and whether before or after it."""


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 24))


def digest(sync: tw.LocalUpdates) -> str:
    """Of all that members must hold alike after an averaging."""
    state = sync.state_dict()
    found = hashlib.blake2b(digest_size=8)
    for kind in ("anchors", "outer_momentum"):
        for name, tensor in sorted(state[kind].items()):
            found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_for(seconds: float, flag: Path | None = None) -> None:
    """Stop this process, and let another one wake it, which makes a file then."""
    then = f"; touch '{flag}'" if flag else ""
    with subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}{then}"]):
        stop()


def interrupt(kind: type, name: str, *, before: bool, at: int, act: Callable[[], None]) -> None:
    """Do something around the call number `at`, from 1, of a method in this process."""
    method, calls = getattr(kind, name), 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == at:
            act()
        result = method(*args, **kwargs)
        if not before and calls == at:
            act()
        return result

    setattr(kind, name, called)


HOW = {"kill": die, "stop": stop}


@contextmanager
def faulty(rank: int, fault: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """Interrupt a call of this process if the fault is this rank's, which is then yielded."""
    own = fault if fault is not None and fault["rank"] == rank else None
    calls = {**PHASES, "taking": (Recipient, "receive", True), "giving": (Channel, "send", True)}
    calls["admitting"] = Membership, "change_members", False
    with ExitStack() as undo:
        if own is not None and own["phase"] in calls:
            kind, name, before = calls[own["phase"]]
            undo.callback(setattr, kind, name, getattr(kind, name))
            act = HOW[own.get("how", "kill")]
            interrupt(kind, name, before=before, at=own["at"], act=act)
        yield own


@contextmanager
def deaf(at: int) -> Iterator[list[int]]:
    """Give a generation up just before this process accepts agreement number `at`, from 1."""
    accept, calls, times = Membership.accept_agreement, itertools.count(1), list[int]()

    def late(self: Membership, number: int, vote: int, answers: Any) -> bool:
        if next(calls) == at:
            times.append(at)
            self.report_broken(number, "told so by the test")
            self.wait_for_next(number)
        return accept(self, number, vote, answers)

    with patch.object(Membership, "accept_agreement", late):
        yield times


@contextmanager
def in_run(
    address: str, net: nn.Module, config: Any, optimizer: Any = None, **options: Any
) -> Iterator[tuple[tw.Members, tw.LocalUpdates, Any]]:
    """Yield the members, their local updates, and the optimizer: SGD where none is given."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.01)
    with (
        tw.join(address, **{"run": "test", "timeout": TIMEOUT_S, **options}) as members,
        tw.local_sgd(net, optimizer, config, members=members) as sync,
    ):
        yield members, sync, optimizer


def wait_for(flag: str) -> None:
    """Until there is a file of this name; at once for an empty one."""
    until(lambda: not flag or Path(flag).exists(), f"the file {flag}")


def member(
    rank: int,
    size: int,
    address: str,
    config: tw.LocalSGD,
    *,
    steps: int = 24,
    min_members: int = 1,
    rejoin: bool = False,
    founders: int | None = None,
    flag: str = "",
    flag_at: int = 4,
    fault: dict[str, Any] | None = None,
    leave_at: dict[int, int] | None = None,
    stop_at: dict[int, int] | None = None,
    step_s: float = 0.0,
    token_file: str | None = None,
    until_size: int = 0,
    timeout_s: float = TIMEOUT_S,
    relay: bool = False,
    ca: str | None = None,
) -> dict[str, Any]:
    """Train until `steps`, and tell what was seen.

    Args:
        until_size: Train on until there are so many members, and 12 steps more, instead.
        timeout_s: Of the members; `rejoin`, `relay` and `ca` are those of `join` too.
        founders: Ranks that begin; the others wait for the file `flag`, which rank 0 makes at step
            `flag_at`.
        fault: `rank`, `phase` (of `PHASES`, or "step"), `at` (number of the call) and `how`.
        leave_at: By rank the step at which it leaves.
        stop_at: By rank the step at which it is stopped for longer than the time-out.
    """
    founders = size if founders is None else founders
    wait_for(flag if rank >= founders else "")
    net = model(rank)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    batches = torch.Generator().manual_seed(rank)
    rounds: dict[int, tuple[str, int, int]] = {}
    longest_s, entered = 0.0, -1
    changes: list[tuple[int, int]] = []
    options = {"token_file": token_file, "timeout": timeout_s, "relay": relay, "ca": ca}
    options |= {"min_members": min_members, "start_members": founders, "rejoin": rejoin}
    with faulty(rank, fault) as own, tw.join(address, run="test", **options) as members:
        members.on_change(lambda now: changes.append((now.generation, now.size)))
        rank_at_first = members.rank
        with tw.local_sgd(net, optimizer, config, members=members) as sync:
            entered, end = sync.step, MOST_STEPS if until_size else steps
            averagings = sync.stats()["averagings"]
            while sync.step < end and not members.left:
                x = torch.randn(8, 24, generator=batches)
                optimizer.zero_grad()
                (net(x) - x.roll(1, 1)).square().mean().backward()
                if own is not None and own["phase"] == "step" and sync.step == own["at"]:
                    HOW[own["how"]]()
                if sync.step == (leave_at or {}).get(rank):
                    members.leave()
                if sync.step == (stop_at or {}).get(rank):
                    stop_for(TIMEOUT_S + 6)
                if flag and rank == 0 and sync.step == flag_at:
                    Path(flag).touch()
                begun = time.monotonic()
                optimizer.step()
                longest_s = max(longest_s, time.monotonic() - begun)
                applied, averagings = averagings, sync.stats()["averagings"]
                if averagings > applied and not members.left:
                    rounds[sync.step] = digest(sync), members.size, members.generation
                    if until_size == members.size:  # on all of them after the same averaging
                        end = min(end, sync.step + 12)
                time.sleep(step_s)
            left = members.left
        return {
            "step": sync.step,
            "entered": entered,
            "rank": rank_at_first,
            "rounds": rounds,
            "longest_s": longest_s,
            "changes": changes,
            "left": left,
            "stats": {} if left else sync.stats(),
        }


def require_joined(found: Sequence[dict[str, Any]]) -> None:
    """Check that the third member entered while the run went on, and had the bits of the first."""
    first, _, joiner = (one["rounds"] for one in found)
    assert found[2]["entered"] > 1
    assert len(joiner) > 3
    assert joiner == {step: first[step] for step in joiner}
