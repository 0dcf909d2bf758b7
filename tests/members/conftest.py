"""What several tests of members need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import HostStore
from tests.members.places import store_alone, token_in


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A token that its owner alone may read."""
    return str(token_in(tmp_path))


@pytest.fixture
def server() -> Iterator[HostStore]:
    """A connection to a store in this process."""
    with store_alone() as store:
        yield store
