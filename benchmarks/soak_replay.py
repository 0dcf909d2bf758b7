"""The members of a soak once more, one after another in one process and without any fault.

What a member did between two averagings depends on its seed and on what it entered with; what an
averaging did on who took part in it, in which order. So the trace of both gives all bits again. The
members of this process exchange through gloo on loopback, which adds in the same order.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.soak_member import CONFIGS, Trainee, digest
from thinwire.comm import Group
from thinwire.comm.member_groups import MemberGroups
from thinwire.comm.relay import RelayEndpoint
from thinwire.core.feedback import compile_loops
from thinwire.local.averaging import Averaging, PendingAveraging
from thinwire.local.model import LocalModel

_TIMEOUT_S = 60.0
_LAST = 20
"""Averagings whose loss counts, the last ones."""
_HELD_OUT = 4096


@dataclass(frozen=True)
class Trace:
    """Record of the members of a soak.

    Attributes:
        config: Name in `CONFIGS`.
        seeds: By identity.
        entered: By identity the step at which a member had the state of the run.
        averagings: By step the members in the order of their ranks.
        digests: By step.
        inherited: Handoffs by step: successor, leaver, factor.
    """

    config: str
    seeds: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    averagings: dict[int, list[str]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    inherited: dict[int, list[tuple[str, str, float]]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(vars(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read a trace that `save` wrote."""
        about = json.loads(path.read_text())
        for name in ("averagings", "digests", "inherited"):
            about[name] = {int(step): value for step, value in about[name].items()}
        return cls(**about)


class _Member:
    def __init__(self, seed: int, config: str) -> None:
        self.trainee, self.group = Trainee(seed), Group.over_private(None, _TIMEOUT_S)
        self.model = LocalModel(self.trainee.net, self.trainee.optimizer)
        self.step = 0
        self._config = CONFIGS[config]
        self.averaging = self._fresh()

    def _fresh(self) -> Averaging:
        config = self._config
        changes = config.compression
        return Averaging(self.group, self.model.params, config, changes)

    @torch.no_grad()
    def begin_like(self, first: "_Member") -> None:
        """All begin with the model of the member of rank 0."""
        for own, theirs in zip(
            [*self.model.params.values(), *self.model.buffers().values()],
            [*first.model.params.values(), *first.model.buffers().values()],
            strict=True,
        ):
            own.copy_(theirs)
        self.averaging = self._fresh()

    @torch.no_grad()
    def enter(self, step: int, donor: "_Member") -> None:
        """Take what all hold alike; own errors and the optimizer's state begin anew."""
        self.step = step
        pairs = [
            (self.averaging.anchors, donor.averaging.anchors),
            (self.averaging.momentum, donor.averaging.momentum),
            (self.model.buffers(), donor.model.buffers()),
            (self.model.params, donor.averaging.anchors),
        ]
        for own, theirs in pairs:
            for name, tensor in own.items():
                tensor.copy_(theirs[name])

    @torch.no_grad()
    def inherit(self, leaver: "_Member", factor: float) -> None:
        """Take over what one that has left had kept."""
        for name, error in self.averaging.errors.items():
            error.add_(leaver.averaging.errors[name], alpha=factor)

    def train(self, step: int) -> None:
        while self.step < step:
            self.trainee.step()
            self.step += 1

    def exchanged(self) -> PendingAveraging:
        """An averaging that has arrived; on the thread of this member."""
        values = dict(self.model.params)
        pending = self.averaging.measure(self.step, values, self.model.buffers())
        self.averaging.launch(pending)
        pending.round.finish()
        return pending


@dataclass(frozen=True)
class Replayed:
    """Outcome of a replay.

    Attributes:
        digests: Of every averaging, by step.
        loss: On data that nobody trained on, the mean over the last averagings.
    """

    digests: dict[int, str]
    loss: float


def undisturbed(trace: Trace) -> Trace:
    """As many averagings of those who began, to whom nothing happens."""
    founders = next(iter(trace.averagings.values()))
    seeds = {number: trace.seeds[number] for number in founders}
    return Trace(trace.config, seeds, averagings=dict.fromkeys(trace.averagings, founders))


def compared(trace: Trace) -> tuple[list[int], float, float]:
    """Return the steps with other bits in a replay, its loss, and that of an undisturbed run."""
    again = replay(trace)
    other = [step for step, digest in trace.digests.items() if again.digests[step] != digest]
    return other, again.loss, replay(undisturbed(trace)).loss


def replay(trace: Trace) -> Replayed:
    """Go through a trace."""
    torch.set_num_threads(1)
    losses: list[float] = []
    members = _founders(trace)
    found: dict[int, str] = {}
    ids: Sequence[str] = ()
    connected: list[MemberGroups] = []
    with ThreadPoolExecutor(16) as threads:
        for step, now in trace.averagings.items():
            if list(now) != list(ids):
                _entered(trace, members, ids, now)
                for groups in connected:
                    groups.release()
                ids, connected = now, _connected(len(now), threads)
                for rank, number in enumerate(now):
                    group: Any = members[number].group
                    group._shared = connected[rank] if connected else None
                    group.rank, group.size = rank, len(now)
            for number in now:
                members[number].train(step)
            arrived = list(threads.map(lambda number: members[number].exchanged(), now))
            for number, pending in zip(now, arrived, strict=True):
                members[number].averaging.commit_(pending, members[number].model.buffers())
            for successor, leaver, factor in trace.inherited.get(step, []):
                members[successor].inherit(members[leaver], factor)
            first = members[now[0]]
            found[step] = digest(first.averaging, first.trainee.net)
            if len(found) > len(trace.averagings) - _LAST:
                losses.append(first.trainee.held_out_loss(_HELD_OUT))
    for groups in connected:
        groups.release()
    return Replayed(found, sum(losses) / len(losses))


def _founders(trace: Trace) -> dict[str, _Member]:
    """Those who begin, with what they need."""
    founders = next(iter(trace.averagings.values()))
    members = {number: _Member(trace.seeds[number], trace.config) for number in founders}
    for member in members.values():
        member.begin_like(members[founders[0]])
    compiled(trace.config)
    return members


def compiled(config: str) -> None:
    """Compile the loops that an averaging calls: members then find them on the disk, and what they
    hold in the end is nothing of the compiler's.
    """
    averaging = _Member(0, config).averaging
    tensors = list(averaging.anchors.values())
    if averaging.changes is not None:
        compile_loops(tensors)


def _entered(
    trace: Trace, members: dict[str, _Member], before: Sequence[str], now: Sequence[str]
) -> None:
    """Let joiners enter with the state of the others at that step."""
    for number in now:
        if number not in members:
            joiner = _Member(trace.seeds[number], trace.config)
            joiner.enter(trace.entered[number], members[before[0]])
            members[number] = joiner


class _Threads(HashStore):  # type: ignore[misc]  # torch's stubs do not know it
    """Store of threads, with the calls of a host's."""

    def announce(self, key: str, value: Any) -> None:
        self.set(key, value)

    def relays(self, endpoint: RelayEndpoint) -> dict[str, RelayEndpoint]:
        return {"": endpoint}

    def multi_get(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        self.wait(keys, *([] if timeout is None else [timeout]))
        found: list[bytes] = super().multi_get(keys)
        return found


def _connected(size: int, threads: ThreadPoolExecutor) -> list[MemberGroups]:
    store: Any = _Threads()
    no_relay = RelayEndpoint("", 0, b"", own_address="127.0.0.1")

    def make(rank: int) -> MemberGroups:
        return MemberGroups(store, rank, size, _TIMEOUT_S, no_relay)

    if size == 1:  # it exchanges with nobody
        return []
    return list(threads.map(make, range(size)))
