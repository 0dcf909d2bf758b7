"""Fixtures of the whole test run."""

import gc
import os
import tempfile
from collections.abc import Iterator
from zlib import crc32

import pytest

from tests.compiled import compile_all
from tests.ranks import Pool

# torch asks for the name of the address of each connection to its store (pytorch 159596), and waits
# 5 s where a name server lets one question drop
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# files of hosts
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="thinwire-state-")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tenth`."""
    parser.addoption("--tenth", type=int, choices=range(10), help="run a tenth of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of `--tenth`, by a checksum of the name: the same ones in every run."""
    tenth = config.getoption("--tenth")
    others = {item for item in items if tenth not in (None, crc32(item.nodeid.encode()) % 10)}
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]


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
