"""The example of members runs as it says: two at once, and one that comes later."""

from pathlib import Path

import pytest

from tests.members.places import lines_of_two
from tests.processes import torchrun

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.slow
def test_members_of_the_example_train_together(tmp_path: Path) -> None:
    lines = lines_of_two(tmp_path, [str(EXAMPLES / "members.py")])
    assert all(each[0].startswith("member ") for each in lines)
    assert lines[0][-1].startswith("step 400: ")


@pytest.mark.slow
def test_sites_of_the_example_train_together(tmp_path: Path) -> None:
    lines = lines_of_two(tmp_path, torchrun(str(EXAMPLES / "sharded_members.py"))[1:])
    assert all(each[0].startswith("site ") for each in lines)
    assert lines[0][-1].startswith("step 160: ")
