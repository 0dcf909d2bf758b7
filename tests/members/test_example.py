"""The example of members runs as it says: two at once, and one that comes later."""

import contextlib
import sys
from pathlib import Path

import pytest

from tests.members.places import host_command, lines_of_two
from tests.processes import running, torchrun
from tests.waiting import until

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.slow
def test_members_of_the_example_train_together(tmp_path: Path) -> None:
    lines = lines_of_two(tmp_path, [str(EXAMPLES / "members.py")])
    assert all(each[0].startswith("member ") for each in lines)
    assert lines[0][-1].startswith("step 2000: ")


@pytest.mark.slow
def test_sites_of_the_example_train_together(tmp_path: Path) -> None:
    lines = lines_of_two(tmp_path, torchrun(str(EXAMPLES / "sharded_members.py"))[1:])
    assert all(each[0].startswith("site ") for each in lines)
    assert lines[0][-1].startswith("step 160: ")


@pytest.mark.slow
def test_the_example_joins_by_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    join = [sys.executable, "-m", "thinwire", "join", "--code-file"]
    with host_command("--bind", "127.0.0.1:0", "--run", "any"), contextlib.ExitStack() as ends:
        until(lambda: any(tmp_path.rglob("*.code")))
        [code] = tmp_path.rglob("*.code")
        words = [*join, str(code), "--", sys.executable, str(EXAMPLES / "members.py")]
        both = [ends.enter_context(running(words, stdout=-1, text=True)) for _ in range(2)]
        lines = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert lines[0][-1].startswith("step 2000: ")
