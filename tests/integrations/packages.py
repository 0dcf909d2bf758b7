"""Which optional packages there are, and how a rank of the pool looks like one of torchrun."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where the package is missing, unless THINWIRE_INTEGRATIONS=required."""
    skipped = find_spec(package) is None and os.environ.get("THINWIRE_INTEGRATIONS") != "required"
    return pytest.mark.skipif(
        skipped, reason=f"{package} is not installed (make test-integrations installs it)"
    )


@contextmanager
def as_under_torchrun(rank: int, size: int) -> Iterator[None]:
    """The environment that the frameworks read; their own warnings are not ours to mend."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,  # not used: the pool has made the process group
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": 1,
    }
    with (
        warnings.catch_warnings(),
        patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
    ):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="thinwire")
        warnings.filterwarnings("ignore", "low_rank with")  # it is for users
        yield
