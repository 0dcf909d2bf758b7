"""Goodput under faults: members that come and go, beside torchrun with restarts.

    python -m benchmarks.goodput --seconds 1800 --out benchmarks/results/goodput.json

Four workers, one at half speed, each in a network of its own behind a line of 20 Mbit/s and 20 ms.
A step sleeps for 0.2 s (0.4 s), as if a GPU worked. The faults are those of a file, by default
`settings/faults.jsonl`: a line for each, with `at_s`, seconds since all workers train, `worker`,
which is 0 to 3, and `what`: "kill", after which the worker is started again at once, "cut" and
"mend" of its line. There one is killed, and a line is cut for 15 s in every 300 s; no time is
scaled. The contenders run at the same time, under the same faults at the same times:

- `members`: rounds of 30 s between members (`thinwire host`, `tw.join`);
- `rounds`: the same rounds of fixed ranks under torchrun, a checkpoint after every round;
- `ddp`: DistributedDataParallel under torchrun, a checkpoint every 100 steps.

Goodput from outside: steps that count at the end over those that the time would have allowed, each
worker at its own speed. A step counts if it was averaged, and if no later restart went back behind
it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import bare_parser, json_lines, markdown, save
from benchmarks.goodput_worker import MEMBERS, ROUND_S, step_seconds
from benchmarks.ranks import host
from thinwire.tools.compare.results import describe_machine
from thinwire.tools.network.netns import Link, Network, inside, network
from thinwire.tools.run.launch import signal_group, start

MODES = ("members", "rounds", "ddp")
FAULTS = Path(__file__).with_name("settings") / "faults.jsonl"
_LINK, _LATENCY = "20mbit", "20ms"
_START_S, _POLL_S, _PORT = 300.0, 0.2, 29500
LOSSES = {
    "waiting": "in an averaging, for others and for the line",
    "averagings made again": "the same, where members were lost meanwhile",
    "steps made again": "not averaged before a kill, or behind the checkpoint",
    "starting": "from the last step of a process until the next one has joined",
    "joiner's copy": "from then until it trains: the copy, the end of the round, or the checkpoint",
    "saving": "of checkpoints",
    "speed": "steps slower than asked for, on this machine",
}
"""Where the time of the workers went, if not into steps that count."""


@dataclass(slots=True)
class Run:
    """One contender: its processes, and what they told."""

    mode: str
    folder: Path
    net: Network
    address: str
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, number: int) -> None:
        """Start a worker, or the agent of torchrun that starts it."""
        own = self.net.addresses[number + 1]
        program = ["-m", "benchmarks.goodput_worker"]
        if self.mode != "members":
            first = self.net.addresses[1]
            program = [
                *("-m", "torch.distributed.run", "--nnodes", str(MEMBERS), "--nproc-per-node=1"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{_PORT}", "--rdzv-id=goodput"),
                *(f"--rdzv-conf=is_host={int(number == 0)}", "--max-restarts=100"),
                *(f"--local-addr={own}", *program),
            ]
        fd = self.net.namespace_fds[number + 1]
        given = [self.mode, str(self.folder), str(number), self.address]
        environment = {
            "GLOO_SOCKET_IFNAME": self.net.interface,
            "OMP_NUM_THREADS": "1",
            # without it, restarted workers read addresses of the workers before them
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.folder / f"{number}.log").open("ab") as log:
            command = [sys.executable, *program, *given]
            self.processes[number] = start(
                command, os.environ | environment, fd, log, subprocess.STDOUT
            )

    def look(self) -> None:
        """Start ended members again, as a service manager does; torchrun does so itself."""
        for number, process in list(self.processes.items()):
            if process.poll() is not None and self.mode == "members":
                self.start(number)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all workers, in order of time."""
        found = [e for n in range(MEMBERS) for e in json_lines(self.folder / f"{n}.jsonl")]
        return sorted(found, key=lambda event: event["time"])

    def all_in(self) -> bool:
        """Return True if every worker has begun to train."""
        return len({e["number"] for e in self.events() if e["what"] == "in"}) == MEMBERS

    def kill(self, number: int) -> None:
        """Kill the worker itself, not the agent."""
        pid = [e["pid"] for e in self.events() if e["what"] == "begin" and e["number"] == number]
        os.kill(pid[-1], signal.SIGKILL)

    def line(self, number: int, state: str) -> None:
        """Cut the line of a worker in the middle, or mend it: packets vanish both ways."""
        address = self.net.addresses[number + 1]

        def change() -> None:
            from pyroute2 import IPRoute

            with IPRoute() as ip:
                for end in ("src", "dst"):
                    rule = {end: address, f"{end}_len": 32, "action": "FR_ACT_BLACKHOLE"}
                    ip.rule("add" if state == "cut" else "del", priority=10, **rule)

        inside(self.net.hub_fd, change)

    def end(self) -> None:
        """Let the workers end, then kill what is left."""
        (self.folder / "end").touch()
        until = time.monotonic() + 2.5 * ROUND_S * (self.mode != "ddp")
        while time.monotonic() < until and any(p.poll() is None for p in self.processes.values()):
            time.sleep(_POLL_S)
        workers = {event["number"]: event["pid"] for event in self.events() if "pid" in event}
        for process in self.processes.values():
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        for pid in workers.values():  # those of torchrun have groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(
    folder: Path, modes: Sequence[str], seconds: float, faults: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Run the contenders and return what came of them."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # no name server is reached there
    plan = sorted(faults, key=lambda fault: float(fault["at_s"]))
    with contextlib.ExitStack() as stack:
        runs = []
        for mode in modes:
            net = stack.enter_context(network(MEMBERS + 1, Link.parse(_LINK, _LATENCY)))
            address = stack.enter_context(host(net)) if mode == "members" else "-"
            made = Run(mode, folder / mode, net, address)
            made.folder.mkdir(parents=True)
            runs.append(made)
            stack.callback(made.end)
            for number in range(MEMBERS):
                made.start(number)
        until = time.monotonic() + _START_S
        while not all(made.all_in() for made in runs):
            assert time.monotonic() < until, "the workers did not start: see their logs"
            time.sleep(_POLL_S)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + seconds:
            while plan and time.monotonic() >= begun_s + plan[0]["at_s"]:
                at, kind, victim = (plan[0][name] for name in ("at_s", "what", "worker"))
                plan.pop(0)
                print(f"{at:.0f} s: {kind} {victim}", flush=True)
                for made in runs:
                    made.kill(victim) if kind == "kill" else made.line(victim, kind)
            for made in runs:
                made.look()
            time.sleep(_POLL_S)
        return {made.mode: measured(made.events()) for made in runs}


def measured(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return goodput and losses of a contender, from its events.

    The time measured is that between the ends of two rounds: the first one with all workers, and
    the last one.
    """
    kept, dropped = counted(events)
    everybody = max(min(e["time"] for e in events if _is(e, "in", n)) for n in range(MEMBERS))
    firsts = [[r["time"] for r in kept if _is(r, "round", n)] for n in range(MEMBERS)]
    begun = max(next(at for at in of_one if at > everybody) for of_one in firsts)
    kept = [row for row in kept if row["time"] > begun]
    ended = max(row["time"] for row in kept)
    possible_s = MEMBERS * (ended - begun)
    lost = dict.fromkeys(LOSSES, 0.0)
    for number in range(MEMBERS):
        own = [e for e in events if e["number"] == number and begun < e["time"] <= ended]
        for name, seconds in _losses_of(own, begun, step_seconds(number)):
            lost[name] += seconds
    lost["steps made again"] += sum(
        row["steps"] * step_seconds(row["number"]) for row in dropped if row["time"] > begun
    )
    useful_s = sum(row["steps"] * step_seconds(row["number"]) for row in kept)
    stats = {row["number"]: row["stats"] for row in kept if "stats" in row}
    return {
        "goodput": useful_s / possible_s,
        "seconds": ended - begun,
        "rounds": len({row["step"] for row in kept}),
        "lost": {name: seconds / possible_s for name, seconds in lost.items()},
        "stats_goodput": [stats[number]["goodput"] for number in sorted(stats)],
    }


def _is(event: Mapping[str, Any], what: str, number: int) -> bool:
    return event["what"] == what and event["number"] == number


def counted(events: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the rounds that count, and those behind which a restart went back."""
    kept: list[Any] = []
    dropped: list[Any] = []
    for event in events:
        if event["what"] == "round":
            kept.append(event)
        elif event["what"] == "in":
            dropped += [row for row in kept if row["step"] > event["step"]]
            kept = [row for row in kept if row["step"] <= event["step"]]
    return kept, dropped


def _losses_of(
    events: Sequence[Mapping[str, Any]], begun: float, step_s: float
) -> Iterator[tuple[str, float]]:
    """Yield what a worker lost, and to what, from its events since `begun`."""
    at = round_at = begun
    size = MEMBERS
    for event in events:
        spent_s = event["time"] - at
        match event["what"]:
            case "round":
                lost_some, size = event["size"] < size, event["size"]
                yield "averagings made again" if lost_some else "waiting", event["exchange_s"]
                yield "saving", event["saving_s"]
                yield "speed", event["computed_s"] - event["steps"] * step_s
                round_at = event["time"]
            case "begin":  # the process before it was seen last at `at`
                yield "steps made again", at - round_at
                yield "starting", spent_s
            case "joined":
                yield "starting", spent_s
            case "in":
                yield "joiner's copy", spent_s
                round_at, size = event["time"], 0
        at = event["time"]


def table(results: Mapping[str, Any]) -> str:
    """Return the results as a table of Markdown."""
    shares = {"goodput": [found["goodput"] for found in results.values()]}
    shares |= {name: [found["lost"][name] for found in results.values()] for name in LOSSES}
    rows = ([name, *(f"{100 * share:.1f}" for share in of_all)] for name, of_all in shares.items())
    return "\n".join(markdown(["of the possible steps, %", *results], rows))


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--faults", type=Path, default=FAULTS, help="the file of the faults")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--folder", type=Path, help="keeps logs and events")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="thinwire-goodput-"))
    faults = [json.loads(line) for line in given.faults.read_text().splitlines()]
    results = run(folder, given.modes, given.seconds, faults)
    print(table(results))
    about = {
        "command": f"python -m benchmarks.goodput --seconds {given.seconds:g}",
        "machine": describe_machine(),
        "faults": faults,
        "step_seconds": [step_seconds(number) for number in range(MEMBERS)],
        "round_seconds": ROUND_S,
        "line": f"{_LINK}, {_LATENCY} one way to the middle",
        "lost_means": LOSSES,
        "contenders": results,
    }
    save(about, given.out)


if __name__ == "__main__":
    main()
