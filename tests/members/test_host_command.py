"""`thinwire host` listens where it was told and nowhere else, and says what is wrong in a line."""

import contextlib
import ipaddress
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.api import AuthenticatedStore, RelayEndpoint, connect, require_relay, server
from tests.members.places import TIMEOUT, TOKEN, host_command, stranger
from tests.processes import ran_code, running
from tests.toys import answer, refusal
from tests.waiting import PATIENCE_S, until
from thinwire.errors import Mismatch, PeerLost, PeerStalled

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "the port is in use" in refusal(capsys, "host", "--bind", f"127.0.0.1:{port}")


def test_a_token_is_made_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert str(path) in answer(capsys, "host", "--new-token", str(path))[0]
    assert "exists already" in refusal(capsys, "host", "--new-token", str(path))


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a process listens, as the kernel says."""
    links = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        links.add(str(link.readlink()))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                address, port = words[1].split(":")
                raw = bytes.fromhex(address)
                swapped = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.add((str(ipaddress.ip_address(swapped)), int(port, 16)))
    return found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def ended(process: subprocess.Popen[str], number: int) -> str:
    """What it still prints after a signal, and that it ends well."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    return out


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_it_listens_on_the_given_address_and_on_no_other(host: str) -> None:
    bracketed = f"[{host}]" if ":" in host else host
    with host_command("--bind", f"{bracketed}:0", "--quiet") as (process, address):
        assert address.startswith(f"tcp://{bracketed}:")
        store = connect(address, "llm", None, TIMEOUT)
        store.set("key", "value")
        assert listening(process.pid) == {(host, port_of(address))}
        # the same port on another address of this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port_of(address)), timeout=5)
        assert ended(process, signal.SIGTERM) == ""


@LINUX
def test_a_relay_shares_its_port_with_the_store() -> None:
    with host_command("--bind", "127.0.0.2:0", "--relay") as (process, address):
        connect(address, "llm", None, TIMEOUT).set("key", "value")
        require_relay(RelayEndpoint("127.0.0.2", port_of(address), b""), PATIENCE_S)
        assert listening(process.pid) == {("127.0.0.2", port_of(address))}
        assert process.stdout is not None
        assert process.stdout.readline() == "relaying for members with relay=True\n"
        ended(process, signal.SIGTERM)


@pytest.mark.slow
@LINUX
def test_public_is_reported_and_done(token_file: str) -> None:
    options = ("--bind", "0.0.0.0:0", "--public", "--token-file", token_file)
    with host_command(*options) as (process, address):
        assert listening(process.pid) == {("0.0.0.0", port_of(address))}
        store = connect(f"tcp://127.0.0.3:{port_of(address)}", "llm", TOKEN, TIMEOUT)
        store.set("key", "value")
        assert "traffic is not encrypted" in next_line(process)
        assert ended(process, signal.SIGINT).startswith("ended: ")


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def write_generation(store: AuthenticatedStore, generation: int, *members: str) -> None:
    decision = {"ids": members, "settled": members[:1], "votes": 3, "answers": []}
    store.set(f"members/{generation}", json.dumps(decision))
    store.set("gen", json.dumps(generation))


@pytest.mark.slow
def test_changed_membership_is_reported(token_file: str) -> None:
    options = ("--bind", "127.0.0.1:0", "--token-file", token_file)
    with host_command(*options) as (process, address):
        store = connect(address, "llm", TOKEN, TIMEOUT)
        write_generation(store, 0, "ann")
        assert next_line(process) == "run llm: generation 0, members: ann"
        write_generation(store, 1, "ann", "bob")
        assert next_line(process) == "run llm: generation 1, members: ann, bob"
        other = stranger(address)
        other.set("run/llm/gen", "7")
        told = next_line(process)
        assert "'run/llm/gen' in the store was refused: it has no MAC" in told
        write_generation(store, 2, "bob", "\x1b[31mred\n")
        assert next_line(process) == r"run llm: generation 2, members: bob, \x1b[31mred\n"
        other.set("run/\x1b[31m/gen", "1")
        other.set("run//gen", "1")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerStalled, match="did not answer"):
            connect(address, "llm", TOKEN, timedelta(seconds=1))
        process.send_signal(signal.SIGCONT)
        assert ended(process, signal.SIGINT).startswith("ended: ")


def test_host_without_a_token_reports_the_risk_once() -> None:
    with host_command("--bind", "127.0.0.1:0") as (process, address):
        write_generation(connect(address, "a", None, TIMEOUT), 0, "ann")
        store = connect(address, "b", None, TIMEOUT)
        store.set("gen", "not JSON")
        with pytest.raises(Mismatch, match="has no token"):
            connect(address, "a", TOKEN, TIMEOUT)
        lines = [next_line(process) for _ in range(3)]
        assert lines[0].startswith("no --token-file: anyone who reaches this port can join")
        assert lines[1] == "run a: generation 0, members: ann"
        assert lines[2].startswith("run b: its generation cannot be read")
        assert ended(process, signal.SIGTERM).count("\n") == 1


@LINUX
def test_host_that_died_is_reported_to_joiners() -> None:
    with host_command("--bind", "127.0.0.1:0", "--quiet") as (process, address):
        connect(address, "a", None, TIMEOUT)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        with pytest.raises(PeerLost, match="nothing listens at tcp://127"):
            connect(address, "a", None, TIMEOUT)


def noise(rng: random.Random) -> bytes:
    """What a port scanner, or somebody who knows the store's form, may send."""
    length = struct.pack("<I", rng.choice([0xFFFFFFFF, 1 << 25, 9, 0]))
    return rng.choice(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            rng.randbytes(rng.randint(1, 200)),
            b"",
            server.GREETING + length + rng.randbytes(9),
            server.GREETING + server.framed([rng.choice([b"set", b"wait", b""]), length, None]),
            server.GREETING + rng.randbytes(rng.randint(1, 60)),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--relay"]])
def test_noise_neither_stops_it_nor_fills_its_output(more: list[str]) -> None:
    """Nobody reads its error output: where it told of each message, it would stop."""
    rng = random.Random(3)
    with host_command("--bind", "127.0.0.1:0", "--quiet", *more) as (process, address):
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", port_of(address)), timeout=5) as line:
                line.sendall(noise(rng))
        store = connect(address, "llm", None, TIMEOUT)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert ended(process, signal.SIGTERM) == ""


def test_no_key_or_value_of_a_stranger_ends_it() -> None:
    with host_command("--bind", "127.0.0.1:0") as (process, address):
        store = stranger(address)
        for value in ('"\\ud800"', "[" * 100_000, "{}", "true"):
            store.set("run/x/gen", value)
            time.sleep(1.2)  # it looks once a second
            assert process.poll() is None
        store.ask("set", b"run/\xff\xfe/gen", b"v")  # a key that is no text
        time.sleep(1.2)
        assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("log", ["/dev/full", "a pipe that nobody reads"])
def test_unwritable_output_does_not_stop_the_run(log: str, token_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "thinwire", "host", "--bind", f"127.0.0.1:{port}"]
    read, write = os.pipe()
    os.close(read)
    out = write if log != "/dev/full" else os.open(log, os.O_WRONLY)
    with running([*command, "--token-file", token_file], stdout=out) as process:
        stores = []

        def connected() -> bool:
            with contextlib.suppress(PeerLost):
                stores.append(connect(f"tcp://127.0.0.1:{port}", "llm", TOKEN, TIMEOUT))
            return bool(stores) or process.poll() is not None

        until(connected, "the meeting place")
        [store] = stores
        for generation in ("0", "1"):
            store.set("gen", generation)
            time.sleep(1.5)  # it says so
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    os.close(out)


def test_a_token_that_could_not_be_written_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    no_room = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); " + (
        f"from thinwire.members.credentials import new_token; new_token({str(path)!r})"
    )
    assert "token cannot be written: File too large" in ran_code(no_room).stderr
    assert not path.exists()
