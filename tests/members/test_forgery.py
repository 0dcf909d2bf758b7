"""Ten thousand forged, altered and repeated messages and values each, by somebody who knows
everything but the key: none is accepted."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tests.api import ALL_RANKS, AuthenticatedStore, Layout, MessageMacs, Slot, run_store
from tests.api import message_pack as pack
from thinwire.errors import PayloadCorrupt

TRIES = 10_000
WORLD, NUMEL, K = 4, 64, 4
KEY, OLD_KEY = b"k" * 32, b"o" * 32
LAYOUT = Layout((Slot(NUMEL, K),), 2)


def message_of(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    positions = torch.randperm(NUMEL, generator=generator)[:K].sort().values
    values = torch.randn(K, generator=generator)
    return pack(LAYOUT, step, 0, [(positions, values)])[0]


def gathered(key: bytes, exchanges: int, channel: str = "messages") -> list[list[Tensor]]:
    """What all ranks send in a row of exchanges, with their proofs."""
    macs = [MessageMacs(key, channel, rank) for rank in range(WORLD)]
    return [
        [macs[rank].with_mac(message_of(step, rank), macs[rank].next()) for rank in range(WORLD)]
        for step in range(exchanges)
    ]


SEEN = gathered(KEY, 8)


def test_honest_messages_are_taken_and_are_sixteen_bytes_longer() -> None:
    reader = MessageMacs(KEY, "messages", 2)
    for step, sent in enumerate(SEEN):
        number = reader.next()
        kept, wrong = reader.verified(torch.stack(sent), number)
        assert (number, wrong) == (step, [])
        assert kept.shape == (WORLD, LAYOUT.nbytes)
        for rank in range(WORLD):
            assert torch.equal(kept[rank], message_of(step, rank))
    assert {message.numel() for sent in SEEN for message in sent} == {LAYOUT.nbytes + 16}


def test_a_message_is_for_the_rank_that_it_was_sent_to() -> None:
    sender, receiver = MessageMacs(KEY, "messages", 1), MessageMacs(KEY, "messages", 0)
    lengths = [8, 8, 5, 0]
    content = torch.arange(sum(lengths), dtype=torch.uint8)
    given, longer = sender.with_macs(content, lengths, sender.next())
    assert longer == [24, 24, 21, 16]
    to_0, to_1 = torch.split(given, longer)[:2]
    for to, part in ((0, to_0), (1, to_1)):
        rows = torch.stack([part, part])
        assert receiver.verified(rows, 0, to)[1] == [0]  # row 0 is from rank 0 by its place
        assert receiver.verified(rows, 0, 1 - to)[1] == [0, 1]
        assert receiver.verified(rows, 0, ALL_RANKS)[1] == [0, 1]


TOKEN, SESSION = b"t" * 32, "5e55"


def strangers(
    rng: random.Random, store: HashStore
) -> list[Callable[[str, bytes, dict[str, bytes]], bytes]]:
    """What somebody may write who can write to the store and has seen all that was ever in it."""

    def elsewhere(token: bytes, run: str, session: str) -> Callable[..., bytes]:
        def write(key: str, value: bytes, _seen: dict[str, bytes]) -> bytes:
            other = HashStore()
            run_store(other, run, token, session).set(key, value)
            return other.get(f"run/{run}/{key}")

        return write

    def turned(_key: str, value: bytes, seen: dict[str, bytes]) -> bytes:
        there = bytearray(seen[_key])
        there[rng.randrange(len(there))] ^= 1 << rng.randrange(8)
        return bytes(there)

    return [
        lambda key, value, seen: value,
        lambda key, value, seen: seen[key][: rng.randrange(len(seen[key]))],
        lambda key, value, seen: seen[key] + rng.randbytes(rng.randint(1, 9)),
        lambda key, value, seen: seen[key][:36] + rng.randbytes(len(value) + 1),
        lambda key, value, seen: b"tws1" + rng.randbytes(32) + value,
        lambda key, value, seen: seen[rng.choice([k for k in seen if k != key])],
        lambda key, value, seen: rng.randbytes(rng.randrange(90)),
        turned,
        elsewhere(b"another token of the same length", "llm", SESSION),
        elsewhere(TOKEN, "other", SESSION),
        elsewhere(TOKEN, "llm", "the session before"),
    ]


def test_ten_thousand_forged_admissions() -> None:
    rng, store = random.Random(11), HashStore()
    member: AuthenticatedStore = run_store(store, "llm", TOKEN, SESSION)
    keys = [f"hello/{n}" for n in range(20)] + [f"members/{n}" for n in range(20)]
    for key in keys:
        member.set(key, f'{{"id": "{key}", "address": "10.0.0.{len(key)}"}}')
    seen = {key: store.get(f"run/llm/{key}") for key in keys}
    values = {key: member.get(key) for key in keys}
    ways = strangers(rng, store)
    refusals = 0
    for turn in range(TRIES):
        key = rng.choice(keys)
        forged = ways[turn % len(ways)](key, values[key], seen)
        assert forged != seen[key]
        store.set(f"run/llm/{key}", forged)  # type: ignore[arg-type]
        with pytest.raises(PayloadCorrupt):
            member.get(key)
        refusals += 1
        store.set(f"run/llm/{key}", seen[key])  # type: ignore[arg-type]
        assert member.get(key) == values[key]
    assert refusals == TRIES
