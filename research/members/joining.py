"""Joins of a member over slow lines: time to its first own step, beside the time that its downlink
takes for the state, and how much the rounds of the others slow down meanwhile.

    python -m research.members.joining --out research/members/joining.json

The quickest run of each case stays in the file.

Needs root: two members, the joiner and the host are processes in network namespaces, each behind a
line of that rate in both directions; the host has 1 Gbit/s. Peaks are of resident memory while the
state is copied, less the peak of rounds without a join, in states. The last row has rounds that
send more than the line carries: the joiner ends with the error that is printed.
"""

import contextlib
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from benchmarks.common import markdown, parser_for, save, surroundings
from benchmarks.ranks import host, on_ranks
from thinwire.errors import ThinwireError
from thinwire.tools.network.netns import Link, Network, network, why_unavailable

FOUNDERS = 2
LEAST_ROUNDS = 8
Made = tuple[torch.nn.Module, torch.optim.Optimizer, tw.LocalSGD]


@dataclass(frozen=True)
class Plan:
    """What founders and a joiner train.

    Attributes:
        make: Makes model, optimizer and settings.
        founders: Members that start together.
        rounds: Rounds that they make before the joiner comes.
        after: Rounds that the joiner makes with the others.
        round_s: Seconds of a round beside those of its step.
        timeout_s: Of each round.
    """

    make: Callable[[], Made]
    founders: int = FOUNDERS
    rounds: int = LEAST_ROUNDS
    after: int = 6
    round_s: float = 0.0
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Case:
    """A join: line, width of the one square layer, seconds of a round, compression."""

    link: str
    width: int
    round_s: float
    compression: Any

    @property
    def state_bytes(self) -> int:
        """Bytes of anchors and outer momentum."""
        return 8 * self.width**2

    def made(self) -> Made:
        net = torch.nn.Linear(self.width, self.width, bias=False)
        config = tw.LocalSGD(1, begin_step=0, outer_momentum=0.9, compression=self.compression)
        return net, torch.optim.SGD(net.parameters(), 0.01), config


def light(parameters: int) -> Any:
    return tw.Sparse(1 - 400 / parameters)


CASES = [
    Case("1mbit", 1100, 2.0, light(1100**2)),
    Case("5mbit", 2500, 2.0, light(2500**2)),
    Case("20mbit", 5840, 3.0, light(5840**2)),
    Case("1mbit", 800, 0.5, tw.Quantized(1)),
]
QUICK = [Case("5mbit", 1600, 1.0, light(1600**2)), CASES[-1]]


def peak_bytes() -> int:
    """Most resident memory of this process since this was called before."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    assert found is not None
    return 1024 * int(found[1])


def train(rank: int, size: int, plan: Plan, address: str, flag: str) -> dict[str, Any]:
    """Train as a founder or the joiner; return what was seen."""
    while rank == plan.founders and not Path(flag).exists():
        time.sleep(0.05)
    torch.manual_seed(max(rank, plan.founders - 1))
    net, optimizer, config = plan.make()
    options: dict[str, Any] = {"start_members": plan.founders, "timeout": plan.timeout_s}
    begun_s, begun_processor_s = time.monotonic(), time.process_time()
    rounds, sizes = list[float](), list[int]()
    peaks, seen = dict[str, int](), list[dict[str, float]]()
    found: dict[str, Any] = {"rank": rank}
    try:
        with tw.join(address, run="joining", **options) as members:
            sync = tw.local_sgd(net, optimizer, config, members=members)
            watching = threading.Thread(target=watch, args=(sync, seen, begun_s), daemon=True)
            if rank == plan.founders:
                watching.start()
            with sync:
                if rank < plan.founders:
                    set_momentum(sync)
                found |= {"entered_s": time.monotonic() - begun_s, "stats": sync.stats()}
                found["processor_s"] = time.process_time() - begun_processor_s
                peaks["join"], last = peak_bytes(), None
                while not members.left and (last is None or sync.step < last):
                    time.sleep(plan.round_s)
                    for param in net.parameters():
                        param.grad = torch.full_like(param, 1e-3 * (1 + rank))
                    begin_s = time.perf_counter()
                    optimizer.step()
                    rounds.append(time.perf_counter() - begin_s + plan.round_s)
                    sizes.append(members.size)
                    if len(rounds) == plan.rounds and rank < plan.founders:
                        peaks["rounds"] = peak_bytes()
                        Path(flag).touch()
                    if members.size > plan.founders and last is None:
                        last = sync.step + plan.after
                        peaks["join" if rank < plan.founders else "start"] = peak_bytes()
                    if Path(flag + ".end").exists():
                        members.leave()
    except ThinwireError as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["entered_s"] = time.monotonic() - begun_s
        Path(flag + ".end").touch()
    peaks.setdefault("join" if rank < plan.founders else "rounds", peak_bytes())
    found |= {"rounds": rounds, "sizes": sizes, "seen": seen}
    found["grown"] = peaks.get("join", 0) - peaks.get("rounds", 0)
    return found


def set_momentum(sync: tw.LocalUpdates) -> None:
    """Give all of the outer momentum a value, so that the whole state changes in every round."""
    state = sync.state_dict()
    for name, tensor in state["outer_momentum"].items():
        tensor.copy_(1e-6 * state["anchors"][name])
    sync.load_state_dict(state)


def watch(sync: tw.LocalUpdates, seen: list[dict[str, float]], begun_s: float) -> None:
    """Note the progress that `stats` tells while the joiner waits."""
    while True:
        with contextlib.suppress(RuntimeError):
            stats = sync.stats()
            row = {name: n for name, n in stats.items() if name.startswith("joining_")}
            seen.append({**row, "seconds": round(time.monotonic() - begun_s, 1)})
        time.sleep(1.0)


def joined(plan: Plan, net: Network | None) -> list[dict[str, Any]]:
    """Run a plan: what founders and joiner saw."""
    with tempfile.TemporaryDirectory() as folder, host(net) as (address, _):
        given = plan, address, str(Path(folder, "flag"))
        return on_ranks(train, plan.founders + 1, *given, net=net, group=False)


def row(case: Case) -> dict[str, Any]:
    """Run a case."""
    link = Link.parse(case.link, "10ms")
    with network(2 + FOUNDERS, link) as net:
        plan = Plan(case.made, round_s=case.round_s)
        return judged(case, link, joined(plan, net))


def judged(case: Case, link: Link, found: list[Any]) -> dict[str, Any]:
    """What the members of a case saw, as numbers."""
    joiner, line_s = found[-1], link.seconds(case.state_bytes)
    slower = []
    for founder in found[:-1]:
        alone = founder["rounds"][2:LEAST_ROUNDS]
        together = [
            seconds
            for seconds, size in zip(founder["rounds"], founder["sizes"], strict=True)
            if size == FOUNDERS
        ]
        beside = together[LEAST_ROUNDS + 1 : -1]
        slower.append(statistics.mean(beside) / statistics.mean(alone) if beside else 1.0)
    copied = joiner.get("stats", {}).get("joining_bytes", 0.0)
    moving = [one["seconds"] for one in joiner["seen"] if one["joining_left_s"] > 0] or [0.0]
    start_s, end_s = moving[0], moving[-1]
    return {
        **{key: value for key, value in asdict(case).items() if key != "compression"},
        "state_mb": round(case.state_bytes / 1e6, 2),
        "line_s": round(line_s, 1),
        "first_step_s": round(joiner["entered_s"], 1),
        "ratio": round(joiner["entered_s"] / line_s, 3),
        "start_s": start_s,
        "copy_s": round(end_s - start_s, 1),
        "repeat_s": round(joiner["entered_s"] - end_s, 1),
        "received_states": round(copied / case.state_bytes, 3),
        "rounds_slower": round(max(slower), 3),
        "sender_states": max(round(one["grown"] / case.state_bytes, 2) for one in found[:-1]),
        "joiner_states": round(joiner["grown"] / case.state_bytes, 2),
        "rate_bit_s": round(joiner.get("stats", {}).get("joining_bit_s", 0.0)),
        "error": joiner.get("error", ""),
    }


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--case", type=int, nargs="+")
    given = parser.parse_args()
    reason = why_unavailable()
    if reason is not None:
        parser.error(f"the lines cannot be emulated here: network namespaces {reason}")
    cases = QUICK if given.quick else CASES
    known = given.out is not None and given.out.exists()
    rows = json.loads(given.out.read_text())["rows"] if known else []
    for case in cases if given.case is None else [CASES[number] for number in given.case]:
        rows = better([*rows, row(case)])
        print("\n".join(table(rows)), rows, flush=True)
        save({"rows": rows, "surroundings": surroundings(1)}, given.out)
    return 0


def better(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The quickest run of each case: the machine may have had other work in a slower one."""
    names = dict.fromkeys((one["link"], one["width"]) for one in rows)
    of_case = ([one for one in rows if (one["link"], one["width"]) == name] for name in names)
    return [min(found, key=lambda one: one["first_step_s"]) for found in of_case]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table of the joins that ended, and what became of the one that could not."""
    titles = ["line", "parameters", "state", "line takes", "first own step", "ratio"]
    titles += ["start, copy, repetition", "rate of the state", "rounds of the others"]
    titles += ["peak of a sender", "peak of the joiner"]
    text = markdown(
        titles,
        (
            [
                one["link"].replace("mbit", " Mbit/s"),
                f"{one['width'] ** 2 / 1e6:.1f} M",
                f"{one['state_mb']:.0f} MB",
                f"{one['line_s']:.0f} s",
                f"{one['first_step_s']:.0f} s",
                f"{one['ratio']:.2f}",
                f"{one['start_s']:.0f}, {one['copy_s']:.0f}, {one['repeat_s']:.0f} s",
                f"{1e-6 * one['rate_bit_s']:.2f} Mbit/s",
                f"{100 * (one['rounds_slower'] - 1):.0f} % slower"
                if one["rounds_slower"] > 1.005
                else "not slower",
                f"{one['sender_states']:+.1f} states",
                f"{one['joiner_states']:+.1f} states",
            ]
            for one in rows
            if not one["error"]
        ),
    )
    for one in rows:
        if one["error"]:
            rates = re.findall(r"[\d.]+ Mbit/s", one["error"])
            ended = f"ended after {one['first_step_s']:.0f} s: {' against '.join(rates)}."
            text += ["", f"A joiner whose state the rounds leave no room for {ended}"]
    return text


if __name__ == "__main__":
    sys.exit(main())
