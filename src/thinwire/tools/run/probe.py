"""Measure the network between real ranks, and a model's step, in a few seconds."""

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from thinwire.layout.traffic import streams_between
from thinwire.tools.doctor.machine import announced, setting
from thinwire.tools.doctor.pairs import TOKEN_BYTES, Answering, Peer, round_trip
from thinwire.tools.run.compute import STEPS_S, step_of_built_in, step_of_task
from thinwire.tools.run.config import ModelSize
from thinwire.tools.run.launch import everyones

_MOST_S, _PATIENCE_S = 10.0, 30.0
_PAIRS_BYTES, _TOGETHER_BYTES, _LEAST_BYTES = 16 * 2**20, 15 * 2**20, 2**18
_PAIRS_S, _TOGETHER_S, _CALLS_S = 3.0, 1.5, 0.5
_FLIGHTS, _MOST_CALLS, _SMALL_BYTES = 32, 10, 256
"""Least latencies in the measurement of a line; most calls of an all-reduce, and its bytes."""


def probe(
    task: str | None,
    size: ModelSize,
    batch: int,
    device: str,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure network and step, on all ranks at once; longer if the latency or a step is long."""
    begin_s = time.perf_counter()
    try:
        address = announced()[0][0]
        token = bytes.fromhex(everyones(secrets.token_hex(TOKEN_BYTES))[0])
        with Answering(address, dist.get_rank(), token, _PATIENCE_S) as answering:
            ends = enumerate(everyones((address, answering.port)))
            peers = [Peer(to, end, port, token, _PATIENCE_S) for to, (end, port) in ends]
            network = _Network(peers)
            tell("latency and rate of every pair")
            pairs = network.pairs()
            tell("all ranks at once")
            together = network.together()
    except OSError as error:
        raise OSError(f"rank {dist.get_rank()} cannot measure its lines: {error}") from error
    call = network.call()
    tell("a step of the model")
    left_s = min(STEPS_S, max(0.0, _MOST_S - (time.perf_counter() - begin_s)))
    if task is None:
        compute = step_of_built_in(size, batch, device, left_s)
    else:
        compute = step_of_task(task, device, network.size, left_s)
    seconds = time.perf_counter() - begin_s
    own = pairs, compute, seconds, network.sent_bytes, socket.gethostname(), idle_restarts()
    found, computes, times, sent_bytes, hosts, restarts = zip(*everyones(own), strict=True)
    pairs = [*chain(*found)]
    not_measured = []
    if any(pair["bytes_s"] is None for pair in pairs):
        not_measured.append("the rate of single pairs: it would exceed the limit of time or bytes")
    # the others wait for the slowest rank
    rank = max(range(network.size), key=lambda rank: computes[rank]["step_s"])
    slowest = {**computes[rank], "rank": rank}
    if slowest["muon_s"] is None:
        not_measured.append("an update by Muon, which cannot train this model")
    return {
        "ranks": network.size,
        "hosts": hosts,
        "idle_restarts": restarts,
        "task": task,
        "pairs": pairs,
        "together": [{"rank": rank, "bytes_s": rate} for rank, rate in enumerate(together)],
        "collectives": [call],
        "compute": slowest,
        "not_measured": not_measured,
        "seconds": max(times),
        "bytes": max(sent_bytes),
    }


def idle_restarts() -> bool:
    """Return True if windows of idle connections shrink."""
    # Source: Linux, include/net/tcp.h, tcp_slow_start_after_idle_check.
    control = setting("tcp_congestion_control")
    return setting("tcp_slow_start_after_idle") != "0" and not control.startswith("bbr")


class _Network:
    """Lines of this rank to the others; in `pairs` no rank measures two at a time."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.streams = streams_between(self.size)
        self.sent_bytes = 0
        self.latency_s = 0.0

    def pairs(self) -> list[dict[str, Any]]:
        """Measure latency and rate to each other rank, both of a pair at once."""
        found = []
        rounds = [*_partners(self.rank, self.size)]
        share_s = _PAIRS_S / len(rounds)
        share_bytes = _PAIRS_BYTES // len(rounds)
        for to in rounds:
            dist.barrier()
            if to is None:
                continue
            with self.peers[to].connect() as connection:
                latency_s = round_trip(connection)[0] / 2
            self.latency_s = max(self.latency_s, latency_s)
            line: dict[str, Any] = {"bytes_s": None}
            if _FLIGHTS * latency_s <= share_s and share_bytes >= _LEAST_BYTES:
                measured, sent_bytes = self.peers[to].line(self.streams, share_bytes, share_s)
                self.sent_bytes += sent_bytes
                line = asdict(measured)
            found.append({"ranks": [self.rank, to], "latency_s": latency_s, **line})
        self.latency_s = max(everyones(self.latency_s))
        return found

    def together(self) -> list[float]:
        """Measure each rank's bytes per second while all send to the next one."""
        limit_s = _TOGETHER_S + _FLIGHTS / 2 * self.latency_s
        flow = self.peers[(self.rank + 1) % self.size].flow(self.streams, _TOGETHER_BYTES, limit_s)
        self.sent_bytes += flow.sent_bytes
        return everyones(flow.bytes_s)

    def call(self) -> dict[str, Any]:
        """Measure a small all-reduce: the mean of several, so that late starters count little."""
        flight_s = 4 * (self.size - 1) * self.latency_s
        times = max(1, min(_MOST_CALLS, int(_CALLS_S / flight_s)))
        small = torch.zeros(_SMALL_BYTES // 4)
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(small)
        seconds = max(everyones((time.perf_counter() - begin_s) / times))
        self.sent_bytes += 2 * _SMALL_BYTES * times
        return {"kind": "all_reduce", "bytes": _SMALL_BYTES, "seconds": seconds}


def _partners(rank: int, size: int) -> Iterator[int | None]:
    """Yield the partner of a rank in each round, until each has met every other."""
    count = size - 1 + size % 2
    for number in range(count):
        to = (number - rank) % count if rank < count else number * (count + 1) // 2 % count
        # of an even number, the last one meets whoever would meet himself
        yield to if to != rank else count if count < size else None
