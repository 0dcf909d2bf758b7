"""Ten thousand messages that a lying relay has altered, made or repeated: a member takes none."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import torch

from tests import api
from tests.members.places import store_alone
from tests.waiting import PATIENCE_S
from thinwire.errors import PayloadCorrupt

TRIES = 10_000
KEY, OLD_KEY = b"k" * 32, b"o" * 32
SIZE, CONTENT_BYTES = 3, 40
CHANNELS = {api.Kind.DATA: "messages", api.Kind.CONTROL: "agreements"}


def content_of(number: int, rank: int) -> bytes:
    return random.Random(f"{number} {rank}").randbytes(CONTENT_BYTES)


class Honest:
    """Every message of every rank, as its sender gives it to the relay."""

    def __init__(self, key: bytes = KEY) -> None:
        self._macs = {
            (kind, rank): api.MessageMacs(key, name, rank)
            for kind, name in CHANNELS.items()
            for rank in range(SIZE)
        }

    def __call__(self, kind: api.Kind, number: int, rank: int) -> bytes:
        content = content_of(number, rank)
        checksum = crc32(content).to_bytes(4, "little") if kind == api.Kind.CONTROL else b""
        message = torch.frombuffer(bytearray(content + checksum), dtype=torch.uint8)
        return self._macs[kind, rank].with_mac(message, number).numpy().tobytes()


HONEST, EARLIER_RUN = Honest(), Honest(OLD_KEY)
Forgery = Callable[[random.Random, api.Kind, int], bytes]


def altered(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    made = bytearray(HONEST(kind, number, 1))
    for at in rng.sample(range(len(made)), rng.randint(1, 3)):
        made[at] ^= 1 << rng.randrange(8)
    return bytes(made)


def made_up(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    return content_of(number, 1) + rng.randbytes(len(HONEST(kind, number, 1)) - CONTENT_BYTES)


def of_another_number(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    return HONEST(kind, number + rng.choice([-1, 1, 7]) if number else 1, 1)


def of_another_rank(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    """The third member's, or the receiver's own."""
    return HONEST(kind, number, rng.choice([0, 2]))


def of_the_other_channel(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    return HONEST(api.Kind.CONTROL if kind == api.Kind.DATA else api.Kind.DATA, number, 1)


def of_an_earlier_run(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    return EARLIER_RUN(kind, number, 1)


def joined(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    """The beginning of one message and the end of another one."""
    at, other = rng.randrange(1, CONTENT_BYTES), HONEST(kind, number + 1, 1)
    return HONEST(kind, number, 1)[:at] + other[at:]


def cut(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    return HONEST(kind, number, 1)[: rng.randrange(CONTENT_BYTES)]


def longer(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    return HONEST(kind, number, 1) + rng.randbytes(rng.randint(1, 9))


FORGERIES: list[Forgery] = [
    altered,
    made_up,
    of_another_number,
    of_another_rank,
    of_the_other_channel,
    of_an_earlier_run,
    joined,
    cut,
    longer,
]


def frame(
    kind: int, number: int, rank: int, content: bytes, offset: int = 0, full: int = -1
) -> bytes:
    full = len(content) if full < 0 else full
    return api.HEAD.pack(len(content), 0, rank, kind, number, offset, full) + content


def misplaced(rng: random.Random, kind: api.Kind, number: int) -> bytes:
    """A forged message in a frame with a wrong head, which no member of the room sends there."""
    content, place = made_up(rng, kind, number), (kind, number, 1)
    return rng.choice(
        [
            frame(kind, max(number - 1, 0) if number else 9, 1, content),
            frame(kind, number + rng.randint(1, 9), 1, content),
            frame(kind, number, SIZE + rng.randrange(9), content),
            frame(kind, number, 0, content),
            frame(rng.randint(7, 250), number, 1, content),
            frame(*place, content[:10], offset=rng.randint(1, 30), full=len(content)),
            frame(api.Kind.ALIVE, number, 1, content),
        ]
    )


def sent(turns: list[tuple[api.Kind, int, bytes]]) -> Iterator[bytes]:
    """What the relay gives to member 0: the forged frames for each turn, and those of member 2."""
    for kind, number, frames in turns:
        yield frames + frame(kind, number, 2, HONEST(kind, number, 2))
        done = number + 1
        for rank in (1, 2):
            yield frame(kind + api.Kind.DATA_DONE, done, rank, b"")


class Liar:
    """A relay for one member: it sends these frames as others', then signs of life."""

    def __init__(self, frames: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = api.RelayEndpoint(*self.listener.getsockname(), b"")
        self._frames = frames
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with self.listener, self.listener.accept()[0] as member:
            assert member.recv(len(api.GREETING), socket.MSG_WAITALL) == api.GREETING
            member.sendall(b"+" + bytes(api.NONCE_BYTES))
            length = int.from_bytes(member.recv(2, socket.MSG_WAITALL), "little")
            member.recv(length + 16, socket.MSG_WAITALL)
            member.sendall(b"+")
            for rank in range(1, SIZE):
                member.sendall(frame(api.Kind.CONNECTED, 0, rank, b""))
            drain = threading.Thread(target=self._drain, args=(member,))
            drain.start()
            with contextlib.suppress(ConnectionError):  # the member hangs up
                member.sendall(self._frames)
                while drain.is_alive():
                    member.sendall(frame(api.Kind.ALIVE, 0, 0, b""))
                    drain.join(1.0)
            drain.join()

    def _drain(self, member: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while member.recv(1 << 16):
                pass


class OnCpu(api.Group):
    """Group of a member, whose process groups torch does not know."""

    device = torch.device("cpu")  # type: ignore[assignment]


@contextlib.contextmanager
def member(turns: list[tuple[api.Kind, int, bytes]]) -> Iterator[api.Group]:
    """Member 0 of three, with a key, whose messages go through a relay that lies in these turns.

    The relay has all that it will send before the member connects: one that waits for messages to
    be made could find the relay silent for too long."""
    relay = Liar(b"".join(sent(turns)))
    with store_alone() as connection:
        store = api.AuthenticatedStore(connection, None)
        for rank in range(1, SIZE):
            store.set(f"endpoint/{rank}", "[null, {}]")  # nobody listens
        groups = api.MemberGroups(store, 0, SIZE, PATIENCE_S, relay.endpoint)
    group = OnCpu.over_private(None, PATIENCE_S)
    group.rank, group.size, group.relayed = 0, SIZE, True
    group._shared = groups
    try:
        group.authenticate(KEY)
        yield group
    finally:
        groups.release()
        relay.thread.join()


def received(group: api.Group, kind: api.Kind, number: int) -> tuple[list[Any], list[int]]:
    """What came of all ranks, and of which ranks it was refused."""
    own = content_of(number, 0)
    if kind == api.Kind.CONTROL:
        try:
            return group.gather_now(own, "agreeing"), []
        except PayloadCorrupt as error:
            assert "the message from rank 1 was refused because its MAC is wrong" in str(error)
            return [], [1]
    assert group.macs is not None
    message = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    assert group.macs.next() == number
    rows = group.all_gather(group.macs.with_mac(message, number), action="averaging").wait()
    kept, wrong = group.macs.verified(rows, number)
    return [bytes(row.tolist()) for row in kept], wrong


def turns_of(
    tries: int, make: Callable[[random.Random, int, api.Kind, int], bytes]
) -> list[tuple[api.Kind, int, bytes]]:
    rng = random.Random(5)
    places = ((list(CHANNELS)[turn % 2], turn // 2) for turn in range(tries))
    return [(*place, make(rng, turn, *place)) for turn, place in enumerate(places)]


def test_ten_thousand_forged_messages_are_refused() -> None:
    def forged(rng: random.Random, turn: int, kind: api.Kind, number: int) -> bytes:
        content = FORGERIES[turn // 2 % len(FORGERIES)](rng, kind, number)
        assert content != HONEST(kind, number, 1)
        return frame(kind, number, 1, content)

    turns = turns_of(TRIES, forged)
    with member(turns) as group:
        for kind, number, _ in turns:
            kept, wrong = received(group, kind, number)
            assert wrong == [1]
            if kept:
                assert kept == [content_of(number, 0), bytes(CONTENT_BYTES), content_of(number, 2)]


def test_frames_of_nobody_reach_nobody() -> None:
    """They come before the honest ones, which are taken all the same."""

    def beside(rng: random.Random, turn: int, kind: api.Kind, number: int) -> bytes:
        return misplaced(rng, kind, number) + frame(kind, number, 1, HONEST(kind, number, 1))

    turns = turns_of(TRIES // 10, beside)
    with member(turns) as group:
        for kind, number, _ in turns:
            kept, wrong = received(group, kind, number)
            assert wrong == []
            assert kept == [content_of(number, rank) for rank in range(SIZE)]


def test_a_message_is_for_the_rank_that_it_was_sent_to() -> None:
    sender, receiver = api.MessageMacs(KEY, "messages", 1), api.MessageMacs(KEY, "messages", 0)
    lengths = [8, 8, 5, 0]
    content = torch.arange(sum(lengths), dtype=torch.uint8)
    given, longer = sender.with_macs(content, lengths, sender.next())
    assert longer == [24, 24, 21, 16]
    to_0, to_1 = torch.split(given, longer)[:2]
    for to, part in ((0, to_0), (1, to_1)):
        rows = torch.stack([part, part])
        assert receiver.verified(rows, 0, to)[1] == [0]  # row 0 is from rank 0 by its place
        assert receiver.verified(rows, 0, 1 - to)[1] == [0, 1]
        assert receiver.verified(rows, 0, api.ALL_RANKS)[1] == [0, 1]
