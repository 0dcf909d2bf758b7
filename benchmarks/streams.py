"""Share of a line that an exchange fills, by packet loss, latency, streams and congestion control.

    python -m benchmarks.streams --out benchmarks/results/streams.json

Two ranks in network namespaces of 50 Mbit/s gather 8.4 MB, the message of one bit of 67 million
parameters, five times. The share is the payload's bits over the line's rate and the median of the
seconds; lost packets are drawn at random. Needs root. Not part of `make bench`.
"""

import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import markdown, parser_for, run_on_ranks, save, surroundings
from thinwire.comm import Group
from thinwire.tools.network.netns import Link, network

RATE, NBYTES, TIMES = "50mbit", 8_400_000, 5
STREAMS = (1, 4, 8, 16, 32)
LATENCIES, LOSSES, CONTROLS = ("20ms", "40ms"), ("0%", "0.2%", "1%"), ("cubic", "bbr")
_WORKER = "BENCHMARK_OF_STREAMS"


def gathered() -> None:
    """Print the seconds of each exchange, by number of streams."""
    dist.init_process_group("gloo")
    message, seconds = torch.zeros(NBYTES, dtype=torch.uint8), dict[int, list[float]]()
    for streams in json.loads(os.environ[_WORKER]):
        group = Group(None, 600.0, streams)
        for number in range(TIMES + 1):
            group.gather_bytes(b"", action="meeting")
            begin_s = time.monotonic()
            group.all_gather(message, action="gathering").wait()
            if number:  # the first makes the connections
                seconds.setdefault(streams, []).append(time.monotonic() - begin_s)
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


def row(latency: str, loss: str, control: str) -> dict[str, Any]:
    """Measure all numbers of streams on one line."""
    link = Link.of(RATE, None, None, latency, loss=loss, congestion=control)
    os.environ |= {_WORKER: json.dumps(STREAMS), "GLOO_SOCKET_IFNAME": "eth0"}
    with network(2, link) as net:
        printed = run_on_ranks([sys.executable, "-m", "benchmarks.streams"], 2, 3600.0, net=net)
    found = json.loads(printed[0].splitlines()[-1])
    return {
        "latency": latency,
        "loss": loss,
        "congestion": control,
        "filled": {n: link.seconds(NBYTES) / statistics.median(s) for n, s in found.items()},
        "seconds": {n: [round(one, 2) for one in s] for n, s in found.items()},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table."""
    titles = ["latency", "lost", "congestion", *(f"{n} streams" for n in STREAMS)]
    return markdown(
        titles,
        (
            [
                *(one[name] for name in ("latency", "loss", "congestion")),
                *(f"{100 * share:.0f} %" for share in one["filled"].values()),
            ]
            for one in rows
        ),
    )


def main() -> None:
    if _WORKER in os.environ:
        gathered()
        return
    given, rows = parser_for(__doc__).parse_args(), list[dict[str, Any]]()
    cases = list(itertools.product(LATENCIES, LOSSES, CONTROLS))
    for case in cases[:1] if given.quick else cases:
        rows.append(row(*case))
        print(table(rows)[-1], flush=True)
        save({"rows": rows, **surroundings(TIMES)}, given.out)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
