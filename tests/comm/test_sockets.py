"""The connections of this process, looked at and ended without a change to anything else."""

import os
import socket
from collections.abc import Iterator

import pytest

from tests.api import connections, connections_between, listeners, shut_down

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        yield client, accepted


@pytest.fixture
def usual_time_out() -> Iterator[None]:
    socket.setdefaulttimeout(20)
    yield
    socket.setdefaulttimeout(None)


def test_both_ends_of_a_connection_are_found(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    found = {each.descriptor: each for each in connections()}
    one, other = found[client.fileno()], found[accepted.fileno()]
    assert (one.local, one.remote) == (client.getsockname(), client.getpeername())
    assert (other.local, other.remote) == (one.remote, one.local)


def test_pipes_between_processes_are_no_connections() -> None:
    """Processes started by multiprocessing, workers that load data and notebooks have them."""
    near, far = socket.socketpair()
    with near, far:
        assert not {near.fileno(), far.fileno()} & {each.descriptor for each in connections()}


def test_over_ipv6_too() -> None:
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
    ):
        [found] = [each for each in connections() if each.descriptor == client.fileno()]
        assert found.remote == server.getsockname()[:2]
        assert server.getsockname()[:2] in listeners()


@pytest.mark.usefixtures("usual_time_out")
def test_time_out_changes_no_existing_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        end.setblocking(True)
    connections()
    listeners()
    assert [os.get_blocking(end.fileno()) for end in pair] == [True, True]


def test_one_that_is_shut_down_ends_for_both(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    [mine] = [each for each in connections() if each.descriptor == client.fileno()]
    shut_down(mine._replace(remote=("127.0.0.1", 1)))  # another one by now
    client.sendall(b"x")
    assert accepted.recv(2) == b"x"
    shut_down(mine)
    assert accepted.recv(1) == b""


def test_connections_to_the_same_port_in_another_folder_are_not_of_a_group() -> None:
    with socket.create_server((ADDRESSES[0], 0)) as first:
        port = first.getsockname()[1]
        with (
            socket.create_server((ADDRESSES[1], port)) as second,
            socket.create_connection(first.getsockname()) as to_first,
            socket.create_connection(second.getsockname()),
        ):
            found = connections_between(("127.0.0.1", 1), {(ADDRESSES[0], port)})
            assert [each.descriptor for each in found] == [to_first.fileno()]
