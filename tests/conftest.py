"""Fixtures of the whole test run."""

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of gloo processes."""
    pool = Pool()
    yield pool
    pool.close()
