"""Members with the real `StatefulDataLoader`, and their run begun anew from a copy."""

import re
from pathlib import Path

import pytest

from tests.integrations.packages import needs
from tests.members.places import lines_of_two

EXAMPLE = Path(__file__).parents[2] / "examples" / "members_resume.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.integrations
@needs("torchdata")
def test_members_continue_from_a_copy_at_their_position_in_the_data(tmp_path: Path) -> None:
    """23 batches a pass: step 96 is in the fifth one, and step 192 in the ninth."""
    for begin, last in ((0, 96), (96, 192)):
        lines = lines_of_two(tmp_path, [str(EXAMPLE)], str(tmp_path / "copies"), str(last))
        place = rf"of 2 begins at step {begin}, pass {begin // 23}"
        assert all(re.search(place, first) for first, _ in lines)
        assert len({end for _, end in lines}) == 1
        assert lines[0][1].startswith(f"step {last}, pass {last // 23}: loss ")
