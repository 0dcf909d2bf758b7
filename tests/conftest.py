"""Fixtures of the whole test run."""

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Pool
from thinwire.optim import DGCMomentum, Lamb


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of gloo processes."""
    _fill_the_cache()
    pool = Pool()
    yield pool
    pool.close()


def _fill_the_cache() -> None:
    """Compile what most tests need, which takes half a minute on a fresh machine, ahead of all time limits."""
    params = [torch.nn.Parameter(torch.ones(20_000)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    for optimizer in (DGCMomentum(params, lr=0.1), DGCMomentum(params[:1], lr=0.1), Lamb(params)):
        optimizer.step()
