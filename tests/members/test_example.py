"""The example of members runs as it says: two at once, and one that comes later."""

import subprocess
import sys
from pathlib import Path

from tests.members.places import TOKEN, meeting_place

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def _two_of(tmp_path: Path, *command: str) -> list[list[str]]:
    """The lines of two that run at the same time, and end well."""
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with meeting_place() as address:
        words = [sys.executable, *command, address, str(token)]
        both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        told = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return [text.splitlines() for text in told]


def test_members_of_the_example_train_together(tmp_path: Path) -> None:
    lines = _two_of(tmp_path, str(EXAMPLES / "members.py"))
    assert all(each[0].startswith("member ") for each in lines)
    assert lines[0][-1].startswith("step 400: ")


def test_sites_of_the_example_train_together(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines = _two_of(tmp_path, *launcher, str(EXAMPLES / "sharded_members.py"))
    assert all(each[0].startswith("site ") for each in lines)
    assert lines[0][-1].startswith("step 400: ")
