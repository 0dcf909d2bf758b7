"""Fixtures of the tests of `thinwire compare`."""

import pytest

from tests.api import comparison
from tests.lab.pooled import run_workers_in
from tests.ranks import Pool


@pytest.fixture
def pooled(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in the processes of the pool: for what comes out, and not how they start and end."""
    monkeypatch.setattr(comparison, "run_workers", run_workers_in(ranks))
