"""Goodput under faults: members that come and go, beside the same run without any fault.

    python -m benchmarks.goodput --seed 1 --out benchmarks/results/goodput.json

Four workers, one at half speed, each in a network of its own behind a line of 20 Mbit/s and 20 ms.
A step sleeps for 0.2 s (0.4 s), as if a GPU worked; rounds take 30 s, the time-out is 60 s. The
faults are those of a file, by default `settings/faults.jsonl`: a line for each, with `at_s`,
seconds since all workers train, `worker`, which is 0 to 3, `what`, and `for_s`, seconds until it is
over:

- "kill": SIGKILL; the worker is started again at once;
- "pause": SIGSTOP, later SIGCONT;
- "cut": the packets of its line vanish both ways;
- "slow": its steps take ten times as long;
- "host": SIGKILL for the host, which is started again at once, with its journal.

2 % of the packets are lost (`--loss`). `--scale 3` divides the times of the faults, the rounds and
the time-out by 3; steps, latency, and what the library needs stay as they are. `calm` is the same
run at the same time without faults and lost packets.

Goodput from outside: steps that count at the end over those that the time would have allowed, each
worker at its own speed. A step counts if it was averaged. `of the rest` leaves out the time that
faults take from their workers, whatever a system does: a pause, nine tenths of a slow time.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import bare_parser, json_lines, markdown, save
from benchmarks.goodput_worker import (
    MEMBERS,
    ROUND_S,
    SLOWER,
    TIMEOUT_S,
    step_seconds,
    train,
)
from benchmarks.ranks import cut, host, started
from thinwire.tools.compare.results import describe_machine
from thinwire.tools.network.netns import Link, Network, network
from thinwire.tools.run.launch import EventReader

FAULTS = Path(__file__).with_name("settings") / "faults.jsonl"
_LINK, _LATENCY = "20mbit", "20ms"
_START_S, _POLL_S = 300.0, 0.2
_LAST_ROUNDS = 5
"""Rounds whose mean is the final loss."""
_TAKEN = {"pause": 1.0, "slow": 1 - 1 / SLOWER}
"""Share of its time that a fault takes from its worker."""
_COSTS = ("since", "seconds", "taken", "lost beyond")
_STATS = ("goodput", "lost_waiting", "lost_regrouping", "lost_joining", "lost_saving")
Fault = Mapping[str, Any]


@dataclass(slots=True)
class Run:
    """One contender: its processes, and what they wrote."""

    folder: Path
    net: Network
    given: tuple[Any, ...]
    address: str = ""
    host: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    processes: dict[int, BaseProcess] = field(default_factory=dict)

    def start_host(self) -> None:
        """Start the host; kill the one before it."""
        self.host.close()
        journal = str(self.folder / "journal")
        self.address, _ = self.host.enter_context(host(self.net, "--journal", journal))

    def start(self, number: int) -> None:
        """Start a worker."""
        fd, log = self.net.namespace_fds[number + 1], self.folder / f"{number}.log"
        given = self.folder, number, self.address, *self.given
        self.processes[number] = started(fd, train, *given, log=log, imports=True)

    def look(self) -> None:
        """Start ended members again, as a service manager does."""
        for number, process in list(self.processes.items()):
            if not process.is_alive():
                self.start(number)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all workers, in order of time."""
        readers = [EventReader(self.folder, number) for number in range(MEMBERS)]
        found = [e | {"number": reader.rank} for reader in readers for e in reader.read()]
        return sorted(found, key=lambda event: event["unix_s"])

    def all_in(self) -> bool:
        """Return True if every worker has begun to train."""
        return len({e["number"] for e in self.events() if e["event"] == "in"}) == MEMBERS

    def fault(self, what: str, number: int, *, over: bool) -> None:
        """Make a fault, or end it."""
        match what:
            case "host":
                self.start_host()
            case "cut":
                cut(self.net, number + 1, "del" if over else "add")
            case "slow":
                slow = self.folder / f"slow-{number}"
                slow.unlink() if over else slow.touch()
            case _:
                sent = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP}[what]
                pid = self.processes[number].pid
                assert pid is not None, "started"
                os.kill(pid, signal.SIGCONT if over else sent)

    def end(self) -> None:
        """Let the workers end, then kill what is left."""
        (self.folder / "end").touch()
        until = time.monotonic() + 2.5 * ROUND_S
        while time.monotonic() < until and any(p.is_alive() for p in self.processes.values()):
            time.sleep(_POLL_S)
        for process in self.processes.values():
            process.kill()
            process.join()


def run(given: argparse.Namespace, folder: Path, faults: Sequence[Fault]) -> dict[str, Any]:
    """Run both contenders and return what came of them."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # no name server is reached there
    joins = {} if given.grace is None else {"grace_seconds": given.grace}
    options = given.seed, given.scale, joins
    plan = [(fault["at_s"], False, fault) for fault in faults]
    plan += [(at + fault["for_s"], True, fault) for at, _, fault in plan if "for_s" in fault]
    plan.sort(key=lambda change: change[0])
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, loss in (("members", given.loss), ("calm", "0%")):
            link = Link.parse(_LINK, _LATENCY, loss=loss)
            net = stack.enter_context(network(MEMBERS + 1, link))
            runs[name] = made = Run(folder / name, net, options)
            made.folder.mkdir(parents=True)
            stack.push(made.host)
            made.start_host()
            stack.callback(made.end)
            for number in range(MEMBERS):
                made.start(number)
        until = time.monotonic() + _START_S
        while not all(made.all_in() for made in runs.values()):
            assert time.monotonic() < until, "the workers did not start: see their logs"
            for made in runs.values():
                made.look()
            time.sleep(_POLL_S)
        began = time.time()
        while time.time() < began + given.seconds / given.scale:
            while plan and time.time() >= began + plan[0][0] / given.scale:
                at_s, over, fault = plan.pop(0)
                print(f"{at_s:.0f} s: {fault['what']} {fault['worker']}", "over" * over, flush=True)
                runs["members"].fault(fault["what"], fault["worker"], over=over)
            for made in runs.values():
                made.look()
            time.sleep(_POLL_S)
        spans = [
            {
                **fault,
                "begins": began + fault["at_s"] / given.scale,
                "ends": began + (fault["at_s"] + fault.get("for_s", 0.0)) / given.scale,
            }
            for fault in faults
        ]
        members, calm = (made.events() for made in runs.values())
        return {"members": measured(members, spans), "calm": measured(calm, [])}


def measured(events: Sequence[Mapping[str, Any]], faults: Sequence[Fault]) -> dict[str, Any]:
    """Return goodput, what each fault cost, and losses of a contender, from its events.

    The time measured is that between the ends of two rounds: the first one with all workers, and
    the last one.
    """
    of_rounds: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["event"] == "round":
            of_rounds.setdefault(event["step"], []).append(event)
    rounds = [rows for _, rows in sorted(of_rounds.items())]
    begun, ended = (max(row["unix_s"] for row in rows) for rows in (rounds[0], rounds[-1]))
    useful = np.array([step for step in _useful_steps(events) if begun < step[0] <= ended])
    bounds = [begun, *(fault["begins"] for fault in faults), ended]
    costs = []
    for before, (since, until) in zip([{}, *faults], pairwise(bounds), strict=True):
        made = useful[(since < useful[:, 0]) & (useful[:, 0] <= until), 1]
        name = " ".join(str(before[key]) for key in ("what", "worker", "for_s") if key in before)
        taken_s = sum(_taken_s(fault, since, until) for fault in faults)
        lost_s = MEMBERS * (until - since) - made.sum() - taken_s
        costs.append(dict(zip(_COSTS, (name, until - since, taken_s, lost_s), strict=True)))
    possible_s = MEMBERS * (ended - begun)
    return {
        "goodput": useful[:, 1].sum() / possible_s,
        "of the rest": useful[:, 1].sum() / (possible_s - sum(row["taken"] for row in costs)),
        "rounds": len(rounds),
        "rounds_with_unequal_digests": [
            rows[0]["step"] for rows in rounds if len({row["digest"] for row in rows}) > 1
        ],
        "costs": costs,
        "curve": [
            [at, int((useful[:, 0] <= at).sum()), rows[0]["loss"]]
            for rows in rounds
            for at in [rows[0]["unix_s"]]
        ],
        "stats": {name: [row["stats"][name] for row in rounds[-1]] for name in _STATS},
    }


def _useful_steps(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yield time and seconds of each step that was averaged."""
    times: dict[int, list[float]] = {number: [] for number in range(MEMBERS)}
    for event in events:
        number = event["number"]
        if event["event"] == "step":
            times[number].append(event["unix_s"])
            continue
        if event["event"] == "round":
            yield from ((at, step_seconds(number)) for at in times[number])
        times[number].clear()


def _taken_s(fault: Fault, since: float, until: float) -> float:
    overlap = min(until, fault["ends"]) - max(since, fault["begins"])
    return _TAKEN.get(fault["what"], 0.0) * max(0.0, overlap)


def final_loss_over_calm(members: Mapping[str, Any], calm: Mapping[str, Any]) -> float:
    """Return the final loss of the members over that of the calm run after as many steps."""
    means = [
        np.lib.stride_tricks.sliding_window_view(found["curve"], _LAST_ROUNDS, axis=0).mean(-1)
        for found in (members, calm)
    ]
    (_, steps, loss), (_, calm_steps, calm_loss) = means[0][-1], means[1].T
    return float(loss / np.interp(steps, calm_steps, calm_loss))


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--scale", type=float, default=1, help="all times are divided by it")
    parser.add_argument("--faults", type=Path, default=FAULTS, help="the file of the faults")
    parser.add_argument("--loss", default="2%", help="of the packets")
    parser.add_argument("--grace", type=float, help="`grace_seconds` of tw.join")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps logs and events")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="thinwire-goodput-"))
    faults = [fault for fault in json_lines(given.faults) if fault["at_s"] < given.seconds]
    results = run(given, folder, faults)
    calm_share = MEMBERS * (1 - results["calm"]["goodput"])
    for contender, found in results.items():
        rest = found["of the rest"]
        print(f"{contender}: goodput {found['goodput']:.1%}, of the rest {rest:.1%}")
        rows = []
        for name, seconds, taken_s, lost_s in map(dict.values, found["costs"]):
            numbers = seconds, taken_s, lost_s, lost_s - calm_share * seconds
            rows.append([name, *(f"{number:.1f}" for number in numbers)])
        print("\n".join(markdown([*_COSTS, "more than calm"], rows)))
    loss = final_loss_over_calm(**results)
    print(f"final loss, over that without faults: {loss:.4f}")
    about = {
        "command": " ".join(["python -m benchmarks.goodput", *sys.argv[1:]]),
        "machine": describe_machine(),
        "step_seconds": [step_seconds(number) for number in range(MEMBERS)],
        "round_seconds": ROUND_S / given.scale,
        "timeout_seconds": TIMEOUT_S / given.scale,
        "line": f"{_LINK}, {_LATENCY} one way to the middle, {given.loss} lost",
        "final_loss_over_calm": loss,
        "contenders": results,
    }
    save(about, given.out)


if __name__ == "__main__":
    main()
