"""Members that reach no other one: all that they exchange goes through the relay of the host."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests import api
from tests.members.places import TOKEN, host_command, meeting_place, store_alone
from tests.members.relays import listening, listens, rank_by_hand, relay_alone, relay_place
from tests.members.training import TIMEOUT_S, digest, in_run, member, model, require_joined
from tests.ranks import Lost, Pool, Raised
from tests.toys import descend
from tests.waiting import PATIENCE_S, until
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, ThinwireError

CONFIGS = {
    "one bit": tw.LocalSGD(2, begin_step=0, compression=tw.Quantized(1)),
    "sparse": tw.LocalSGD(2, begin_step=0, compression=tw.Sparse(0.9)),
    "split": tw.LocalSGD(2, begin_step=0, compression=tw.Sparse(0.9, exchange="split")),
    "whole": tw.LocalSGD(2, begin_step=0),
    "late, parts": tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1), delay=1, fragments=2),
    "three steps late": tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1), delay=3),
}
STEPS = 40
"""In which there are 20 averagings."""


def in_order(rank: int, size: int, address: str, config: Any, options: Any) -> list[str]:
    """The digest after every averaging, of data that the rank among the members says."""
    net, flag, steps = model(0), options.pop("flag", ""), options.pop("steps", STEPS)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    found = []
    options = {"min_members": size, **options}
    options["relay"] = rank in options.pop("relayed", range(size))
    with in_run(address, net, config, optimizer, **options) as (members, sync, _):
        batches = torch.Generator().manual_seed(members.rank)
        while sync.step < steps:
            x = torch.randn(8, 24, generator=batches)
            descend(optimizer, (net(x) - x.roll(1, 1)).square().mean())
            if sync.synced:
                found.append(digest(sync))
            if flag:
                Path(flag).touch()
                time.sleep(0.1)
    return found


@pytest.mark.parametrize(
    ("name", "token", "size"),
    [*((name, True, 3) for name in CONFIGS), ("whole", False, 2), ("whole", False, 3)],
)
def test_bits_equal_members_that_reach_one_another(
    ranks: Pool, token_file: str, name: str, token: bool, size: int
) -> None:
    """Nobody, one or all through the relay; without a token sums are made in shares."""
    found, config = [], CONFIGS[name]
    steps = 20 * config.k_steps // config.fragments
    for relayed in ([], [size - 1], [*range(size)]):
        options = {"relayed": relayed, "steps": steps}
        options |= {"token_file": token_file} if token else {}
        with relay_place(TOKEN if token else None) as address:
            args = in_order, address, config, options
            found += ranks.run(*args, size=size, group=False)
    assert len(found[0]) >= 20
    assert found == 3 * size * [found[0]]


def heavy(rank: int, size: int, address: str, relayed: list[int], options: Any) -> list[str]:
    """The digest after every averaging of messages that go over several connections."""
    torch.manual_seed(0)
    net, found = torch.nn.Linear(1200, 600), []
    config = tw.LocalSGD(1, begin_step=0, compression=tw.Quantized(8))
    options = {"min_members": size, "relay": rank in relayed, **options}
    with in_run(address, net, config, timeout=4 * TIMEOUT_S, **options) as (members, sync, sgd):
        torch.manual_seed(members.rank)
        while sync.step < 4:
            descend(sgd, net(torch.randn(4, 1200)).square().mean())
            found.append(digest(sync))
    return found


def test_any_number_of_streams_gives_the_same_bits(ranks: Pool, token_file: str) -> None:
    found = []
    for relayed, streams in ([], 1), ([2], 4), ([0, 1, 2], None):
        with relay_place() as address:
            options = {"token_file": token_file, "streams": streams}
            found += ranks.run(heavy, address, relayed, options, size=3, group=False)
    assert found == 9 * [found[0]]


def _member(
    rank: int, size: int, address: str, config: Any, relayed: list[int], options: Any
) -> Any:
    return member(rank, size, address, config, relay=rank in relayed, **options)


class Tapped:
    """What the relay reads from one member, which passes through `tap` on its way."""

    def __init__(self, reader: Any, rank: int, tap: Callable[[int, bytes], bytes]) -> None:
        self._reader, self._rank, self._tap = reader, rank, tap

    async def readexactly(self, length: int) -> bytes:
        return self._tap(self._rank, await self._reader.readexactly(length))


@contextlib.contextmanager
def tapped(tap: Callable[[int, bytes], bytes]) -> Iterator[dict[int, set[int]]]:
    """Yield, by rank, the ranks for which its messages are not."""
    hand_on, reached = api.Relay._hand_on, {}

    async def handed(self: Any, room: Any, rank: int, reader: Any, direct: set[int]) -> None:
        reached[rank] = direct
        await hand_on(self, room, rank, Tapped(reader, rank, tap), direct)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.Relay, "_hand_on", handed)
        yield reached


def wide(rank: int, size: int, address: str, token_file: str, reaching: int) -> int:
    """The bytes that left this member, by the relay and directly."""
    torch.manual_seed(0)
    net = torch.nn.Linear(600, 500)
    torch.manual_seed(rank)
    config = tw.LocalSGD(1, begin_step=0, compression=tw.Quantized(8))
    options = {"token_file": token_file, "min_members": size, "relay": rank >= reaching}
    run = in_run(address, net, config, timeout=4 * TIMEOUT_S, **options)
    with run as (_, sync, optimizer):
        while sync.step < 10:
            descend(optimizer, net(torch.randn(4, 600)).square().mean())
        return int(sync.stats()["bytes_sent"])


@pytest.mark.parametrize(("size", "reaching"), [(2, 0), (4, 0), (4, 2)])
def test_a_message_is_uploaded_once(ranks: Pool, token_file: str, size: int, reaching: int) -> None:
    """300 kB each round, and half a percent of heads and signs; nothing that goes directly."""
    uploaded = dict.fromkeys(range(size), 0)

    def count(rank: int, content: bytes) -> bytes:
        uploaded[rank] += len(content)
        return content

    with relay_place() as address, tapped(count) as reached:
        sent = ranks.run(wide, address, token_file, reaching, size=size, group=False)
    once = min(sent)
    assert sorted(sent) == [once] * (size - reaching) + [2 * once] * reaching
    assert once > 10 * 300_000
    for count_of_one in uploaded.values():
        assert once <= count_of_one < 1.005 * once
    pair = {rank for rank in range(size) if reached[rank]}
    assert len(pair) == reaching
    assert all(reached[rank] == pair - {rank} for rank in pair)


def test_a_connection_that_breaks_is_no_change_of_members(ranks: Pool, token_file: str) -> None:
    """The rank is back before the others count it as gone, and gets what it missed."""
    calls = breaks = 0

    def cut(rank: int, content: bytes) -> bytes:
        nonlocal calls, breaks
        calls += rank == 1
        if rank == 1 and calls % 50 == 0:
            breaks += 1
            raise ConnectionResetError
        return content

    with relay_place() as address, tapped(cut):
        options = {"token_file": token_file}
        args = _member, address, CONFIGS["sparse"], [0, 1, 2], options
        found = ranks.run(*args, size=3, group=False)
    assert breaks > 1
    assert [one["changes"] for one in found] == 3 * [[]]
    assert found[0]["rounds"] == found[1]["rounds"] == found[2]["rounds"]


def test_goodbye_is_a_departure_at_once_and_silence_a_later_one() -> None:
    with relay_alone() as place:
        clients = [api.RelayClient(place, "room", rank, 3) for rank in range(2)]
        with rank_by_hand(place, "room", 2, patience_s=PATIENCE_S):  # the relay waits for 5 s
            assert all(client.wait_for_all(PATIENCE_S) for client in clients)
        clients[1].close(PATIENCE_S)
        until(lambda: clients[0].departed, "the departure")
        assert clients[0].departed == {1}
        until(lambda: clients[0].departed == {1, 2}, "the departure")
        clients[0].close(PATIENCE_S)


def hold_host(port: int, token_file: str, flag: Path, kills: int, over: threading.Event) -> None:
    """A host, which is killed and started again so many times once there is the flag."""
    options = ["--bind", f"127.0.0.1:{port}", "--token-file", token_file, "--relay"]
    options += ["--journal", f"{flag}-runs"]
    for _ in range(kills):
        with host_command(*options) as (host, _):
            until(lambda: flag.exists() or over.is_set(), "the first averaging")
            time.sleep(0.3)
            host.send_signal(signal.SIGKILL)
            host.wait()
        time.sleep(0.3)
    with host_command(*options):
        over.wait()


def test_relay_killed_and_back_costs_nothing(ranks: Pool, token_file: str, tmp_path: Path) -> None:
    """Members wait, send again what was on its way, and have the bits of an undisturbed run."""
    with listening() as free:
        port = free.getsockname()[1]
    options = {"token_file": token_file, "timeout": PATIENCE_S}
    found = []
    for kills in (0, 3):
        flag, over = tmp_path / f"go{kills}", threading.Event()
        host = threading.Thread(target=hold_host, args=(port, token_file, flag, kills, over))
        host.start()
        try:
            until(lambda: listens("127.0.0.1", port), "the host")
            paced = {**options, "flag": str(flag) if kills else ""}
            args = (f"tcp://127.0.0.1:{port}", CONFIGS["sparse"], paced)
            found += ranks.run(in_order, *args, size=3, group=False)
        finally:
            over.set()
            host.join()
    assert found == 6 * [found[0]]


@pytest.mark.parametrize(
    ("phase", "relayed"),
    [
        ("before sending", [0, 1, 2]),
        ("once sent", [0, 1, 2]),
        ("once sent", [1]),
        ("once sent", [2]),
        ("before the last agreement", [0, 1, 2]),
    ],
)
def test_the_others_go_on_without_a_member_that_dies(
    ranks: Pool, token_file: str, phase: str, relayed: list[int]
) -> None:
    fault = {"rank": 1, "phase": phase, "at": 3, "how": "kill"}
    options = {"fault": fault, "token_file": token_file}
    with relay_place() as address:
        args = _member, address, CONFIGS["sparse"], relayed, options
        found = ranks.run(*args, size=3, expect_errors=True, group=False)
    assert isinstance(found.pop(1), Lost)
    assert found[0]["rounds"] == found[1]["rounds"]
    assert [one["changes"] for one in found] == 2 * [[(1, 2)]]


@pytest.mark.parametrize("relayed", [[0, 1, 2], [2], [0]])
def test_a_joiner_gets_the_state_through_the_relay(
    ranks: Pool, token_file: str, tmp_path: Path, relayed: list[int]
) -> None:
    options = {"founders": 2, "flag": str(tmp_path / "go"), "step_s": 0.02, "until_size": 3}
    options["token_file"] = token_file
    with relay_place() as address:
        args = _member, address, CONFIGS["late, parts"], relayed, options
        found = ranks.run(*args, size=3, group=False)
    require_joined(found)


def test_without_a_relay_at_the_host_no_member_can_ask_for_it(token_file: str) -> None:
    with (
        meeting_place() as address,
        pytest.raises(PeerLost, match="relays nothing: start `thinwire host` with --relay"),
    ):
        tw.join(address, run="a", token_file=token_file, relay=True, timeout=TIMEOUT_S)


def test_the_wrong_token_is_refused_by_the_relay_too(token_file: str) -> None:
    with relay_alone(TOKEN) as place:
        other = place._replace(key=api.relay_key(TOKEN[::-1]))
        with pytest.raises(Mismatch, match="another token"):
            api.require_relay(other, TIMEOUT_S)
        client = api.RelayClient(other, "room", 0, 2)
        assert not client.wait_for_all(PATIENCE_S)
        assert isinstance(client.refusal, Mismatch)
        client.close(PATIENCE_S)
        api.require_relay(place, TIMEOUT_S)


@pytest.fixture(scope="session")
def cert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by itself, with its key in the same file."""
    folder = tmp_path_factory.mktemp("cert")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=thinwire"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    both = folder / "both"
    both.write_bytes((folder / "key").read_bytes() + (folder / "cert").read_bytes())
    return both


def test_with_a_certificate_traffic_is_encrypted(ranks: Pool, token_file: str, cert: Path) -> None:
    options = {"token_file": token_file, "ca": str(cert)}
    with relay_place(tls=api.certificate(cert, None)) as address:
        found = ranks.run(in_order, address, CONFIGS["sparse"], options, size=2, group=False)
        with pytest.raises(Mismatch, match="has a certificate"):
            tw.join(address, run="b", token_file=token_file, relay=True, timeout=TIMEOUT_S)
    assert found == 2 * [found[0]]
    with relay_place() as address, pytest.raises(PeerLost, match="and --cert, or omit ca="):
        tw.join(address, run="a", timeout=TIMEOUT_S, relay=True, **options)


def test_another_certificate_is_refused(token_file: str, cert: Path, tmp_path: Path) -> None:
    system = ssl.get_default_verify_paths().cafile
    if system is None:
        pytest.skip("no authorities on this machine")
    with (
        relay_place(tls=api.certificate(cert, None)) as address,
        pytest.raises(Mismatch, match="the certificate of the relay at tls://"),
    ):
        tw.join(address, run="a", token_file=token_file, relay=True, ca=system)


def altered(rank: int, size: int, address: str, token_file: str) -> tuple[str, int]:
    """How training ended, and after how many averagings."""
    net, told = model(0), ""
    torch.manual_seed(rank)
    options = {"token_file": token_file, "start_members": size, "relay": True}
    try:
        run = in_run(address, net, CONFIGS["whole"], **options)
        with run as (members, sync, optimizer):
            try:
                while sync.step < STEPS:
                    before = digest(sync)
                    descend(optimizer, net(torch.randn(8, 24)).square().mean())
            except PayloadCorrupt as error:
                told = str(error)
                assert digest(sync) == before
            averagings = int(sync.stats()["averagings"])
            if told:
                members.leave()
                raise PayloadCorrupt(told)
    except PayloadCorrupt:
        assert told
    return told, averagings


@pytest.mark.fault
@pytest.mark.parametrize("kind", [api.Kind.DATA, api.Kind.CONTROL])
@pytest.mark.parametrize("how", ["altered", "repeated"])
def test_a_relay_that_lies_is_found_out(
    ranks: Pool, token_file: str, kind: api.Kind, how: str
) -> None:
    """A message of member 1 arrives as another one; a vote says so, or in a vote they end."""
    sent: list[bytes] = []
    lies: list[bytes] = []
    head: list[tuple[int, ...]] = [()]

    def lie(rank: int, content: bytes) -> bytes:
        if rank != 1:
            return content
        if len(content) == api.HEAD.size and len(head[0]) == 0:
            head[0] = api.HEAD.unpack(content)
            return content
        (length, _, _, what, *_), head[0] = head[0], ()
        if what != kind or length < 30 or len(lies) == 1:
            return content
        sent.append(content)
        older = [each for each in sent[:-1] if len(each) == len(content) and each != content]
        if len(sent) < 10 or not older:
            return content
        lies.append(older[-1] if how == "repeated" else content[:7] + b"lies" + content[11:])
        return lies[0]

    with relay_place() as address, tapped(lie):
        found = ranks.run(altered, address, token_file, size=3, group=False, expect_errors=True)
    assert len(lies) == 1
    ended = [one for one in found if not isinstance(one, Raised)]
    refused = [averagings for told, averagings in ended if "its MAC is wrong" in told]
    assert refused == (3 if kind == api.Kind.DATA else 2) * [refused[0]]
    assert refused[0] < 20


def test_stranger_with_a_malformed_message_is_disconnected() -> None:
    """And only on that one: the room goes on."""
    with relay_alone() as place:
        clients = [api.RelayClient(place, "room", rank, 2) for rank in range(2)]
        assert all(client.wait_for_all(PATIENCE_S) for client in clients)
        frame = api.HEAD.pack(api.FRAME_BYTES + 1, api.ALL, 0, api.Kind.DATA, 0, 0, 0)
        fake = api.HEAD.pack(0, api.ALL, 0, api.Kind.DISCONNECTED, 0, 0, 0)
        connected = partial(socket.create_connection, place[:2], PATIENCE_S)
        admitted = partial(rank_by_hand, place, "other", 0)
        admitted().close()  # one that goes by itself
        for connect, words in (
            (connected, b"GET / HTTP/1.1\r\n\r\n"),
            (connected, b"\x16\x03\x01"),  # TLS, and there is no certificate
            (connected, b"\0"),  # of torch's store, and there is none
            (admitted, frame),
            (admitted, fake),
        ):
            with connect() as stranger, contextlib.suppress(ConnectionResetError):
                stranger.sendall(words)
                while stranger.recv(4096):
                    pass
        clients[0].send(api.Kind.DATA, b"x" * 200_000)
        number = clients[1].claim(api.Kind.DATA, 0)
        with clients[1].changed:
            arrived = clients[1].changed.wait_for(
                lambda: clients[1].arrived(api.Kind.DATA, {0: number}), PATIENCE_S
            )
        assert arrived
        assert clients[1].pop(api.Kind.DATA, {0: number}) == {0: b"x" * 200_000}
        for client in clients:
            client.close(PATIENCE_S)


def test_receiver_that_reads_nothing_delays_its_senders() -> None:
    """The relay keeps no more than some parts of a message for it."""
    size = 64 << 20
    with relay_alone() as place:
        client = api.RelayClient(place, "room", 0, 2)
        with rank_by_hand(place, "room", 1) as slow:
            assert client.wait_for_all(PATIENCE_S)
            before = resident_bytes()
            client.send(api.Kind.DATA, bytes(size))
            time.sleep(1.0)
            assert resident_bytes() - before < size + (24 << 20) + api.relay._QUEUE_BYTES
            taken = 0
            while taken < size:
                taken += len(slow.recv(1 << 20))
        client.close(PATIENCE_S)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_more_members_are_let_in_than_there_may_be() -> None:
    """One whose line broke takes its own place again."""
    with relay_alone() as place, contextlib.ExitStack() as ends:
        ends.enter_context(pytest.MonkeyPatch.context()).setattr(api.relay, "MOST_CONNECTIONS", 3)
        for rank in (0, 1, 2, 0):
            ends.enter_context(rank_by_hand(place, "room", rank))
        with pytest.raises(PeerLost, match="has reached its limit of connections"):
            api.require_relay(place, PATIENCE_S)


@pytest.mark.parametrize("words", [b"", api.GREETING])
def test_silent_strangers_keep_no_member_out(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: the relay drops the oldest, so that they take no more than so much memory."""
    monkeypatch.setattr(api.relay, "_HELLO_S", 10 * PATIENCE_S)
    with relay_alone() as place, contextlib.ExitStack() as ends:
        client, strangers = api.RelayClient(place, "room", 0, 2), []
        ends.callback(client.close, PATIENCE_S)
        member = rank_by_hand(place, "room", 1)
        for _ in range(api.server.MOST_CONNECTIONS + 50):
            stranger = socket.create_connection(place[:2], timeout=PATIENCE_S)
            strangers.append(ends.enter_context(stranger))
            stranger.sendall(words)
        assert client.wait_for_all(PATIENCE_S)
        member.close()
        with rank_by_hand(place, "room", 1):
            client.send(api.Kind.DATA, b"x")
        for stranger in strangers[:50]:
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(64):
                    pass


def test_a_relay_that_stays_away_is_an_error(ranks: Pool, token_file: str, tmp_path: Path) -> None:
    flag, place = tmp_path / "go", relay_place()
    address = place.__enter__()
    options = {"token_file": token_file, "flag": str(flag), "rejoin": False}
    args = (in_order, address, CONFIGS["sparse"], options)

    def end() -> None:
        until(flag.exists, "the first averaging")
        place.__exit__(None, None, None)

    ending = threading.Thread(target=end)
    ending.start()
    found = ranks.run(*args, size=2, group=False, expect_errors=True)
    ending.join()
    # the time-out may end before or after the host is asked for the last time
    assert {one.type_name for one in found} <= {"PeerLost", "PeerStalled"}
    assert all("the meeting place" in one.text for one in found)


def test_a_state_that_was_sent_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow line too, where it is on its way for longer than a connection takes to close: a
    donor learns how far behind a joiner is, and a member that leaves hands over what it holds."""
    sent = {"w": torch.rand(1 << 18, generator=torch.Generator().manual_seed(4))}
    received: list[api.StateMessage] = []

    def slow(rank: int, part: bytes) -> bytes:
        time.sleep(2e-3)
        return part

    with relay_alone() as place, tapped(slow), store_alone() as store:
        kv = api.KeyValueView(api.AuthenticatedStore(store, None))
        way = api.TransferContext(kv, place, PATIENCE_S, b"")
        other = way.cloned()
        monkeypatch.setattr(api.TransferContext, "cloned", lambda self: self)
        donor = api.Donor(way, 0, "ann", [api.StateMessage("state", {}, {})])
        recipient = api.Recipient(other, 0)

        def receive() -> None:
            recipient.receive(8 << 20)
            recipient.receive_state([], lambda _: True)
            received.append(recipient.receive(8 << 20))

        thread = threading.Thread(target=receive)
        thread.start()
        donor.enqueue(api.StateMessage("own", {}, sent))
        donor.close(PATIENCE_S)
        assert not donor.alive
        assert recipient.line.nbytes > sent["w"].nbytes
        thread.join(PATIENCE_S)
        recipient.line.close()
    assert torch.equal(received[0].tensors["w"], sent["w"])


def test_one_that_reads_nothing_slows_nobody_down() -> None:
    """The others have all messages, up to the bytes that may wait for it."""
    message = bytes(range(256)) * (1 << 14)
    with relay_alone() as place:
        clients = [api.RelayClient(place, "room", rank, 3) for rank in range(2)]
        with rank_by_hand(place, "room", 2):
            assert all(client.wait_for_all(PATIENCE_S) for client in clients)
            for number in range(6):
                clients[0].send(api.Kind.DATA, message)
                wanted = {0: clients[1].claim(api.Kind.DATA, 0)}
                until(lambda wanted=wanted: clients[1].arrived(api.Kind.DATA, wanted), str(number))
                assert clients[1].pop(api.Kind.DATA, wanted)[0] == message
        for client in clients:
            client.close()


def test_a_message_too_long_for_a_relay_is_an_error() -> None:
    with relay_alone() as place:
        client = api.RelayClient(place, "room", 0, 2)
        with pytest.raises(ThinwireError, match="1073741825 bytes is too long for a relay"):
            client.send(api.Kind.DATA, bytes((1 << 30) + 1))
        client.close(PATIENCE_S)
