"""What ranks tell each other through a store, in time."""

import threading
import time

import pytest
from torch.distributed import HashStore

from tests.api import Late, StoreView, within
from tests.waiting import PATIENCE_S


def test_rows_of_ranks_that_came() -> None:
    store = HashStore()
    views = [StoreView(store, rank, 3) for rank in range(3)]
    views[0].write("facts", {"a": [1, None]})
    views[2].write("facts", False)
    until = time.monotonic() + 0.3
    assert views[1].read_all("facts", until) == {0: {"a": [1, None]}, 2: False}


def test_slow_work_is_left_behind() -> None:
    assert within(PATIENCE_S, lambda: 7, name="test") == 7
    with pytest.raises(ZeroDivisionError):
        within(PATIENCE_S, lambda: 1 // 0, name="test")
    over = threading.Event()
    with pytest.raises(Late):
        within(0.1, lambda: over.wait(PATIENCE_S), name="test")
    over.set()
