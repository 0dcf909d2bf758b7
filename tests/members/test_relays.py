"""One store and several relays, of which each pair of members uses the nearest."""

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests.api import (
    AuthenticatedStore,
    Link,
    RelayClient,
    connect,
    network,
    relay_key,
)
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home
from tests.members.places import TIMEOUT, TOKEN, host_command, meeting_place
from tests.members.relays import listening, relay_place
from tests.members.test_relay import CONFIGS, in_order
from tests.members.training import TIMEOUT_S, digest, in_run, member, require_joined
from tests.processes import ran_thinwire
from tests.ranks import Pool
from tests.toys import descend, refusal
from tests.waiting import PATIENCE_S, until
from thinwire.errors import PeerLost

PORT = 29_500


@contextlib.contextmanager
def relay_command(
    store: str, *options: str, bind: str = "127.0.0.1:0", namespace: int = -1
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that relays for a store, announced there, and its address."""
    words = ["--bind", bind, "--relay", "--store", store, *options]
    with host_command(*words, namespace=namespace) as (process, address):
        assert process.stdout is not None
        assert process.stdout.readline() == f"relaying for members with relay=True of {store}\n"
        yield process, address


def announced(store: str) -> dict[str, Any]:
    """Return the relays that a store knows, by name."""
    relays = connect(store, "any", TOKEN, TIMEOUT).of_relays(relay_key(TOKEN))
    return {name: json.loads(relays.verified(name, v)) for name, v in relays.entries("").items()}


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str, frozenset[int]]]]:
    """Yield the room, relay and other ranks of the connections that this process makes."""
    begin, found = RelayClient.__init__, list[tuple[str, str, frozenset[int]]]()

    def begun(self: Any, endpoint: Any, room: str, *args: Any) -> None:
        begin(self, endpoint, room, *args)
        found.append((room, str(endpoint), self.others))

    with patch.object(RelayClient, "__init__", begun):
        yield found


def regional(
    rank: int, size: int, address: str, bits: int | None, relayed: list[int], options: Any
) -> Any:
    """Return the rank among the members, its digests, its relays by rank, and its bytes sent."""
    torch.manual_seed(0)
    net, found = torch.nn.Linear(60, 50), []
    compression = None if bits is None else tw.Quantized(bits)
    config = tw.LocalSGD(1, begin_step=0, compression=compression)
    options = {"start_members": size, "timeout": PATIENCE_S, "relay": rank in relayed, **options}
    with recorded() as used, in_run(address, net, config, **options) as (members, sync, sgd):
        torch.manual_seed(members.rank)
        while sync.step < 10:
            descend(sgd, net(torch.randn(4, 60)).square().mean())
            found.append(digest(sync))
        own, sent = members.rank, int(sync.stats()["bytes_sent"])
    relays = {other: relay for _, relay, others in used for other in others}
    assert len(relays) == sum(len(others) for _, _, others in used), "two relays for a pair"
    return own, found, relays, sent


REGIONS = [1, 1, 2, 2]
"""Of the members; region 0 is that of the store."""


@needs_netns
@pytest.mark.parametrize(
    ("bits", "relayed", "token"),
    [(8, [0, 1, 2, 3], True), (8, [0, 2], True), (None, [0, 1, 2, 3], False), (None, [2], False)],
)
def test_pairs_use_the_relay_that_is_near_to_both(
    ranks: Pool, token_file: str, bits: int | None, relayed: list[int], token: bool
) -> None:
    """The regions are 40 ms apart. Sums are made in shares where no message has a MAC."""
    with contextlib.ExitStack() as ends:
        net = ends.enter_context(network(3, Link.parse("100mbit", "20ms")))
        spaces = net.namespace_fds
        secret = ["--token-file", token_file] if token else []
        bind = ["--bind", f"{net.addresses[0]}:{PORT}", *secret]
        _, store = ends.enter_context(host_command(*bind, namespace=spaces[0]))
        near = {}
        for region in {*REGIONS}:
            where = {"bind": f"{net.addresses[region]}:{PORT}", "namespace": spaces[region]}
            _, near[region] = ends.enter_context(relay_command(store, *secret, **where))
        options = {"token_file": token_file} if token else {}
        homes = [spaces[region] for region in REGIONS]
        found = at_home(ranks, homes, regional, store, bits, relayed, options)
    with meeting_place(TOKEN if token else None) as address:
        direct = ranks.run(regional, address, bits, [], options, size=4, group=False)
    region_of = {one[0]: region for one, region in zip(found, REGIONS, strict=True)}
    away = {found[index][0] for index in relayed}
    relays = {one[0]: one[2] for one in found}
    for own in range(4):
        assert relays[own].keys() == (set(range(4)) if own in away else away) - {own}
        for other, relay in relays[own].items():
            assert relays[other][own] == relay
            assert relay in (near[region_of[own]], near[region_of[other]])
    assert {tuple(one[1]) for one in [*found, *direct]} == {tuple(direct[0][1])}
    if bits is not None:
        copies = [len({*used.values()}) + 3 - len(used) for _, _, used, _ in found]
        assert len({one[3] / many for one, many in zip(found, copies, strict=True)}) == 1


def recording(rank: int, size: int, *args: Any) -> tuple[list[str], list[str]]:
    """Return the digest after every averaging, and the relays in the order of their use."""
    with recorded() as used:
        return in_order(rank, size, *args), [*dict.fromkeys(relay for _, relay, _ in used)]


def test_a_relay_that_dies_is_replaced_by_another(
    ranks: Pool, token_file: str, tmp_path: Path
) -> None:
    """The store relays nothing; the second relay is announced after the run has begun."""
    flag, secret = tmp_path / "go", ["--token-file", token_file]
    options = {"token_file": token_file, "timeout": TIMEOUT_S}
    with relay_place() as address:
        args = in_order, address, CONFIGS["sparse"], dict(options)
        expected = ranks.run(*args, size=3, group=False)[0]
    with meeting_place() as store, relay_command(store, *secret) as (relay, first):
        second = []

        def replace() -> None:
            until(flag.exists, "the first averaging")
            with relay_command(store, *secret) as (_, address):
                second.append(address)
                until(lambda: len(announced(store)) == 2, "the second relay")
                relay.send_signal(signal.SIGKILL)
                over.wait()

        over = threading.Event()
        thread = threading.Thread(target=replace)
        thread.start()
        try:
            args = recording, store, CONFIGS["sparse"], {**options, "flag": str(flag)}
            found = ranks.run(*args, size=3, group=False)
        finally:
            flag.touch()
            over.set()
            thread.join()
    assert found == 3 * [(expected, [first, *second])]


def _member(rank: int, size: int, address: str, config: Any, options: Any) -> Any:
    return member(rank, size, address, config, **options)


def test_a_joiner_gets_the_state_where_the_store_relays_nothing(
    ranks: Pool, token_file: str, tmp_path: Path
) -> None:
    """One of the relays there accepts connections, and answers nothing."""
    options = {"founders": 2, "flag": str(tmp_path / "go"), "step_s": 0.02, "until_size": 3}
    options |= {"token_file": token_file, "relay": True}
    secret = ["--token-file", token_file]
    with (
        meeting_place() as store,
        relay_command(store, *secret),
        relay_command(store, *secret),
        relay_command(store, *secret) as (stopped, _),
    ):
        until(lambda: len(announced(store)) == 3, "the relays")
        stopped.send_signal(signal.SIGSTOP)
        args = _member, store, CONFIGS["late, parts"], options
        found = ranks.run(*args, size=3, group=False)
    require_joined(found)


def test_a_relay_is_announced_again_at_a_store_that_restarts(token_file: str) -> None:
    with listening() as free:
        bind = f"127.0.0.1:{free.getsockname()[1]}"
    secret = ["--token-file", token_file]
    words = ["--bind", bind, *secret]
    with contextlib.ExitStack() as ends:
        host, store = ends.enter_context(host_command(*words))
        relay, _ = ends.enter_context(relay_command(store, *secret, "--announce", "[fd00::1]:77"))
        until(lambda: announced(store) == {"[fd00::1]:77": ["fd00::1", 77, ""]}, "its address")
        host.send_signal(signal.SIGKILL)
        host.wait()
        ends.enter_context(host_command(*words))
        assert relay.stdout is not None
        assert relay.stdout.readline().startswith(f"not announced at {store}: ")
        until(lambda: announced(store), "its address")
        lines = iter(relay.stdout.readline, "")
        assert f"announced again at {store}\n" in lines
        relay.send_signal(signal.SIGKILL)
        until(lambda: not announced(store), "the end of its address")
        # no relay is left
        with pytest.raises(PeerLost, match="relays nothing"):
            tw.join(store, run="a", token_file=token_file, relay=True, timeout=TIMEOUT_S)


def test_an_address_of_a_stranger_is_no_relay(token_file: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with meeting_place() as store:
        found = connect(store, "any", TOKEN, TIMEOUT)
        forged = AuthenticatedStore(found.connection, bytes(32), f"relay/{found.session}/")
        forged.announce("127.0.0.1:9", json.dumps(["127.0.0.1", 9]))
        with pytest.raises(PeerLost, match="relays nothing"):
            tw.join(store, run="a", token_file=token_file, relay=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--store", "tcp://127.0.0.1:1"], "give --relay too"),
        (["--store", "tcp://127.0.0.1:1", "--relay", "--journal", "file"], "takes no --run"),
        (["--store", "tcp://127.0.0.1:1", "--relay", "--page", "0"], "takes no --run"),
        (["--store", "tcp://127.0.0.1:1", "--relay", "--recover"], "takes no --run"),
        (["--store", "tcp://127.0.0.1:1", "--relay", "--end", "a"], "takes no --run"),
        (["--store", "tcp://127.0.0.1:1", "--relay", "--public"], "--announce is missing"),
        (["--store", "127.0.0.1:1", "--relay"], "is not an address"),
        (["--store", "tcp://127.0.0.1:1", "--relay", "--announce", "a"], "is not an address"),
        (["--relay", "--announce", "127.0.0.1:1"], "a relay with --store"),
    ],
)
def test_a_relay_with_options_that_contradict_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(capsys, "host", "--bind", "127.0.0.1:0", *words)


def test_a_relay_that_its_store_refuses_ends(token_file: str) -> None:
    words = "host", "--bind", "127.0.0.1:0", "--relay", "--token-file", token_file, "--store"
    with listening() as free:
        port = free.getsockname()[1]
    with meeting_place(TOKEN[::-1]) as other:
        for store, message in ((other, "another token"), (f"tcp://127.0.0.1:{port}", "nothing")):
            ended = ran_thinwire(*words, store)
            assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
            assert message in ended.stderr
