"""A machine of two is lost for good in mid-step: torchrun goes on with the other one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launched import free_port

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "restarts.py"
STEPS, KILL_AT = 1500, 50


def _agent(port: int, folder: Path, *, host: int) -> "subprocess.Popen[str]":
    settings = f"last_call_timeout=3,join_timeout=60,is_host={host}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-conf", settings, str(EXAMPLE), str(folder), str(STEPS)),
    ]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE if host else subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        if int(text.rpartition(")")[2].split()[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def _reached(folder: Path) -> int:
    file = folder / "reached"
    text = file.read_text().split() if file.exists() else []
    return int(text[0]) if text else 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_other_machine_goes_on_alone_and_says_what_was_lost(tmp_path: Path) -> None:
    port = free_port()
    first, second = (_agent(port, tmp_path, host=host) for host in (1, 0))
    try:
        until = time.monotonic() + 100
        while _reached(tmp_path) < KILL_AT and time.monotonic() < until:
            time.sleep(0.02)
        for process in [*_children(second.pid), second.pid]:
            os.kill(process, signal.SIGKILL)
        out, _ = first.communicate(timeout=120)
    finally:
        for agent in (first, second):
            for process in [*_children(agent.pid), agent.pid] if agent.poll() is None else []:
                os.kill(process, signal.SIGKILL)
            agent.wait()
    assert first.returncode == 0, out
    told = re.search(r"1 ranks go on from step (\d+): (\d+) steps are made again", out)
    assert told, out
    begun, lost = int(told[1]), int(told[2])
    assert begun % 20 == 0
    assert begun + lost >= KILL_AT
    assert lost <= 20
    assert f"step {STEPS}: loss " in out
