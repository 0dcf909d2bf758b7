"""Each sample of an epoch goes to exactly one rank, whoever comes and goes."""

import random
import warnings
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import thinwire as tw
from tests.members.places import meeting_place
from tests.members.training import TIMEOUT_S
from tests.ranks import Pool


def epochs(rank: int, size: int, length: int, shuffle: bool) -> list[list[int]]:
    sampler = tw.ShardedSampler(range(length), seed=3, shuffle=shuffle)
    assert len(sampler) == len(range(rank, length, size))
    return [list(sampler) for _ in range(3)]


@pytest.mark.parametrize("length", [2, 12, 13])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_of_an_epoch_is_seen_once(ranks: Pool, length: int, shuffle: bool) -> None:
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


def history(seed: int) -> None:
    """Ranks that take unequal numbers of samples, come, are lost, or all resume."""
    chance = random.Random(seed)
    length, size = chance.randint(5, 60), chance.randint(1, 5)
    start = tw.ShardedSampler(range(length), seed=seed)
    sharers = [tw.ShardedSampler(range(length), seed=seed) for _ in range(size)]
    for rank, each in enumerate(sharers):
        each.start_as_joiner(start.state_dict(), rank, size)
    seen: Counter[int] = Counter()
    iterators = [iter(each) for each in sharers]

    def take(which: int) -> None:
        for _ in range(length + 2):  # epochs of few samples may have none for this rank
            sample = next(iterators[which], None)
            if sample is not None:
                seen[sample] += 1
                return
            iterators[which] = iter(sharers[which])

    for _ in range(chance.randint(3, 8)):
        even = chance.random() < 0.5
        steps = chance.randint(0, max(1, length // size // 2))
        for which in range(len(sharers)):
            for _ in range(steps if even else chance.randint(0, 3)):
                take(which)
        taken = [each.taken for each in sharers]
        if even and chance.random() < 0.3 and len(set(taken)) == 1:
            state = sharers[0].state_dict()  # all resume, as another number of ranks
            sharers = [tw.ShardedSampler(range(length)) for _ in range(chance.randint(1, 5))]
            for rank, each in enumerate(sharers):
                each.start_as_joiner(state, rank, len(sharers))
        else:
            kept = [each for each in sharers if chance.random() < 0.8] or sharers[:1]
            new = [tw.ShardedSampler(range(length)) for _ in range(chance.randint(0, 2))]
            for rank, each in enumerate(kept):
                each.redistribute(taken, rank, len(kept) + len(new))
            for rank, each in enumerate(new, len(kept)):
                each.start_as_joiner(kept[0].state_dict(), rank, len(kept) + len(new))
            sharers = [*kept, *new]
        iterators = [iter(each) for each in sharers]
    # all that is left until the end of the latest epoch
    last = max(each.epoch for each in sharers)
    for each in sharers:
        while each.epoch <= last:
            seen.update(each)
    assert seen == Counter(dict.fromkeys(range(length), last + 1)), seed


def test_a_hundred_histories_of_joins_losses_and_resumes() -> None:
    for seed in range(100):
        history(seed)


def member(rank: int, size: int, address: str) -> list[int]:
    with tw.join(address, run="test", timeout=TIMEOUT_S, min_members=3) as members:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sampler = tw.ShardedSampler(range(90), seed=5, members=members)
        seen: list[int] = []
        with tw.local_sgd(model, optimizer, tw.LocalSGD(3, 0), members=members) as sync:
            data: Any = range(90)
            for batch in DataLoader(data, batch_size=2, sampler=sampler):
                seen += batch.tolist()
                optimizer.zero_grad()
                model(batch[:, None].expand(-1, 4).float() / 90).square().mean().backward()
                if members.rank == 2 and sync.step == 6:
                    members.leave()
                optimizer.step()
                if sync.left or sync.step == 15:
                    break
        return seen


def test_members_share_what_one_that_leaves_has_not_taken(ranks: Pool) -> None:
    with meeting_place(None) as address:
        found = ranks.run(member, address, size=3, group=False)
    seen = Counter(chain(*found))
    assert max(seen.values()) == 1, "no sample twice"
    # three members until the averaging of step 9, two of them until step 15
    assert sorted(map(len, found)) == [18, 30, 30]


def overlapping(rank: int, size: int, address: str) -> list[str]:
    """A member whose sampler was not given the members takes all samples, as all others do."""
    with tw.join(address, run="test", timeout=TIMEOUT_S, min_members=3) as members:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sampler = tw.ShardedSampler(range(90), seed=5 + (members.rank == 2))
        with (
            warnings.catch_warnings(record=True) as warned,
            tw.local_sgd(model, optimizer, tw.LocalSGD(3, 0), members=members) as sync,
        ):
            warnings.simplefilter("always")
            data: Any = range(90)
            for batch in DataLoader(data, batch_size=2, sampler=sampler):
                optimizer.zero_grad()
                model(batch[:, None].expand(-1, 4).float() / 90).square().mean().backward()
                optimizer.step()
                if sync.step == 9:
                    break
        return [str(each.message) for each in warned]


def test_members_that_share_batches_are_noticed(ranks: Pool) -> None:
    with meeting_place(None) as address:
        for warned in ranks.run(overlapping, address, size=3, group=False):
            (message,) = warned
            assert "changes of ranks 0 and 1 are equal" in message
            assert "same batches" in message and "ShardedSampler" in message


def test_what_does_not_fit_is_refused() -> None:
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
