"""The processes of these tests."""

from collections.abc import Iterator

import pytest

from tests.device import stand_in
from tests.ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Those of other tests do not get the device, which torch never forgets."""
    if stand_in.MISSING:
        pytest.skip(stand_in.MISSING)
    stand_in.built()
    pool = Pool()
    yield pool
    pool.close()
