"""Fixtures of the whole test run."""

import gc
import os
from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from tests.api import LoopKind, needs_of, warm_up
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
    for work in get_args(LoopKind):  # what most tests need, ahead of all time limits
        warm_up(needs_of(work, [torch.zeros(1)]))
    pool = Pool()
    yield pool
    pool.close()
