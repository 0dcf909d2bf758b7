"""What several tests of members need."""

from pathlib import Path

import pytest

from tests.members.places import token_in


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A token that its owner alone may read."""
    return str(token_in(tmp_path))
