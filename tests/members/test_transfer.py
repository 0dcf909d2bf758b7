"""What a joiner takes from a member is that member's, whole and in order, and meant for it."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.api import (
    AuthenticatedStore,
    Donor,
    Download,
    KeyValueView,
    Part,
    Recipient,
    StateMessage,
    TransferContext,
    transfer,
)
from tests.members.places import LOOPBACK, store_alone
from tests.waiting import until
from thinwire.errors import LineTooSlow, PayloadCorrupt, PeerLost

LIMIT_S = 10.0
MESSAGES = [StateMessage("round", {"n": n}, {"w": torch.full((99,), float(n))}) for n in (0, 1, 2)]


class Tapped(transfer.Channel):
    """A line whose messages somebody changes, of whatever run and joiner."""

    change: Any = None

    def receive(self) -> memoryview:
        message = super().receive()
        of_joiner = self._other == 0
        return memoryview(Tapped.change(bytearray(message))) if of_joiner else message


def both_ends(timeout_s: float, number: int = 0, key: bytes = b"k" * 32) -> tuple[Donor, Recipient]:
    """A member that gives to the joiner of this number, which has a key."""
    store = ENDS.enter_context(store_alone())
    kv = KeyValueView(AuthenticatedStore(store, b"s" * 32))
    way = TransferContext(kv, LOOPBACK, timeout_s, b"k" * 32)
    donor = Donor(way, number, "ann", [StateMessage("state", {}, {})])
    DONORS.append(donor)
    recipient = Recipient(way.cloned()._replace(key=key), number)
    recipient.receive(1 << 20)
    recipient.receive_state([], lambda _: True)
    return donor, recipient


def tensors(value: float) -> dict[str, torch.Tensor]:
    """A state of several types and layouts: a scalar, nothing, one that is not contiguous."""
    found = {
        "wide": torch.full((700, 3), value).t(),
        "scalar": torch.tensor(value),
        "none": torch.zeros(0),
        "flags": torch.full((2001,), value > 0),
        "double": torch.full((33, 5), value, dtype=torch.float64),
    }
    return found | {"complex": torch.full((77,), complex(value, 1)), "same": torch.ones(512)}


DONORS: list[Donor] = []
ENDS = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Ends the donors of a test."""
    yield
    while DONORS:
        DONORS.pop().close()
    ENDS.close()


def copied(states: list[str], *, rounds: int = 0, wrong: tuple[int, int] = (-1, 0)) -> Any:
    """A download from as many donors as states, and what it reads into.

    `wrong` is a donor with a wrong bit, and the byte of the first tensor that has it.
    """
    store = ENDS.enter_context(store_alone())
    way = TransferContext(
        KeyValueView(AuthenticatedStore(store, b"s" * 32)), LOOPBACK, LIMIT_S, b"k"
    )
    given, taken, count = tensors(2.0), tensors(0.0), len(states)
    for index, state in enumerate(states):
        part = Part(index, count, state)
        own = {name: tensor.clone() for name, tensor in given.items()}
        if index == wrong[0]:
            own["double"].view(torch.uint8).view(-1)[wrong[1]] ^= 1
        donor = Donor(way, 3, "ann", [StateMessage("state", {"n": 0}, {})], part, own)
        DONORS.append(donor)
        for n in range(rounds):
            donor.enqueue(StateMessage("round", {"n": 1 + n}, {"w": torch.zeros(1 << 20)}))
        for tensor in own.values():  # training goes on
            tensor.zero_()
    return Download(way.cloned(), 3, 1 << 30, count, taken), taken


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_of_a_state_have_every_byte_once(count: int) -> None:
    given = {name: tensor.reshape(-1) for name, tensor in tensors(2.0).items()}
    views = [view for at in range(count) for view in Part(at, count).blocks(given)]
    assert sum(len(view) for view in views) == sum(tensor.nbytes for tensor in given.values())
    for view in views:
        view.zero_()
    assert not any(tensor.any() for tensor in given.values())


@pytest.mark.parametrize("count", [1, 3])
def test_state_of_one_round_comes_from_several_donors(count: int) -> None:
    download, here = copied(["round 7"] * count, rounds=2)
    found = []
    while (message := download.next(wait=False)) is not None:
        if found == [0]:  # the counters come before the tensors
            assert all(torch.equal(here[name], t) for name, t in tensors(2.0).items())
        found.append(message.plain["n"])
    assert found == [0, 1, 2]
    whole = sum(tensor.nbytes for tensor in here.values())
    others = download.stats["joining_total_bytes"] - (whole - here["same"].nbytes)
    assert 0 < others < 1000 * count  # counters and digests
    download.close()


def test_parts_of_different_rounds_are_refused() -> None:
    download, _ = copied(["round 7", "round 8"])
    assert download.next(wait=True) is not None
    with pytest.raises(PayloadCorrupt, match="different rounds"):
        download.next(wait=False)
    download.close()


def test_donor_that_is_lost_ends_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Donor._send_state

    def lost(donor: Donor, line: Any) -> None:
        if donor.part.index == 1:
            raise PeerLost("told so by the test")
        send(donor, line)

    monkeypatch.setattr(Donor, "_send_state", lost)
    download, _ = copied(["round 7"] * 2)
    with pytest.raises(PeerLost, match="closed its connection"):
        while download.next(wait=False) is not None:
            pass
    download.close()
    until(lambda: not download.alive, "the ends of all donors")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_wrong_bit_of_a_donor_is_never_taken(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever part it is, and whichever donor has it; a wrong bit that is not sent is none."""
    monkeypatch.setattr(transfer, "_BLOCK_BYTES", 64)
    refused = 0
    for donor in range(count):
        for block in range(count):
            download, here = copied(["round 7"] * count, wrong=(donor, 64 * block))
            try:
                while download.next(wait=False) is not None:
                    pass
            except PayloadCorrupt:
                refused += 1
                assert donor in download.refused
                assert len(download.refused) == 2
            else:
                assert all(torch.equal(here[name], t) for name, t in tensors(2.0).items())
            download.close()
            while DONORS:
                DONORS.pop().close()
    assert refused >= 2 * count - 1


UNREADABLE: dict[str, Any] = {
    "no JSON": lambda line: line.send(b"no JSON"),
    "no header": lambda line: line.send(b"{}"),
    "a list": lambda line: line.send(b"[]"),
    "digests of nothing": lambda line: line.send(b'{"state": "round 7", "digests": 3}'),
    "no text": lambda line: line.send(b"\xff\xfe"),
    "deep": lambda line: line.send(b"[" * 100_000),
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("at", [0, 1])
def test_unreadable_data_is_an_error_that_blames_its_donor(
    monkeypatch: pytest.MonkeyPatch, what: str, at: int
) -> None:
    send = Donor._send_state

    def unreadable(donor: Donor, line: Any) -> None:
        (UNREADABLE[what] if donor.part.index == at else partial(send, donor))(line)

    monkeypatch.setattr(Donor, "_send_state", unreadable)
    download, _ = copied(["round 7"] * 2)
    with pytest.raises(PayloadCorrupt):
        while download.next(wait=False) is not None:
            pass
    assert download.refused == [at]
    download.close()


def test_joiner_that_never_catches_up_is_given_both_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    send = transfer.Channel.send

    def slow(line: transfer.Channel, *message: Any) -> None:
        time.sleep(len(message[0]) / 10e6)
        send(line, *message)

    monkeypatch.setattr(transfer.Channel, "send", slow)
    monkeypatch.setattr(transfer, "_JUDGED_S", 0.2)
    download, _ = copied(["round 7"], rounds=12)
    with pytest.raises(LineTooSlow, match=r"rounds send \S+ Mbit/s, and \S+ Mbit/s arrived"):
        while download.next(wait=False) is not None:
            pass
    download.close()


def test_joiner_is_not_judged_by_rounds_that_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    download, _ = copied(["round 7"], rounds=12)
    while download.next(wait=False) is not None:
        pass
    monkeypatch.setattr(transfer, "_JUDGED_S", 0.2)
    (first,) = download._recipients
    assert first is not None
    first.idle = False  # until the donor says again that there is none
    assert download.next(wait=False) is None
    download.close()


def taken(
    monkeypatch: pytest.MonkeyPatch, change: Any, *, key: bytes = b"k" * 32, number: int = 4
) -> list[StateMessage]:
    """The messages of a member with `key` for joiner 4, as joiner `number` reads them."""
    monkeypatch.setattr(transfer, "Channel", Tapped)
    Tapped.change = staticmethod(change)
    donor, recipient = both_ends(LIMIT_S, 4, key)
    for message in MESSAGES:
        donor.enqueue(message)
    if number != 4:
        recipient.line._number = number
    try:
        return [recipient.receive(1 << 20) for _ in MESSAGES]
    finally:
        recipient.line.close()
        donor.close(LIMIT_S)


def test_given_parameters_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = taken(monkeypatch, lambda message: message)
    for given, got in zip(MESSAGES, found, strict=True):
        assert (got.kind, got.plain, got.last) == (given.kind, given.plain, False)
        assert torch.equal(got.tensors["w"], given.tensors["w"])


def flipped(message: bytearray) -> bytearray:
    message[-1] ^= 1
    return message


def repeating() -> Any:
    """Gives each message again in the place of the next one."""
    seen: list[bytearray] = []

    def change(message: bytearray) -> bytearray:
        seen.append(message)
        return seen[-2] if len(seen) > 1 else message

    return change


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (flipped, {}),
        (lambda message: message[:5], {}),
        (repeating(), {}),
        (lambda message: message, {"key": b"another key of a stranger......."}),
        (lambda message: message, {"number": 5}),
    ],
)
def test_message_changed_repeated_or_redirected_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(PayloadCorrupt, match="damaged in transit: join again"):
        taken(monkeypatch, change, **options)
