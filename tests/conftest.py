"""Fixtures of the whole test run."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests.compiled import compile_all
from tests.ranks import Pool

# torch asks for the name of the address of each connection to its store (pytorch 159596), and waits
# 5 s where a name server lets one question drop
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_finish() -> None:
    """Spare later garbage collections and saves the objects of all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of gloo processes."""
    compile_all()
    pool = Pool()
    yield pool
    pool.close()
