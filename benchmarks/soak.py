"""Members that come and go for a while: kills, stops, cuts and joins by a seeded schedule.

    python -m benchmarks.soak --seconds 1800 --seed 1 --folder runs/soak
    python -m benchmarks.soak --members 2 --times 20 --every 1 --timeout 6 --faults kill
    python -m benchmarks.soak --replay runs/soak/trace.json

Four to six members train over links with latency, in network namespaces where this process may
make them, else on loopback and without cuts. It ends with status 1 where something that is promised
did not hold: see `Soak.problems`. Afterwards the trace of the members is replayed in one process
without any fault, and must give the same bits.

`--faults` gives the kinds that are made, of which "kill" takes the oldest member then: in turn all.
"host" kills the host, "lost file" its file too; "kill, host" and "kill, lost file" are both at
once. Where half of the members or fewer are left then, the host is started with `--recover`.
"""

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median_low
from typing import Any

from benchmarks.common import bare_parser
from benchmarks.ranks import cut, host, started
from benchmarks.soak_member import CONFIGS, RUN, Part, live
from benchmarks.soak_replay import Trace, compared, compiled
from thinwire.members.kv import KeyValueView
from thinwire.members.meeting import connect
from thinwire.tools.network.netns import Link, Network, inside, network, why_unavailable
from thinwire.tools.run.launch import EventReader

_SLOTS = 10
KINDS = (
    *("kill", "two", "stop", "leave", "recipient", "donor", "join and kill", "cut"),
    *("host", "lost file", "kill, host", "kill, lost file"),
)
"""Faults."""
_POLL_S = 0.1
_START_S = 180.0
_SLACK_S = 15.0
"""Of silence beyond the time-out: to notice, to regroup over the latency, and to connect anew."""
_STOPPED_S = 4.0
"""Beyond the time-out, for one that is stopped or cut off."""
_LAST_STEPS = 40
_ENOUGH = 1000
"""Averagings after which losses are compared: until then they fall fast."""
_LOSS_WITHIN = 0.01
"""Of the loss of a run that nobody disturbs, with as many averagings."""
_CUT_OFF = ("Evicted", "QuorumLost", "PeerStalled", "ThinwireError")
"""How one may end whose link was cut: it cannot know what the others have decided."""


@dataclass(slots=True)
class Process:
    """One member, as the driver sees it."""

    part: Part
    process: BaseProcess
    slot: int
    ids: list[str] = field(default_factory=list)
    entered: dict[str, int] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    inherited: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    fate: str = ""
    """Fault that was injected; empty for none."""
    last: float = 0.0
    longest_s: float = 0.0
    read: int = 0

    @property
    def number(self) -> int:
        """Of the process."""
        return self.part.number

    @property
    def takes_part(self) -> bool:
        """True if it is in the run and no fault was injected."""
        return bool(self.entered) and not self.fate and self.end is None


@dataclass(slots=True)
class Soak:
    """A run under faults.

    Attributes:
        problems: What did not hold, in words; empty where all did.
        events: Kinds of faults that were made, in order.
    """

    folder: Path
    seed: int
    seconds: float
    every_s: float
    timeout_s: float
    config: str
    net: Network | None
    slack_s: float = _SLACK_S
    fewest: int = 4
    kinds: Sequence[str] = KINDS
    times: int | None = None
    """Faults after which it ends; None if by time."""
    address: str = ""
    problems: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    all: list[Process] = field(default_factory=list)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    dice: random.Random = field(default_factory=random.Random)
    deck: list[str] = field(default_factory=list)
    ending: bool = False
    host: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def run(self) -> None:
        """Begin with the fewest, make faults until it is over, and let all end together."""
        self.dice.seed(self.seed)
        try:
            self._start_host()
            for _ in range(self.fewest):
                self._start(start_members=self.fewest)
            self._wait(lambda: len(self._there) == self.fewest, _START_S, "the start")
            until, due = time.monotonic() + self.seconds, time.monotonic() + 1.0
            while not self.problems and len(self.events) != self.times:
                if time.monotonic() > until:
                    if self.times is not None:
                        self._problem(f"{len(self.events)} faults in {self.seconds:g} s")
                    break
                self._look()
                if time.monotonic() >= due and self._settled():
                    self._fault()
                    due = time.monotonic() + self.every_s
            limit_s = 2 * (self.timeout_s + self.slack_s)
            if not self.problems:
                self._wait(self._settled, limit_s, "the last fault")
            if not self.problems:
                self._finish(limit_s)
        finally:
            self.host.close()
            for one in self.all:
                if one.process.is_alive() and one.process.pid:
                    one.process.kill()
                    one.process.join()

    def _finish(self, limit_s: float) -> None:
        last = max(line["step"] for one in self._there for line in one.lines) + _LAST_STEPS
        new = self.folder / "end.new"
        new.write_text(str(last))
        new.rename(self.folder / "end")
        self.ending = True
        self._wait(lambda: all(not one.process.is_alive() for one in self.all), limit_s, "the end")
        self._look()

    # processes

    @property
    def _there(self) -> list[Process]:
        """Members that take part, and to whom nothing is done."""
        return [one for one in self.all if one.takes_part]

    def _start(self, *, start_members: int = 2, dies_taking: int = 0, fate: str = "") -> Process:
        taken = {one.slot for one in self.all if one.process.is_alive()}
        slot = min(set(range(_SLOTS)) - taken)
        part = Part(
            len(self.all),
            str(self.folder),
            self.address,
            self.config,
            start_members,
            self.timeout_s,
            dies_taking,
        )
        fd = None if self.net is None else self.net.namespace_fds[slot + 1]
        process = started(fd, live, part, log=self.folder / f"{part.number}.log")
        one = Process(part, process, slot, fate=fate, last=time.monotonic())
        self.all.append(one)
        return one

    def _look(self) -> None:
        """Read what the members tell, and do what is due."""
        time.sleep(_POLL_S)
        now = time.monotonic()
        for due, act in list(self.later):
            if now >= due:
                self.later.remove((due, act))
                act()
        for one in self.all:
            dead = not one.process.is_alive()
            self.read(one, now)
            if one.end is None and dead and not one.fate:
                if not (self.folder / "die-giving").exists() and "donor" in self.events[-1:]:
                    one.fate = "killed"
                else:
                    self._problem(f"{one.number} ended with {one.process.exitcode}, untold")
                    one.fate = "died"
            silent_s = now - one.last
            if not dead and one.end is None and not one.fate:
                one.longest_s = max(one.longest_s, silent_s)
                if silent_s > self.timeout_s + self.slack_s + (0 if one.entered else _START_S):
                    self._problem(f"{one.number} told nothing for {silent_s:.1f} s")

    def read(self, one: Process, now: float) -> None:
        """Read the new events of a member."""
        reader = EventReader(self.folder, one.number, one.read)
        for line in reader.read():
            one.last = now
            match line["event"]:
                case "joined":
                    one.ids.append(line["id"])
                case "entered":
                    one.entered[line["id"]] = line["step"]
                case "averaged":
                    one.lines.append(line)
                case "received":
                    one.received.append(line)
                case "inherited":
                    one.inherited.append(line)
                case "end":
                    one.end = line
                    self._look_at_end(one, line)
        one.read = reader.offset

    def _look_at_end(self, one: Process, line: dict[str, Any]) -> None:
        ending = f"{line['error']}: {line['text']}" if line["error"] else "no error"
        allowed = {
            "stopped": ("Evicted",),
            "cut": _CUT_OFF,
            "leaving": ("",),
            "": ("",) if self.ending else (),
        }.get(one.fate, ())
        if line["error"] not in allowed:
            self._problem(f"{one.number} ({one.fate or 'no fault'}) ended with {ending}")
        if one.fate == "leaving" and not line["left"]:
            self._problem(f"{one.number} did not leave")
        for kind in ("sockets", "descriptors"):
            if line["after"][kind] > line["before"][kind]:
                self._problem(
                    f"{one.number} ({one.fate or 'no fault'}): {line['after'][kind]} {kind} after "
                    f"the run, {line['before'][kind]} before it"
                )

    def _problem(self, text: str) -> None:
        self._note(f"PROBLEM {text}")
        self.problems.append(text)

    def _note(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def _wait(self, until: Callable[[], bool], limit_s: float, action: str) -> None:
        end = time.monotonic() + limit_s
        while not until() and not self.problems:
            self._look()
            if time.monotonic() > end:
                self._problem(f"{action} took more than {limit_s:g} s")

    def _settled(self) -> bool:
        """True if the last fault is over: all present members are in one generation."""
        if self.later or len(self._there) < self.fewest or self._at_host("gen") is None:
            return False
        busy = [
            one
            for one in self.all
            if one.end is None
            and one.process.is_alive()
            and (one.fate or not one.entered or len(one.lines) < 2)
        ]
        if busy or not all(one.lines for one in self._there):
            return False
        last = {(one.lines[-1]["generation"], one.lines[-1]["size"]) for one in self._there}
        return len(last) == 1 and next(iter(last))[1] == len(self._there)

    # faults

    def _fault(self) -> None:
        """Make the next one; every kind comes before one comes again."""
        if not self.deck:
            kinds = [kind for kind in self.kinds if self.net is not None or kind != "cut"]
            self.deck = self.dice.sample(kinds, len(kinds))
        few, many = len(self._there) <= self.fewest, len(self._there) >= self.fewest + 2
        kind = self.deck.pop()
        if many and kind in ("two", "join and kill", "donor"):
            self.deck.insert(0, kind)
            kind = "kill"
        self.events.append(kind)
        victim = self.dice.choice(self._there) if self.kinds is KINDS else self._there[0]
        self._note(f"{len(self._there)} members: {kind} ({victim.number})")
        away_s = self.timeout_s + _STOPPED_S
        match kind:
            case "kill":
                self._kill(victim)
            case "two":
                self._start()
                self._start()
            case "stop":
                victim.fate = "stopped"
                self._signal(victim, signal.SIGSTOP)
                self._after(away_s, partial(self._signal, victim, signal.SIGCONT))
            case "cut":
                victim.fate = "cut"
                self._cut(victim, "add")
                self._after(away_s, partial(self._cut, victim, "del"))
            case "leave":
                victim.fate = "leaving"
                self._signal(victim, signal.SIGUSR1)
            case "recipient":
                self._start(dies_taking=self.dice.choice([1, 2]), fate="killed")
            case "donor":
                (self.folder / "die-giving").touch()
                self._start()
            case "join and kill":
                joiner = self._start()
                self._after(0.0, partial(self._kill_beside, joiner, victim))
            case _:
                self._fault_of_host(kind, victim, few=few)
        if few and kind in ("kill", "stop", "cut", "leave", "donor", "join and kill"):
            self._start()

    def _fault_of_host(self, kind: str, victim: Process, *, few: bool) -> None:
        """Kill the host, maybe a member too, and start the host again after a while."""
        if kills := kind.startswith("kill"):
            self._kill(victim)
        lost = kind.endswith("file")
        recover = lost and 2 * len(self._there) <= len(self._there) + kills

        def end_host() -> None:
            self.host.close()
            if lost:
                (self.folder / "journal").unlink()
            down_s = self.dice.uniform(0.0, self.timeout_s / 4)
            self._after(down_s, partial(self._start_host, few and kills, recover=recover))

        # at once, or while the others form a generation
        self._after(self.dice.uniform(0.0, self.timeout_s) if kills else 0.0, end_host)

    def _start_host(self, joins: bool = False, *, recover: bool = False) -> None:
        """Start the host, again at the same address, and then a joiner if one is missing."""
        options = ["--journal", str(self.folder / "journal"), *["--recover"] * recover]
        port = int(self.address.rpartition(":")[2] or 0)
        self.address, _ = self.host.enter_context(host(self.net, *options, port=port))
        if joins:
            self._start()

    def _at_host(self, key: str) -> Any:
        """Return a value of the run at the host."""

        def read() -> Any:
            store = connect(self.address, RUN, None, timedelta(seconds=30))
            return KeyValueView(store).get(key)

        return read() if self.net is None else inside(self.net.namespace_fds[0], read)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    def _kill_beside(self, joiner: Process, victim: Process) -> None:
        """Kill a member a moment after a joiner has come."""
        if not joiner.ids:
            self._after(_POLL_S, partial(self._kill_beside, joiner, victim))
        else:
            self._after(self.dice.uniform(0.0, 3.0), partial(self._kill, victim))

    def _kill(self, victim: Process) -> None:
        victim.fate = "killed"
        self._signal(victim, signal.SIGKILL)

    def _signal(self, victim: Process, number: signal.Signals) -> None:
        assert victim.process.pid is not None, "started"
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.process.pid, number)

    def _cut(self, victim: Process, command: str) -> None:
        assert self.net is not None, "else there are no cuts"
        cut(self.net, victim.slot + 1, command)

    # afterwards

    def trace(self) -> Trace:
        """Return the averagings and their members, from the reports; differences are problems."""
        found = Trace(self.config)
        by_step: dict[int, dict[int, list[tuple[Process, str]]]] = {}
        ids: dict[int, list[str]] = {}
        for one in self.all:
            for identity, step in one.entered.items():
                found.seeds[identity], found.entered[identity] = one.number, step
            for line in one.lines:
                by = by_step.setdefault(line["step"], {})
                by.setdefault(line["generation"], []).append((one, line["digest"]))
                if ids.setdefault(line["generation"], line["ids"]) != line["ids"]:
                    self._problem(f"generation {line['generation']} was formed twice")
        for step, by in sorted(by_step.items()):
            # one that was lost may have heard an agreement which the others then made anew
            lost = {n for n, members in by.items() if all(one.fate for one, _ in members)}
            kept = [n for n in by if n not in lost] or [max(by)]
            digests = {text for n in kept for _, text in by[n]}
            if len(digests) != 1:
                self._problem(f"step {step}: " + ", ".join(sorted(digests)))
            found.averagings[step] = ids[max(kept)]
            found.digests[step] = by[max(kept)][0][1]
        for one in self.all:
            for line in one.inherited:
                found.inherited.setdefault(line["step"], []).append(
                    (line["id"], line["of"], line["factor"])
                )
            for line in one.received:
                expected = found.digests.get(line["step"])
                if expected != line["digest"]:
                    self._problem(f"joiner {one.number} at step {line['step']}: other bits")
        return found

    def growth(self) -> dict[str, list[tuple[int, int]]]:
        """Of whoever saw most generations: what it mostly held in each, at its usual size. It has
        grown where the later half of four or more all held more than the first: a generation that
        ends at once has been seen beside the connections of the next one alone.
        """
        seen = {one.number: {line["generation"] for line in one.lines} for one in self.all}
        oldest = max(self.all, key=lambda one: len(seen[one.number]))
        quiet = [line for line in oldest.lines if not line["gives"]]
        size = Counter({line["generation"]: line["size"] for line in quiet}.values())
        usual = size.most_common(1)[0][0]
        found = {}
        for kind in ("threads", "sockets", "descriptors"):
            seen_in: dict[int, list[int]] = {}
            for line in quiet:
                if line["size"] == usual:
                    seen_in.setdefault(line["generation"], []).append(line[kind])
            found[kind] = [(n, median_low(counts)) for n, counts in seen_in.items()]
            held = [value for _, value in found[kind]]
            if len(held) > 3 and min(held[len(held) // 2 :]) > held[0]:
                self._problem(f"{oldest.number} held {held} {kind} in generations of {usual}")
        return found

    def losses(self) -> tuple[float, float]:
        """At the beginning and at the end, of those who were there to the end."""
        first = [one.lines[0]["loss"] for one in self.all[: self.fewest] if one.lines]
        last = [line["loss"] for one in self._there_at_end for line in one.lines[-5:]]
        return sum(first) / len(first), sum(last) / len(last)

    @property
    def _there_at_end(self) -> list[Process]:
        return [one for one in self.all if not one.fate and one.lines]


def soak(folder: Path, latency: str, **options: Any) -> dict[str, Any]:
    """One run, and its replay; what came of it. Options are those of `Soak`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("*.jsonl", "*.log", "end*", "die-giving", "journal"):
        for old in folder.glob(name):
            old.unlink()
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # no name server is reached there
    why = why_unavailable()
    compiled(options["config"])
    with contextlib.ExitStack() as stack:
        link = Link.parse("none", latency)
        net = None if why else stack.enter_context(network(_SLOTS + 1, link))
        made = Soak(folder, net=net, **options)
        begun = time.monotonic()
        made.run()
        took_s = time.monotonic() - begun
        trace = made.trace()
    trace.save(folder / "trace.json")
    if not trace.averagings:
        return {"problems": made.problems}
    other, loss, calm = compared(trace)
    if other:
        made._problem(f"replay: other bits from step {other[0]} on, {len(other)} averagings")
    first, last = made.losses()
    if not last < 0.8 * first:
        made._problem(f"the loss was {first:.3f} and is {last:.3f}")
    if len(trace.averagings) >= _ENOUGH and loss / calm - 1 > _LOSS_WITHIN:
        made._problem(f"the held-out loss is {loss:.4f}, undisturbed {calm:.4f}")
    return {
        "problems": made.problems,
        "network": why or f"{latency} each way to the middle",
        "seed": made.seed,
        "config": made.config,
        "seconds": round(took_s, 1),
        "faults": dict(Counter(made.events)),
        "processes": len(made.all),
        "generations": max(line["generation"] for one in made.all for line in one.lines) + 1,
        "averagings": len(trace.averagings),
        "replayed alike": len(trace.averagings) - len(other),
        "longest silence in seconds": round(max(one.longest_s for one in made.all), 1),
        "loss": [round(first, 4), round(last, 4)],
        "held-out loss": round(loss, 5),
        "held-out loss, undisturbed": round(calm, 5),
        "held": made.growth(),
    }


def main() -> int:
    parser = bare_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--every", dest="every_s", type=float, default=20, help="seconds between faults"
    )
    parser.add_argument(
        "--timeout", dest="timeout_s", type=float, default=8, help="of the members, in seconds"
    )
    parser.add_argument(
        "--slack",
        dest="slack_s",
        type=float,
        default=_SLACK_S,
        help="of silence; more on a busy machine",
    )
    parser.add_argument(
        "--members", dest="fewest", type=int, default=4, help="the fewest, at the start too"
    )
    parser.add_argument("--faults", dest="kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--times", type=int, help="faults after which it ends, within --seconds")
    parser.add_argument("--config", choices=CONFIGS, default="sparse")
    parser.add_argument("--latency", default="50ms")
    parser.add_argument("--folder", type=Path, help="keeps logs and trace")
    parser.add_argument("--replay", type=Path, help="only replay this trace")
    options = vars(parser.parse_args())
    if (file := options.pop("replay")) is not None:
        trace = Trace.load(file)
        other, loss, calm = compared(trace)
        print(f"{len(trace.digests)} averagings, {len(other)} with other bits: {other[:10]}")
        print(f"held-out loss {loss:.5f}, undisturbed {calm:.5f}")
        return int(bool(other))
    folder = options.pop("folder") or Path(tempfile.mkdtemp(prefix="thinwire-soak-"))
    found = soak(folder, **options)
    (folder / "summary.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
