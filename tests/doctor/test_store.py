"""What ranks tell each other through a store, in time."""

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from tests.api import Late, StoreView, within
from tests.api import doctor_ranks as module
from tests.waiting import PATIENCE_S


def test_rows_of_ranks_that_came() -> None:
    store = HashStore()
    views = [StoreView(store, rank, 3) for rank in range(3)]
    views[0].write("facts", {"a": [1, None]})
    views[2].write("facts", False)
    until = time.monotonic() + 0.3
    assert views[1].read_all("facts", until) == {0: {"a": [1, None]}, 2: False}


@pytest.mark.parametrize("ahead_s", [7.5e6, -3e6])
def test_the_skew_of_a_clock_is_measured(ahead_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = threading.current_thread()

    def read() -> float:
        return time.time() + ahead_s * (threading.current_thread() is fast)

    monkeypatch.setattr(module, "time", SimpleNamespace(time=read, monotonic=time.monotonic))
    store, until = HashStore(), time.monotonic() + PATIENCE_S
    answering = threading.Thread(target=StoreView(store, 0, 2).clock_skew, args=([0, 1], until))
    answering.start()
    measured = StoreView(store, 1, 2).clock_skew([0, 1], until)
    answering.join()
    assert measured is not None
    skew_s, unsure_s = measured
    assert abs(skew_s - ahead_s) <= unsure_s < PATIENCE_S


def test_no_skew_without_rank_0() -> None:
    assert StoreView(HashStore(), 1, 2).clock_skew([0, 1], time.monotonic() + 0.1) is None


def test_slow_work_is_left_behind() -> None:
    assert within(PATIENCE_S, lambda: 7, name="test") == 7
    with pytest.raises(ZeroDivisionError):
        within(PATIENCE_S, lambda: 1 // 0, name="test")
    over = threading.Event()
    with pytest.raises(Late):
        within(0.1, lambda: over.wait(PATIENCE_S), name="test")
    over.set()
