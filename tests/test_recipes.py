"""Scripts in the manner of public ones move to thinwire by a few lines, and train."""

import json
import math
import sys
from pathlib import Path

import pytest

from tests.integrations.packages import needs
from tests.processes import ran
from tests.test_examples import ROOT

FOLDER = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.diff"))
COMMAND = [sys.executable, "-m", "research.recipes.run"]
PACKAGES = {
    "run_clm": "transformers",
    "run_clm_no_trainer": "transformers",
    "lightning_fit": "lightning",
    "fabric_loop": "lightning",
    "peft_lora": "peft",
}
"""Of the scripts that need another one than torch and scikit-learn."""
CLASSES = dict.fromkeys(NAMES, 256) | {"timm_train": 10}
"""Of what a script predicts: bytes, or digits."""


def test_few_lines_change() -> None:
    done = ran([*COMMAND, "--lines"], cwd=ROOT)
    counts = json.loads(done.stdout)
    assert sorted(counts) == NAMES
    assert all(0 < count <= 8 for count in counts.values())
    rows = json.loads((ROOT / "research" / "recipes" / "run.json").read_text())
    assert {row["recipe"]: row["changed_lines"] for row in rows} == counts
    for name in NAMES:
        assert "thinwire" not in (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        added = (FOLDER / f"{name}.diff").read_text(encoding="utf-8").split("\n+")[1:]
        assert any("thinwire" in line.partition("\n")[0] for line in added)


def trained(name: str, folder: Path) -> None:
    file = folder / "rows.json"
    done = ran([*COMMAND, name, "--link", "loopback", "--results", str(file)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())
    old, new = row["before"]["loss"], row["after"]["loss"]
    assert old < math.log(CLASSES[name]) - 0.3, "it has learned"
    # 48 steps, of which local training averages every eighth
    assert new < old + 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PACKAGES])
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    trained(name, tmp_path)


@pytest.mark.slow
@pytest.mark.integrations
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(package)) for name, package in PACKAGES.items()]
)
def test_recipe_with_another_package_trains(name: str, tmp_path: Path) -> None:
    trained(name, tmp_path)
