"""Members with the real `StatefulDataLoader`, and their run begun anew from a copy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.packages import needs
from tests.members.places import TOKEN, meeting_place

EXAMPLE = Path(__file__).parents[2] / "examples" / "members_resume.py"


def members(folder: Path, last: int) -> list[list[str]]:
    """The lines of two members that train up to a step."""
    token = folder / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    with meeting_place() as address:
        words = [sys.executable, str(EXAMPLE), address, str(token), str(folder / "copies")]
        both = [
            subprocess.Popen([*words, str(last)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        told = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return [text.splitlines() for text in told]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.integrations
@needs("torchdata")
def test_members_go_on_from_a_copy_at_their_place_in_the_data(tmp_path: Path) -> None:
    """23 batches a pass: step 96 is in the fifth one, and step 192 in the ninth."""
    for begin, last in ((0, 96), (96, 192)):
        lines = members(tmp_path, last)
        place = rf"of 2 begins at step {begin}, pass {begin // 23}"
        assert all(re.search(place, first) for first, _ in lines)
        assert len({end for _, end in lines}) == 1
        assert lines[0][1].startswith(f"step {last}, pass {last // 23}: loss ")
