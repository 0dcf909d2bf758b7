"""A sampler that gives each sample of a dataset to exactly one rank."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from thinwire import _validate as check
from thinwire.comm import rank_and_size_in, require_process_group
from thinwire.members.members import Members, member_of

_KEYS = ("length", "seed", "shuffle", "epoch", "dealt", "dealt_beyond", "left_before")
"""Keys of a state."""
Taken = tuple[int, int]
"""Epoch of a rank, and the samples that it has taken since the last distribution."""


class ShardedSampler(Sampler[int]):
    """Gives each sample of an epoch to exactly one rank: `DataLoader(data, 32, sampler=...)`.

    All ranks draw the same order from the epoch number and the seed, and take samples from it
    round-robin. No sample is repeated or left out. `DistributedSampler` repeats some samples to
    give all ranks equally many; here ranks may differ by one sample, hence by one batch. Train
    inside `engine.join()`, or give a loader with `drop_last=True` a length that fits. If two ranks
    have equal batches all the same, their first exchanges notice it and warn.

    A new iteration continues where the last one ended, and begins the next epoch after the end of
    one. `state_dict` holds the progress of all ranks together, if each has taken equally many
    samples; with members, of any number, as of the last averaging. Another number of ranks can
    resume from it, also in the middle of an epoch. Loader workers take samples ahead: a sample that
    was drawn but not yet trained on counts as taken.

    With members that join and leave, the rest of the epoch is distributed again at the end of each
    round that changes the membership. So are the samples that a lost member took after the last
    averaging: its changes since then are lost, and another member trains on them.

    Example::

        sampler = tw.ShardedSampler(data, seed=1)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        ...
        engine.save("run", extra={"sampler": sampler})
        engine.load("run")
        sampler.load_state_dict(engine.extra["sampler"])

    Args:
        data: Any object with a length, the same on all ranks.
        seed: Seed of the order; the same on all ranks.
        shuffle: True if each epoch has its own order; False keeps the order of the data.
        group: The ranks that share the data; None for all of them.
        members: The value that `thinwire.join` returned, instead of `group`. All members make their
            samplers in the same order, before `local_sgd` or `prepare` is given the members.

    Raises:
        TypeError, ValueError: An argument of another kind, or data without a sample; `group` and
            `members` both.
    """

    def __init__(
        self,
        data: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group: dist.ProcessGroup | None = None,
        members: Members | None = None,
    ) -> None:
        check.instance("data", data, Sized, advice="with a length")
        self._length = check.integer("len(data)", len(data), at_least=1)
        self._seed = check.integer("seed", seed, at_least=0)
        self._shuffle = check.boolean("shuffle", shuffle)
        require_process_group(group)
        self._epoch = self._taken = self._start = 0
        self._orders: dict[int, list[int]] = {}
        self._lefts: dict[int, list[int]] = {}
        self._rank, self._ranks = rank_and_size_in(group)
        self._member = member = member_of(members)
        if member is not None:
            if group is not None:
                raise ValueError("group and members both say who shares the data: give one")
            member.register_sampler(self, self._progress)
            self._rank, self._ranks = member.sharing_rank_and_size

    @property
    def epoch(self) -> int:
        """Current epoch, or the next one between epochs; from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, unless it is the current one. For loops that call
        `DistributedSampler.set_epoch`. Members count epochs together: there the
        next one begins if this member has taken its part of the current one.
        """
        epoch = check.integer("epoch", epoch, at_least=0)
        if self._member is not None:
            left = not self._taken or self._next < len(self._left(self._epoch))
            epoch = self._epoch if left else self._epoch + 1
        if self._start == self._epoch and self._taken == 0:
            self._start = epoch
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._taken = 0

    def __len__(self) -> int:
        """Return the number of this rank's samples that are left in the epoch."""
        return len(range(self._next, len(self._left(self._epoch)), self._ranks))

    def __iter__(self) -> Iterator[int]:
        epoch = self._epoch
        # read for each sample: a new membership may change epoch, rank and order between two
        while epoch == self._epoch and self._next < len(self._left(epoch)):
            position = self._left(epoch)[self._next]
            self._taken += 1
            yield self._sample(epoch, position)
        if epoch == self._epoch:
            self._begin(epoch + 1)

    @property
    def _next(self) -> int:
        """Position of this rank's next sample in the remaining samples."""
        return self._taken * self._ranks + self._rank

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(self._length))
            if self._shuffle:
                # close numbers give distant seeds, 63 bits wide
                mixed = self._seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03
                source = torch.Generator().manual_seed(mixed % (1 << 63))
                order = torch.randperm(self._length, generator=source, device="cpu").tolist()
            kept = {e: known for e, known in self._orders.items() if e == epoch - 1}
            self._orders = kept | {epoch: order}
        return self._orders[epoch]

    def _left(self, epoch: int) -> Sequence[int]:
        """Return the samples that ranks share in an epoch, as positions in its order. `~sample`
        marks a sample left over from the epoch before.
        """
        return self._lefts.get(epoch, range(self._length))

    def _sample(self, epoch: int, position: int) -> int:
        return ~position if position < 0 else self._order(epoch)[position]

    def _progress(self) -> Taken:
        """Return this rank's progress, for the other ranks."""
        return self._epoch, self._taken

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of all ranks together, if they have taken equally many samples: plain
        values. Members may have taken any number; their progress is that at the last averaging.
        """
        same: list[Taken | None] = [self._progress()] * self._ranks
        taken = same if self._member is None else self._member.taken_of(self)
        known = [report or (self._start, 0) for report in taken]
        top = max(epoch for epoch, _ in known)
        left: list[int] = []  # of all epochs until the latest of any rank
        for epoch in range(min(epoch for epoch, _ in known), top + 1):
            for at, position in enumerate(self._left(epoch)):
                # position `at` belongs to rank `at % n`, as its sample number `at // n`
                own, count = known[at % len(known)]
                if own < epoch or (own == epoch and at // len(taken) >= count):
                    left.append(position if epoch == top else ~self._sample(epoch, position))
        positions = [position for position in left if position >= 0]
        first = min(positions, default=self._length)
        return {
            "length": self._length,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": top,
            "dealt": first,
            "dealt_beyond": sorted(set(range(first, self._length)).difference(positions)),
            "left_before": [~position for position in left if position < 0],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` of any number of ranks. All ranks load the same one.

        Raises:
            TypeError: `state` is no mapping.
            ValueError: The state is of other data, or of no sampler; nothing has changed.
        """
        check.instance("state", state, Mapping)
        if state.keys() != set(_KEYS):
            raise ValueError(
                f"the state of a ShardedSampler has the keys {list(_KEYS)}, got {list(state)}"
            )
        if state["length"] != self._length:
            raise ValueError(
                f"the state is of {state['length']} samples, and the data here have "
                f"{self._length}: give the same data"
            )
        seed, epoch, dealt = (
            check.integer(key, state[key], at_least=0) for key in ("seed", "epoch", "dealt")
        )
        gone = set(state["dealt_beyond"])
        left = [~sample for sample in state["left_before"]]
        left += [position for position in range(dealt, self._length) if position not in gone]
        self._shuffle = check.boolean("shuffle", state["shuffle"])
        self._seed = seed
        self._orders = {}
        # an epoch of which nothing is left is over
        self._lefts = {epoch: left} if left else {}
        self._epoch = self._start = epoch if left else epoch + 1
        self._taken = 0
        if self._member is not None:
            self._rank, self._ranks = self._member.sharing_rank_and_size
