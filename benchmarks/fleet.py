"""Seconds in which a run of W members forms, goes on without a lost one, and admits another.

    python -m benchmarks.fleet --members 4 8 16 32 64 --round-trip-ms 40 100
    python -m benchmarks.fleet --clients 8 64 200 --round-trip-ms 40 100
    python -m benchmarks.fleet --quick

Members are processes that train a tiny model over the loopback. Clients are threads with the
membership protocol of a member, and the bytes of its rendezvous, but without torch's groups,
training and state. Both reach one `thinwire host` whose answers they receive a round trip late.
"""

import multiprocessing as mp
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

import thinwire as tw
from benchmarks.common import parser_for, save, surroundings
from benchmarks.ranks import host, started
from thinwire.comm.elastic import PrefetchingStore, exchange_endpoints
from thinwire.comm.relay import RelayEndpoint
from thinwire.members import client, watcher
from thinwire.members.credentials import new_token, read_token
from thinwire.members.kv import KeyValueView
from thinwire.members.meeting import connect
from thinwire.members.membership import Membership
from thinwire.members.watcher import Terms

PAUSE_S, LIMIT_S, PER_PROCESS = 0.3, 180.0, 50
FOUND, BREAK, ADMIT, LOSE = "found", "break", "admit", "lose"


class Distant(socket.socket):
    """A connection whose answers come `round_trip_s` late."""

    round_trip_s = 0.0
    _asked = True

    def sendall(self, *content: Any) -> None:
        self._asked = True
        super().sendall(*content)

    def recv(self, *size: Any) -> bytes:
        found = super().recv(*size)
        if self._asked:
            self._asked = False
            time.sleep(self.round_trip_s)
        return found


def be_distant(round_trip_s: float) -> None:
    """Let the host be this far from this process."""
    near: Callable[..., socket.socket] = client._first_connection

    def far(*where: Any) -> socket.socket:
        time.sleep(round_trip_s)
        return Distant(fileno=near(*where).detach())

    Distant.round_trip_s = round_trip_s
    vars(client)["_first_connection"] = far


def member(pipe: Connection, address: str, token: str, size: int, trip_s: float) -> None:
    """Train until killed; report each averaging."""
    be_distant(trip_s)
    os.environ["THINWIRE_KERNELS"] = "reference"  # nothing is compiled
    torch.manual_seed(os.getpid())
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    config = tw.LocalSGD(1, begin_step=0)
    pipe.recv()
    with (
        tw.join(address, run="fleet", token_file=token, start_members=size) as members,
        tw.local_sgd(net, optimizer, config, members=members) as sync,
    ):
        while sync.step < 1e9:
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            pipe.send((os.getpid(), time.monotonic(), members.size))
            time.sleep(PAUSE_S)


class Rendezvous:
    """What connecting a generation asks of the host."""

    relayed, copies = False, 1

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, relay: RelayEndpoint, *_: Any
    ) -> None:
        store.relays(relay)
        exchange_endpoints(store, rank, size, timeout_s, ("127.0.0.1", 1), {})
        prefetching = PrefetchingStore(store, size)
        for kind in ("DATA", "CONTROL"):
            of_kind = PrefixStore(kind, prefetching)
            of_kind.set(str(rank), "x" * (154 + 8 * size))
            for other in range(size):
                of_kind.wait([str(other)], timedelta(seconds=timeout_s))
                of_kind.get(str(other))

    def disconnect(self) -> None:
        """End nothing."""

    release = disconnect


def clients(
    pipe: Connection, address: str, token: str, size: int, trip_s: float, ids: list[str]
) -> None:
    """Take part as several members, until this process is killed."""
    be_distant(trip_s)
    vars(watcher)["MemberGroups"] = Rendezvous
    secret = read_token(token)
    sending = threading.Lock()
    memberships: dict[str, Membership] = {}

    def report(*event: Any) -> None:
        with sending:
            pipe.send(event)

    def take_part(own: str) -> None:
        reach = partial(connect, address, "fleet", secret, timedelta(seconds=60))
        kv = KeyValueView(reach(), None, reach)
        terms = Terms(RelayEndpoint("127.0.0.1", 0, b""), 1, size, 60.0)
        memberships[own] = one = Membership(kv, own, terms)
        one.meet()
        if one.joiner:
            kv.put(f"ready/{one.say_hello(kv)}", {"id": own})
        number, told = -1, False
        while not one.watcher.stopped.is_set():
            with one.changed:
                now = one.generation
                if now is not None and now.number > number:
                    number = now.number
                    report(own, time.monotonic(), now.size)
                one.changed.wait(PAUSE_S)
            if now is not None and now.rank == 0 and not told and one.ready_joiners():
                told = True
                report(ADMIT, number, (*now.ids, *one.ready_joiners()))

    while True:
        match pipe.recv():
            case (kind, *others) if kind == FOUND:
                for own in others or ids:
                    threading.Thread(target=take_part, args=(own,), daemon=True).start()
            case (kind, own) if kind == LOSE:
                memberships[own].watcher.stopped.set()
                memberships.pop(own).kv.disconnect()
            case (kind, number) if kind == BREAK:
                for one in memberships.values():
                    one.report_broken(number, "a member is lost")
            case (_, number, present):
                for own, one in memberships.items():
                    if own in present[:-1]:
                        one.change_members(number, present, present[:-1])


class Fleet:
    """The processes, and what they have reported."""

    def __init__(self, pipes: list[Any], counted: dict[str, list[int]]) -> None:
        self.pipes = pipes
        self._counted = counted

    def tell(self, *words: Any) -> None:
        for pipe in self.pipes:
            pipe.send(words)

    def timed(self, begin: Callable[[], object], present: int) -> dict[str, float]:
        """Return the seconds until so many members have been in a generation of as many."""
        cpu_s = {name: sum(map(cpu_seconds, pids)) for name, pids in self._counted.items()}
        begun_s = time.monotonic()
        begin()
        last: dict[Any, float] = {}
        while len(last) < present:
            ready = wait(self.pipes, LIMIT_S)
            assert ready, f"{len(last)} of {present} came"
            for pipe in self.pipes:
                if pipe not in ready:
                    continue
                with suppress(EOFError, ConnectionError):
                    who, *about = pipe.recv()
                    if who == ADMIT:
                        self.tell(ADMIT, *about)
                    elif about[1] == present and about[0] > begun_s:
                        last.setdefault(who, about[0])
        taken_s = max(last.values()) - begun_s
        used = {k: sum(map(cpu_seconds, v)) - cpu_s[k] for k, v in self._counted.items()}
        return {"s": round(taken_s, 2)} | {f"{k} cpu s": round(v, 2) for k, v in used.items()}


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def measured(kind: str, size: int, trip_s: float) -> dict[str, Any]:
    """Form a run, lose its member number 1, and admit another."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        token = str(Path(name, "token"))
        new_token(token)
        options = "--token-file", token, "--journal", str(Path(name, "runs"))
        address, pid = ends.enter_context(host(None, *options))
        of_all = [f"client-{n:03}" for n in range(size)]
        parts = [of_all[at : at + PER_PROCESS] for at in range(0, size, PER_PROCESS)]
        what: Any = member if kind == "members" else clients
        more = [()] * (size + 1) if kind == "members" else [(part,) for part in [*parts, []]]
        pipes, pids = [], list[int]()
        for extra in more:
            own, other = mp.Pipe()
            process = started(None, what, other, address, token, size, trip_s, *extra)
            ends.callback(process.join)
            ends.callback(process.kill)
            pipes.append(own)
            pids.append(process.pid or 0)
        fleet = Fleet(pipes[:-1], {kind: pids, "host": [pid]})
        row: dict[str, Any] = {"kind": kind, "W": size, "round_trip_ms": 1e3 * trip_s}
        row["form"] = fleet.timed(lambda: fleet.tell(FOUND), size)
        time.sleep(2.0)
        idle = {one: cpu_seconds(one) for one in (pid, *pids)}
        time.sleep(4.0)
        used = {one: (cpu_seconds(one) - before) / 4 for one, before in idle.items()}
        row["idle"] = {"host cpu": round(used.pop(pid), 3), "cpu": round(sum(used.values()), 3)}

        def lose() -> None:
            if kind == "members":
                os.kill(pids[1], signal.SIGKILL)
                fleet.pipes.pop(1)
            else:
                fleet.pipes[0].send((LOSE, of_all[1]))
                fleet.tell(BREAK, 0)

        row["lose"] = fleet.timed(lose, size - 1)
        fleet.pipes.append(pipes[-1])
        row["admit"] = fleet.timed(lambda: pipes[-1].send((FOUND, "joiner")), size)
        return row


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=[])
    parser.add_argument("--clients", type=int, nargs="*", default=[])
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[40.0])
    arguments = parser.parse_args()
    kinds = {"members": arguments.members, "clients": arguments.clients}
    if arguments.quick:
        kinds = {"members": [2], "clients": [4]}
    rows = []
    for trip_ms in arguments.round_trip_ms:
        for kind, sizes in kinds.items():
            for size in sizes:
                rows.append(measured(kind, size, trip_ms / 1e3))
                print(rows[-1], flush=True)
    save({**surroundings(1), "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
