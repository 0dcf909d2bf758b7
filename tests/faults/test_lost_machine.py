"""A machine of two is lost for good in mid-step: torchrun goes on with the other one."""

import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.launched import free_port
from tests.processes import kill_all, running
from tests.waiting import PATIENCE_S, until

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "restarts.py"
STEPS, KILL_AT = 1500, 50


def _agent(port: int, folder: Path, *, host: int) -> AbstractContextManager[Any]:
    settings = f"last_call_timeout=3,join_timeout=60,is_host={host}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
        *("--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-conf", settings, str(EXAMPLE), str(folder), str(STEPS)),
    ]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.PIPE if host else subprocess.DEVNULL
    return running(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment)


def _reached(folder: Path) -> int:
    file = folder / "reached"
    text = file.read_text().split() if file.exists() else []
    return int(text[0]) if text else 0


@pytest.mark.fault("one of two torchrun agents goes for good")
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_other_machine_continues_alone_and_reports_the_loss(tmp_path: Path) -> None:
    port = free_port()
    with _agent(port, tmp_path, host=1) as first, _agent(port, tmp_path, host=0) as second:
        until(lambda: _reached(tmp_path) >= KILL_AT, "training")
        kill_all(second)
        out, _ = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 0, out
    told = re.search(r"1 ranks go on from step (\d+): (\d+) steps are made again", out)
    assert told, out
    begun, lost = int(told[1]), int(told[2])
    assert begun % 20 == 0
    assert begun + lost >= KILL_AT
    assert lost <= 20
    assert f"step {STEPS}: loss " in out
