"""Every example, and the code of the README, runs as it says: on two CPU ranks.

The code of the README and what needs other packages is started by torchrun, the rest in the
processes of the pool.
"""

import re
from pathlib import Path

import pytest

from tests.integrations.packages import needs
from tests.launched import run_script
from tests.processes import ran, torchrun
from tests.ranks import Pool

ROOT = Path(__file__).parent.parent
OPTIONAL = {
    "accelerate_loop.py": "accelerate",
    "lightning_loop.py": "lightning",
    "lora.py": "peft",
    "members_resume.py": "torchdata",
    "members_trainer.py": "peft",
    "transformers_trainer.py": "transformers",
    "trl_qlora.py": "trl",
}
TESTED_ELSEWHERE = {"tasks", "recipes", "pretrain", "fine_tuning"}
"""By tests/lab/test_task.py, tests/test_recipes.py and tests/integrations/test_pretrain.py; for the
last one packages are missing here.
"""
EXAMPLES = sorted(
    p for p in (ROOT / "examples").rglob("*.py") if p.parent.name not in TESTED_ELSEWHERE
)


def output_of(script: Path, cwd: Path) -> str:
    done = ran(torchrun(str(script)), cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.name not in OPTIONAL], ids=lambda path: path.name
)
def test_example_runs_and_is_short(ranks: Pool, path: Path, tmp_path: Path) -> None:
    assert lines_of(path) < 140
    assert run_script(ranks, path, tmp_path).strip()


@pytest.mark.slow
@pytest.mark.integrations
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(package)) for name, package in OPTIONAL.items()]
)
def test_example_with_another_package_runs_and_is_short(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / name
    assert lines_of(path) < 140
    assert output_of(path, tmp_path)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block, encoding="utf-8")
        assert output_of(script, tmp_path)
