"""Who comes to a meeting place is admitted, or is told at once why not; nobody else notices."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

import thinwire as tw
from tests.api import Address, KeyValueView, connect, host, parse_address, require_same
from tests.lab.namespaces import needs_netns
from tests.members.places import TIMEOUT, TOKEN, meeting_place, stranger
from tests.processes import ran
from tests.waiting import time_out, until
from thinwire.errors import Mismatch, PayloadCorrupt, PeerLost, PeerStalled, ThinwireError

SHORT = timedelta(seconds=time_out(1.0))


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with meeting_place() as address:
        yield address


def refused(
    address: str, token: bytes | None, error: type[ThinwireError], timeout: timedelta = TIMEOUT
) -> str:
    with pytest.raises(error) as caught:
        connect(address, "llm", token, timeout)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("token", [TOKEN, None])
def test_members_of_a_run_have_a_store_of_their_own(token: bytes | None) -> None:
    with meeting_place(token) as address:
        one, two = (connect(address, "llm", token, TIMEOUT) for _ in range(2))
        other = connect(address, "other", token, TIMEOUT)
        one.set("gen", "3")
        assert two.get("gen") == b"3"
        assert other.look(["gen"])[1] == [None]
        assert (one.key_for("messages") is None) == (token is None)
        assert stranger(address).check(["run/llm/gen"])
        assert one.key_for("messages") == two.key_for("messages")
        if token is not None:
            assert one.key_for("messages") != other.key_for("messages")


def test_over_ipv6() -> None:
    with meeting_place(host="::1") as address:
        assert address.startswith("tcp://[::1]:")
        store = connect(address, "llm", TOKEN, TIMEOUT)
        store.set("key", "value")
        assert connect(address, "llm", TOKEN, TIMEOUT).get("key") == b"value"


def test_another_token_is_reported_at_once_to_the_joiner_alone(place: str) -> None:
    member = connect(place, "llm", TOKEN, TIMEOUT)
    member.set("key", "value")
    assert "has another token" in refused(place, b"another token, long enough", Mismatch)
    assert "this member has none" in refused(place, None, Mismatch)
    assert member.get("key") == b"value"


def test_host_without_a_token_is_reported_to_a_member_that_has_one() -> None:
    with meeting_place(None) as address:
        assert "has no token" in refused(address, TOKEN, Mismatch)


def test_another_version_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(host, "MEETING_VERSION", 0)
        older.setattr(host, "__version__", "0.1.9")
        place = meeting_place()
        address = place.__enter__()
    try:
        text = refused(address, TOKEN, Mismatch)
        assert "thinwire 0.1.9 (protocol 0)" in text
        assert "install the same release" in text
    finally:
        place.__exit__(None, None, None)


def test_values_of_an_earlier_life_of_the_host_do_not_verify() -> None:
    with meeting_place() as address:
        connect(address, "llm", TOKEN, TIMEOUT).set("members/1", "old")
        old = stranger(address).get("run/llm/members/1")
    with meeting_place() as address:
        stranger(address).set("run/llm/members/1", old)
        with pytest.raises(PayloadCorrupt, match="members/1"):
            connect(address, "llm", TOKEN, TIMEOUT).get("members/1")


def test_a_greeting_that_a_stranger_has_written_is_refused() -> None:
    with meeting_place() as address:
        greeting = {"meeting": 1, "thinwire": "0.2.0", "session": "00"}
        stranger(address).set("thinwire/host", json.dumps(greeting))
        assert "has no token" in refused(address, TOKEN, Mismatch)


@pytest.mark.fault("nobody at the meeting point, at the start or later")
def test_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    text = refused(f"tcp://127.0.0.1:{port}", TOKEN, PeerLost)
    assert f"thinwire host --bind 127.0.0.1:{port}" in text
    assert "does not resolve" in refused("tcp://no.such.invalid:29400", TOKEN, PeerLost)


def test_where_something_listens_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        told = f"did not answer within {SHORT.total_seconds():g} s"
        assert told in refused(address, TOKEN, PeerStalled, SHORT)


def test_where_something_else_listens() -> None:
    def answer(server: socket.socket) -> None:
        for _ in range(2):
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,), daemon=True)
        thread.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert "no meeting place" in refused(address, TOKEN, PeerLost, SHORT)


def test_store_of_torch_is_no_meeting_point() -> None:
    """It closes the connection, or waits for more, by what has arrived when it reads."""
    server = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    address = f"tcp://127.0.0.1:{server.port}"
    assert "no meeting place" in refused(address, TOKEN, ThinwireError, SHORT)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:29400",
        "tcp://10.0.0.1",
        "tcp://fd00::1:29400",
        "tcp://a:99999",
        "tcp://a:0",
        "http://a:1",
        "",
    ],
)
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://10.0.0.1:29400"):
        connect(address, "llm", TOKEN, TIMEOUT)


def test_arguments_of_another_kind_are_named() -> None:
    with pytest.raises(TypeError, match="address must be str, got 3"):
        tw.join(3, run="llm")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="token_file must be str"):
        tw.join("tcp://127.0.0.1:1", run="llm", token_file=3)  # type: ignore[arg-type]
    for name in ("x" * 65, "a\nb", "\u202ea"):
        with pytest.raises(ValueError, match="name="):
            tw.join("tcp://127.0.0.1:1", run="llm", name=name)


def test_addresses_read_as_they_are_printed() -> None:
    for text in ("10.0.0.1:29400", "[fd00::1]:1", "host.example:65535"):
        assert str(parse_address("bind", text, scheme=False)) == text
    assert parse_address("a", "tcp://[::1]:7", scheme=True) == Address("::1", 7)


@pytest.mark.parametrize("run", ["", "a/b", "../x", "a b", "-x", "x" * 65, "run\n"])
def test_malformed_run_name_is_refused(place: str, run: str) -> None:
    with pytest.raises(ValueError, match="no name of a run"):
        connect(place, run, TOKEN, TIMEOUT)


def test_another_layout_is_reported_to_the_joiner_alone(place: str) -> None:
    stores = [connect(place, "facts", TOKEN, TIMEOUT) for _ in range(3)]
    first, same, other = map(KeyValueView, stores)
    facts = {"strategy": "localsgd", "layout": [3, 4], "wire": 1}
    require_same(first, "local", facts)
    require_same(same, "local", facts)
    with pytest.raises(Mismatch, match=r"layout is \[3, 5\] here and \[3, 4\] there. Start it as"):
        require_same(other, "local", {**facts, "layout": [3, 5], "wire": 2})
    with pytest.raises(Mismatch, match="wire is nothing here and 1 there"):
        require_same(other, "local", {"strategy": "localsgd", "layout": [3, 4]})
    require_same(first, "local", facts)


def test_a_store_is_refused_that_a_stranger_filled_beforehand(place: str) -> None:
    stranger(place).set("run/squat/local/facts", "{}")
    kv = KeyValueView(connect(place, "squat", TOKEN, TIMEOUT))
    with pytest.raises(PayloadCorrupt, match="run/squat/local/facts"):
        require_same(kv, "local", {"wire": 1})


def silent_name_server(work: str) -> str:
    """What a script prints where the name server of its network keeps silent."""
    name = f"tw{os.getpid()}names"
    folder = Path("/etc/netns") / name
    folder.mkdir(parents=True)
    try:
        (folder / "resolv.conf").write_text("nameserver 192.0.2.53\n")
        for words in (
            f"netns add {name}",
            f"-n {name} link set lo up",
            f"-n {name} link add d0 type veth peer name d1",
            f"-n {name} link set d1 up",
            f"-n {name} addr add 192.0.2.1/24 dev d0",
            f"-n {name} link set d0 up",
            f"-n {name} neigh add 192.0.2.53 lladdr 02:00:00:00:00:53 dev d0",
        ):
            subprocess.run(["ip", *words.split()], check=True)

        def is_up() -> bool:
            show = ["ip", "-n", name, "link", "show", "d0"]
            return b"LOWER_UP" in subprocess.run(show, capture_output=True, check=True).stdout

        # while the line comes up, a question cannot be sent, and the resolver gives up at once
        until(is_up, "the line")
        # as on a user's machine, a resolver asks for longer than the time-out
        command = ["ip", "netns", "exec", name, "env", "-u", "RES_OPTIONS", sys.executable]
        return ran([*command, "-c", work]).stdout
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(folder)


@needs_netns
def test_a_name_server_that_keeps_silent_is_not_waited_for_longer_than_the_time_out() -> None:
    told = silent_name_server(
        "import thinwire as tw\n"
        "try: tw.join('tcp://head.cluster:29400', run='a', timeout=1)\n"
        "except tw.errors.PeerLost as error: print(error)\n"
    )
    # where it waits for the resolver, the resolver says why it gives up
    text = r"head\.cluster does not resolve to an address: no name server answered within \S+ s\n"
    assert re.fullmatch(text, told)
