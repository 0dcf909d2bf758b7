"""What several tests of members need."""

from pathlib import Path

import pytest

from tests.members.places import TOKEN


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A token that its owner alone may read."""
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    return str(path)
