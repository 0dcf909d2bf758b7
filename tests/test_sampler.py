"""Each sample of an epoch goes to exactly one rank, whoever comes and goes."""

import random
from collections import Counter
from itertools import chain, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import thinwire as tw
from tests.members.places import meeting_place
from tests.members.training import in_run
from tests.ranks import Pool
from tests.toys import descend, warned


def epochs(rank: int, size: int, length: int, shuffle: bool) -> list[list[int]]:
    sampler = tw.ShardedSampler(range(length), seed=3, shuffle=shuffle)
    assert len(sampler) == len(range(rank, length, size))
    return [list(sampler) for _ in range(3)]


@pytest.mark.parametrize("length", [2, 12, 13])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_of_an_epoch_is_seen_once(ranks: Pool, length: int, shuffle: bool) -> None:
    found = ranks.run(epochs, length, shuffle, size=3)
    for each in zip(*found, strict=True):
        assert sorted(chain(*each)) == list(range(length))
    if length > 2:
        assert (len({tuple(each) for each in found[0]}) > 1) == shuffle
    assert shuffle or found[1][0] == list(range(1, length, 3))


def half(rank: int, size: int, batches: int) -> tuple[list[int], dict[str, Any]]:
    sampler = tw.ShardedSampler(range(100), seed=7)
    loader = iter(DataLoader(list(range(100)), batch_size=4, sampler=sampler))
    seen = [int(x) for _ in range(batches) for x in next(loader)]
    return seen, sampler.state_dict()


def rest(rank: int, size: int, state: dict[str, Any]) -> tuple[list[int], int, list[int]]:
    sampler = tw.ShardedSampler(range(100))
    sampler.load_state_dict(state)
    left = len(sampler)
    seen = list(sampler)
    assert len(seen) == left
    return seen, sampler.epoch, list(sampler)


@pytest.mark.parametrize("batches", [0, 5, 8])
def test_another_number_of_ranks_goes_on_in_the_middle(ranks: Pool, batches: int) -> None:
    first = ranks.run(half, batches, size=3)
    states = [state for _, state in first]
    assert states[0] == states[1] == states[2]
    second = ranks.run(rest, states[0], size=2)
    seen = [*chain(*(each for each, _ in first)), *chain(*(each for each, _, _ in second))]
    assert sorted(seen) == list(range(100))
    assert [epoch for _, epoch, _ in second] == [1, 1]
    assert sorted(chain(*(each for *_, each in second))) == list(range(100))


def resumes(rank: int, size: int) -> list[list[list[int]]]:
    """By history and epoch this rank's samples, in a hundred runs that stop and resume."""
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    found = []
    for seed in range(100):
        chance = random.Random(seed)
        length = left = chance.randint(5, 60)
        box: list[Any] = [None]
        epochs: list[list[int]] = [[]]
        while len(epochs) <= 2:
            ranks = chance.randint(1, size)
            steps = chance.randint(0, left // ranks) if chance.random() < 0.8 else None
            if rank < ranks:
                new = {"seed": seed} if box[0] is None else {}
                sampler = tw.ShardedSampler(range(length), group=groups[ranks], **new)
                if box[0] is not None:
                    sampler.load_state_dict(box[0])
                epochs[-1] += islice(sampler, steps)  # None: to the end of the epoch
                box = [sampler.state_dict()]
            dist.broadcast_object_list(box, 0)
            left = 0 if steps is None else left - steps * ranks
            if not left:
                epochs.append([])
                left = length
        found.append(epochs[:2])
    return found


def test_a_hundred_histories_of_resumes_on_other_numbers_of_ranks(ranks: Pool) -> None:
    for histories in zip(*ranks.run(resumes, size=4), strict=True):
        for epoch in zip(*histories, strict=True):
            samples = sorted(chain(*epoch))
            assert samples == list(range(len(samples))) and len(samples) >= 5


class Sharer:
    """A member as its sampler sees it: what it took since the last averaging is lost with it."""

    def __init__(self, length: int, seed: int) -> None:
        self.sampler: Any = tw.ShardedSampler(range(length), seed=seed)
        self.sampler._member = self
        self.since: list[int] = []

    def share(self, state: dict[str, Any], rank: int, size: int) -> None:
        self.sharing_rank_and_size, self.report = (rank, size), None
        self.reports: list[Any] = [None] * size
        self.sampler.load_state_dict(state)
        self.samples = iter(self.sampler)

    def taken_of(self, sampler: Any) -> list[Any]:
        return self.reports

    def take(self, count: int) -> None:
        while len(self.since) < count:  # epochs of few samples may have none for this rank
            try:
                self.since.append(next(self.samples))
            except StopIteration:
                self.samples = iter(self.sampler)


def history(seed: int) -> None:
    """Members that take unequal numbers of samples between averagings, join, or are lost."""
    chance = random.Random(seed)
    length, size = chance.randint(5, 60), chance.randint(1, 5)
    start = tw.ShardedSampler(range(length), seed=seed).state_dict()
    sharers = [Sharer(length, seed) for _ in range(size)]
    for rank, each in enumerate(sharers):
        each.share(start, rank, size)
    trained: Counter[int] = Counter()
    for _ in range(chance.randint(3, 12)):
        for each in sharers:
            each.take(chance.randint(0, max(1, length // len(sharers) // 2)))
        kept = [each for each in sharers if chance.random() < 0.8] or sharers[:1]
        for each in kept:
            trained.update(each.since)
            each.since, each.report = [], each.sampler._progress()
        new = [Sharer(length, 0) for _ in range(chance.choice([0, 0, 1, 2]))]
        if kept != sharers or new:
            reports, sharers = [each.report for each in sharers], [*kept, *new]
            for each in kept:
                each.reports = reports
            [state, *others] = [each.sampler.state_dict() for each in kept]
            assert all(other == state for other in others)
            for rank, each in enumerate(sharers):
                each.share(state, rank, len(sharers))
    # all that is left until the end of the latest epoch
    last = max(each.sampler.epoch for each in sharers)
    for each in sharers:
        while each.sampler.epoch <= last:
            trained.update(each.sampler)
    assert trained == Counter(dict.fromkeys(range(length), last + 1)), seed


def test_a_hundred_histories_of_joins_and_losses() -> None:
    for seed in range(100):
        history(seed)


def member(rank: int, size: int, address: str, sharing: bool) -> tuple[list[int], list[str]]:
    """Samples and warnings; a sampler without the members takes all, as all others do."""
    model, seen = torch.nn.Linear(4, 1), []
    run = in_run(address, model, tw.LocalSGD(3, 0), min_members=3)
    with warned() as texts, run as (members, sync, optimizer):
        own = {"members": members} if sharing else {}
        seed = 5 + (not sharing and members.rank == 2)
        sampler = tw.ShardedSampler(range(90), seed=seed, **own)
        data: Any = range(90)
        for batch in DataLoader(data, batch_size=2, sampler=sampler):
            seen += batch.tolist()
            if sharing and members.rank == 2 and sync.step == 6:
                members.leave()
            inputs = batch[:, None].expand(-1, 4).float() / 90
            descend(optimizer, model(inputs).square().mean())
            if sync.left or sync.step == (15 if sharing else 9):
                break
    return seen, texts


def test_members_share_samples_left_by_a_leaving_member(ranks: Pool) -> None:
    with meeting_place(None) as address:
        found = [seen for seen, _ in ranks.run(member, address, True, size=3, group=False)]
    seen = Counter(chain(*found))
    assert max(seen.values()) == 1, "no sample twice"
    # three members until the averaging of step 9, two of them until step 15
    assert sorted(map(len, found)) == [18, 30, 30]


def test_members_that_share_batches_are_noticed(ranks: Pool) -> None:
    with meeting_place(None) as address:
        for _, texts in ranks.run(member, address, False, size=3, group=False):
            (message,) = texts
            assert "changes of ranks 0 and 1 are equal" in message
            assert "same batches" in message and "ShardedSampler" in message


def test_state_that_does_not_fit_is_refused() -> None:
    sampler = tw.ShardedSampler(range(10))
    state = sampler.state_dict()
    with pytest.raises(TypeError, match=r"data must be .* with a length"):
        tw.ShardedSampler(iter(()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"len\(data\) must be an integer >= 1"):
        tw.ShardedSampler([])
    with pytest.raises(ValueError, match="the state is of 10 samples, and the data here have 11"):
        tw.ShardedSampler(range(11)).load_state_dict(state)
    with pytest.raises(ValueError, match="has the keys"):
        sampler.load_state_dict({"epoch": 1})
    sampler.set_epoch(2)
    assert sampler.epoch == 2 and len(list(sampler)) == 10
    assert sampler.epoch == 3
