"""The emulated link carries what it says, and the host's own network is never touched."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api import Link, inside, network
from tests.api import netns_Network as Network
from tests.lab.namespaces import NETNS, processes_in

pytestmark = NETNS


@contextmanager
def connection(link: Link) -> Iterator[tuple[socket.socket, socket.socket, Network]]:
    """Two connected sockets, each in a namespace of its own."""
    with network(2, link) as net:

        def listen() -> socket.socket:
            return socket.create_server((net.addresses[0], 5000))

        def connect() -> socket.socket:
            return socket.create_connection((net.addresses[0], 5000), timeout=20)

        with (
            inside(net.namespace_fds[0], listen) as server,
            inside(net.namespace_fds[1], connect) as far,
        ):
            near, _ = server.accept()
            with near:
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield near, far, net


def seconds_for(source: socket.socket, sink: socket.socket, count: int) -> float:
    sender = threading.Thread(target=source.sendall, args=(bytes(count),))
    begin_s = time.monotonic()
    sender.start()
    received = 0
    while received < count:
        received += len(sink.recv(1 << 20))
    sender.join()
    return time.monotonic() - begin_s


@pytest.mark.parametrize("latency", ["0ms", "1ms"])
def test_the_limit_can_be_lifted_and_put_back(latency: str) -> None:
    """So that strategies prepare themselves without waiting for a slow line."""
    count, link = 1_000_000, Link.parse("4mbit", latency)
    with connection(link) as (near, far, net):
        net.lift()
        lifted_s = seconds_for(near, far, count)
        net.limit()
        limited_s = seconds_for(far, near, count)
        assert limited_s >= 0.8 * link.seconds(count)
        assert lifted_s < limited_s  # by a hundredth of it where nothing else runs


@pytest.mark.parametrize("latency", ["0ms", "5ms"])
def test_the_two_directions_of_a_line_have_rates_of_their_own(latency: str) -> None:
    """Two slow senders meet in a receiver that is fast enough for both, and the other way round."""
    count, slow = 250_000, Link.parse("1mbit")
    home = Link.parse(None, latency, up="1mbit", down="20mbit")
    seconds = seconds_of_two_senders(home, count)
    assert 0.8 * slow.seconds(count) <= seconds < 1.6 * slow.seconds(count)
    reverse = Link.parse(None, latency, up="20mbit", down="1mbit")
    assert seconds_of_two_senders(reverse, count) >= 0.8 * slow.seconds(2 * count)


def seconds_of_two_senders(link: Link, count: int) -> float:
    with network(3, link) as net, contextlib.ExitStack() as stack:
        address = (net.addresses[0], 5000)
        server = stack.enter_context(
            inside(net.namespace_fds[0], lambda: socket.create_server(address))
        )
        pairs = []
        for fd in net.namespace_fds[1:]:
            far = inside(fd, lambda: socket.create_connection(address, timeout=20))
            pairs.append((stack.enter_context(far), stack.enter_context(server.accept()[0])))
        begin_s = time.monotonic()
        receivers = [
            threading.Thread(target=seconds_for, args=(far, near, count)) for far, near in pairs
        ]
        for thread in receivers:
            thread.start()
        for thread in receivers:
            thread.join()
        return time.monotonic() - begin_s


def test_latency_delays_every_message() -> None:
    with connection(Link.parse("none", "20ms")) as (near, far, _):
        begin_s = time.monotonic()
        for _ in range(5):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            far.sendall(b"x")
            assert near.recv(1) == b"x"
        assert time.monotonic() - begin_s >= 5 * 2 * 0.02


def test_a_delayed_link_is_shaped_too_and_loses_nothing() -> None:
    link = Link.parse("20mbit", "5ms")
    with connection(link) as (near, far, _):
        assert seconds_for(near, far, 2_000_000) >= 0.8 * link.seconds(2_000_000)
        near.sendall(bytes(range(256)) * 40)
        received = b""
        while len(received) < 10_240:
            received += far.recv(65_536)
        assert received == bytes(range(256)) * 40


def test_a_link_loses_its_share_of_packets() -> None:
    count, link = 2000, Link.parse("none", loss="30%")
    with network(2, link) as net, contextlib.ExitStack() as stack:
        kind = socket.AF_INET, socket.SOCK_DGRAM
        near, far = (
            stack.enter_context(inside(fd, lambda: socket.socket(*kind)))
            for fd in net.namespace_fds
        )
        far.bind((net.addresses[1], 5000))
        far.settimeout(0.1)
        arrived = 0
        for _ in range(count // 100):  # few at a time, which no queue drops
            for _ in range(100):
                near.sendto(b"x", (net.addresses[1], 5000))
            with contextlib.suppress(TimeoutError):
                while far.recv(1):
                    arrived += 1
        assert 0.6 * count < arrived < 0.8 * count


@pytest.mark.parametrize("control", ["cubic", "bbr"])
def test_connections_of_a_link_have_its_congestion_control(control: str) -> None:
    if control not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text():
        pytest.skip(f"this kernel has no {control}")
    with connection(Link.parse("none", congestion=control)) as (near, far, _):
        for end in (near, far):
            found = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert found.rstrip(b"\0") == control.encode()


@pytest.mark.parametrize("loss", ["2", "-1%", "51%", "some"])
def test_a_wrong_loss_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match="loss"):
        Link.parse("20mbit", loss=loss)


def interfaces_of_the_host() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.mark.parametrize("latency", ["0ms", "1ms"])
def test_nothing_is_left_and_nothing_was_touched(latency: str) -> None:
    before = interfaces_of_the_host()
    routes = Path("/proc/net/route").read_text()
    namespaces: list[str] = []
    with pytest.raises(KeyError), network(2, Link.parse("20mbit", latency)) as net:
        namespaces += [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in net.namespace_fds]
        assert interfaces_of_the_host() == before
        raise KeyError
    assert interfaces_of_the_host() == before
    assert Path("/proc/net/route").read_text() == routes
    assert len(namespaces) == 2
    assert [processes_in(namespace) for namespace in namespaces] == [[], []]
