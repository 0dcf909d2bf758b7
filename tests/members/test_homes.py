"""Members behind routers that let nothing in: what they exchange goes through the host's relay."""

import contextlib
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.api import Link, inside, interface_bytes
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home, homes, needs_homes, walled
from tests.members.places import host_command
from tests.members.relays import listens, relay_place
from tests.members.test_relay import CONFIGS, in_order
from tests.members.training import digest, in_run
from tests.ranks import Pool
from tests.toys import descend
from tests.waiting import PATIENCE_S, until
from thinwire.errors import ThinwireError

PORT = 29_400


def reaches(namespace: int, address: str) -> bool:
    """Whether a connection from there to this address is answered by a member."""
    return bool(inside(namespace, lambda: listens(address, PORT)))


def listening(namespace: int) -> socket.socket:
    return inside(namespace, lambda: socket.create_server(("0.0.0.0", PORT)))


@needs_homes
@pytest.mark.parametrize("averagings", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_members_train_behind_routers(ranks: Pool, token_file: str, averagings: int) -> None:
    with homes(2, Link.parse("1gbit")) as (net, namespaces):
        with contextlib.ExitStack() as ends:
            for namespace in namespaces:
                ends.enter_context(listening(namespace))
            for own, other in ((0, 1), (1, 0)):
                assert not reaches(namespaces[own], net.addresses[1 + other])
        found = trained(ranks, net, namespaces, token_file, averagings)
    assert len(found[0]) >= averagings
    assert found == 2 * [found[0]]


@needs_netns
def test_members_train_that_nothing_reaches(ranks: Pool, token_file: str) -> None:
    with walled(2, Link.parse("1gbit")) as (net, namespaces):
        with listening(namespaces[1]):
            assert not reaches(namespaces[0], net.addresses[2])
        found = trained(ranks, net, namespaces, token_file, 20)
    assert len(found[0]) >= 20
    assert found == 2 * [found[0]]


def unjoined(rank: int, size: int, address: str, token_file: str) -> str:
    """The error of a member that opens a port and is not reached there."""
    options = {"token_file": token_file, "start_members": 2, "timeout": 3.0}
    try:
        with in_run(address, torch.nn.Linear(2, 2), tw.LocalSGD(1, 0), **options):
            return "no error"
    except ThinwireError as error:
        return str(error)


@pytest.mark.slow
@needs_netns
def test_members_that_cannot_connect_are_reported_by_relay(ranks: Pool, token_file: str) -> None:
    with walled(2, Link.parse("1gbit")) as (net, namespaces):
        address = f"{net.addresses[0]}:{PORT}"
        bind = ["--bind", address, "--token-file", token_file]
        with host_command(*bind, namespace=net.namespace_fds[0]):
            found = at_home(ranks, namespaces, unjoined, f"tcp://{address}", token_file)
    for text in found:
        assert "relay=True" in text
        assert "host --relay" in text
        assert "restart" not in text, "there is nothing to restart from"


def trained(ranks: Pool, net: Any, namespaces: list[int], token_file: str, count: int) -> Any:
    """What `in_order` finds in each of the namespaces; the host is in the first worker's."""
    bind = ["--bind", f"{net.addresses[0]}:{PORT}", "--token-file", token_file, "--relay"]
    options = {"token_file": token_file, "steps": 2 * count}
    address = f"tcp://{net.addresses[0]}:{PORT}"
    with host_command(*bind, namespace=net.namespace_fds[0]):
        return at_home(ranks, namespaces, in_order, address, CONFIGS["sparse"], options)


ROUNDS, MESSAGE_BYTES = 8, 1_200_000


def big_rounds(rank: int, size: int, address: str, token_file: str) -> list[str]:
    """The digest after every averaging, each of a message of `MESSAGE_BYTES`."""
    torch.manual_seed(0)
    net, found = torch.nn.Linear(1200, MESSAGE_BYTES // 1200), []
    config = tw.LocalSGD(1, begin_step=0, compression=tw.Quantized(8))
    options = {"token_file": token_file, "min_members": size, "timeout": PATIENCE_S, "relay": True}
    with in_run(address, net, config, **options) as (members, sync, optimizer):
        batches = torch.Generator().manual_seed(members.rank)
        while sync.step < ROUNDS:
            x = torch.randn(4, 1200, generator=batches)
            descend(optimizer, net(x).square().mean())
            found.append(digest(sync))
    return found


def hold_host(net: Any, token_file: str, kills: list[float], over: threading.Event) -> None:
    """A host that is killed and started again, each time once it has sent so many messages."""
    bind = ["--bind", f"{net.addresses[0]}:{PORT}", "--token-file", token_file, "--relay"]

    def sent() -> int:
        return inside(net.namespace_fds[0], lambda: interface_bytes("eth0"))

    while kills:
        with host_command(*bind, namespace=net.namespace_fds[0]) as (host, _):
            limit = sent() + kills[0] * MESSAGE_BYTES
            until(lambda limit=limit: over.is_set() or sent() > limit, "a message")  # type: ignore[misc]
            if over.is_set():
                return
            host.send_signal(signal.SIGKILL)
            host.wait()
        kills.pop(0)
        time.sleep(0.5)
    with host_command(*bind, namespace=net.namespace_fds[0]):
        over.wait()


@pytest.mark.slow
@pytest.mark.fault
@needs_homes
def test_a_relay_that_is_killed_within_a_round_costs_nothing(ranks: Pool, token_file: str) -> None:
    """In the middle of messages of half a second; the bits are those of an undisturbed run."""
    with relay_place() as address:
        args = (big_rounds, address, token_file)
        undisturbed = ranks.run(*args, size=2, group=False)
    over, kills = threading.Event(), [2.8, 3.2, 2.5]
    with homes(2, Link.parse("20mbit")) as (net, namespaces):
        host = threading.Thread(target=hold_host, args=(net, token_file, kills, over))
        host.start()
        try:
            until(lambda: reaches(net.namespace_fds[0], net.addresses[0]), "the host")
            address = f"tcp://{net.addresses[0]}:{PORT}"
            found = at_home(ranks, namespaces, big_rounds, address, token_file)
        finally:
            over.set()
            host.join()
    assert kills == []
    assert len(found[0]) == ROUNDS
    assert [*found, *undisturbed] == 4 * [found[0]]
