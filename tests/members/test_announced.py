"""Values that end with a connection: a member whose process ends is gone at the host at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
from torch.distributed import DistNetworkError

from tests.api import (
    AuthenticatedStore,
    HostStore,
    KeyValueView,
    Membership,
    Terms,
    connect,
    watcher,
)
from tests.members.places import LOOPBACK, TIMEOUT, TOKEN, meeting_place
from tests.waiting import PATIENCE_S, until


def value(store: HostStore) -> bytes | None:
    _, found = store.ask("look", "0", "0", "key")
    return found


def test_announced_value_ends_with_its_connection(server: HostStore) -> None:
    other = server.clone()
    other.announce("key", b"1")
    other.announce("key", b"2")
    assert value(other) == b"2"
    assert value(server) == b"2"
    other.close()
    until(lambda: value(server) is None, "its end")


def test_value_of_a_later_connection_stays(server: HostStore) -> None:
    others = [server.clone(), server.clone()]
    for store in others:
        store.announce("key", b"second")
        assert value(store) == b"second"
    others[0].close()
    time.sleep(0.2)
    assert value(server) == b"second"


def test_announcement_removes_no_lasting_value(server: HostStore) -> None:
    server.ask("set", "key", "1")
    stranger = server.clone()
    stranger.announce("key", b"2")
    with pytest.raises(DistNetworkError):
        value(stranger)
    assert value(server) == b"1"


def test_member_without_a_connection_is_left_out_at_once() -> None:
    names = ["ann", "bob", "cid"]
    terms = Terms(LOOPBACK, 1, len(names), PATIENCE_S)
    with meeting_place() as address, ExitStack() as ends:
        reach = partial(connect, address, "test", TOKEN, TIMEOUT)
        ann, bob, cid = (
            Membership(KeyValueView(reach(), None, reach), name, terms) for name in names
        )
        pool = ends.enter_context(ThreadPoolExecutor(len(names)))
        for one in (ann, bob, cid):
            ends.callback(one.close)
        list(pool.map(Membership.meet, (ann, bob, cid)))
        ends.enter_context(patch.object(watcher, "_ANNOUNCE_S", 10 * PATIENCE_S))
        cid.watcher.stopped.set()
        cid.kv.disconnect()
        for one in (ann, bob):
            one.report_broken(0, "of the test")
        until(lambda: all(one.current().number == 1 for one in (ann, bob)), "generation 1")
        assert sorted(ann.current().ids) == sorted(bob.current().ids) == ["ann", "bob"]


@pytest.mark.parametrize(
    ("ann_s", "bob_s", "stays"),
    [
        (None, 0.0, True),
        (None, 4.0, True),
        (None, PATIENCE_S, False),
        pytest.param(9.0, 12.0, True, marks=pytest.mark.slow),
    ],
)
def test_one_of_two_is_left_out_unless_it_connects_to_the_host_again_in_time(
    ann_s: float | None, bob_s: float, stays: bool
) -> None:
    """Counted from when the other one was connected itself."""
    terms = Terms(LOOPBACK, 1, 2, 4 * PATIENCE_S)
    met, ended = threading.Event(), threading.Event()
    with meeting_place() as address, ExitStack() as ends:
        reach = partial(connect, address, "test", TOKEN, TIMEOUT)

        def after(seconds: float, **limit: float) -> AuthenticatedStore:
            ended.wait(seconds if met.is_set() else 0.0)
            return reach(**limit)

        reaches = partial(after, ann_s or 0.0), partial(after, bob_s)
        ann, bob = (
            Membership(KeyValueView(again(), None, again), name, terms)
            for name, again in zip(("ann", "bob"), reaches, strict=True)
        )
        for one in (ann, bob):
            ends.callback(one.close)
        ends.callback(ended.set)
        list(ends.enter_context(ThreadPoolExecutor(2)).map(Membership.meet, (ann, bob)))
        met.set()
        bob.kv.store.connection.close()
        here = KeyValueView(reach())
        until(lambda: here.get("hb/bob") is None or not bob_s, "the end of its connection")
        ann.report_broken(0, "of the test")
        if ann_s is not None:
            until(lambda: here.get("alive/1/ann"), "its announcement")
            ann.kv.store.connection.close()
        until(lambda: ann.current().number == 1, "generation 1")
        assert sorted(ann.current().ids) == (["ann", "bob"] if stays else ["ann"])
