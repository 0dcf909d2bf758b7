"""Every example, and the code of the README, runs as it says: under torchrun, on two CPU ranks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.packages import needs

ROOT = Path(__file__).parent.parent
OPTIONAL = {"accelerate_loop.py": "accelerate", "lightning_loop.py": "lightning"}
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.integrations, needs(OPTIONAL[path.name])] if path.name in OPTIONAL else [])
    for path in sorted((ROOT / "examples").rglob("*.py"))
]


def torchrun(script: Path, cwd: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=cwd, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            out, err = process.communicate(timeout=200)
        finally:
            if process.poll() is None:  # with its workers, which would go on without it
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + err
    return str(out)


@pytest.mark.slow
@pytest.mark.timeout(220)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_is_short(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120
    assert torchrun(path, tmp_path).strip()


@pytest.mark.slow
@pytest.mark.timeout(440)
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block, encoding="utf-8")
        assert torchrun(script, tmp_path).strip()
