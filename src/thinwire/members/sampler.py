"""Batches for members that join and leave."""

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from thinwire import _validate as check
from thinwire.members.members import Members


class MemberSampler(Sampler[list[int]]):
    """Draws the batches of one member, without end: `DataLoader(data, batch_sampler=...)`.

    A batch is a pure function of seed, step of the run, rank and generation, so members need not
    exchange any positions. Samples are drawn with replacement: over len(data) / (batch_size *
    members) steps a sample is seen once on average, and 37 % of the samples are not seen. Changes
    of the membership do not alter that. The batches of a lost member's last round are lost with it.

    A loader with `num_workers` above 0 draws batches ahead: a change of the membership shows that
    many batches later.

    If a member is a site of shards, its rank r gets the samples r, r + shards, r + 2 shards, ... of
    the member's batch.

    Example::

        sampler = tw.MemberSampler(len(data), members, batch_size=32)
        loader = DataLoader(data, batch_sampler=sampler)

    Args:
        length: Number of samples in the dataset.
        members: The members of the run.
        batch_size: Samples per batch of this member; for a site of shards, of all its ranks.
        seed: Seed, the same on all members.

    Raises:
        TypeError, ValueError: An argument is invalid, or the shards do not divide the batch.
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
                f"batch_size={batch_size} is that of the site, and its {self._ranks} ranks must "
                f"get equally many samples: give a multiple of {self._ranks}"
            )

    def __iter__(self) -> Iterator[list[int]]:
        step = self._members.step
        while True:
            step = max(step, self._members.step)
            samples = self.batch(step, self._members.rank, self._members.generation)
            yield samples[self._rank :: self._ranks]
            step += 1

    def batch(self, step: int, rank: int, generation: int) -> list[int]:
        """Return the samples of one step.

        Args:
            step: Step of the run, from 0.
            rank: Rank of the member.
            generation: Generation of the membership.
        """
        text = f"{self._seed} {step} {rank} {generation}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        source = torch.Generator().manual_seed(seed)
        drawn: list[int] = torch.randint(
            self._length, (self._batch_size,), generator=source, device="cpu"
        ).tolist()
        return drawn
