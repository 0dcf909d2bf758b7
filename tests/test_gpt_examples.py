"""The nanoGPT-like loop and the ways to move it: few new lines, and exact resumption.

The scripts run as they are, in the processes of the pool.
"""

import re
import sys
import types
import warnings
from pathlib import Path

import pytest

from tests.gpt_changes import MOVED, PAGE, changes, written
from tests.launched import as_torchrun_starts, free_port
from tests.ranks import Pool

FOLDER = Path(__file__).parent.parent / "examples" / "gpt"
STEPS = 30


def run(rank: int, size: int, name: str, port: int, steps: int, out: str) -> str:
    """What one rank of the script prints; it makes its own process group, as under torchrun."""
    # where batches are
    warnings.filterwarnings("ignore", message="the changes of all ranks are equal")
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    module = types.ModuleType(f"example_{name}")
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, f"{name}.py", "exec"), module.__dict__)
        with as_torchrun_starts(rank, size, port) as said:
            module.main(steps, Path(out))
    finally:
        del sys.modules[module.__name__]
    return said.getvalue()


def losses(ranks: Pool, name: str, out: Path, steps: int = STEPS) -> dict[str, float]:
    """Loss of rank 0 by what was printed before it: of all steps, and on held-out text."""
    said = ranks.run(run, name, free_port(), steps, str(out))[0]
    return {
        at: float(loss) for at, loss in re.findall(r"(step \d+: (?:held-out )?loss) ([\d.]+)", said)
    }


@pytest.mark.parametrize("name", MOVED)
def test_few_lines_are_new(name: str) -> None:
    new = [line[1:].strip() for line in changes(name) if line.startswith("+")]
    assert 0 < len([line for line in new if not line.startswith("#")]) <= 8


def test_page_shows_the_changes_in_the_files() -> None:
    """python -m tests.gpt_changes writes it there."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *MOVED])
def test_resumed_in_the_middle_ends_as_undisturbed(ranks: Pool, tmp_path: Path, name: str) -> None:
    whole = losses(ranks, name, tmp_path / "whole")
    first = losses(ranks, name, tmp_path / "parts", STEPS // 2)
    second = losses(ranks, name, tmp_path / "parts")
    assert len(first) == STEPS // 2 + 2
    assert first | second == whole
