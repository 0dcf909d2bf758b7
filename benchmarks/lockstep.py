"""K ranks in one process: local updates with the library's own changes, codes, error feedback and
outer step, on replicas that take turns.

Each rank's averaging runs in a thread of its own, of which one works at a time: it goes on where
all have given their part of a collective.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from thinwire._names import named_parameters
from thinwire.comm import Pending, Sources
from thinwire.local.averaging import Averaging
from thinwire.local.config import LocalSGD

T = TypeVar("T")


class Ranks:
    """The ranks of one process, and their parts of each collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self._given: dict[int, list[Tensor | None]] = {}
        self._left: dict[int, int] = {}
        self._failed = False
        self._threads = ThreadPoolExecutor(size)

    def run(self, work: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
        """Run `work(rank)` of these ranks together; raise the first error.

        Afterwards no collective is pending, with or without an error.
        """
        self._failed, self.size = False, len(ranks)
        futures = [self._threads.submit(self._worked, work, rank) for rank in ranks]
        wait(futures)
        try:
            return [future.result() for future in futures]
        finally:
            self._given.clear()
            self._left.clear()

    def _worked(self, work: Callable[[int], T], rank: int) -> T:
        with self.condition, torch.no_grad():
            try:
                return work(rank)
            except BaseException:
                self._failed = True
                raise
            finally:
                self.condition.notify_all()

    def give(self, number: int, rank: int, part: Tensor) -> None:
        """Add this rank's part of a collective."""
        self._given.setdefault(number, [None] * self.size)[rank] = part.clone()
        self._left.setdefault(number, self.size)
        self.condition.notify_all()

    def all_of(self, number: int) -> list[Tensor]:
        """Wait for the tensors of all ranks and return them; every rank asks once."""
        parts = self._given[number]
        self.condition.wait_for(lambda: self._failed or all(part is not None for part in parts))
        found = [part for part in parts if part is not None]
        if len(found) < self.size:
            raise RuntimeError("another rank of this process has failed")
        self._left[number] -= 1
        if not self._left[number]:
            del self._given[number], self._left[number]
        return found


class Rank:
    """One rank, instead of a `Group`."""

    node_size = 1
    macs = None

    def __init__(self, ranks: Ranks) -> None:
        self.bytes_sent = 0
        self._ranks = ranks

    def begin_round(self, rank: int, size: int) -> None:
        """Be one of the ranks that take part."""
        self.rank, self.size, self._calls = rank, size, 0

    def all_gather(self, message: Tensor, *, action: str) -> Pending[Tensor]:
        """See `Group`."""
        return self._given(message, torch.stack)

    def all_to_all(self, parts: Tensor, lengths: Sequence[int], *, action: str) -> Pending[Tensor]:
        """See `Group`."""
        begin = sum(lengths[: self.rank])
        end = begin + lengths[self.rank]
        return self._given(parts, lambda given: torch.stack([part[begin:end] for part in given]))

    def all_reduce_(self, buffer: Tensor, *, action: str) -> Pending[Tensor]:
        """See `Group`; sums in the order of the ranks."""

        def summed(given: list[Tensor]) -> Tensor:
            buffer.copy_(given[0])
            for part in given[1:]:
                buffer.add_(part)
            return buffer

        return self._given(buffer, summed)

    def _given(self, part: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Pending[Tensor]:
        number, self._calls = self._calls, self._calls + 1
        self.bytes_sent += part.numel() * part.element_size()
        self._ranks.give(number, self.rank, part)
        return Pending(lambda: join(self._ranks.all_of(number)))


class LocalRanks:
    """`local_sgd` of K models in one process: call `step` after every rank's local step, `flush`
    in the end.

    Args:
        models: Equal in the beginning, one a rank.
        config: Its interval, first steps, outer rule and compression count; fragments, delay,
            optimizer state, nodes and rounds by time are refused.

    Attributes:
        late: Ranks without which a round closes, by the number of the round.
        late_change: "residual" adds a late rank's change to its residual, "kept" leaves it in the
            parameters, "dropped" drops it.
        late_weight: Divisor of a round's sum of changes: "list" counts its ranks, "work" the rounds
            that their changes come from.
    """

    def __init__(self, models: Sequence[nn.Module], config: LocalSGD) -> None:
        plain = LocalSGD(
            config.k_steps,
            config.begin_step,
            outer_lr=config.outer_lr,
            outer_momentum=config.outer_momentum,
            outer_nesterov=config.outer_nesterov,
            compression=config.compression,
        )
        if config != plain:
            raise ValueError(f"not in one process: {config}")
        self.config, self.steps, self.rounds, self._last = config, 0, 0, 0
        self.late: Callable[[int], Collection[int]] = lambda _: ()
        self.late_change: Literal["residual", "kept", "dropped"] = "residual"
        self.late_weight: Literal["list", "work"] = "list"
        self._work = [0] * len(models)
        self._ranks = Ranks(len(models))
        self._params = [
            {name: p for name, p in named_parameters(model) if p.requires_grad} for model in models
        ]
        self._buffers = [
            {f"buffer {name}": b for name, b in model.named_buffers() if b.is_floating_point()}
            for model in models
        ]
        self.ranks = [Rank(self._ranks) for _ in models]
        self.averagings = [
            Averaging(cast("Sources", rank), params, config, config.compression)
            for rank, params in zip(self.ranks, self._params, strict=True)
        ]

    @property
    def synced(self) -> bool:
        """True if all models are equal."""
        return self._last == self.steps

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the state of every averaging: the live tensors."""
        return {
            "counters": [self.steps, self.rounds, self._last],
            "ranks": [
                [averaging.anchors, averaging.momentum, averaging.kept, {"": averaging.sketches}]
                for averaging in self.averagings
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; models are loaded by themselves."""
        self.steps, self.rounds, self._last = state["counters"]
        for own, loaded in zip(self.state_dict()["ranks"], state["ranks"], strict=True):
            _copy_(own, loaded)

    def step(self) -> None:
        """Count a local step of every rank; average when the interval is over."""
        self.steps += 1
        if self.steps <= self.config.begin_step or self.steps - self._last >= self.config.k_steps:
            self._average()

    def flush(self) -> None:
        """Average the steps since the last averaging."""
        if not self.synced:
            self._average()

    def _average(self) -> None:
        late = self.late(self.rounds)
        present = [rank for rank in range(len(self.ranks)) if rank not in late]
        self._work = [rounds + 1 for rounds in self._work]
        for index, rank in enumerate(present):
            self.ranks[rank].begin_round(index, len(present))
        work = sum(self._work[rank] for rank in present) / len(present)
        share = work if self.late_weight == "work" else 1.0
        self._ranks.run(lambda rank: self._averaged(rank, share), present)
        for rank in present:
            self._work[rank] = 0
        for rank in late:
            self._follow_(rank, present[0])
        self._last = self.steps
        self.rounds += 1

    @torch.no_grad()
    def _follow_(self, late: int, present: int) -> None:
        """Take the anchors of a rank that averaged."""
        own, other = self.averagings[late], self.averagings[present]
        for name, param in self._params[late].items():
            change = own.anchors[name] - param
            if self.late_change == "residual":
                own.errors[name] += change
            new = other.anchors[name]
            param.copy_(new - change if self.late_change == "kept" else new)
        if self.late_change == "dropped":
            self._work[late] = 0
        _copy_(own.anchors, other.anchors)
        _copy_(own.momentum, other.momentum)
        _copy_(own.sketches, other.sketches)
        _copy_(self._buffers[late], self._buffers[present])

    def _averaged(self, rank: int, share: float) -> None:
        averaging, buffers = self.averagings[rank], self._buffers[rank]
        pending = averaging.measure(self.steps, self._params[rank], buffers)
        if (bad := pending.first_not_finite({})) is not None:
            raise FloatingPointError(f"{bad} is not finite at step {self.steps}")
        pending.share = share
        averaging.launch(pending)
        pending.round.finish()
        averaging.commit_(pending, buffers)


def _copy_(own: Any, loaded: Any) -> None:
    """Copy tensors of nested lists and dictionaries."""
    if isinstance(own, Tensor):
        own.copy_(loaded)
        return
    for key in own if isinstance(own, dict) else range(len(own)):
        _copy_(own[key], loaded[key])
