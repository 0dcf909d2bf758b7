"""Examine the network between all ranks of torchrun; rank 0 collects the reports."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from thinwire._watchdog import Late, within
from thinwire.layout.traffic import streams_between
from thinwire.tools.doctor.cross_checks import Reports, Seen, cross_findings
from thinwire.tools.doctor.local_checks import (
    Finding,
    machine_findings,
    meeting_point,
    one_wait_s,
    status_of,
    wrong,
)
from thinwire.tools.doctor.machine import Machine
from thinwire.tools.doctor.pairs import TOKEN_BYTES, Answering, Line, Peer, Reach, reach_all

THREAD = "thinwire-doctor"
"""Name of the threads that wait for others."""

_SHORTEST_S = 0.01


@final
class StoreView:
    """Key-value view of the store: rows of JSON that ranks exchange."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.store = PrefixStore("thinwire/doctor", store)

    def write(self, kind: str, row: Any) -> None:
        """Publish a row to all ranks."""
        self.store.set(f"{kind}/{self.rank}", json.dumps(row))

    def read(self, kind: str, rank: int, until: float) -> Any:
        """Return the row of a rank; None if it is missing at `until`, by `time.monotonic`."""
        key = f"{kind}/{rank}"
        left = timedelta(seconds=max(until - time.monotonic(), _SHORTEST_S))
        try:
            self.store.wait([key], left)
            return json.loads(self.store.get(key))
        except DistError:
            return None

    def read_all(self, kind: str, until: float) -> dict[int, Any]:
        """Return the rows of all ranks that have published one by `until`."""
        rows = {rank: self.read(kind, rank, until) for rank in range(self.size)}
        return {rank: row for rank, row in rows.items() if row is not None}


_MET, _PAIRS, _LINE, _GLOO = 0.5, 0.7, 0.8, 0.97
"""Deadlines of the phases, as fractions of the whole time."""
_SLACK = 0.5
"""Extra wait for gloo to report a failed group, as a fraction of its time-out."""
_FAREWELL_S = 1.0
_NUMBERS = 16 * 1024
_LINE_BYTES, _LINE_S = 8 * 2**20, 3.0
Report = Callable[[str, tuple[Finding, ...]], None]


@final
@dataclass
class Examination:
    """One rank's part; ranks other than 0 print only what they cannot send to rank 0."""

    rank: int
    size: int
    begun: float
    limit_s: float
    show: Callable[[str], None]
    report: Report

    def __post_init__(self) -> None:
        self.wait_s = one_wait_s(self.limit_s)
        self.machine = Machine.look()

    def run(self) -> int:
        """Run all phases and return the exit status; a thread may stay blocked in torch."""
        self.show("meeting the other ranks")
        limit_s = self._left_s(_MET)
        rank_and_size = (self.rank, self.size)
        limit = timedelta(seconds=limit_s)
        try:
            self.store, *_ = within(
                limit_s,
                lambda: next(iter(rendezvous("env://", *rank_and_size, timeout=limit))),
                name=THREAD,
            )
        except (Late, RuntimeError, ValueError) as error:
            alone = "waited for all ranks without success"
            problem = "did not reach the store" if self.rank else alone
            reason = str(error).partition("\n")[0] or "time-out"
            return self._ended_alone(f"{problem}: {reason}")
        view = StoreView(self.store, *rank_and_size)
        if self.rank == 0:
            view.write("token", secrets.token_hex(TOKEN_BYTES))
        token = view.read("token", 0, self._by(_MET))
        if token is None:
            return self._ended_alone("received nothing from rank 0")
        with contextlib.ExitStack() as stack:
            reports = self._examined(view, bytes.fromhex(token), stack)
        return self._concluded(view, reports)

    def _examined(self, view: StoreView, token: bytes, stack: contextlib.ExitStack) -> Reports:
        port = 0
        address = self.machine.address
        no_socket = "" if address else "this machine has no address that leads to others"
        try:
            if address:
                answering = Answering(address, self.rank, token, self.limit_s)
                port = stack.enter_context(answering).port
        except OSError as error:
            no_socket = error.strerror or str(error)
        view.write("facts", [asdict(self.machine), port, no_socket])
        rows = view.read_all("facts", self._by(_MET))
        seen, strangers = _read(rows)
        self.show("connecting all pairs")
        peers = {
            rank: Peer(rank, row.machine.address, rows[rank][1], token, self.wait_s)
            for rank, row in seen.items()
            if rank != self.rank and rows[rank][1]
        }
        # one rank of each machine stands for it: a thin line would be full of messages otherwise
        first = {min(ranks) for ranks in Reports(self.size, seen, strangers).machines}
        large = first if self.rank in first else set()
        reaches = reach_all(peers.values(), large)
        view.write("pairs", [asdict(reach) for reach in reaches])
        pairs = view.read_all("pairs", self._by(_PAIRS))
        lines = self._lines(view, _farthest(pairs, first), peers)
        self.show("forming a gloo group")
        if self.rank == 0:
            able = [rank for rank, row in seen.items() if not row.machine.gloo_error]
            view.write("plan", len(able) == self.size)
        plan = bool(view.read("plan", 0, self._by(_GLOO)))
        if plan:
            view.write("gloo", self._group_error())
        outcomes = view.read_all("gloo", self._by(_GLOO)) if plan and self.rank == 0 else {}
        for rank in pairs.keys() & seen.keys():
            reached = tuple(Reach(**row) for row in pairs[rank])
            seen[rank] = replace(seen[rank], reaches=reached)
        reports = {rank: replace(row, gloo=outcomes.get(rank)) for rank, row in seen.items()}
        return Reports(self.size, reports, strangers, plan, lines)

    def _lines(
        self, view: StoreView, ends: tuple[int, ...], peers: Mapping[int, Peer]
    ) -> tuple[tuple[int, int, Line], ...]:
        """Measure between two ranks, in both directions at once; rank 0 returns the results."""
        self.show("measuring the longest line")
        to = sum(ends) - self.rank
        if self.rank in ends and to in peers:
            row = None
            with contextlib.suppress(OSError):
                line, _ = peers[to].line(streams_between(self.size), _LINE_BYTES, _LINE_S)
                row = [self.rank, to, asdict(line)]
            view.write("line", row)
        rows = [view.read("line", rank, self._by(_LINE)) for rank in ends if self.rank == 0]
        return tuple((rank, to, Line(**row)) for rank, to, row in filter(None, rows))

    def _concluded(self, view: StoreView, reports: Reports) -> int:
        if self.rank == 0:
            findings = tuple(cross_findings(reports))
            status = status_of(findings)
            machines = len(reports.machines)
            self.report(
                f"{self.size} rank{'s' * (self.size != 1)} on {machines} "
                f"machine{'s' * (machines != 1)}",
                findings,
            )
            view.write("status", status)
            until = time.monotonic() + _FAREWELL_S
            for rank in set(reports.seen) - {0}:  # rank 0 may be the one that holds the store
                view.read("bye", rank, until)
            return status
        answer = view.read("status", 0, self._by(1.0))
        if answer is None:
            return self._ended_alone("did not receive the findings of rank 0")
        with contextlib.suppress(dist.DistError):  # rank 0 has gone, and its store
            view.write("bye", True)
        return int(answer)

    def _group_error(self) -> str:
        slack_s = _SLACK * self.wait_s
        limit_s = min(self.wait_s, self._left_s(_GLOO))
        timeout = timedelta(seconds=limit_s)

        def form() -> str:
            # a connection of its own, since it may block
            store = PrefixStore("gloo", self.store.clone())
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout
            )
            numbers = torch.full((_NUMBERS,), float(self.rank + 1), device="cpu")
            dist.all_reduce(numbers)
            expected = self.size * (self.size + 1) / 2
            right = bool((numbers == expected).all())
            dist.destroy_process_group()
            return "" if right else f"a sum over all ranks is not {expected:g}"

        try:
            return within(limit_s + slack_s, form, name=THREAD)
        except Late:
            return f"nothing within {limit_s + slack_s:.1f} s"
        except RuntimeError as error:
            return " ".join(str(error).split("] ", 1)[-1].split())[:200]

    def _ended_alone(self, problem: str) -> int:
        """Print on this rank, since it cannot reach rank 0."""
        store = meeting_point(os.environ, self.machine.addresses, self.wait_s, started=True)
        rest = [f for f in machine_findings(self.machine) if f.level != "ok"]
        cure = "fix the problems below, or those that the other ranks print"
        if any(finding.check == "name server" for finding in rest):
            cure = "fix the name server first: torch waits for it before the ranks meet"
        lost = wrong("ranks", f"rank {self.rank} {problem}", cure)
        self.report(f"rank {self.rank}", (lost, store, *rest))
        return 1

    def _by(self, part: float) -> float:
        return self.begun + part * self.limit_s

    def _left_s(self, part: float) -> float:
        return max(self._by(part) - time.monotonic(), _FAREWELL_S)


def _farthest(pairs: Mapping[int, Any], first: Set[int]) -> tuple[int, ...]:
    """Return the two ranks with the longest round trip among the first of each machine."""
    trips = [
        (reach["latency_s"], rank, reach["to"])
        for rank in first & set(pairs)
        for reach in pairs[rank]
        if reach["to"] in first and reach["latency_s"] is not None
    ]
    return max(trips)[1:] if trips else ()


def _read(rows: Mapping[int, Any]) -> tuple[dict[int, Seen], dict[int, str]]:
    """Return the ranks' reports, and the versions of ranks with another report format."""
    seen, strangers = {}, {}
    for rank, (row, _, error) in rows.items():
        try:
            seen[rank] = Seen(Machine.of_row(row), no_socket=error)
        except TypeError:
            strangers[rank] = str(row.get("versions", {}).get("thinwire", "of another form"))
    return seen, strangers
