"""Share of a line that an exchange fills, by packet loss, latency, streams and congestion control.

    python -m research.lines.streams --out research/lines/streams.json

Two ranks in network namespaces of 50 Mbit/s gather 8.4 MB, the message of one bit of 67 million
parameters, three times. The share is the payload's bits over the line's rate and the median of the
seconds; lost packets are drawn at random. The last part averages a bfloat16 model of 34 million
parameters at one bit, by one stream and by the default: an averaging takes what a step with one
takes longer than a step without. Needs root.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import thinwire as tw
from benchmarks.common import markdown, parser_for, save, surroundings
from benchmarks.ranks import on_ranks
from research.gpt import GPT, generator
from thinwire.comm import Group
from thinwire.tools.network.netns import Link, network

RATE, NBYTES, TIMES = "50mbit", 8_400_000, 3
STREAMS = (1, 4, 8, 16, 32)
LATENCIES, LOSSES, CONTROLS = ("20ms", "40ms"), ("0%", "0.2%", "1%"), ("cubic", "bbr")
MODEL, LINE = "34M", ("20ms", "0.2%", "cubic")


def gathered(rank: int, size: int) -> dict[int, list[float]]:
    """Return the seconds of each exchange, by number of streams."""
    message, seconds = torch.zeros(NBYTES, dtype=torch.uint8), dict[int, list[float]]()
    for streams in STREAMS:
        group = Group(None, 600.0, streams)
        for number in range(TIMES + 1):
            group.gather_bytes(b"", action="meeting")
            begin_s = time.monotonic()
            group.all_gather(message, action="gathering").wait()
            if number:  # the first makes the connections
                seconds.setdefault(streams, []).append(time.monotonic() - begin_s)
    return seconds


def averaged(rank: int, size: int) -> dict[str, list[float]]:
    """Return the seconds of each averaging, by one stream and by the default."""
    model, seconds = GPT(MODEL).bfloat16(), dict[str, list[float]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # messages are the same with Muon
    config = tw.LocalSGD(2, begin_step=0, compression=tw.Quantized(1))
    dice = generator(rank)
    for param in model.parameters():
        param.grad = 1e-3 * torch.randn(param.shape, generator=dice).bfloat16()
    for name, streams in {"1 stream": 1, "default": None}.items():
        plain_s, both_s = list[float](), list[float]()
        with tw.local_sgd(model, optimizer, config, streams=streams) as sync:
            for _ in range(2 * (TIMES + 1)):
                begin_s = time.monotonic()
                optimizer.step()
                (both_s if sync.synced else plain_s).append(time.monotonic() - begin_s)
        seconds[name] = [s - statistics.median(plain_s) for s in both_s[1:]]
    return seconds


def on_a_line(work: Callable[..., Any], latency: str, loss: str, control: str) -> Any:
    """Return what rank 0 returns of `work` on one line."""
    link = Link.parse(RATE, latency, loss=loss, congestion=control)
    with network(2, link) as net:
        return on_ranks(work, 2, net=net)[0]


def row(latency: str, loss: str, control: str) -> dict[str, Any]:
    """Measure all numbers of streams on one line."""
    found = on_a_line(gathered, latency, loss, control)
    line_s = Link.parse(RATE).seconds(NBYTES)
    return {
        "latency": latency,
        "loss": loss,
        "congestion": control,
        "filled": {n: line_s / statistics.median(s) for n, s in found.items()},
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
    given, rows = parser_for(__doc__).parse_args(), list[dict[str, Any]]()
    results: dict[str, Any] = {"rows": rows, **surroundings(TIMES)}
    cases = list(itertools.product(LATENCIES, LOSSES, CONTROLS))
    for case in cases[:1] if given.quick else cases:
        rows.append(row(*case))
        print(table(rows)[-1], flush=True)
        save(results, given.out)
    if not given.quick:
        results["averaging"] = {"model": MODEL, "line": LINE, "seconds": on_a_line(averaged, *LINE)}
        save(results, given.out)
        print(json.dumps(results["averaging"]))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
