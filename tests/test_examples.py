"""Every example, and the code of the README, runs as it says: under torchrun, on two CPU ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.packages import needs

ROOT = Path(__file__).parent.parent
OPTIONAL = {"accelerate_loop.py": "accelerate", "lightning_loop.py": "lightning"}
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.integrations, needs(OPTIONAL[path.name])] if path.name in OPTIONAL else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]


def torchrun(script: Path, cwd: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_is_short(path: Path, tmp_path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100
    assert torchrun(path, tmp_path).strip()


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block, encoding="utf-8")
        assert torchrun(script, tmp_path).strip()
