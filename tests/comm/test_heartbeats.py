"""Heartbeat threads end, and leave the script's own connections alone."""

import os
import signal
import subprocess
import sys
import time

from torch.distributed import TCPStore

from tests.api import HeartbeatThread
from tests.processes import running

HOST = """
import time; from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_thread_that_ends_before_it_connects_ends_no_connection_of_the_script() -> None:
    with running([sys.executable, "-c", HOST], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None  # threads connect one at a time: the first waits for it
        stopped = TCPStore("127.0.0.1", int(host.stdout.readline()), None, False)
        os.kill(host.pid, signal.SIGSTOP)
        first = HeartbeatThread(stopped, 0, 2, 60.0)
        time.sleep(0.2)
        own = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        HeartbeatThread(own, 0, 2, 60.0).stop()
        own.set("name", "value")
        assert own.get("name") == b"value"
        first.stop()
