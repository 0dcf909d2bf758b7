"""Rates of emulated lines, as `thinwire doctor` and `thinwire probe` measure them."""

import socket
from pathlib import Path

import pytest

from tests.api import TOKEN_BYTES, Answering, Line, Link, Peer, inside, network
from tests.lab.namespaces import NETNS
from tests.waiting import PATIENCE_S

pytestmark = [*NETNS, pytest.mark.slow]
TOKEN, STREAMS = b"t" * TOKEN_BYTES, 16


def measured(loss: str, control: str) -> tuple[Line, int]:
    """The line from one network namespace to another, and the bytes that were sent."""
    if control not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text():
        pytest.skip(f"this kernel has no {control}")
    link = Link.of("10mbit", None, None, "20ms", loss=loss, congestion=control)
    with network(2, link) as net:
        near, far = net.namespace_fds
        address = net.addresses[1]
        answering = inside(far, lambda: Answering(address, 1, TOKEN, PATIENCE_S))
        with answering:
            peer = Peer(1, address, answering.port, TOKEN, PATIENCE_S)
            return inside(near, lambda: peer.line(STREAMS, 4 * 2**20, 3.0))


@pytest.mark.parametrize(
    ("loss", "control", "advised"),
    [("0%", "cubic", False), ("2%", "cubic", True), ("2%", "bbr", False)],
)
def test_lost_packets_and_connections_show_in_the_rates(
    loss: str, control: str, advised: bool
) -> None:
    for _ in range(3):  # a busy machine may hold up the first
        line, sent = measured(loss, control)
        if bool(line.advice) == advised and line.bytes_s > 0.5e6:
            break
    assert line.congestion == control
    assert bool(line.advice) == advised
    assert 4e6 < 8 * line.bytes_s < 11e6
    assert line.lost < 0.02 if loss == "0%" else 0.001 < line.lost < 0.1
    assert 0 < sent <= 4 * 2**20


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_peer_that_is_not_there_is_an_error_not_a_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    files = open_files()
    with pytest.raises(OSError, match="refused"):
        Peer(1, "127.0.0.1", port, TOKEN, 0.5).line(STREAMS, 2**20, 1.0)
    assert open_files() == files
