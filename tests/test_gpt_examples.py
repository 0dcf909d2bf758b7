"""The nanoGPT-like loop and the ways to move it: few new lines, the same loss where nothing
is compressed, and exact resumption.

The scripts run as they are, in the processes of the pool; where a test needs other settings it
changes lines of the text and fails when the line is not there.
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


def run(
    rank: int, size: int, name: str, changes: dict[str, str], port: int, steps: int, out: str
) -> str:
    """What one rank of the script prints; it makes its own process group, as under torchrun."""
    # where batches are
    warnings.filterwarnings("ignore", message="the changes of all ranks are equal")
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {name}.py"
        text = text.replace(old, new)
    module = types.ModuleType(f"example_{name}")
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, f"{name}.py", "exec"), module.__dict__)
        with as_torchrun_starts(rank, size, port) as said:
            module.main(steps, Path(out))
    finally:
        del sys.modules[module.__name__]
    return said.getvalue()


def losses(
    ranks: Pool, name: str, out: Path, *, changes: dict[str, str] | None = None, steps: int = STEPS
) -> dict[str, float]:
    """Loss of rank 0 by what was printed before it: of all steps, and on held-out text."""
    said = ranks.run(run, name, changes or {}, free_port(), steps, str(out))[0]
    return {
        at: float(loss) for at, loss in re.findall(r"(step \d+: (?:held-out )?loss) ([\d.]+)", said)
    }


def assert_same(a: dict[str, float], b: dict[str, float], within: float) -> None:
    assert a.keys() == b.keys()
    apart = {at: abs(a[at] - b[at]) for at in a if abs(a[at] - b[at]) > within}
    assert not apart, apart


SGD = {
    "optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))":
        "optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)",
    "DECAY = 3e-3, 3e-4, 10, 60, 0.1": "DECAY = 0.3, 0.03, 10, 60, 1e-4",
}  # fmt: skip
WITHOUT_CLIPPING = {"nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "pass"}


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
    first = losses(ranks, name, tmp_path / "parts", steps=STEPS // 2)
    second = losses(ranks, name, tmp_path / "parts")
    assert len(first) == STEPS // 2 + 2
    assert_same(whole, first | second, within=0)


@pytest.mark.slow
def test_the_engine_is_ddp(ranks: Pool, tmp_path: Path) -> None:
    """But for clipping: 1 / max(norm, 1) here, 1 / (norm + 1e-6) in torch."""
    assert_same(
        losses(ranks, "plain", tmp_path / "plain"),
        losses(ranks, "engine", tmp_path / "engine"),
        within=2e-6,
    )


@pytest.mark.slow
def test_dgc_before_its_ramp_in_ddp_is_sgd_in_ddp(ranks: Pool, tmp_path: Path) -> None:
    plain = losses(ranks, "plain", tmp_path / "plain", changes={**SGD, **WITHOUT_CLIPPING})
    dense = {
        'ramp = {"sparsity": (0.9, 0.99), "rampup_step": 20}': 'ramp = {"rampup_begin_step": 999}',
        "local_grad_clip_norm=1.0": "momentum=0.9",
    }
    assert_same(plain, losses(ranks, "attach", tmp_path / "attach", changes=dense), within=1e-6)
