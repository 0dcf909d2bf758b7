"""Exchanges among members: groups whose ranks change between two agreements."""

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.comm import Group, Pending, Regrouped, is_alone, require_mesh
from thinwire.comm.member_groups import MemberGroups
from thinwire.comm.private import forget_ended, in_flight
from thinwire.comm.waiting import own_deadlines, progressed, whole_s
from thinwire.errors import Evicted, PeerLost, PeerStalled, ThinwireError
from thinwire.members.closing import ClosingVote, Late
from thinwire.members.generation import Generation, packed, unpacked
from thinwire.members.kv import KeyValueView
from thinwire.members.membership import Membership
from thinwire.members.watcher import BUSY_BEAT_S, Terms

AWAY = Evicted, Late, PeerLost, PeerStalled
"""Errors of a member that was away: it reached nobody, or the others continued without it."""
_T = TypeVar("_T")


class ElasticGroup(Group):
    """The ranks of the generation that this member is bound to."""

    # an agreement that one member has received is valid for all; else it is repeated. An
    # interrupted exchange raises `Regrouped`: the caller repeats it

    static_membership = False
    _advice = ""

    def __init__(self, membership: Membership, kv: KeyValueView, terms: Terms) -> None:
        self.membership = membership
        self._begin(terms.timeout_s)
        self._kv = kv
        self._terms = terms
        self.on_rebind: list[Callable[[], None]] = []
        self.bound: Generation | None = None
        self.pending_after: int | None = None
        self._attempt: int | None = None
        self.come_back: Callable[[ThinwireError], None] | None = None
        """Enters the run again after an error of `AWAY`, or raises it; None before any step."""
        self._in_call = False
        self._regroup_s = 0.0
        if membership.generation is not None:
            self.bind_latest()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def answer_index(self) -> int:
        membership = self.membership
        return membership.agreed.voters.index(membership.own_id)

    def leave_out(self, ranks: Sequence[int]) -> bool:
        now = self.bound
        if now is None or not ranks:
            return False
        odd = {self.membership.agreed.voters[rank] for rank in ranks}
        ids = [one for one in now.ids if one not in odd]
        self.membership.change_members(now.number, ids, ids)
        self.pending_after = now.number
        return True

    def bind_latest(self) -> int:
        """Bind to the last generation, waiting for a pending one; return its number."""
        if self.pending_after is not None:
            self._wait_for_next(self.pending_after)
            self.pending_after = None
        now = self.membership.current()
        if now is not self.bound:
            self._bind(now)
        return now.number

    def _bind(self, now: Generation) -> None:
        first = self.bound is None
        self.bound = now
        self._use(now, str(now.number))
        forget_ended()
        progressed()  # an interrupted wait does not count against the remaining members
        if not first:
            for callback in self.on_rebind:
                callback()

    def _use(self, now: Generation, name: str) -> None:
        """Exchange with these members from now on; `name` is that of no others."""
        self.rank = now.rank
        self.size = now.size
        groups: Any = now.groups  # it has the attributes of a Private that Group uses
        self._shared = groups
        self.relayed = groups is not None and groups.relayed
        self.copies = groups.copies if self.relayed else 1
        key = self.membership.kv.store.key_for("exchange", name)
        if key and now.macs is None:
            self.authenticate(key)
            now.macs = self.macs, self._agreement_macs
        self.macs, self._agreement_macs = now.macs or (None, None)

    def _leave_out_late(self) -> None:
        """Exchange with the members that make the present round alone."""
        membership, now = self.membership, self.bound
        if now is None or (ids := now.present_ids(membership.present)) == now.ids:
            return
        name = f"{now.number}/{membership.agreed.vote}"
        if now.present is None or now.present.ids != ids:
            present = Generation(now.number, ids, ids.index(membership.own_id), now.continuing)
            if present.size > 1:
                where = self._kv.store.under(f"gloo/{name}"), present.rank, present.size
                limits = membership.connecting_s, self._terms.endpoint
                make = partial(MemberGroups, *where, *limits)
                present.groups = self._in_generation(now.number, make)
            with membership.changed:
                now.present = present
                if membership.frozen:  # its waits were to be ended before it was there
                    present.disconnect()
        self._use(now.present, name)

    def is_exchanging(self) -> bool:
        return self._shared is not None and in_flight([self._shared.group, *self._shared.more])

    @contextmanager
    def one_deadline(self) -> Iterator[None]:
        """Enclose a call; nothing is exchanged outside.

        A member that was away enters the run again, and the outermost block ends there: the others
        have made the rest of it. One that was late ends the innermost block.
        """
        outermost = not self._in_call
        self._in_call = True
        try:
            with super().one_deadline():
                yield
        except AWAY as error:
            # others wait for the rest of the call of one that was only late
            ends_here = outermost or isinstance(error, Late)
            if self.come_back is None or not ends_here:
                raise
            self.come_back(error)
        finally:
            self._in_call = not outermost

    @contextmanager
    def one_attempt(self) -> Iterator[None]:
        self._attempt = self.bind_latest()
        self._leave_out_late()
        try:
            yield
        finally:
            self._attempt = None

    @contextmanager
    def as_if(self, rank: int, size: int) -> Iterator[None]:
        """Act as another member, to replay the messages that it received."""
        own = (self.rank, self.size)
        self.rank = rank
        self.size = size
        try:
            yield
        finally:
            self.rank, self.size = own

    def launch_bytes(
        self, payload: bytes, *, action: str, common: bytes | None = None
    ) -> Pending[list[bytes]]:
        assert self._in_call or self.come_back is None, f"{action}: outside of one_deadline"
        return Pending.started(self._voting(payload, action))

    def _voting(self, payload: bytes, action: str) -> Generator[None, None, list[bytes]]:
        """Repeat an agreement until it counts; pause whenever it has been launched."""
        if self.bound is None and self.pending_after is None:
            return [payload]
        membership, attempt = self.membership, self._attempt
        vote = membership.agreed.vote + 1
        closing = self._at_host(vote, payload) if attempt is None else None
        try:
            while True:
                # another member may have received all answers: then they are in the store
                if (known := membership.accept_recorded(vote)) is not None:
                    return self._taken(known)
                number = self.bind_latest()
                if attempt not in (None, number):
                    raise Regrouped
                self._take_back_late(attempt)
                try:
                    if closing is not None and closing.launch():
                        yield
                        if (answers := self._closed(closing, action)) is not None:
                            return self._taken(answers)
                        continue
                    gathered = super().launch_bytes(payload, action=action)
                    yield
                    answers = [row for row in gathered.wait() if row is not None]
                except Regrouped:
                    continue
                if membership.accept_agreement(number, vote, answers):
                    return answers
                self._wait_for_next(number)
        except Evicted:
            # the others may have used the answer of this member, which then takes the result too
            if (known := membership.missed(vote)) is None:
                raise
            return known

    def _at_host(self, vote: int, payload: bytes) -> ClosingVote | None:
        """Return an agreement of all members at the host; None if they agree by themselves."""
        self.membership.present = None
        grace_s = self._terms.grace_seconds
        if grace_s is None:
            return None
        least = self._terms.min_members if self.early else None
        self.early = False
        return ClosingVote(self._kv, self.membership, vote, payload, grace_s, least)

    def _take_back_late(self, attempt: int | None) -> None:
        """Exchange with all members again, unless in an attempt of a round."""
        now = self.bound
        if attempt is None and now is not None and now.present is not None:
            if now.present.rank == 0:
                with suppress(PeerLost, PeerStalled):  # the host need not be there
                    self._kv.call(lambda: self._kv.store.drop(f"gloo/{now.number}/"))
            now.release_present()
            self._use(now, str(now.number))

    def _closed(self, closing: ClosingVote, action: str) -> list[bytes] | None:
        """Wait for an agreement at the host; None if the host ends meanwhile."""
        awaited = "host", True, closing.vote
        wait = partial(self._wait_for_all, [closing], action, awaited, by_gloo=True)
        self._in_generation(self.membership.current().number, wait)
        if closing.error is not None:
            raise closing.error
        return closing.answers

    def _taken(self, answers: list[bytes]) -> list[bytes]:
        """Return the answers of an agreement, if this member was in time for it."""
        membership = self.membership
        voters = membership.agreed.voters
        if membership.own_id not in voters:
            raise Late
        now = membership.current()
        missing = [one for one in now.ids if one not in voters]
        membership.present = voters if missing else None
        if any(map(membership.watcher.is_gone, missing)):
            membership.report_broken(now.number, f"no heartbeat of {', '.join(missing)}")
        return answers

    def _launched(self, *exchange: Any, **options: Any) -> Pending[Tensor]:
        number = -1 if self.bound is None else self.bound.number
        launch = partial(super()._launched, *exchange, **options)
        pending = self._in_generation(number, launch)

        def finish() -> Tensor:
            if self.membership.current().number != number:
                raise Regrouped
            return self._in_generation(number, pending.wait)

        return Pending(finish)

    @property
    def _ask_before_s(self) -> float:  # type: ignore[override]
        # the answer takes this long where a member is silent, and the time-out is to be kept
        return min(BUSY_BEAT_S, self.timeout_s / 2)

    def _extension_s(self) -> float:
        return self.membership.extension_s(whole_s(self.timeout_s))

    def _in_generation(self, number: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`; if it fails wait for the next generation: `Regrouped`."""
        # outside of the handler: an error of the next generation stands alone
        try:
            return work()
        except ThinwireError as error:
            broken = str(error)
        self.membership.report_broken(number, broken)
        self._wait_for_next(number)
        raise Regrouped

    def _wait_for_next(self, number: int) -> None:
        begun_s = time.perf_counter()
        try:
            self.membership.wait_for_next(number)
        finally:
            self._regroup_s += time.perf_counter() - begun_s

    def take_regroup_s(self) -> float:
        taken = self._regroup_s
        self._regroup_s = 0.0
        return taken


_SITE_TIMEOUTS = 3
"""Time-outs for which ranks of a site wait for each other: one of them may regroup meanwhile."""
_CONNECT_S = 120.0
_END = "the end"


class SingleRank:
    """Site of one rank, which holds the whole model."""

    mesh: DeviceMesh | None = None
    rank = 0
    size = 1

    def gather_values(self, action: str, value: Any) -> list[Any]:
        return [value]

    def broadcast_value(self, action: str, value: Any) -> Any:
        return self.gather_values(action, value if self.rank == 0 else None)[0]

    def announce_end(self, error: ThinwireError) -> None:
        """Tell the other ranks of the site, wherever they wait, why this one ends. Does so once."""

    @contextmanager
    def raising_together(self, action: str) -> Iterator[None]:
        """Raise the error of this rank in the block, or else of another rank of the site."""
        problem: ThinwireError | None = None
        try:
            yield
        except ThinwireError as error:
            problem = error
        texts = self.gather_values(action, None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text is not None:
                raise PeerLost(f"{action}: rank {rank} of this site: {text}")


class Site(SingleRank):
    """The ranks of this site, all ranks of its job, which hold a model in shards."""

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
                f"mesh has {sites} sites, but a member is one site: start every site as a job of "
                "its own, with a mesh of (1, shards) over its ranks"
            )
        self.mesh = mesh
        self.ranks = Group(mesh.get_group("shard"), _SITE_TIMEOUTS * timeout_s + _CONNECT_S)
        self.ranks.one_site = True
        self.rank = self.ranks.rank
        self.size = self.ranks.size
        self._ended = False

    def gather_values(self, action: str, value: Any) -> list[Any]:
        report = json.dumps([action, value], separators=(",", ":")).encode()
        ended = self._ended
        self._ended = True
        with own_deadlines():
            answers = self.ranks.gather_bytes(report, action=f"{action}, inside the site")
        rows = [json.loads(answer) for answer in answers]
        for rank, (occasion, text) in enumerate(rows):
            if occasion == _END != action:
                raise PeerLost(f"{action}: rank {rank} of this site has ended: {text}")
            if occasion != action:
                raise ThinwireError(
                    f"{action}: rank {rank} of this site makes another call ({occasion}). Make the "
                    "same calls in the same order on all ranks; restart the site"
                )
        self._ended = ended
        return [value for _, value in rows]

    def announce_end(self, error: ThinwireError) -> None:
        if not self._ended:
            with suppress(ThinwireError):
                self.gather_values(_END, f"{type(error).__name__}: {error}")
            self._ended = True


class SiteGroup(Group):
    """The ranks of all sites that take part."""

    # first the ranks of one shard agree across the sites, then the ranks of each site exchange the
    # answers that they received: one shard may have a lost site's answer and another not. Such a
    # site is left out everywhere; its data may still be in the mean of one shard. Ranks are ordered
    # by site, then by shard

    static_membership = False

    def __init__(self, site: Site, shard_group: ElasticGroup) -> None:
        self._begin(shard_group.timeout_s)
        self.site = site
        self.shards = site.ranks
        self.replicas = shard_group
        self._shard_group = shard_group
        self._received_ids = [shard_group.membership.own_id]

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._shard_group.rank * self.site.size + self.site.rank

    def one_deadline(self) -> AbstractContextManager[None]:
        return self._shard_group.one_deadline()

    def take_regroup_s(self) -> float:
        return self._shard_group.take_regroup_s()

    @property
    def parts(self) -> list[int]:  # type: ignore[override]
        """Shard of each of the last answers; a lost site gave none."""
        return list(range(self.site.size)) * len(self._received_ids)

    @property
    def answer_index(self) -> int:
        site = self._received_ids.index(self._shard_group.membership.own_id)
        return site * self.site.size + self.site.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._shard_group.size * self.site.size

    @contextmanager
    def one_attempt(self) -> Iterator[None]:
        with self._announcing_end(), self._shard_group.one_attempt():
            yield

    @contextmanager
    def _announcing_end(self) -> Iterator[None]:
        try:
            yield
        except ThinwireError as error:
            if self._shard_group.membership.end_reason is not None:
                self.site.announce_end(error)
            raise

    def launch_bytes(
        self, payload: bytes, *, action: str, common: bytes | None = None
    ) -> Pending[list[bytes]]:
        with self._announcing_end():
            gathered = self._shard_group.launch_bytes(payload, action=action)

        def common_answers() -> list[bytes]:
            with self._announcing_end():
                answers = gathered.wait()
            ids = self._shard_group.membership.agreed.voters
            all_equal = len(set(answers)) == 1
            report = {"ids": ids, "answers": packed(answers[:1] if all_equal else answers)}
            received = [
                dict(zip(r["ids"], cycle(unpacked(r["answers"])), strict=False))
                for r in self.site.gather_values(action, report)
            ]
            # a site counts only if the ranks of every shard have received its answer
            self._received_ids = [site for site in received[0] if all(site in r for r in received)]
            return [by_site[site] for site in self._received_ids for by_site in received]

        return Pending(common_answers)
