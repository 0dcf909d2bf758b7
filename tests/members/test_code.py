"""A machine joins by a code alone: through TLS, routers, proxies, other ports, and IPv6."""

import contextlib
import os
import pty
import re
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from tests.api import Address, Code, Link, enter, make_certificate, network, read_code
from tests.faults.lines import blackhole
from tests.lab.namespaces import needs_netns
from tests.members.homes import homes, needs_homes
from tests.members.places import TOKEN, host_command, meeting_place, token_in
from tests.members.relays import listening
from tests.processes import ran, running
from tests.waiting import PATIENCE_S, until
from thinwire.errors import Mismatch, PeerLost

PORT = 29_443
SCRIPT = """
import torch, thinwire as tw

torch.manual_seed(0)
net = torch.nn.Linear(24, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with tw.join(timeout=30, start_members=2) as members:
    torch.manual_seed(members.rank)
    with tw.local_sgd(net, optimizer, tw.LocalSGD(2), members=members) as sync:
        while sync.step < 12:
            optimizer.zero_grad()
            net(torch.randn(8, 24)).square().mean().backward()
            optimizer.step()
print(members.size, net.weight.sum().item())
"""
PROXY = """
import asyncio, sys

async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def handle(reader, writer):
    line, *headers = (await reader.readuntil(b"\\r\\n\\r\\n")).split(b"\\r\\n")
    method, where, _ = line.decode().split()
    print(method, where, *(h.decode() for h in headers if h.startswith(b"Proxy")), flush=True)
    host, _, port = where.rpartition(":")
    there = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.write(b"HTTP/1.1 200 Connection established\\r\\n\\r\\n")
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(handle, sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
CODES = st.builds(
    Code,
    st.builds(
        Address, st.sampled_from(["10.0.0.1", "host.example", "fd00::1"]), st.integers(1, 65535)
    ),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.binary(min_size=16, max_size=64),
    st.binary(min_size=32, max_size=32),
    st.booleans(),
)


@given(CODES, st.data())
def test_a_code_is_read_whole_or_not_at_all(code: Code, data: st.DataObject) -> None:
    text = code.text()
    assert read_code(f" {text}\n") == code
    at = data.draw(st.integers(0, len(text) - 2))
    other = "A" if text[at] != "A" else "B"
    for damaged in (text[:at], text[:at] + other + text[at + 1 :], text + text):
        with pytest.raises(ValueError, match="characters") as refused:
            read_code(damaged)
        assert text[4:20] not in str(refused.value), "it is a secret"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script of a member; the files of hosts are there too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "proxy.py").write_text(PROXY)
    return tmp_path


@contextlib.contextmanager
def shared(folder: Path, bind: str, *options: str, namespace: int = -1) -> Iterator[Path]:
    """The file of the code of a host of the run `llm`, which is not on a terminal."""
    codes = folder.joinpath("thinwire")
    for of_before in codes.glob("*.code"):
        of_before.unlink()
    with host_command("--bind", bind, "--run", "llm", *options, namespace=namespace):
        until(lambda: any(codes.glob("*.code")))
        [code] = codes.glob("*.code")
        until(lambda: code.read_text().endswith("\n"))
        assert stat.S_IMODE(code.stat().st_mode) == 0o600
        yield code


def trained(folder: Path, code: Path, namespaces: Sequence[int] = (-1, -1), **more: str) -> None:
    """Let two members train, each by one command."""
    command = [sys.executable, "-m", "thinwire", "join", "--code-file", str(code), "--"]
    with contextlib.ExitStack() as ends:
        both = []
        for namespace in namespaces:
            there = [sys.executable, enter.__file__, str(namespace), str(os.getpid())]
            words = [*there, *command, sys.executable, str(folder / "train.py")]
            passed = () if namespace < 0 else (namespace,)
            options = {"env": os.environ | more, "pass_fds": passed, "stdout": -1, "text": True}
            both.append(ends.enter_context(running(words, **options)))
        lines = [process.communicate(timeout=2 * PATIENCE_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert lines[0].startswith("2 ")
    assert lines == 2 * [lines[0]]


@pytest.mark.parametrize("options", [(), ("--relay",)], ids=["direct", "relay"])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_two_members_join_by_a_code(folder: Path, host: str, options: tuple[str, ...]) -> None:
    with shared(folder, f"{host}:0", *options) as code:
        trained(folder, code)
        text = code.read_text()
        assert read_code(text).token.decode() not in text


def test_a_further_relay_is_known_by_its_announcement(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("timeout=30", "relay=True, timeout=30"))
    with shared(folder, "127.0.0.1:0") as code:
        address, _, token, *_ = read_code(code.read_text())
        (folder / "token").write_bytes(token)
        (folder / "token").chmod(0o600)
        make_certificate(folder / "pem")
        options = ["--token-file", str(folder / "token"), "--cert", str(folder / "pem")]
        with host_command(
            *("--bind", "127.0.0.2:0", "--relay", "--store", f"tcp://{address}", *options)
        ):
            trained(folder, code)


@needs_homes
def test_members_join_from_behind_routers(folder: Path) -> None:
    with homes(2, Link.parse("1gbit")) as (net, namespaces):
        bind = f"{net.addresses[0]}:443"
        with shared(folder, bind, "--relay", namespace=net.namespace_fds[0]) as code:
            trained(folder, code, namespaces)


@needs_netns
@pytest.mark.parametrize("login", ["", "some:word%21@"], ids=["open", "login"])
def test_members_join_through_a_proxy_alone(folder: Path, login: str) -> None:
    with network(4, Link.parse("1gbit")) as net:
        host, proxy, *members = net.namespace_fds
        for namespace, own in zip(members, net.addresses[2:], strict=True):
            others = {net.addresses[0], *net.addresses[2:]} - {own}
            blackhole(namespace, [*others])
        there = [sys.executable, enter.__file__, str(proxy), str(os.getpid())]
        words = [*there, sys.executable, str(folder / "proxy.py"), net.addresses[1], "3128"]
        bind = f"{net.addresses[0]}:443"
        with (
            running(words, pass_fds=(proxy,), stdout=-1, text=True) as process,
            shared(folder, bind, "--relay", namespace=host) as code,
        ):
            assert process.stdout.readline() == "ready\n"
            trained(folder, code, members, HTTPS_PROXY=f"http://{login}{net.addresses[1]}:3128")
            seen = process.stdout.readline()
    assert seen.startswith(f"CONNECT {bind}")
    assert ("Proxy-Authorization: Basic c29tZTp3b3JkIQ==" in seen) == bool(login)


def test_members_join_at_a_mapped_port(folder: Path) -> None:
    with listening() as free:
        outside = free.getsockname()[1]
    with socket.create_server(("127.0.0.2", 0)) as free:
        inner = free.getsockname()[1]
    (folder / "map.py").write_text(
        PROXY.replace(
            PROXY[PROXY.index("    line, *headers") : PROXY.index("    await asyncio.gather")],
            f"    there = await asyncio.open_connection('127.0.0.2', {inner})\n",
        )
    )
    words = [sys.executable, str(folder / "map.py"), "127.0.0.1", str(outside)]
    announced = ("--announce", f"127.0.0.1:{outside}", "--relay")
    with (
        running(words, stdout=-1, text=True),
        shared(folder, f"127.0.0.2:{inner}", *announced) as code,
    ):
        assert read_code(code.read_text()).address == ("127.0.0.1", outside)
        trained(folder, code)


def join_with(monkeypatch: pytest.MonkeyPatch, code: Code) -> None:
    monkeypatch.setenv("THINWIRE_CODE", code.text())
    with tw.join(timeout=5):
        pass


@pytest.mark.parametrize("options", [(), ("--relay",)], ids=["direct", "relay"])
def test_another_certificate_or_token_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    with shared(folder, "127.0.0.1:0", *options) as file:
        code = read_code(file.read_text())
        with pytest.raises(Mismatch, match=r"certificate of the host .* not that of the code"):
            join_with(monkeypatch, code._replace(fingerprint=bytes(32)))
        with pytest.raises(Mismatch, match="another token"):
            join_with(monkeypatch, code._replace(token=bytes(32)))
        join_with(monkeypatch, code)


def test_a_host_without_tls_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting_place() as address:
        where = Address("127.0.0.1", int(address.rpartition(":")[2]))
        with pytest.raises(PeerLost, match="speaks no TLS"):
            join_with(monkeypatch, Code(where, "llm", TOKEN, bytes(32), False))


def test_a_code_lasts_until_a_new_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as free:
        bind = f"127.0.0.1:{free.getsockname()[1]}"
    token = str(folder / "token")
    codes = []
    for options in (("--new-token", token), ("--token-file", token), ("--new-token", token)):
        with shared(folder, bind, *options) as file:
            codes.append(read_code(file.read_text()))
            join_with(monkeypatch, codes[-1])
            if len(codes) == 3:
                with pytest.raises(Mismatch, match="another token"):
                    join_with(monkeypatch, codes[0])
    assert codes[0] == codes[1]
    assert codes[2] == codes[0]._replace(token=codes[2].token)


@pytest.mark.parametrize("other", ["port", "journal"])
def test_a_host_that_runs_keeps_its_token(folder: Path, other: str) -> None:
    """Whatever a second host with the same port, or the same file of runs, was to make anew."""
    kept = ["--new-token", str(folder / "token"), "--journal", str(folder / "runs")]
    with shared(folder, "127.0.0.1:0", *kept) as file:
        code = read_code(file.read_text())
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        bind = str(code.address) if other == "port" else "127.0.0.1:0"
        second = [sys.executable, "-m", "thinwire", "host", "--bind", bind, "--run", "llm", *kept]
        done = ran(second)
        assert (done.returncode, "in use" in done.stderr) == (2, True)
        assert {path: path.read_bytes() for path in before} == before
        trained(folder, file)


def test_a_new_token_replaces_a_token_alone(folder: Path) -> None:
    """Not any file; and the runs that are kept in a named file end with it."""
    mine = folder / "mine"
    make = ["--bind", "127.0.0.1:0", "--run", "llm", "--new-token"]
    for content in ("short", 20 * "key of another program\n"):
        mine.write_text(content)
        mine.chmod(0o600)
        done = ran([sys.executable, "-m", "thinwire", "host", *make, str(mine)])
        assert (done.returncode, mine.read_text()) == (2, content)
    token = "0" * 64
    mine.write_text(token)
    bad = ["--cert", str(folder / "train.py")]
    done = ran([sys.executable, "-m", "thinwire", "host", *make, str(mine), *bad])
    assert (done.returncode, mine.read_text()) == (2, token)
    kept = ("--journal", str(folder / "runs"), "--new-token", str(folder / "token"))
    for _ in range(2):
        with shared(folder, "127.0.0.1:0", *kept) as file:
            trained(folder, file)


@pytest.mark.parametrize("secret", ["its own", "of a file"])
def test_a_run_with_a_code_is_ended_at_its_host(folder: Path, secret: str) -> None:
    """By the options of its host, and --end."""
    endless = SCRIPT.replace("sync.step < 12", "not members.left")
    (folder / "train.py").write_text(endless)
    with listening() as free:
        bind = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "thinwire"]
    options = ["--new-token", str(folder / "token")] if secret == "of a file" else []
    with shared(folder, bind, *options) as code, contextlib.ExitStack() as ends:
        member = [*command, "join", "--code-file", str(code), "--", sys.executable, "train.py"]
        both = [ends.enter_context(running(member, cwd=folder)) for _ in range(2)]
        end = [*command, "host", "--bind", bind, "--run", "llm", *options, "--end", "llm"]
        until(lambda: "these leave" in ran(end).stdout)
        assert [process.wait(PATIENCE_S) for process in both] == [0, 0]


def on_terminal(command: Sequence[str], prompt: bytes, answer: bytes = b"") -> str:
    """What a command shows on a terminal; after the prompt this is typed, or it is ended."""
    ours, theirs = pty.openpty()
    with running(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        found, asked = b"", False
        with contextlib.suppress(OSError):  # the other end was closed
            while True:
                found += os.read(ours, 4096)
                if prompt in found and not asked:
                    asked = True
                    os.write(ours, answer) if answer else process.terminate()
    os.close(ours)
    return found.decode()


def test_a_terminal_shows_the_code_and_asks_for_it(folder: Path) -> None:
    host = ["host", "--bind", "127.0.0.1:0", "--run", "llm"]
    shown = on_terminal([sys.executable, "-m", "thinwire", *host], b"\ntw1.")
    [word] = re.findall(r"tw1\.\S+", shown)
    code = read_code(word)
    assert code.run == "llm"
    assert not [*folder.rglob("*.code")], "it is on the terminal alone"
    show = [sys.executable, "-c", "import os; print('has', len(os.environ['THINWIRE_CODE']))"]
    command = [sys.executable, "-m", "thinwire", "join", "--", *show]
    asked = on_terminal(command, b"Code of the run", f"{word}\n".encode())
    assert f"has {len(word)}" in asked
    assert word not in asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["join"], "no command"),
        (["join", "--", "true"], "no code: give --code-file"),
        (["join", "tw1.AAAA", "--", "true"], "a code of 8 characters"),
        (["join", "--code-file", "none", "--", "true"], "code file none does not exist"),
        (["host", "--run", "a b", "--bind", "127.0.0.1:0"], "no name of a run"),
        (["host", "--run", "a", "--bind", "0.0.0.0:0", "--public"], "--announce is missing"),
    ],
)
def test_missing_input_is_one_line(folder: Path, words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "thinwire", *words]
    done = ran(command, stdin=-3, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]


def test_variables_of_thinwire_up_stand_for_arguments(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meeting_place() as address:
        monkeypatch.setenv("THINWIRE_ADDRESS", address)
        with pytest.raises(ValueError, match="run is missing"):
            tw.join(timeout=5)
        with pytest.raises(Mismatch, match="has a token"):
            tw.join(run="llm", timeout=5)
        monkeypatch.setenv("THINWIRE_TOKEN_FILE", str(token_in(folder)))
        with tw.join(run="llm", timeout=5):
            pass


def test_a_script_without_an_address_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="thinwire join -- python"):
        tw.join()
