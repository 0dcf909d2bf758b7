"""What a joiner takes from a member is that member's, whole and in order, and meant for it."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.api import (
    AuthenticatedStore,
    Donor,
    KeyValueView,
    Recipient,
    StateMessage,
    TransferContext,
    transfer,
)
from tests.members.places import LOOPBACK
from thinwire.errors import PayloadCorrupt

LIMIT_S = 10.0
MESSAGES = [
    StateMessage("state" if n == 0 else "round", {"n": n}, {"w": torch.full((9,), float(n))})
    for n in (0, 1, 2)
]


class Tapped(transfer.Channel):
    """A line whose messages somebody changes, of whatever run and joiner."""

    change: Any = None

    def receive(self) -> memoryview:
        message = super().receive()
        of_joiner = self._other == 0
        return memoryview(Tapped.change(bytearray(message))) if of_joiner else message


def both_ends(timeout_s: float, number: int = 0, key: bytes = b"k" * 32) -> tuple[Donor, Recipient]:
    """A member that gives to the joiner of this number, which has a key."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_S), wait_for_workers=False)
    kv = KeyValueView(AuthenticatedStore(store, b"s" * 32))
    way = TransferContext(kv, LOOPBACK, timeout_s, b"k" * 32)
    donor = Donor(way, number, "ann", own_id="bob")
    return donor, Recipient(way.cloned()._replace(key=key), number)


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
        recipient.close()
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
    """Gives the first two messages again in the place of the next two."""
    seen: list[bytearray] = []

    def change(message: bytearray) -> bytearray:
        seen.append(message)
        return seen[-3] if len(seen) > 2 else message

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
