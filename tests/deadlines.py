"""How long after its deadline a call ends, which no test asserts: on a machine with nothing else to
do it is 2 s at most.

    python -m tests.deadlines --repeats 5

Three ranks train, and one of them is stopped (the deadline is the time-out of the others) or killed
(the deadline is its end). Then joiners come to a host that refuses them. The exit status
is 1 where a call ended later.
"""

import argparse
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

from tests.api import connect
from tests.comm.cutting import trainees
from tests.members.places import TOKEN, meeting_place
from thinwire.errors import ThinwireError

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats, late = parser.parse_args().repeats, False
    print(f"{'case':40} {'latest':>9} {'at most':>9} met")
    for name, measured in CASES.items():
        latest_s = max(measured() for _ in range(repeats))
        late |= latest_s > LIMIT_S
        met = "yes" if latest_s <= LIMIT_S else "NO"
        print(f"{name:40} {latest_s:7.2f} s {LIMIT_S:7.2f} s {met}", flush=True)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
