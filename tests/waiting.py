"""How long tests wait on a machine of any speed, with any other work.

No test of the default run asserts seconds. It waits for an event up to `PATIENCE_S`, which only a
failure reaches. A time-out of the library that runs out in a test is `time_out(seconds)`.
"""

import math
import os
import time
from collections.abc import Callable

__all__ = ["PATIENCE_S", "SLOWNESS", "time_out", "until"]

_NAME, _MOST, _SPIN_S = "THINWIRE_TESTS_SLOWNESS", 3, 0.2


def _measured() -> int:
    """How many processes share a core with this one, at most `_MOST`."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while (cpu_s := time.process_time() - begin_cpu_s) < _SPIN_S:
        pass
    share = (time.perf_counter() - begin_s) / cpu_s
    return min(_MOST, max(1, math.ceil(share - 0.25)))


# measured once, before there are other processes of the tests, which inherit it
SLOWNESS = int(os.environ.get(_NAME) or _measured())
os.environ[_NAME] = str(SLOWNESS)
PATIENCE_S = 240.0
"""When a test gives up an event that has to come."""


def time_out(seconds: float) -> float:
    """A time-out that runs out in a test: longer where the machine is busy."""
    return seconds * SLOWNESS


def until(condition: Callable[[], object], what: str = "the event") -> None:
    """Wait for `condition`; fail where it stays false."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come within {PATIENCE_S:g} s"
        time.sleep(0.02)
