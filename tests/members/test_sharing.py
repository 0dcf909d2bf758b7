"""Members that join, leave and are killed train on each sample of an epoch exactly once."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.members.places import meeting_place
from tests.members.training import TIMEOUT_S, wait_for
from tests.ranks import Lost, Pool

SAMPLES, BATCH, INTERVAL, FOUNDERS = 83, 3, 3, 3
EVENTS = 5


def events_of(seed: int) -> list[tuple[str, int]]:
    """What happens to which process, one after the other; the first one stays."""
    chance = random.Random(seed)
    present, newcomer, events = list(range(FOUNDERS)), FOUNDERS, []
    for _ in range(EVENTS):
        # a majority survives a loss
        kind = chance.choice(["join", "kill", "leave"]) if len(present) > 2 else "join"
        if kind == "join":
            present.append(newcomer)
            newcomer += 1
            events.append((kind, present[-1]))
        else:
            events.append((kind, present.pop(chance.randrange(1, len(present)))))
    return events


class Trained:
    """Samples that this process has brought into an averaging, as lines of a file."""

    def __init__(self, path: Path, averagings: float) -> None:
        self._path, self._averagings = path, averagings
        self._since: list[int] = []

    def add(self, samples: list[int], averagings: float) -> None:
        self._since += samples
        if averagings > self._averagings:
            with self._path.open("a") as file:
                file.write("".join(f"{sample}\n" for sample in self._since))
            self._since, self._averagings = [], averagings


def endless(sampler: tw.ShardedSampler) -> Iterator[int]:
    while True:
        yield from sampler


def sharer(
    rank: int, size: int, address: str, folder: str, events: list[tuple[str, int]]
) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """Train, with the events that process 0 begins; then tell the samples left, and the state."""
    flags, coming, size_before = Path(folder), iter(events), 0
    wait_for(str(flags / f"join {rank}") if rank >= FOUNDERS else "")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with tw.join(address, run="t", timeout=TIMEOUT_S, start_members=FOUNDERS) as members:
        sampler = tw.ShardedSampler(range(SAMPLES), seed=5, members=members)
        samples = endless(sampler)
        with tw.local_sgd(model, optimizer, tw.LocalSGD(INTERVAL, 0), members=members) as sync:
            trained = Trained(flags / f"trained {rank}", sync.stats()["averagings"])
            while not members.left and not (flags / f"end {sync.step}").exists():
                if rank == 0 and members.size != size_before:
                    size_before = members.size
                    # some epochs later members differ in the samples that they have taken
                    last = (sync.step // INTERVAL + 15) * INTERVAL
                    kind, who = next(coming, ("end", last))
                    (flags / f"{kind} {who}").touch()
                batch = list(islice(samples, BATCH))
                optimizer.zero_grad()
                model(torch.tensor(batch)[:, None] / SAMPLES).square().mean().backward()
                if (flags / f"kill {rank}").exists() and sync.step % INTERVAL == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if (flags / f"leave {rank}").exists():
                    members.leave()
                optimizer.step()
                trained.add(batch, sync.stats()["averagings"])
                time.sleep(0.02)
        if members.left:
            return {}, {}
        state = sampler.state_dict()
        return {sampler.epoch: list(sampler), sampler.epoch: list(sampler)}, state


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("seed", range(4))
def test_samples_are_trained_on_once_in_an_epoch(ranks: Pool, tmp_path: Path, seed: int) -> None:
    events = events_of(seed)
    size = FOUNDERS + sum(kind == "join" for kind, _ in events)
    with meeting_place(None) as address:
        found = ranks.run(
            sharer, address, str(tmp_path), events, size=size, group=False, expect_errors=True
        )
    killed = [who for kind, who in events if kind == "kill"]
    assert [rank for rank, each in enumerate(found) if isinstance(each, Lost)] == sorted(killed)
    ended = [each for each in found if not isinstance(each, Lost)]
    assert all(isinstance(each, tuple) for each in ended), ended
    last = max(min(left) for left, _ in ended if left)
    trained = Counter(
        int(line) for path in tmp_path.glob("trained *") for line in path.read_text().split()
    )
    rest = Counter(
        sample
        for left, _ in ended
        for epoch, samples in left.items()
        if epoch <= last
        for sample in samples
    )
    assert trained + rest == Counter(dict.fromkeys(range(SAMPLES), last + 1)), events
    first, *others = [state for _, state in ended if state]
    assert all(state == first for state in others)
    resumed = tw.ShardedSampler(range(SAMPLES))
    resumed.load_state_dict(first)
    assert rest == (Counter(resumed) if resumed.epoch == last else Counter())
