"""The example of members runs as it says: two at once, and one that comes later."""

import subprocess
import sys
from pathlib import Path

from tests.members.places import TOKEN, meeting_place

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_members_of_the_example_train_together(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with meeting_place() as address:
        command = [sys.executable, str(EXAMPLES / "members.py"), address, str(token)]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        told = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    lines = [text.splitlines() for text in told]
    assert all(each[0].startswith("member ") for each in lines)
    assert lines[0][-1].startswith("step 400: ")


def test_sites_of_the_example_train_together(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", str(EXAMPLES / "sharded_members.py")]
    with meeting_place() as address:
        command = [*launcher, address, str(token)]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        told = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    lines = [text.splitlines() for text in told]
    assert all(each[0].startswith("site ") for each in lines)
    assert lines[0][-1].startswith("step 400: ")
