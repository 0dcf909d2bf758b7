"""Members of a run: joining, the current membership, leaving."""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire import _validate as check
from thinwire.comm.handshake import leaves
from thinwire.errors import (
    Evicted,
    Mismatch,
    PayloadCorrupt,
    PeerLost,
    PeerStalled,
    QuorumLost,
    ThinwireError,
)
from thinwire.members.closing import Late
from thinwire.members.generation import Outcome
from thinwire.members.group import AWAY, ElasticGroup, SingleRank, Site, SiteGroup
from thinwire.members.kv import KeyValueView
from thinwire.members.meeting import require_same
from thinwire.members.membership import Membership
from thinwire.members.missed import MissedRounds
from thinwire.members.transfer import (
    MOST_DONORS,
    MOST_WAITING,
    Donor,
    Download,
    Part,
    StateMessage,
    TransferContext,
)
from thinwire.members.watcher import CLOSED_KEY, Terms
from thinwire.page import report_of

_NEWS_S = 10.0
_MOST_KEPT = 0.1
_LEAVE_S = 2.0
"""Longest time in seconds for the announcement of a member that leaves."""
_MOST_FAILURES = 3
"""Attempts to enter a run again without an averaging."""
_log = logging.getLogger("thinwire")
Facts = Mapping[str, Any]


class SharedState(Protocol):
    """State that all members share; it is copied to joiners."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors, by name, that are equal on the members after the last round."""

    def counters(self) -> StateMessage:
        """Return a copy of all other state that is equal then."""

    @property
    def averagings(self) -> int:
        """Number of the last round that the state holds."""

    def begin_round(self, before: int, members: int) -> None:
        """Begin a round of so many members, which are admitted, after one of `before`."""

    def last_update(self) -> StateMessage | None:
        """Return the changes that the last round made; None if they were not recorded."""

    def apply(self, message: StateMessage) -> None:
        """Apply the counters of a state whose tensors are here, or an update, from a donor."""

    def own_state(self) -> StateMessage:
        """Return the state that only this member holds, for the handoff."""

    def add_handoff(self, message: StateMessage, factor: float) -> None:
        """Add a leaving member's own state, times `factor`, to that of this member."""

    @property
    def max_bytes(self) -> int:
        """Upper bound on the tensor bytes of one message."""


class Member:
    """This process as a member of a run: what `Members` shows, and what local updates use."""

    def __init__(self, kv: KeyValueView, terms: Terms, site: SingleRank, *, rejoin: bool) -> None:
        self.site = site
        self._rejoins = rejoin and site.mesh is None
        self._failures = self._entries = 0
        self._identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.terms = terms
        self.timeout_s = terms.timeout_s
        self.kv = kv
        self._facts: dict[str, Facts] = {}
        """Facts of the set-up by occasion."""
        facts = {
            "shards of a site": site.size,
            "streams": terms.streams,
            "keep_batch": terms.keep_batch,
            "grace_seconds": terms.grace_seconds,
        }
        self.require_same_setup("site", facts)
        if site.mesh is not None:  # there a host that has lost its file gets them again
            self.kv = kv.under(f"shard/{site.rank}")
            self.require_same_setup("site", facts)
        self._named = {} if terms.name is None else {"name": terms.name}
        self.numbers = dict[str, float]()
        """Numbers that the caller shows on the page."""
        try:
            self._membership = self._join_run()
        except BaseException:
            self.kv.disconnect()
            raise
        self.group = ElasticGroup(self._membership, self.kv, terms)
        self.group.streams = terms.streams
        self.job = SiteGroup(site, self.group) if isinstance(site, Site) else self.group
        self._donors: list[Donor] = []
        self._donor_ids: list[str] = []
        self._kept: list[tuple[int, StateMessage]] = []
        """Latest rounds, `_MOST_KEPT` states in all, for a joiner that has the state of one."""
        self._incoming_handoffs: list[tuple[Download, float]] = []
        self.download: Download | None = None
        self._refused_donors: dict[str, bool] = {}
        """Donors that are asked after all others: True for one that sent what is refused."""
        self.leaving = self._has_state = self.left = False
        self._outgoing_handoff: Donor | None = None
        self._reports: Sequence[Facts] = ()
        """Reports of all members of the round, until it ends."""
        self._late: dict[str, tuple[int, str]] = {}
        """By late member the first round that it lacks, and the member that sends it."""
        self._missed = MissedRounds()
        self.step: Callable[[], int] = lambda: 0
        self._samplers: dict[Any, Callable[[], Any]] = {}
        """Samplers of this member, and what returns the progress of each."""
        self._sharing_ids: tuple[str, ...] = ()
        self._taken: dict[tuple[str, int], list[Any]] = {}
        """Last reported progress of each sampler since then, by member and rank of its site."""
        self._sampler_states: Facts = {}
        """States of the samplers that a joiner received."""

    def _join_run(self) -> Membership:
        # identities of members that were lost do not come back
        former = self._membership.presented() if self._entries else None
        own_id = self._identity + (f"+{self._entries}" if self._entries else "")
        self._entries += 1
        own_id = self.site.broadcast_value("naming the site", own_id)
        membership = Membership(self.kv.clone(), own_id, self.terms)
        membership.former = former
        membership.shown = self._named
        membership.facts = self._facts
        try:
            _meet(membership, self.site)
        except BaseException:  # Ctrl-C too: else the thread would remain as an idle member
            membership.close()
            raise
        return membership

    @property
    def _transfer_context(self) -> TransferContext:
        # the membership's view knows when the host was started anew
        key = self._membership.kv.store.key_for("state") or b""
        return TransferContext(self.kv, self.terms.endpoint, self.timeout_s, key)

    def require_mesh(self, mesh: DeviceMesh | None) -> None:
        """Raise unless this is the mesh of the site, which `join` was given."""
        if mesh != self.site.mesh:
            raise ValueError(
                f"mesh={mesh} was given with members, and join was given mesh={self.site.mesh}: "
                "for a site of shards, pass the same mesh=, (1, shards) over its ranks, to both"
            )

    @property
    def joiner(self) -> bool:
        """True until this process has received the state of a run that had begun without it."""
        return self.group.bound is None and self.group.pending_after is None

    @property
    def id(self) -> str:
        """Identity of this member: host, process, eight digits, and how often it has returned."""
        return self._membership.own_id

    @property
    def ids(self) -> tuple[str, ...]:
        """Identities of all members in the order of their ranks; empty on a joiner."""
        return self.present()[1]

    @property
    def rank(self) -> int:
        """Rank of this member, from 0; -1 on a joiner, and after leaving."""
        ids = self.ids
        return ids.index(self.id) if self.id in ids and not self.left else -1

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Rank of this process and number of all, over the ranks of all sites."""
        site = self.site
        return max(self.rank, 0) * site.size + site.rank, max(len(self.ids), 1) * site.size

    def present(self) -> tuple[int, tuple[str, ...]]:
        """Return the number and the identities of the current generation."""
        if (bound := self.group.bound) is not None:
            return bound.number, bound.ids
        return (not self.joiner and self._membership.admitted) or (-1, ())

    def _hand_over(
        self, state: SharedState, leaving_id: str, successor: str, made: Facts, factor: float
    ) -> None:
        # joiners count from 0
        number = (1 << 40) + (made["generation"] << 20) + made["ids"].index(leaving_id)
        if successor == self.id:
            download = Download(self._transfer_context, number, state.max_bytes)
            self._incoming_handoffs.append((download, factor))
        if leaving_id == self.id:
            own = replace(state.own_state(), plain={"of": self.id}, last=True)
            self._outgoing_handoff = Donor(self._transfer_context, number, successor, [own])

    def close(self, *, leaves: bool) -> None:
        """Leave the run; unless `leaves`, as a member that was lost."""
        self._close_transfers()
        if self._outgoing_handoff is not None:
            self._outgoing_handoff.close(self.timeout_s)
        membership = self._membership
        if leaves and membership.end_reason is None and membership.store_problem is None:
            self.kv.limit_s = min(_LEAVE_S, self.timeout_s)
            membership.announce_leaving(self.kv)
        membership.close()
        self.kv.disconnect()

    def _close_transfers(self) -> None:
        self._missed.close()
        for donor in self._donors:
            donor.close()
        self._donors = []
        self._late = {}

    def may_rejoin(self, error: ThinwireError) -> bool:
        """Return True if this member, which was away or late, may enter the run again."""
        closed = self._membership.watcher.stopped.is_set()
        wanted = self._rejoins or isinstance(error, Late)
        return wanted and not (closed or self.left)

    def rejoin(self, state: SharedState, why: ThinwireError) -> None:
        """Enter the run again as a joiner that has `state`; `Evicted` after three failures."""
        known = self.present()[0]
        while self._failures < _MOST_FAILURES:
            pause_s = self.timeout_s * self._failures / 2
            _log.warning("%s. This member enters the run again in %.3g s", why, pause_s)
            time.sleep(pause_s)
            self._failures += 1  # until it has taken part in an averaging
            self._membership.close()
            try:
                self._enter_again(state, known)
            except (*AWAY, QuorumLost) as error:
                self._membership.close()
                why = error
            else:
                _log.warning("entered the run again, at step %d", self.step())
                for callback in self.group.on_rebind:
                    callback()
                return
        raise Evicted(f"this member cannot enter the run again: {why}")

    def _enter_again(self, state: SharedState, known: int) -> None:
        """Join the run in which generation `known` was, as a new member that has a state."""
        self._close_transfers()
        self._taken = {}
        ended = ""
        try:
            self._membership = self._join_run()
        except QuorumLost as error:
            ended = f"{error}. Start all members again, from the last copy"
        while not ended and (found := self.kv.get(f"members/{known + 1}")) is not None:
            known += 1
            if not found["vote"]:
                ended = f"it has begun anew, with generation {known}. Start this member again"
        if ended:
            self._failures = _MOST_FAILURES
            raise Evicted(ended)
        self.group.membership = self._membership
        self.group.bound = self.group.pending_after = None
        self.fetch_state(state)
        self.group.bind_latest()

    def show(self, stats: Facts, loss: Any) -> None:
        """Show numbers of this member on the page of the run."""
        self._membership.shown = report_of({**stats, **self.numbers}, loss) | self._named

    def register_sampler(self, sampler: Any, progress: Callable[[], Any]) -> None:
        """Add a sampler, whose samples are distributed again when the membership changes."""
        self._samplers[sampler] = progress
        self._sharing_ids = self._sharing_ids or self.ids
        self._start_samplers(len(self._samplers) - 1)

    def _start_samplers(self, first: int = 0) -> None:
        """Give samplers, from number `first` on, the states that this joiner received."""
        if not self._sampler_states:
            return
        self._sharing_ids = tuple(self._sampler_states["sharing_ids"])
        states = self._sampler_states["states"]
        if len(self._samplers) > len(states):
            raise Mismatch(
                f"this member has made {len(self._samplers)} samplers, and the others "
                f"{len(states)}: make the same samplers on all members, before local updates begin"
            )
        for sampler, state in [*zip(self._samplers, states, strict=False)][first:]:
            sampler.load_state_dict(state)

    def _sampler_facts(self) -> Facts:
        states = [sampler.state_dict() for sampler in self._samplers]
        return {"samplers": {"sharing_ids": self._sharing_ids, "states": states}} if states else {}

    @property
    def sharing_rank_and_size(self) -> tuple[int, int]:
        """`rank_and_size` among those that share the samples, as of the last distribution."""
        ids = self._sharing_ids or (self.id,)
        site = self.site
        return ids.index(self.id) * site.size + site.rank, len(ids) * site.size

    def _redistribute_samples(self, ids: Sequence[str]) -> None:
        # a lost one has taken those of its last report: what it computed later reached nobody
        if not self._samplers or tuple(ids) == self._sharing_ids or self.id not in ids:
            return
        states = [sampler.state_dict() for sampler in self._samplers]
        self._sharing_ids = tuple(ids)
        self._taken = {}
        for sampler, state in zip(self._samplers, states, strict=True):
            sampler.load_state_dict(state)

    def taken_of(self, sampler: Any) -> list[tuple[int, int] | None]:
        """Return what each rank had taken at the last averaging; None if nothing since it began."""
        index = [*self._samplers].index(sampler)
        reports = [
            self._taken.get((one, rank))
            for one in self._sharing_ids
            for rank in range(self.site.size)
        ]
        return [None if report is None else tuple(report[index]) for report in reports]

    def require_same_setup(self, occasion: str, facts: Facts) -> None:
        """Raise if these facts differ from those of the other members."""
        self._facts[occasion] = own = dict(leaves("", facts))
        require_same(self.kv, occasion, own)

    def fetch_state(self, state: SharedState) -> None:
        """Copy the state of the run from donors, and wait for admission."""
        failures = 0
        try:
            while (problem := self._attempt(state)) is not None:
                _log.warning("asking another member for the state: %s", problem)
                wrong = {one for one, sent_wrong in self._refused_donors.items() if sent_wrong}
                if wrong >= {*self._membership.expected, *self._donor_ids}:
                    raise PayloadCorrupt(f"no member is left to ask for the state: {problem}")
                download = self.download
                failures = 0 if download is None or download.reached else failures + 1
                if failures == _MOST_FAILURES:
                    raise PeerLost(
                        f"this member reaches the host, and {failures} times none of the members "
                        f"that were to send the state, such as {', '.join(self._donor_ids)} "
                        f"({problem}). {self._membership.watcher.connecting_advice()}"
                    )
        except ThinwireError as error:
            self.site.announce_end(error)
            raise
        self.group.pending_after = -1

    def _attempt(self, state: SharedState) -> str | None:
        """Try to get the state; return the error of a rank of this site, if one has any."""
        problem: ThinwireError | None = None
        try:
            self._fetch_from_donor(state)
        except (PeerLost, PeerStalled, PayloadCorrupt) as error:
            if self._membership.kv.waiting_s > self.timeout_s / 2:
                raise  # the meeting place is stalled: no other member can be asked either
            self._membership.require_heartbeat()
            problem = error
        indices = [] if self.download is None else self.download.refused
        own_text = None if problem is None else str(problem)
        refused = {self._donor_ids[n]: isinstance(problem, PayloadCorrupt) for n in indices}
        report = [self._has_state, own_text, self.step(), refused]
        answers = self.site.gather_values("waiting for admission", report)
        for *_, refused in answers:
            self._refused_donors |= refused
        texts = [text for _, text, *_ in answers if text is not None]
        if not texts and len({step for _, _, step, _ in answers}) > 1:
            texts = ["the ranks of this site were admitted after different rounds"]
        if not texts:
            return None
        if any(ready for ready, *_ in answers):
            # the others may have admitted this member, which has no state: join as a new one
            self._membership.close()
            self._membership = self.group.membership = self._join_run()
        return str(texts[0])

    def _fetch_from_donor(self, state: SharedState) -> None:
        site = self.site
        self._has_state = False
        self.download = None
        asks: Facts = {"has": state.averagings, "without": [*self._refused_donors]}
        number = self._membership.say_hello(self.kv, **asks) if site.rank == 0 else 0
        number = site.broadcast_value("asking for admission", number)
        try:
            # either all ranks of the site are ready, or none
            with site.raising_together("receiving the state"):
                self._donor_ids = self._wait_for_donor(number)
                where = self._transfer_context, number, state.max_bytes
                count = len(self._donor_ids)
                self.download = download = Download(*where, count, state.tensors())
                # until it has caught up: the others wait for it from then on
                while (message := download.next(wait=False)) is not None:
                    state.apply(message)
            self._has_state = True
            if site.rank == 0:
                self.kv.put(f"ready/{number}", {"id": self.id})
            while True:
                message = download.next(wait=True)
                assert message is not None, "waited for"
                state.apply(message)
                if message.last:
                    break
            self._sampler_states = message.plain.get("samplers") or {}
            self._start_samplers()
        finally:
            if self.download is not None:
                self.download.close()
        if not self._membership.is_admitted():
            raise PeerStalled("the membership changed while this member was being admitted")

    def _wait_for_donor(self, number: int) -> list[str]:
        began = logged = time.monotonic()
        while (found := self.kv.look([f"donor/{number}"], 1.0)[1][0]) is None:
            self._membership.require_heartbeat()
            if time.monotonic() - logged > _NEWS_S:
                logged = time.monotonic()
                _log.warning("waited %.0f s for the end of a round to join", logged - began)
        return [*map(str, found)]

    def report(self) -> dict[str, Any]:
        """Return what this member reports in the agreement of a round."""
        report: dict[str, Any] = {"leaving": self.id} if self.leaving else {}
        if self._samplers:
            taken = [progress() for progress in self._samplers.values()]
            report["taken"] = [self.id, self.site.rank, taken]
        if self.group.rank == self.site.rank == 0:
            report["assign"] = self._membership.waiting_joiners()
            report["admit"] = self._membership.ready_joiners()
            report["end"] = self._membership.ending
        return report

    def receive_reports(self, reports: Sequence[Facts]) -> None:
        """Take the reports of all members, which all of them have agreed on."""
        self._reports = reports
        progress = [report["taken"] for report in reports if "taken" in report]
        self._taken |= {(member, rank): taken for member, rank, taken in progress}

    def end_round(self, state: SharedState, *, goes_on: bool = False) -> None:
        """Send states, admit joiners and release leaving members, as all members have agreed."""
        # goes_on: the same call makes another round at once, before which no member joins or leaves
        self._failures = 0
        # the generation of the agreement, equal on all members, even if a new one has formed since
        now = self.group.bound
        assert now is not None, "exchanged"
        made = {
            **self._membership.agreed.to_dict(),
            "averaging": state.averagings,
            "generation": now.number,
            "ids": now.ids,
            "reports": [] if goes_on else self._reports,
            "goes_on": goes_on,
        }
        self._reports = ()
        self._missed.close()
        self._end_round(state, made, None)

    def _end_round(self, state: SharedState, made: Facts, update: StateMessage | None) -> None:
        """End a round that was `made`; a member that was late for it gives the `update`."""
        ids, voters, reports = made["ids"], made["voters"], made["reports"]
        # identities, not ranks: the reports may belong to a generation that has ended by now
        agreed = reports[0] if reports else {}
        of_leaving = [report["leaving"] for report in reports if "leaving" in report]
        leaving_ids = [one for one in ids if one in of_leaving or agreed.get("end")]
        remaining = [member for member in ids if member not in leaving_ids]
        admitted = [member for member in agreed.get("admit", []) if member not in ids]
        following = len(remaining) + len(admitted)
        state.begin_round(len(ids), following or len(ids))
        if not made["goes_on"]:
            self._redistribute_samples([*remaining, *admitted])
        if update is None and (update := state.last_update()) is not None:
            update = replace(update, plain={**update.plain, "made": made})
        self._send_to_late(made, [*remaining, *admitted])
        self._kept = [] if update is None else [*self._kept, (state.averagings, update)]
        whole = sum(tensor.nbytes for tensor in state.tensors().values())
        most = max(_MOST_KEPT * whole, MOST_WAITING * bool(self._late))
        while sum(kept.nbytes for _, kept in self._kept) > most:
            del self._kept[0]
        self._donors = [donor for donor in self._donors if donor.alive]
        for donor in self._donors:
            if donor.part.index == 0:
                assert update is not None, "somebody listens"
                last = donor.joiner in admitted
                plain = {**update.plain, **(self._sampler_facts() if last else {})}
                donor.enqueue(replace(update, plain=plain, last=last))
        present = [member for member in remaining if member in voters]
        for number, hello in agreed.get("assign", []):
            self._assign_donors(state, number, hello, present)
        for download, factor in [one for one in self._incoming_handoffs if not one[0].alive]:
            self._incoming_handoffs.remove((download, factor))
            try:
                message = download.next(wait=True)
            except (ThinwireError, RuntimeError) as error:
                _log.warning("the handoff of a leaving member was lost: %s", error)
            else:
                assert message is not None, "waited for"
                state.add_handoff(message, factor)
        if admitted or leaving_ids:
            # the residual's share of the mean over all members stays the same
            factor = following / len(ids)
            for leaving_id in leaving_ids if present else ():
                self._hand_over(state, leaving_id, present[0], made, factor)
            number = made["generation"]
            self._membership.change_members(number, [*remaining, *admitted], remaining)
            if self.id in leaving_ids:
                self._membership.wait_for_decision()
                self.left = True
                return
            self.group.pending_after = number  # the next one connects while this member trains

    def _send_to_late(self, made: Facts, ids: Sequence[str]) -> None:
        """Begin to send rounds to members that were late for this one, each by one that was not."""
        voters, now = made["voters"], made["averaging"]
        late = [one for one in made["ids"] if one in ids and one not in voters]
        for donor in self._donors:
            if donor.joiner in self._late and donor.joiner not in late:
                donor.close()
        self._late = {one: sent for one, sent in self._late.items() if one in late}
        present = [member for member in ids if member in voters]
        for index, member in enumerate(late if present else ()):
            since, sender = self._late.get(member, (now, ""))
            if sender in ids:
                continue
            sender = present[index % len(present)]
            self._late[member] = since, sender
            before = [kept for at, kept in self._kept if at >= since]
            # without some of them it enters the run again
            if sender == self.id and len(before) == now - since:
                number = (1 << 62) + secrets.randbits(61)
                where = self._transfer_context, number, member, before
                self._donors.append(Donor(*where, offered_by=self.id))

    def catch_up(self, state: SharedState) -> None:
        """Apply the rounds that this member was late for, and continue with the others."""
        membership = self._membership
        while (closed := self.kv.get(CLOSED_KEY)) and closed["vote"] > membership.agreed.vote:
            after = state.averagings, state.max_bytes
            update = self._missed.next(membership, self._transfer_context, *after)
            made = update.plain["made"]
            state.apply(update)
            membership.accept_closed(Outcome.from_dict(made))
            self.receive_reports(made["reports"])
            self._end_round(state, made, update)
            _log.info("took over averaging %d, for which this member was late", state.averagings)

    def _assign_donors(
        self, state: SharedState, number: int, hello: Facts, remaining: Sequence[str]
    ) -> None:
        """Become a donor of this joiner, if its request chooses this member."""
        with self._membership.changed:
            self._membership.donor_assigned_s[number] = time.monotonic()
        good = [member for member in remaining if member not in hello.get("without", ())]
        good = good or [*remaining]
        first = number % max(len(good), 1)
        has = hello.get("has", 0)
        donors = [*good[first:], *good[:first]][:MOST_DONORS]
        if self.id not in donors:
            return
        counters = state.counters()
        since = [update for at, update in self._kept if at > has]
        if has == 0 or len(since) != state.averagings - has:  # they would be of no use
            since = []
        part = Part(donors.index(self.id), len(donors), json.dumps(counters.plain), donors)
        where = self._transfer_context, number, hello["id"], [*since, counters]
        self._donors.append(Donor(*where, part, state.tensors(), self.group.is_exchanging))

    def records(self, *, compressed: bool) -> bool:
        """Return True if the messages of the next averaging must be kept for other members."""
        some_are_late = self._membership.present is not None
        others = some_are_late or (compressed and len(self.ids) > 1)
        return others or any(donor.alive for donor in self._donors)


class Members:
    """The members of a run, as `join` returns them; this process is one of them.

    Leaving the `with` block leaves the run. An exception counts as a crash: the others notice it
    after the time-out.

    Example::

        with tw.join("tcp://10.0.0.1:29400", run="llm", token_file="token") as members:
            with tw.local_sgd(model, optimizer, config, members=members) as sync:
                while sync.step < 10_000 and not members.left:
                    train_step()
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    def __enter__(self) -> "Members":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._member.close(leaves=kind is None)

    @property
    def id(self) -> str:
        """Identity of this member: host, process, eight digits, and how often it has returned."""
        return self._member.id

    @property
    def ids(self) -> tuple[str, ...]:
        """Identities of all members in the order of their ranks; empty on a joiner."""
        return self._member.ids

    @property
    def rank(self) -> int:
        """Rank of this member, from 0; -1 on a joiner, and after leaving."""
        return self._member.rank

    @property
    def size(self) -> int:
        """Number of members; 1 on a joiner."""
        return max(len(self.ids), 1)

    @property
    def generation(self) -> int:
        """Number of membership changes up to the last averaging; -1 on a joiner."""
        return self._member.present()[0]

    @property
    def step(self) -> int:
        """Local steps of the run; a joiner continues the count of the others."""
        return self._member.step()

    @property
    def left(self) -> bool:
        """True if this process has left the run."""
        return self._member.left

    def on_change(self, callback: "Callable[[Members], None]") -> None:
        """Call `callback` with the members after each change, between two exchanges."""
        self._member.group.on_rebind.append(lambda: callback(self))

    def show(self, *, total_steps: int | None = None, held_out_loss: float | None = None) -> None:
        """Show on the page how many steps the run takes, and the last loss on held-out data."""
        numbers: dict[str, float] = {}
        if total_steps is not None:
            numbers["total_steps"] = check.integer("total_steps", total_steps, at_least=1)
        if held_out_loss is not None:
            numbers["held_out_loss"] = check.real("held_out_loss", held_out_loss)
        self._member.numbers |= numbers

    def leave(self) -> None:
        """Leave the run after the current round. The others continue without an error."""
        self._member.leaving = True

    def close(self) -> None:
        """Leave the run at once. The others continue without this member. May be called twice."""
        self._member.close(leaves=True)


def member_of(members: Members | None) -> Member | None:
    """Return this process as a member; None without members."""
    if members is None:
        return None
    check.instance("members", members, Members)
    return members._member


def _meet(membership: Membership, site: SingleRank) -> None:
    """Let the first rank meet the other sites; then each rank those that hold the same shard."""
    with site.raising_together("meeting the other sites"):
        if site.rank == 0:
            membership.meet()
    own_ids = () if site.rank or membership.joiner else membership.current().ids
    ids = tuple(site.broadcast_value("sharing the list of sites", own_ids))
    with site.raising_together("meeting the ranks with the same shard"):
        if site.rank > 0:
            membership.meet(ids)
