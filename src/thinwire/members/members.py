"""Members of a run: who takes part now, and how one comes and goes."""

import datetime
import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from thinwire import _validate as check
from thinwire.comm import Group
from thinwire.comm.handshake import leaves
from thinwire.comm.relay import RelayPlace, require_relay
from thinwire.comm.waiting import seconds_of
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, PeerStalled, ThinwireError
from thinwire.members.board import Board
from thinwire.members.credentials import parse_address, read_token
from thinwire.members.generation import Generation
from thinwire.members.giving import Given, Giver, Heir, Taker, Way, legacy_number
from thinwire.members.group import ElasticGroup, OneRank, Site, SiteGroup
from thinwire.members.keeper import Keeper
from thinwire.members.meeting import connect, reached_from, require_same
from thinwire.members.relay import relay_key

__all__ = ["Members", "Work", "join"]

_TIMEOUT_S = 60.0
_POLL_S = 0.1
_NEWS_S = 10.0
_LEAVE_S = 2.0
"""For the word of a member that ends by itself."""
_log = logging.getLogger("thinwire")
Said = Mapping[str, Any]


class Work(Protocol):
    """What members do together, as far as newcomers must learn it."""

    def state_for_newcomer(self) -> Given:
        """All that the members hold alike after the last round."""

    def last_round(self) -> Given:
        """What has changed it since the one before."""

    def take(self, given: Given) -> None:
        """Go on from what a member gave."""

    def own_state(self) -> Given | None:
        """What is this member's alone and shall not be lost when it leaves; None for nothing."""

    def inherit(self, given: Given, factor: float) -> None:
        """Add what another member had for its own."""

    @property
    def most_bytes(self) -> int:
        """A bound of the tensors that can be given at once."""


class Shared(Protocol):
    """A sampler whose samples members share; `thinwire.ShardedSampler` is one."""

    @property
    def taken(self) -> tuple[int, int]:
        """What this rank has taken since samples were dealt."""

    def deal(self, taken: Sequence[tuple[int, int]], rank: int, ranks: int) -> None:
        """Deal what is left anew; see there."""

    def state_dict(self) -> Said:
        """What a newcomer needs, right after `deal`."""

    def join_in(self, state: Said, rank: int, ranks: int) -> None:
        """Begin as a newcomer."""


class Members:
    """What `join` returns: the members of a run, of which this process is one.

    Leaving the `with` block ends this member's part; by an error, as one that is lost.
    """

    def __init__(
        self,
        board: Board,
        way: str | RelayPlace,
        timeout_s: float,
        site: OneRank,
        keeper_of: Callable[[Board, str], Keeper],
    ) -> None:
        self._site, self._keeper_of, self.timeout_s = site, keeper_of, timeout_s
        self._board = board if self.site is None else board.under(f"shard/{site.rank}")
        key = self._board.store.key_for("state") or b""
        self._way = Way(self._board, way, timeout_s, key)
        self._keeper = self._met()
        self.group = ElasticGroup(self._keeper)
        self.job: Group = self.group
        if self.site is not None:
            self.job = SiteGroup(self.site, self.group)
        self._callbacks: list[Callable[[Members], None]] = []
        self.group.on_rebind.append(self._tell)
        self._givers: list[Giver] = []
        self._heirs: list[Heir] = []
        self._leaving = self._is_ready = self.left = False
        self._legacy: Giver | None = None
        self._plan: Said = {}
        self._step: Callable[[], int] = lambda: 0
        self._goers: tuple[str, ...] = ()
        self._samplers: list[Shared] = []
        self._sharers: tuple[str, ...] = ()
        """The members among whom samples are dealt."""
        self._taken: dict[tuple[str, int], list[Any]] = {}
        """By member and rank of its site what each sampler has given to it since."""
        self._dealt: Said = {}
        """What a newcomer was told of the samplers."""

    @property
    def site(self) -> Site | None:
        """The ranks that are this member together; None where it is one rank."""
        return self._site if isinstance(self._site, Site) else None

    def _met(self) -> Keeper:
        me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        me = self._site.first_says("naming the site", me)
        keeper = self._keeper_of(self._board.clone(), me)
        try:
            _meet(keeper, self._site)
        except BaseException:  # such as Ctrl-C: the thread would stay as a member without work
            keeper.close()
            self._board.hang_up()
            raise
        return keeper

    def require_mesh(self, mesh: DeviceMesh | None) -> None:
        """Refuse another mesh than `join` was given.

        Raises:
            ValueError: It is another one.
        """
        mine = self._site.mesh
        if mesh != mine:
            which = "no mesh" if mesh is None else "a mesh" if mine is None else "another mesh"
            raise ValueError(
                f"{which} was given with members, and join was given "
                f"{'none' if mine is None else 'one'}: a member that is a site of shards needs the "
                "same mesh=, (1, shards) over its ranks, in both places"
            )

    def __enter__(self) -> "Members":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(leaves=kind is None)

    @property
    def newcomer(self) -> bool:
        """Whether the run had begun, and this process has not got its state yet."""
        return self.group.bound is None and self.group.over is None

    @property
    def id(self) -> str:
        """Of this member: host, process and eight digits."""
        return self._keeper.me

    @property
    def ids(self) -> tuple[str, ...]:
        """Of all members, in the order of their ranks; empty while this one is a newcomer."""
        return self._present()[1]

    @property
    def rank(self) -> int:
        """Of this member, from 0; -1 while it is a newcomer, and once it has left."""
        ids = self.ids
        return ids.index(self.id) if self.id in ids and not self.left else -1

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ids)

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among the ranks of all members, and how many they are."""
        rank, size, site = max(self.rank, 0), max(self.size, 1), self._site
        return rank * site.size + site.rank, size * site.size

    @property
    def generation(self) -> int:
        """Counts the changes of the members; -1 while this one is a newcomer. A change that was
        agreed on at the end of a round shows from the next averaging on.
        """
        return self._present()[0]

    def _present(self) -> tuple[int, tuple[str, ...]]:
        """Number and members of the generation that this one is in."""
        bound = self.group.bound
        if bound is not None:
            return bound.number, bound.ids
        admitted = None if self.newcomer else self._keeper.admitted
        return (-1, ()) if admitted is None else admitted

    @property
    def step(self) -> int:
        """Local steps of the run as this member counts them; a newcomer's are the others'."""
        return self._step()

    def on_change(self, callback: "Callable[[Members], None]") -> None:
        """Call this with the members whenever they have changed, between two exchanges."""
        self._callbacks.append(callback)

    def leave(self) -> None:
        """End this member's part after the running round; the others go on without an error."""
        self._leaving = True

    def _hand_over(
        self, work: Work, goers: Sequence[str], stay: Sequence[str], now: Generation, size: int
    ) -> None:
        """What those who leave have kept goes to the first who stays, one of `size` then."""
        for goer in goers:
            number = legacy_number(now.number, now.ids.index(goer))
            if stay[0] == self.id:
                factor = size / now.size  # of the mean over all it stays what it was
                self._heirs.append(Heir(self._way, number, factor, at_most=work.most_bytes))
            if goer == self.id:
                self._legacy = Giver(self._way, number, stay[0], me=self.id)
                own = work.own_state() or Given("own", {}, {})
                self._legacy.give(replace(own, plain={"of": self.id}))
                self._legacy.close()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback(self)

    def close(self) -> None:
        """End this member's part at once; may be called twice. The others go on without it."""
        self._close(leaves=True)

    def _close(self, *, leaves: bool) -> None:
        for giver in self._givers:
            giver.close()
        self._givers = []
        if self._legacy is not None:
            self._legacy.close(self.timeout_s)
        if leaves and self._keeper.end is None and self._keeper.store_problem is None:
            self._board.limit_s = min(_LEAVE_S, self.timeout_s)
            self._keeper.say_left(self._board)
        self._keeper.close()
        self._board.hang_up()

    # for local updates

    def follow(self, step: Callable[[], int]) -> None:
        """Let `step` be what this says."""
        self._step = step

    def deal(self, sampler: Shared) -> None:
        """Let the samples that are left be dealt anew where others take part."""
        self._samplers.append(sampler)
        self._sharers = self._sharers or self.ids
        if self._dealt:
            self._join_in(len(self._samplers) - 1)

    def _join_in(self, place: int) -> None:
        self._sharers = tuple(self._dealt["sharers"])
        states = self._dealt["states"]
        if place >= len(states):
            raise Mismatch(
                f"this member has made {place + 1} samplers, and the others {len(states)}: make "
                "the same ones on all members, before local updates begin"
            )
        self._samplers[place].join_in(states[place], *self._place_among(self._sharers))

    def _told_of_samplers(self) -> Said:
        """For a newcomer, right after samples were dealt to it."""
        if not self._samplers:
            return {}
        states = [sampler.state_dict() for sampler in self._samplers]
        return {"dealt": {"sharers": self._sharers, "states": states}}

    def _place_among(self, ids: Sequence[str]) -> tuple[int, int]:
        """This rank's number among the ranks of these members, and how many they are."""
        site = self._site
        return ids.index(self.id) * site.size + site.rank, len(ids) * site.size

    def _deal_among(self, ids: Sequence[str]) -> None:
        """After a round: what is left goes to these members. One that was lost took what those took
        who took most.
        """
        if not self._samplers or tuple(ids) == self._sharers or self.id not in ids:
            return
        before = [(each, rank) for each in self._sharers for rank in range(self._site.size)]
        for at, sampler in enumerate(self._samplers):
            known = [tuple(taken[at]) for taken in self._taken.values()]
            told = [self._taken.get(each) for each in before]
            taken = [max(known) if each is None else tuple(each[at]) for each in told]
            sampler.deal(taken, *self._place_among(ids))
        self._sharers = tuple(ids)

    def begin(self, what: str, facts: Said) -> None:
        """Say what this member is set up for, or compare it with what the run is set up for.

        Args:
            what: The occasion, in a word.
            facts: What all members must have in common, as JSON holds it.

        Raises:
            Mismatch: On this member alone.
            PeerLost, PeerStalled: The meeting place has gone, or does not answer.
        """
        board = self._board
        board.ask(lambda: require_same(board.store.under(what), dict(leaves("", facts))))

    def fetch(self, work: Work) -> None:
        """Get the state of the run from a member, and wait to be let in.

        Raises:
            PeerStalled: None of the members gives a sign of life, or the meeting place does not
                answer.
            PeerLost: The meeting place has gone.
        """
        try:
            self._let_in(work)
        except ThinwireError as error:
            self._site.tell_end(error)
            raise
        self.group.over = -1

    def _let_in(self, work: Work) -> None:
        while True:
            problem: ThinwireError | None = None
            try:
                self._fetched(work)
            except (PeerLost, PeerStalled, PayloadCorrupt) as error:
                if self._keeper.board.waits_s > self.timeout_s / 2:
                    raise  # it was the meeting place, and no other member can be asked either
                self._keeper.require_life()
                problem = error
            ready, problem = self._outcome(problem)
            if problem is None:
                break
            if ready:
                # the others may count on a member that has no state: come again as another
                self._keeper.close()
                self._keeper = self.group.keeper = self._met()
                self._is_ready = False
            _log.warning("asking another member for the state: %s", problem)

    def _outcome(self, problem: ThinwireError | None) -> tuple[bool, ThinwireError | None]:
        """Whether a rank of this site counts as ready, and why one of them is not let in."""
        mine = None if problem is None else str(problem)
        told = self._site.all_say("being let in", [self._is_ready, mine, self.step])
        texts = [text for _, text, _ in told if text is not None]
        if not texts and len({step for _, _, step in told}) > 1:
            texts = ["the ranks of this site were let in after different rounds"]
        ready = any(is_ready for is_ready, _, _ in told)
        return ready, PeerLost(texts[0]) if texts else None

    def _fetched(self, work: Work) -> None:
        site, problem = self._site, None
        number = self._keeper.say_hello(self._board) if site.rank == 0 else 0
        number = site.first_says("asking to be let in", number)
        taker = given = None
        try:
            try:
                self._wait_for_giver(number)
                taker = Taker(self._way, number)
                given = taker.take(work.most_bytes)
                work.take(given)
                while given.waiting > 1:  # the others would wait for all of these
                    given = taker.take(work.most_bytes)
                    work.take(given)
            except (PeerLost, PeerStalled, PayloadCorrupt) as error:
                problem = error
            site.require_none("taking the state", problem)  # all of its ranks are ready, or none
            assert taker is not None and given is not None, "taken"
            self._is_ready = True
            if site.rank == 0:
                self._board.put(f"ready/{number}", {"id": self._keeper.me})
            while not given.last:
                given = taker.take(work.most_bytes)
                work.take(given)
            self._dealt = given.plain.get("dealt") or {}
            for place in range(len(self._samplers)) if self._dealt else ():
                self._join_in(place)
        finally:
            if taker is not None:
                taker.close()
        if not self._keeper.is_let_in():
            raise PeerStalled("the others have changed while this member was let in")

    def _wait_for_giver(self, number: int) -> None:
        asked = told = time.monotonic()
        while not self._board.has(f"giver/{number}"):
            self._keeper.require_life()
            time.sleep(_POLL_S)
            if time.monotonic() - told > _NEWS_S:
                told = time.monotonic()
                _log.info("waited %.0f s for the end of a round to join", told - asked)

    def report(self) -> dict[str, Any]:
        """What this member says in the agreement that ends a round."""
        said: dict[str, Any] = {"leaving": self.id} if self._leaving else {}
        if self._samplers:
            taken = [sampler.taken for sampler in self._samplers]
            said["taken"] = [self.id, self._site.rank, taken]
        if self.group.rank == self._site.rank == 0:
            said |= {"serve": self._keeper.waiting(), "admit": self._keeper.ready()}
        return said

    def hear(self, said: Sequence[Said]) -> None:
        """Remember what all have said in the agreement that ends a round."""
        self._plan = said[0]
        # by name: this may be of a generation that is over by now
        self._goers = tuple(dict.fromkeys(each["leaving"] for each in said if "leaving" in each))
        told = [each["taken"] for each in said if "taken" in each]
        self._taken = {(member, rank): taken for member, rank, taken in told}

    def end_round(self, work: Work, *, goes_on: bool = False) -> None:
        """Give, let in and let go what was agreed on; all members call it after the same round.

        Args:
            work: What members do together.
            goes_on: Whether the same call makes another round at once: nobody comes or goes before
                that, who would be missed in it.
        """
        plan, self._plan = {} if goes_on else self._plan, {}
        goers, self._goers = () if goes_on else self._goers, ()
        # that of the agreement, the same on all, even if the next one has been formed meanwhile
        now = self.group.bound
        assert now is not None, "exchanged"
        goers = tuple(each for each in goers if each in now.ids)
        stay = [each for each in now.ids if each not in goers]
        admitted = [each for each in plan.get("admit", []) if each not in now.ids]
        if not goes_on:
            self._deal_among([*stay, *admitted])
        self._givers = [giver for giver in self._givers if giver.works]
        if self._givers:
            given = work.last_round() if self.group.size > 1 else work.state_for_newcomer()
            for giver in self._givers:
                # a line that is slower than the rounds would carry them for ever
                message = work.state_for_newcomer() if giver.lags else given
                last = giver.newcomer in admitted
                plain = {**message.plain, **(self._told_of_samplers() if last else {})}
                giver.give(replace(message, plain=plain, last=last))
        for number, newcomer in plan.get("serve", []):
            self._keeper.served[number] = time.monotonic()
            if stay and stay[number % len(stay)] == self.id:
                giver = Giver(self._way, number, newcomer, me=self.id)
                giver.give(work.state_for_newcomer())
                self._givers.append(giver)
        done = [heir for heir in self._heirs if not heir.works]
        self._heirs = [heir for heir in self._heirs if heir not in done]
        for heir in done:
            if heir.taken is not None:
                work.inherit(heir.taken, heir.factor)
        if admitted or goers:
            if goers and stay:
                self._hand_over(work, goers, stay, now, len(stay) + len(admitted))
            self._keeper.change(now.number, [*stay, *admitted], stay)
            if self.id in goers:
                self._keeper.wait_for_decision()
                self.left = True
                return
            self.group.over = now.number  # it connects while this member trains

    @property
    def gives(self) -> bool:
        """Whether a newcomer hears of every round from this member."""
        return any(giver.works for giver in self._givers)


def _meet(keeper: Keeper, site: OneRank) -> None:
    """Let the first rank meet the other sites, and then all of them those with the same shard."""
    problem: ThinwireError | None = None
    ids: tuple[str, ...] = ()
    if site.rank == 0:
        try:
            keeper.meet()
            ids = () if keeper.newcomer else keeper.current().ids
        except ThinwireError as error:
            problem = error
    site.require_none("meeting the other sites", problem)
    ids = tuple(site.first_says("telling of the other sites", ids))
    if site.rank > 0:
        try:
            keeper.meet(ids)
        except ThinwireError as error:
            problem = error
    site.require_none("meeting those with the same shard", problem)


def join(
    address: str,
    *,
    run: str,
    token_file: str | Path | None = None,
    min_members: int = 1,
    start_members: int | None = None,
    timeout: float | datetime.timedelta | None = None,
    mesh: DeviceMesh | None = None,
    relay: bool = False,
    ca: str | Path | None = None,
) -> Members:
    """Meet the other members of a run, without torchrun.

    Args:
        address: Of the meeting place (`thinwire host`), such as "tcp://10.0.0.1:29400".
        run: Its name; members of one run train together.
        token_file: Holds the secret of the run; None where the meeting place has none.
        min_members: How many must have come before anybody begins, and must be left where one is
            lost; `leave` may take a run below it.
        start_members: How many must have come before anybody begins, where that is more; the same
            on all of them.
        timeout: For how long to wait for others, at the start and in every round, in seconds or as
            a timedelta; 60 s by default.
        mesh: Where this member is a site that holds its model in shards: of all ranks of the site,
            which are a job of their own, (1, shards) with the dimensions "replicate" and "shard".
            All of them join, and come and go together.
        relay: Send and receive everything through the meeting place (`thinwire host --relay`), by
            connections that this process makes; the same on all members of a run.
        ca: With `relay`, where the host has --cert: a file with the certificate of who has signed
            it, or the host's own. Without, the connection to the relay is in plain.

    Returns:
        The members, a context manager. Where the run has begun already this process is a newcomer
        until it enters `local_sgd(..., members=members)`.

    Raises:
        QuorumLost: Fewer than `min_members` came within the time-out; names those who did.
        ThinwireError: Nobody answers at the address, nobody relays there, or the token is another
            one.
        Mismatch: The others hold the model in another number of shards, or differ in `relay`; the
            relay's certificate does not verify.
        TypeError, ValueError: An argument that cannot be.
    """
    check.instance("run", run, str)
    check.integer("min_members", min_members, at_least=1)
    if start_members is None:
        start_members = min_members
    check.integer("start_members", start_members, at_least=min_members)
    timeout_s = _TIMEOUT_S if timeout is None else seconds_of(timeout)
    assert timeout_s is not None, "given"
    check.instance("address", address, str)
    place = parse_address("address", address, scheme=True)
    token = None
    if token_file is not None:
        check.instance("token_file", token_file, (str, Path))
        token = read_token(token_file)
    check.instance("relay", relay, bool)
    tls = None if ca is None else _authority(ca)
    if tls is not None and not relay:
        raise ValueError("ca= is for the connection to a relay: give relay=True too, or no ca=")
    limit = datetime.timedelta(seconds=timeout_s)
    site = OneRank() if mesh is None else Site(mesh, timeout_s)
    board = Board.over(partial(connect, address, run, token, limit), place.port, timeout_s)
    way: str | RelayPlace = reached_from(place, timeout_s)
    if relay:
        way = RelayPlace(place.host, place.port + 1, relay_key(token), tls)
        require_relay(way, timeout_s)
    facts = {"shards of a site": site.size, "relay": relay}
    board.ask(lambda: require_same(board.store.under("site"), facts))
    keeper_of = partial(
        Keeper,
        way=way,
        min_members=min_members,
        start_members=start_members,
        timeout_s=timeout_s,
    )
    return Members(board, way, timeout_s, site, keeper_of)


def _authority(ca: str | Path) -> ssl.SSLContext:
    check.instance("ca", ca, (str, Path))
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(
            f"ca={str(ca)!r} holds no certificate: {error.strerror or error}"
        ) from None
