"""A sealed store gives back what a holder of the token wrote under this key, and nothing else."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import DistError

from tests.api import AuthenticatedStore, HostStore
from tests.members.places import store_alone
from tests.waiting import PATIENCE_S
from thinwire.errors import PayloadCorrupt

SECRET = b"s" * 32
LIMIT = timedelta(seconds=4 * PATIENCE_S)  # nobody waits for so long
SHORT = timedelta(seconds=0.3)


@pytest.fixture
def plain() -> Iterator[HostStore]:
    """What a stranger has: a connection."""
    with store_alone() as store:
        yield store


@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.parametrize("direct", [True, False])
def test_store_calls_equal_torchs(plain: HostStore, secret: bytes | None, direct: bool) -> None:
    sealed = AuthenticatedStore(plain, secret, "run/a/")
    store: Any = sealed if direct else PrefixStore("part", sealed)
    store.set("one", "first")
    assert store.get("one") == b"first"
    store.set("bytes", bytes(range(256)))
    assert store.get("bytes") == bytes(range(256))
    assert store.multi_get(["one", "bytes"]) == [b"first", bytes(range(256))]
    assert store.compare_set("new", "", "mine") == b"mine"
    assert store.compare_set("new", "", "other") == b"mine"
    assert store.compare_set("new", "wrong", "other") == b"mine"
    assert store.compare_set("new", "mine", "next") == b"next"
    assert store.check(["one", "new"]) is True
    assert store.check(["one", "none"]) is False
    store.wait(["one"])
    store.wait(["one"], SHORT)
    if direct:
        assert store.clone().get("new") == b"next"
        assert not store.under("deep").under("er").check(["new"])


def test_a_wait_ends_at_its_time_out(plain: HostStore) -> None:
    store = AuthenticatedStore(plain, SECRET)
    with pytest.raises(DistError, match="timeout"):
        store.wait(["never"], SHORT)


def test_without_a_secret_values_are_as_they_were(plain: HostStore) -> None:
    store = AuthenticatedStore(plain, None)
    store.set("key", "value")
    assert plain.get("key") == b"value"
    assert store.key_for("messages") is None
    sealed = AuthenticatedStore(plain, SECRET)
    keys = {sealed.key_for("messages", "1"), sealed.key_for("messages", "2"), sealed.key_for("m")}
    assert len(keys | {sealed.under("shard/1").key_for("m")}) == 4


def moved(plain: HostStore) -> None:
    plain.set("run/a/key", plain.get("run/a/other"))


def of_another_run(plain: HostStore) -> None:
    AuthenticatedStore(plain, b"another run's secret", "run/a/").set("key", "value")


def from_another_prefix(plain: HostStore) -> None:
    AuthenticatedStore(plain, SECRET, "run/b/").set("key", "value")
    plain.set("run/a/key", plain.get("run/b/key"))


def last_byte(plain: HostStore) -> None:
    there = plain.get("run/a/key")
    plain.set("run/a/key", there[:-1] + bytes([there[-1] ^ 1]))


FORGERIES: list[Callable[[HostStore], None]] = [
    lambda plain: plain.set("run/a/key", "value"),
    lambda plain: plain.set("run/a/key", ""),
    lambda plain: plain.set("run/a/key", "tws1"),
    lambda plain: plain.set("run/a/key", plain.get("run/a/key")[:-1]),
    lambda plain: plain.set("run/a/key", plain.get("run/a/key") + b"more"),
    lambda plain: plain.set("run/a/key", b"tws1" + bytes(32) + b"value"),
    last_byte,
    moved,
    of_another_run,
    from_another_prefix,
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_unverified_message_is_refused(
    plain: HostStore, forge: Callable[[HostStore], None]
) -> None:
    store = AuthenticatedStore(plain, SECRET, "run/a/")
    store.set("key", "value")
    store.set("other", "value")
    forge(plain)
    plain.set("run/a/part/key", plain.get("run/a/key"))
    torch_made = PrefixStore("part", store)
    for read in (
        lambda: store.get("key"),
        lambda: store.multi_get(["other", "key"]),
        lambda: store.compare_set("key", "unknown", "new"),
        lambda: torch_made.get("key"),
    ):
        with pytest.raises(PayloadCorrupt, match="key' in the store was refused") as refused:
            read()
        assert "\n" not in str(refused.value)


def group(
    store: AuthenticatedStore, rank: int, size: int, limit: timedelta = LIMIT
) -> ProcessGroupGloo:
    return ProcessGroupGloo(store, rank, size, limit)  # type: ignore[arg-type]


class Noting:
    """A store that notes which keys are set."""

    def __init__(self, store: HostStore, keys: list[str]) -> None:
        self.store, self.keys = store, keys

    def set(self, key: str, value: bytes) -> None:
        self.keys.append(key)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("prefixed", [True, False])
def test_gloo_meets_through_it(plain: HostStore, prefixed: bool) -> None:
    size, keys = 4, list[str]()
    clones: list[Any] = [Noting(plain.clone(), keys) for _ in range(size)]
    stores = [AuthenticatedStore(clone, SECRET, "run/a/") for clone in clones]

    def sum_of(rank: int) -> float:
        store: Any = PrefixStore("g", stores[rank]) if prefixed else stores[rank].under("g")
        made = group(store, rank, size)
        value = torch.tensor([float(rank)])
        made.allreduce([value]).wait()
        return value.item()

    with ThreadPoolExecutor(size) as threads:
        assert list(threads.map(sum_of, range(size))) == [6.0] * size
    assert len(keys) == len(set(keys)) == size
    assert all(key.startswith("run/a/g/") for key in keys)
    assert all(plain.get(key).startswith(b"tws1") for key in keys)


def test_an_address_that_a_stranger_gives_to_gloo_is_refused_at_once(plain: HostStore) -> None:
    store = AuthenticatedStore(plain, SECRET, "run/a/")
    stranger = AuthenticatedStore(plain.clone(), None, "run/a/")
    with ThreadPoolExecutor(2) as threads:
        theirs = threads.submit(group, stranger.under("g"), 1, 2, timedelta(seconds=3))
        with pytest.raises(PayloadCorrupt, match="was refused: it has no MAC"):
            group(store.under("g"), 0, 2)
        assert theirs.exception() is not None
