"""How often a member asks a distant meeting place and waits for the answer."""

import threading
from typing import Any

import pytest

from tests.api import AuthenticatedStore, HostStore, KeyValueView, MemberGroups, Membership, Terms
from tests.members.places import LOOPBACK

LIMIT_S = 20.0


class Counted:
    """A connection that counts the answers that were waited for."""

    def __init__(self, store: HostStore) -> None:
        self.store, self.answers = store, 0

    def ask(self, *parts: Any) -> list[Any]:
        self.answers += parts[0] != "set"
        return self.store.ask(*parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_whoever_looks_waits_for_one_answer(server: HostStore, secret: bytes | None) -> None:
    counted = Counted(server)
    kv = KeyValueView(AuthenticatedStore(counted, secret))
    assert kv.get("members/0") is None
    assert counted.answers == 1
    assert kv.put_if_absent("members/0", {"ids": ["ann"]}) == {"ids": ["ann"]}
    counted.answers = 0
    assert kv.get("members/0") == {"ids": ["ann"]}
    assert counted.answers == 1


@pytest.mark.parametrize("size", [2, 5])
def test_generation_connects_after_four_answers_at_any_size(server: HostStore, size: int) -> None:
    stores = [Counted(server.clone()) for _ in range(size)]
    made: dict[int, MemberGroups] = {}

    def make(rank: int) -> None:
        store = AuthenticatedStore(stores[rank], None)
        made[rank] = MemberGroups(store, rank, size, LIMIT_S, LOOPBACK)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for direct in made.values():
        direct.release()
    assert len(made) == size
    assert {store.answers for store in stores} == {4}


def test_many_requests_cost_few_answers(server: HostStore) -> None:
    counted = Counted(server)
    kv = KeyValueView(AuthenticatedStore(counted, None))

    def membership(name: str) -> Membership:
        return Membership(kv, name, Terms(LOOPBACK, 1, 1, LIMIT_S))

    numbers = [membership(f"member-{n}").say_hello(kv) for n in range(40)]
    assert numbers == list(range(40))
    counted.answers = 0
    assert membership("ann").say_hello(kv) == 40
    assert counted.answers == 2
    leader = membership("bob")
    counted.answers = 0
    leader.watcher._read_hellos()
    assert counted.answers <= 2
    assert sorted(leader.hellos) == list(range(41))
    assert leader.hellos[40]["id"] == "ann"
