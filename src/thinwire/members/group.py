"""The exchange among members: groups whose ranks change between two agreements, of members that
are one rank each, or sites of ranks which hold a model in shards and come and go together.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import Group, Pending, Regrouped, is_alone, require_mesh
from thinwire.comm.private import forget_ended
from thinwire.comm.waiting import own_deadlines, progressed, whole_s
from thinwire.errors import PayloadCorrupt, PeerLost, ThinwireError
from thinwire.members.generation import Generation, packed, unpacked
from thinwire.members.keeper import AWAY_S, Keeper

if TYPE_CHECKING:
    from thinwire.comm.private import Private

__all__ = ["ElasticGroup", "OneRank", "Site", "SiteGroup"]


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
        self._shared, self.relayed = shared, groups is not None and groups.relayed
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

    def _launched(self, *exchange: Any, **options: Any) -> Pending[Tensor]:
        number = self.number
        try:
            pending = super()._launched(*exchange, **options)
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


_PATIENCE = 3
"""Time-outs for which the ranks of a site wait for each other: one of them may regroup meanwhile,
with the members that hold its shard."""
_BUILDS_S = 120.0
_END = "the end"


class OneRank:
    """A site of one rank, whose model is whole."""

    mesh: DeviceMesh | None = None
    rank, size = 0, 1

    def all_say(self, what: str, value: Any) -> list[Any]:
        """What every rank of the site says on an occasion, in rank order, as JSON holds it.

        Raises:
            ThinwireError: A rank of the site speaks on another occasion.
            PeerLost, PeerStalled: One of them has gone, or says that it ends.
        """
        return [value]

    def first_says(self, what: str, value: Any) -> Any:
        """What the first rank of the site says; the others give anything."""
        return self.all_say(what, value if self.rank == 0 else None)[0]

    def tell_end(self, error: ThinwireError) -> None:
        """Tell the other ranks of the site, wherever they wait for this one, why it ends; once."""

    def require_none(self, what: str, problem: ThinwireError | None) -> None:
        """Raise this rank's problem, or tell of that of another rank of the site.

        Raises:
            ThinwireError: `problem`; or PeerLost.
        """
        told = self.all_say(what, None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(told):
            if text is not None:
                raise PeerLost(f"{what}: rank {rank} of this site: {text}")


class Site(OneRank):
    """The ranks of this site, all those of its job.

    Args:
        mesh: Of one site: (1, shards), with the dimensions "replicate" and "shard".
        timeout_s: Of the members.

    Attributes:
        mesh: As given.
        ranks: The ranks of the site.

    Raises:
        TypeError, ValueError: See `require_mesh`; or it has several sites.

    Communication: making the first one over a mesh is collective over its ranks.
    """

    def __init__(self, mesh: DeviceMesh, timeout_s: float) -> None:
        if is_alone():
            raise ValueError(
                "mesh was given but torch.distributed is not initialized: call init_process_group "
                "first, for the ranks of this site alone"
            )
        require_mesh(mesh)
        sites = mesh.size(0)
        if sites != 1:
            raise ValueError(
                f"mesh has {sites} sites, and a member is one: start every site as a job of its "
                "own, with a mesh of (1, shards) over its ranks"
            )
        self.mesh = mesh
        self.ranks = Group(mesh.get_group("shard"), _PATIENCE * timeout_s + _BUILDS_S)
        self._over = False
        """Whether the ranks have lost each other: nothing is told any more."""

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Of this process in the site, which is the number of its shard."""
        return self.ranks.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Shards."""
        return self.ranks.size

    def all_say(self, what: str, value: Any) -> list[Any]:
        said = json.dumps([what, value], separators=(",", ":")).encode()
        over, self._over = self._over, True
        with own_deadlines():
            answers = self.ranks.gather_bytes(said, what=f"{what}, inside the site")
        rows = [json.loads(answer) for answer in answers]
        for rank, (occasion, text) in enumerate(rows):
            if occasion == _END != what:
                raise PeerLost(f"{what}: rank {rank} of this site has ended: {text}")
            if occasion != what:
                raise ThinwireError(
                    f"{what}: rank {rank} of this site is at another place ({occasion}). All of "
                    "them must make the same calls in the same order; start the site again"
                )
        self._over = over
        return [value for _, value in rows]

    def tell_end(self, error: ThinwireError) -> None:
        if not self._over:
            with contextlib.suppress(ThinwireError):
                self.all_say(_END, f"{type(error).__name__}: {error}")
            self._over = True


class SiteGroup(Group):
    """All ranks of all sites that take part, as far as they agree with each other.

    Those that hold the same shard agree among themselves, at every site: an agreement that breaks
    off is theirs to make again, see `ElasticGroup`. Once it has come about the ranks of each site
    tell each other what they have heard. A site that was lost may have been heard by those of one
    shard and not of another: it counts nowhere then, so that all judge the same answers. What it
    had sent may still be in the mean of one shard.

    Its ranks are those of the first site by their shards, those of the second, and so on.
    """

    stays = False

    def __init__(self, site: Site, lane: ElasticGroup) -> None:
        self._begin(lane.timeout_s)
        self.site, self.shards, self.replicas = site, site.ranks, lane
        self._lane, self._heard = lane, [lane.keeper.me]

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Of this process."""
        return self._lane.rank * self.site.size + self.site.rank

    @property
    def parts(self) -> list[int]:  # type: ignore[override]
        """Of each of the last answers the shard of its rank; a site that was lost gave none."""
        return list(range(self.site.size)) * len(self._heard)

    @property
    def place(self) -> int:
        return self._heard.index(self._lane.keeper.me) * self.site.size + self.site.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        """Ranks of all sites."""
        return self._lane.size * self.site.size

    @contextlib.contextmanager
    def one_attempt(self) -> Iterator[None]:
        with self._ending_together(), self._lane.one_attempt():
            yield

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Where this rank cannot go on among the members, its site cannot."""
        try:
            yield
        except ThinwireError as error:
            if self._lane.keeper.end is not None:
                self.site.tell_end(error)
            raise

    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """As `Group.gather_bytes`, of the sites that every rank of this one has heard."""
        with self._ending_together():
            answers = self._lane.gather_bytes(payload, what=what)
        ids = self._lane.keeper.voters
        alike = len(set(answers)) == 1
        told = {"ids": ids, "answers": packed(answers[:1] if alike else answers)}
        lanes = self.site.all_say(what, told)
        heard = [dict(zip(lane["ids"], _answers_of(lane), strict=True)) for lane in lanes]
        self._heard = [each for each in heard[0] if all(each in lane for lane in heard)]
        return [lane[each] for each in self._heard for lane in heard]


def _answers_of(lane: dict[str, Any]) -> list[bytes]:
    answers = unpacked(lane["answers"])
    return answers * len(lane["ids"]) if len(answers) == 1 else answers
