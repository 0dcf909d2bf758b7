"""The exchange among members: a group whose ranks change between two agreements."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.comm import Group, Pending, Regrouped
from thinwire.comm.private import forget_ended
from thinwire.comm.waiting import progressed, whole_s
from thinwire.errors import PayloadCorrupt, ThinwireError
from thinwire.members.generation import Generation
from thinwire.members.keeper import AWAY_S, Keeper

if TYPE_CHECKING:
    from thinwire.comm.private import Private

__all__ = ["ElasticGroup"]


class ElasticGroup(Group):
    """The ranks of the generation that this member has taken up.

    An agreement that breaks off is made again by those who are left, unless one of them has heard
    it to its end: then it holds for all. An exchange that breaks off is `Regrouped`: the caller
    makes it again.

    Attributes:
        bound: The generation that was taken up.
        on_rebind: Called once this member has taken up another generation.
        over: The generation after which the next one has been agreed on, and is being connected
            beside the training; -1 for a newcomer. None where none is awaited.
    """

    stays = False

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._begin(keeper.timeout_s)
        self.on_rebind: list[Callable[[], None]] = []
        self.bound: Generation | None = None
        self.over: int | None = None
        self._attempt: int | None = None
        if keeper.generation is not None:
            self.take_up()

    @property
    def device(self) -> torch.device:
        """See `Group.device`."""
        return torch.device("cpu")

    @property
    def global_ranks(self) -> list[int]:
        """See `Group.global_ranks`: the members of the generation."""
        return list(range(self.size))

    @property
    def number(self) -> int:
        """Of the generation that was taken up; -1 before the first."""
        return -1 if self.bound is None else self.bound.number

    def take_up(self) -> int:
        """Go on in the last generation that was formed, or in the one that has been agreed on; its
        number.

        Raises:
            Evicted, QuorumLost: This member cannot go on.
        """
        if self.over is not None:
            self.keeper.settle(self.over)
            self.over = None
        now = self.keeper.current()
        if now is not self.bound:
            self._bind(now)
        return now.number

    def _bind(self, now: Generation) -> None:
        first, self.bound = self.bound is None, now
        self.rank, self.size = now.rank, now.size
        groups: Any = now.groups  # it has what Group asks of a Private
        shared: Private | None = groups
        self._shared = shared
        key = self.keeper.board.store.key_for("exchange", str(now.number))
        if key is not None:
            self.prove(key)
        forget_ended()
        progressed()  # a wait that broke off counts against nobody who is left
        if not first:
            for callback in self.on_rebind:
                callback()

    @contextmanager
    def one_attempt(self) -> Iterator[None]:
        """See `Group.one_attempt`."""
        self._attempt = self.take_up()
        try:
            yield
        finally:
            self._attempt = None

    @contextmanager
    def as_if(self, rank: int, size: int) -> Iterator[None]:
        """Stand in the place of another member, to go through what it has heard."""
        mine, self.rank, self.size = (self.rank, self.size), rank, size
        try:
            yield
        finally:
            self.rank, self.size = mine

    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """See `Group.gather_bytes`; numbered, see `Keeper`. A newcomer agrees with itself."""
        if self.bound is None and self.over is None:
            return [payload]
        vote = self.keeper.votes + 1
        while True:
            known = self.keeper.recorded(vote)
            if known is not None:
                return known
            number = self.take_up()
            if self._attempt not in (None, number):
                raise Regrouped
            try:
                answers = super().gather_bytes(payload, what=what)
            except Regrouped:
                continue
            if self.keeper.passed(number, vote, answers):
                return answers
            self.keeper.settle(number)

    def _launched(
        self,
        launches: Sequence[Callable[..., Any]],
        result: Callable[[], Tensor],
        what: str,
        held: Sequence[Tensor],
        *,
        wire_bytes: float,
        rated: bool = True,
        control: bool = False,
    ) -> Pending[Tensor]:
        number = self.number
        try:
            pending = super()._launched(
                launches, result, what, held, wire_bytes=wire_bytes, rated=rated, control=control
            )
        except ThinwireError as error:
            raise self._broken(number, error) from error

        def finish() -> Tensor:
            if self.keeper.current().number != number:
                raise Regrouped
            try:
                return pending.wait()
            except PayloadCorrupt:
                raise
            except ThinwireError as error:
                raise self._broken(number, error) from error

        return Pending(finish)

    @property
    def _asks_ahead_s(self) -> float:  # type: ignore[override]
        # the answer takes this long where a member is silent, and the time-out is to be kept
        return min(AWAY_S, self.timeout_s / 2)

    def _more_s(self) -> float:
        return self.keeper.more_s(whole_s(self.timeout_s))

    def _broken(self, number: int, error: ThinwireError) -> Regrouped:
        self.keeper.broken(number, str(error))
        self.keeper.settle(number)
        return Regrouped()
