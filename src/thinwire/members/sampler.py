"""Batches of members that come and go."""

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from thinwire import _validate as check
from thinwire.members.members import Members

__all__ = ["MemberSampler"]


class MemberSampler(Sampler[list[int]]):
    """Draws the batches of one member, without end: `DataLoader(data, batch_sampler=...)`.

    A batch is a pure function of seed, step of the run, rank and generation: whoever goes through
    the same members sees the same samples, and nobody has to tell anybody where it is. It is drawn
    with replacement, so nothing is shared out: over len(data) / (batch_size * members) steps a
    sample is seen once on average, 37 % of them not at all, and no member that comes or goes
    changes that. A member that is lost takes the batches of the round that it was in with it.

    With `num_workers` of the loader above 0 batches are drawn ahead, in this process: a change of
    members shows as many batches later.

    Where a member is a site of shards, each of its ranks gets a part of the member's batch, the
    samples r, r + shards, r + 2 shards, ... of it.

    Args:
        length: Samples there are.
        members: Of the run.
        batch_size: Samples of each batch, of this member; of a site of shards, of all its ranks.
        seed: The same on all members.

    Raises:
        TypeError, ValueError: An argument that cannot be; shards that do not divide the batch.
    """

    def __init__(self, length: int, members: Members, batch_size: int, seed: int = 0) -> None:
        self._length = check.integer("length", length, at_least=1)
        self._batch_size = check.integer("batch_size", batch_size, at_least=1)
        self._seed = check.integer("seed", seed)
        check.instance("members", members, Members)
        self._members = members
        site = members.site
        self._rank, self._ranks = (0, 1) if site is None else (site.rank, site.size)
        if batch_size % self._ranks:
            raise ValueError(
                f"batch_size={batch_size} is of the whole site, and its {self._ranks} ranks must "
                "get equally many samples: give a multiple"
            )

    def __iter__(self) -> Iterator[list[int]]:
        step = self._members.step
        while True:
            step = max(step, self._members.step)
            samples = self.batch(step, self._members.rank, self._members.generation)
            yield samples[self._rank :: self._ranks]
            step += 1

    def batch(self, step: int, rank: int, generation: int) -> list[int]:
        """The samples of one step.

        Args:
            step: Of the run, from 0.
            rank: Of a member.
            generation: Of the members.
        """
        text = f"{self._seed} {step} {rank} {generation}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        source = torch.Generator().manual_seed(seed)
        drawn: list[int] = torch.randint(
            self._length, (self._batch_size,), generator=source, device="cpu"
        ).tolist()
        return drawn
