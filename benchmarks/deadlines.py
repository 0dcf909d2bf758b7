"""How long after its deadline a call ends, which no test asserts: on a machine with nothing else to
do it is 2 s at most.

    python -m benchmarks.deadlines --repeats 5

Three ranks train, and one of them is stopped (the deadline is the time-out of the others) or killed
(the deadline is its end). Then joiners come to a host that refuses them. The exit status
is 1 where a call ended later.
"""

import contextlib
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from benchmarks.common import parser_for, save, surroundings
from tests.comm.cutting import trainees
from tests.members.places import TOKEN, meeting_place
from thinwire.errors import ThinwireError
from thinwire.members.meeting import connect

LIMIT_S = 2.0
TIMEOUT_S = 5.0
PATIENCE_S = 60.0


def after_an_attack(kind: str, victim: int, number: signal.Signals, deadline_s: float) -> float:
    """Seconds from the deadline to the last error of the others."""
    with trainees(kind, 3, TIMEOUT_S) as job:
        time.sleep(random.random())
        others = [rank for rank in range(3) if rank != victim]
        process = job.processes[victim]
        ends = job.ended(others, lambda: os.kill(process.pid, number), PATIENCE_S)
    return max(PATIENCE_S if end is None else end.error_s for end in ends) - deadline_s


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def refused(
    host: Callable[[], contextlib.AbstractContextManager[str]], token: bytes, deadline_s: float
) -> float:
    """Seconds from the deadline to the error."""
    with host() as address:
        begun = time.monotonic()
        try:
            connect(address, "run", token, timedelta(seconds=TIMEOUT_S))
        except ThinwireError:
            return time.monotonic() - begun - deadline_s
    raise AssertionError("it was not refused")


CASES: dict[str, Callable[[], float]] = {
    "a rank is stopped, agreements": lambda: after_an_attack("votes", 1, signal.SIGSTOP, TIMEOUT_S),
    "a rank is stopped, steps": lambda: after_an_attack("engine", 1, signal.SIGSTOP, TIMEOUT_S),
    "the host of the store is stopped": lambda: after_an_attack(
        "engine", 0, signal.SIGSTOP, TIMEOUT_S
    ),
    "a rank is killed, agreements": lambda: after_an_attack("votes", 1, signal.SIGKILL, 0.0),
    "a rank is killed, steps": lambda: after_an_attack("engine", 1, signal.SIGKILL, 0.0),
    "nobody at the meeting place": lambda: refused(nobody, TOKEN, 0.0),
    "another token at the meeting place": lambda: refused(
        meeting_place, secrets.token_bytes(32), 0.0
    ),
    "who listens there says nothing": lambda: refused(silent, TOKEN, TIMEOUT_S),
}


def main() -> int:
    parser = parser_for(__doc__)
    given = parser.parse_args()
    repeats = 1 if given.quick else given.repeats
    rows: list[dict[str, Any]] = []
    print(f"{'case':40} {'latest':>9} {'at most':>9} met")
    around = surroundings(repeats)
    for name, measured in CASES.items():
        latest_s = max(measured() for _ in range(repeats))
        rows.append({"case": name, "late_s": latest_s, "at_most_s": LIMIT_S})
        met = "yes" if latest_s <= LIMIT_S else "NO"
        print(f"{name:40} {latest_s:7.2f} s {LIMIT_S:7.2f} s {met}", flush=True)
    save({**around, "timeout_s": TIMEOUT_S, "rows": rows}, given.out)
    return int(any(row["late_s"] > LIMIT_S for row in rows))


if __name__ == "__main__":
    sys.exit(main())
