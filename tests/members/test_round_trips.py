"""How often a member asks a distant meeting place and waits for the answer."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch._C._distributed_c10d import Store

from tests.api import AuthenticatedStore, HostStore, KeyValueView, MemberGroups, Membership, Terms
from tests.members.places import LOOPBACK, store_alone

LIMIT_S = 20.0
CALLS = "check", "compare_set", "wait", "get", "multi_get", "look", "set"
"""Calls that wait for one answer."""


class Counted(Store):
    """A store that counts the answers that were waited for."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store, self.answers = store, 0
        self.looked: list[str] = []

    def announce(self, key: str, value: Any) -> None:
        self.store.announce(key, value)

    def has_extended_api(self) -> bool:
        return False


def _counting(name: str) -> Any:
    def call(self: Counted, *arguments: Any) -> Any:
        self.answers += 1
        self.looked += arguments[0] if name == "look" else []
        return getattr(self.store, name)(*arguments)

    return call


for _name in CALLS:
    setattr(Counted, _name, _counting(_name))


@pytest.fixture
def server() -> Iterator[HostStore]:
    with store_alone() as store:
        yield store


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_whoever_looks_waits_for_one_answer(server: HostStore, secret: bytes | None) -> None:
    counted = Counted(server)
    kv = KeyValueView(AuthenticatedStore(counted, secret))
    assert kv.get("members/0") is None
    assert kv.get_verified("members/0") is None
    assert counted.answers == 2
    assert kv.put_if_absent("members/0", {"ids": ["ann"]}) == {"ids": ["ann"]}
    counted.answers = 0
    assert kv.get("members/0") == {"ids": ["ann"]}
    assert kv.get_verified("members/0")
    assert counted.answers == 2


@pytest.mark.parametrize("size", [2, 5])
def test_generation_connects_after_three_answers_at_any_size(server: HostStore, size: int) -> None:
    stores = [Counted(server.clone()) for _ in range(size)]
    made: dict[int, MemberGroups] = {}

    def make(rank: int) -> None:
        made[rank] = MemberGroups(stores[rank], rank, size, LIMIT_S, LOOPBACK)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for direct in made.values():
        direct.release()
    assert len(made) == size
    assert {store.answers for store in stores} == {3}


def test_many_requests_cost_few_answers(server: HostStore) -> None:
    counted = Counted(server)
    kv = KeyValueView(AuthenticatedStore(counted, None))

    def membership(name: str) -> Membership:
        return Membership(kv, name, Terms(LOOPBACK, 1, 1, LIMIT_S))

    numbers = [membership(f"member-{n}").shared.say_hello(kv) for n in range(40)]
    assert numbers == list(range(40))
    counted.answers = 0
    assert membership("ann").shared.say_hello(kv) == 40
    assert counted.answers == 3
    leader = membership("bob")
    counted.answers = 0
    for _ in range(2):  # the newest first
        leader.watcher._check_joiners()
    assert leader.shared.hellos[40]["id"] == "ann"
    for _ in range(2):
        leader.watcher._check_joiners()
    assert sorted(leader.shared.hellos) == list(range(41))
    assert counted.answers == 4
