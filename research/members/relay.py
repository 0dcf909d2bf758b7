"""Rounds through a relay beside rounds over direct connections, on lines of 20 Mbit/s: seconds of
a round, and how often a member uploads its message.

    python -m research.members.relay --repeats 10 --out research/members/relay.json
    python -m research.members.relay --latency 20ms --loss 0.2% --congestion cubic --out FILE

Needs root: every member is a process in a network namespace of its own, behind a line of that rate
in each direction; the host has 1 Gbit/s. A message has 2 MB. Relay and direct take turns, twice.
Uploads are what TCP counts as acknowledged, without headers; agreements are among them. "line" is
the time in which the line carries the uploads of a direct round.
"""

import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from typing import Any

import torch

import thinwire as tw
from benchmarks.common import parser_for, save, surroundings
from benchmarks.ranks import HOST_PORT, host, on_ranks
from thinwire.comm.sockets import connections
from thinwire.tools.network.netns import Link, Network, inside, limit_rate, network, why_unavailable

RATE, HOST_LINE = "20mbit", Link.parse("1gbit")
WIDTH = 1400
MESSAGE_BYTES = WIDTH * WIDTH
TURNS, WARM_UP = 2, 3
PATIENCE_S = 300.0
_ACKED = slice(120, 128)
"""`tcpi_bytes_acked` in the kernel's `struct tcp_info`."""


def acknowledged() -> int:
    """Return the bytes that the others have acknowledged on all connections of this process."""
    total = 0
    for connection in connections():
        with socket.socket(fileno=os.dup(connection.descriptor)) as held:
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.stop)
            total += int.from_bytes(info[_ACKED], sys.byteorder)
    return total


def train(
    rank: int, size: int, address: str, relay: bool, repeats: int
) -> tuple[list[float], int, int]:
    """Return the seconds of every round, the bytes uploaded in all of them, and those of their
    messages.
    """
    net = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer, seconds = torch.optim.SGD(net.parameters(), 0.01), []
    config = tw.LocalSGD(1, begin_step=0, compression=tw.Quantized(8))
    options: dict[str, Any] = {"relay": relay, "min_members": size, "timeout": PATIENCE_S}
    with (
        tw.join(address, run=str(relay), **options) as members,
        tw.local_sgd(net, optimizer, config, members=members) as sync,
    ):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
        begin = 0, 0
        for number in range(WARM_UP + repeats):
            if number == WARM_UP:
                begin = acknowledged(), int(sync.stats()["bytes_sent"])
            optimizer.zero_grad()
            net(x).square().mean().backward()
            begin_s = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin_s)
        uploaded, sent = acknowledged() - begin[0], int(sync.stats()["bytes_sent"]) - begin[1]
    return seconds[WARM_UP:], uploaded, sent


def widen_host(net: Network) -> None:
    """Give the host, the first worker, a line of its own rate."""
    from pyroute2 import IPRoute

    def change(name: str) -> None:
        with IPRoute() as ip:
            limit_rate(ip, ip.link_lookup(ifname=name)[0], HOST_LINE, "change")

    inside(net.namespace_fds[0], partial(change, net.interface))
    inside(net.hub_fd, partial(change, "port0"))


def row(size: int, repeats: int, line: Link) -> dict[str, Any]:
    """Rounds of `size` members, through the relay and directly."""
    seconds: defaultdict[bool, list[float]] = defaultdict(list)
    uploads: defaultdict[bool, list[float]] = defaultdict(list)
    with network(1 + size, line) as net:
        widen_host(net)
        for turn in range(TURNS):
            for relay in (False, True):
                port = HOST_PORT + 10 * turn + 5 * relay
                with host(net, "--relay", port=port) as (address, _):
                    found = on_ranks(train, size, address, relay, repeats, net=net, group=False)
                seconds[relay] += map(max, zip(*(times for times, *_ in found), strict=True))
                uploads[relay] += [uploaded / sent for *_, uploaded, sent in found]
    direct_s, relayed_s = (statistics.median(seconds[relay]) for relay in (False, True))
    direct_uploads = statistics.median(uploads[False])
    return {
        "members": size,
        "direct_s": round(direct_s, 3),
        "relay_s": round(relayed_s, 3),
        "ratio": round(relayed_s / direct_s, 3),
        "line_s": round(line.seconds(direct_uploads * MESSAGE_BYTES), 3),
        "direct_uploads": round(direct_uploads, 3),
        "relay_uploads": round(statistics.median(uploads[True]), 3),
    }


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--latency", default="0ms")
    parser.add_argument("--loss", default="0%")
    parser.add_argument("--congestion")
    given = parser.parse_args()
    lossy = {"loss": given.loss, "congestion": given.congestion}
    line = Link.parse(RATE, given.latency, **lossy)
    reason = why_unavailable()
    if reason is not None:
        parser.error(f"the lines cannot be emulated here: network namespaces {reason}")
    rows = []
    print(f"{'members':>7} {'line s':>7} {'direct s':>9} {'relay s':>8} {'ratio':>6} uploads")
    for size in given.members[:1] if given.quick else given.members:
        rows.append(row(size, 2 if given.quick else given.repeats, line))
        one = rows[-1]
        print(
            f"{size:7} {one['line_s']:7.2f} {one['direct_s']:9.2f} {one['relay_s']:8.2f} "
            f"{one['ratio']:6.2f} {one['relay_uploads']:.2f} (direct {one['direct_uploads']:.2f})",
            flush=True,
        )
    save({"line": str(line), "rows": rows, "surroundings": surroundings(given.repeats)}, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
