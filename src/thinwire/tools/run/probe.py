"""Measure the network between real ranks, and a model's step, in a few seconds."""

import socket
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from thinwire.tools.run.compute import STEPS_S, step_of_built_in, step_of_task
from thinwire.tools.run.config import ModelSize
from thinwire.tools.run.task import everyones

_MOST_BYTES, _MOST_S = 32 * 2**20, 10.0
_PAIRS_BYTES, _TOGETHER_BYTES, _COLLECTIVES_BYTES = 12 * 2**20, 12 * 2**20, 8 * 2**20
_PAIRS_S, _TOGETHER_S, _COLLECTIVES_S = 3.5, 4.0, 2.0
_ROUND_TRIPS, _FEWEST_TRIPS, _DROPPED, _TRIPS_S = 20, 4, 2, 0.3
_OPENING, _FLIGHTS = 8, 20
"""Latencies until a window is open, and least latencies in the measurement of a pair's rate."""
_PIECE_BYTES = 2**16
_FIRST_BYTES, _DRAINING_BYTES, _LONG_ENOUGH_S = 2**16, 2**18, 0.4


def probe(
    task: str | None,
    size: ModelSize,
    batch: int,
    device: str,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure network and step, on all ranks at once; longer if the latency or a step is long."""
    begin_s = time.perf_counter()
    line = _Line()
    tell("latency and rate of every pair")
    pairs = line.pairs()
    tell("all ranks at once, and collectives")
    together = line.together()
    collectives = line.collectives(min(together, default=inf))
    tell("a step of the model")
    left_s = min(STEPS_S, max(0.0, _MOST_S - (time.perf_counter() - begin_s)))
    if task is None:
        compute = step_of_built_in(size, batch, device, left_s)
    else:
        compute = step_of_task(task, device, line.size, left_s)
    seconds = time.perf_counter() - begin_s
    parts = everyones(
        {
            "pairs": pairs,
            "compute": compute,
            "seconds": seconds,
            "bytes": line.sent_bytes,
            "host": socket.gethostname(),
            "restarts": idle_restarts(),
        }
    )
    pairs = [pair for part in parts for pair in part["pairs"]]
    if any(pair["bytes_s"] is None for pair in pairs):
        line.not_measured.append(
            "the rate of single pairs: it would exceed the limit of time or bytes"
        )
    # the others wait for the slowest rank
    rank = max(range(line.size), key=lambda rank: parts[rank]["compute"]["step_s"])
    slowest = {**parts[rank]["compute"], "rank": rank}
    if slowest["muon_s"] is None:
        line.not_measured.append("an update by Muon, which cannot train this model")
    return {
        "ranks": line.size,
        "hosts": [part["host"] for part in parts],
        "idle_restarts": [part["restarts"] for part in parts],
        "task": task,
        "pairs": pairs,
        "together": [{"rank": rank, "bytes_s": rate} for rank, rate in enumerate(together)],
        "collectives": collectives,
        "compute": slowest,
        "not_measured": line.not_measured,
        "seconds": max(part["seconds"] for part in parts),
        "bytes": max(part["bytes"] for part in parts),
    }


def idle_restarts() -> bool:
    """Return True if windows of idle connections shrink."""
    # Source: Linux, include/net/tcp.h, tcp_slow_start_after_idle_check.
    settings = Path("/proc/sys/net/ipv4")
    try:
        control = (settings / "tcp_congestion_control").read_text()
        after_idle = (settings / "tcp_slow_start_after_idle").read_text()
    except OSError:  # not Linux
        return True
    return after_idle.strip() != "0" and not control.startswith("bbr")


def _rate_of(nbytes: int, taken_s: float, latency_s: float) -> float:
    """Return the bytes per second of a flow, without the latencies before its first byte."""
    return nbytes / max(taken_s - 2 * latency_s, taken_s / 8)


def _largest(own: float) -> float:
    """Return the largest value of all ranks."""
    value = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


class _Line:
    """Link of this rank into the network."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sent_bytes = 0
        self.latency_s = 0.0
        """Largest latency to another rank."""
        self.not_measured: list[str] = []

    def pairs(self) -> list[dict[str, Any]]:
        """Measure latency and rate to each higher rank; no rank is in two pairs at a time."""
        found = []
        rounds = list(_tournament(self.size))
        share_s = _PAIRS_S / max(1, len(rounds))
        trips_s = min(_TRIPS_S, share_s / 2)
        rate_s = share_s - trips_s
        share_bytes = _PAIRS_BYTES // max(1, len(rounds))
        dist.barrier()
        for other in (partners[self.rank] for partners in rounds):
            if other is None:
                continue
            latency_s = self._latency(other, trips_s)
            self.latency_s = max(self.latency_s, latency_s)
            rate, most = None, 0
            too_long = _FLIGHTS * latency_s > rate_s or share_bytes < _FIRST_BYTES
            if not self._agreed(other, too_long):
                rate, most = self._rate(other, latency_s, share_bytes, rate_s)
            if other > self.rank:
                found.append(
                    {
                        "ranks": [self.rank, other],
                        "latency_s": latency_s,
                        "bytes_s": rate,
                        "largest_bytes": most,
                    }
                )
        return found

    def _latency(self, other: int, most_s: float) -> float:
        """Return half of the median round trip of eight bytes."""
        word, taken = torch.zeros(8, dtype=torch.uint8), list[float]()
        while len(taken) < _ROUND_TRIPS:
            begin_s = time.perf_counter()
            for sends in (self.rank < other, self.rank > other):
                dist.send(word, other) if sends else dist.recv(word, other)
            taken.append(time.perf_counter() - begin_s)
            if len(taken) % _FEWEST_TRIPS == 0 and self._agreed(other, sum(taken) > most_s):
                break
        self.sent_bytes += 8 * len(taken)
        return median(taken[_DROPPED:]) / 2

    def _rate(
        self, other: int, latency_s: float, most_bytes: int, most_s: float
    ) -> tuple[float, int]:
        """Return bytes per second of the largest transfer, the better of two, and its size."""
        # smaller transfers tell little: burst buckets hold them whole, after a loss TCP waits 0.2
        # s, and windows open over several round trips
        nbytes, left_bytes, left_s = _FIRST_BYTES, most_bytes, most_s
        while True:
            taken_s = self._both_ways(other, other, nbytes)
            left_bytes, left_s = left_bytes - nbytes, left_s - taken_s
            long = taken_s >= _LONG_ENOUGH_S + _OPENING * latency_s
            enough = long and nbytes > _FIRST_BYTES  # a busy machine makes one of them long
            if self._agreed(other, enough or 5 * nbytes > left_bytes or 5 * taken_s > left_s):
                break
            nbytes *= 4
        if self._agreed(other, nbytes <= left_bytes and taken_s <= left_s):
            taken_s = min(taken_s, self._both_ways(other, other, nbytes))
        return _rate_of(nbytes, taken_s, latency_s), nbytes

    def _agreed(self, other: int, word: bool) -> bool:
        """Return the value of the lower of the two ranks."""
        answer = torch.tensor(word)
        dist.send(answer, other) if self.rank < other else dist.recv(answer, other)
        return bool(answer)

    def _both_ways(self, to: int, source: int, nbytes: int) -> float:
        """Return the seconds until `nbytes` are sent and received, in pieces as of collectives."""
        out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
        begin_s = time.perf_counter()
        pieces = zip(torch.split(out, _PIECE_BYTES), torch.split(into, _PIECE_BYTES), strict=True)
        for works in [(dist.isend(one, to), dist.irecv(other, source)) for one, other in pieces]:
            for work in works:
                assert work is not None, "this rank belongs to the group"
                work.wait()
        self.sent_bytes += nbytes
        return time.perf_counter() - begin_s

    def together(self) -> list[float]:
        """Return each rank's bytes per second while all send to the next one; the better of two."""
        if self.size == 1:
            return []
        self.latency_s = _largest(self.latency_s)
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        nbytes, left_bytes = _DRAINING_BYTES, _TOGETHER_BYTES
        while True:
            own_s = self._both_ways(to, source, nbytes)
            taken_s = _largest(own_s)
            left_bytes -= nbytes
            enough = taken_s >= _LONG_ENOUGH_S + _OPENING * self.latency_s
            # if all of it were bytes
            next_s = 4 * max(taken_s - 2 * self.latency_s, 0.0)
            if enough or 5 * nbytes > left_bytes or next_s > _TOGETHER_S:
                break
            nbytes *= 4
        own_s = min(own_s, self._both_ways(to, source, nbytes))
        return everyones(_rate_of(nbytes, own_s, self.latency_s))

    def collectives(self, rate: float) -> list[dict[str, Any]]:
        """Measure all-reduce and all-gather, small and as large as time allows."""
        found: list[dict[str, Any]] = []
        if self.size == 1:
            return found
        left_bytes, left_s = _COLLECTIVES_BYTES, _COLLECTIVES_S
        hops = 2 * (self.size - 1)
        for kind, copies, flight_s in (
            ("all_reduce", 2.0, 2 * hops * self.latency_s),
            ("all_gather", float(self.size), hops * self.latency_s),
        ):
            for nbytes, most_times in ((256, 10), (2**16, 3), (2**20, 2)):
                once_s = flight_s + copies * nbytes / rate
                times = max(1, min(most_times, int(_COLLECTIVES_S / 4 / once_s)))
                cost = int(copies * nbytes) * times
                if (times * once_s > left_s and found) or cost > left_bytes:
                    self.not_measured.append(
                        f"{kind} of {nbytes} bytes: it would exceed the time or bytes that are left"
                    )
                    continue
                left_bytes, left_s = left_bytes - cost, left_s - times * once_s
                self.sent_bytes += cost
                seconds = _timed_collective(kind, nbytes, times)
                found.append({"kind": kind, "bytes": nbytes, "seconds": seconds})
        return found


def _timed_collective(kind: str, nbytes: int, times: int) -> float:
    """Return the mean seconds of several collectives, so that late starters count little."""
    own = torch.zeros(nbytes // 4)
    outputs = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(times):
        if kind == "all_reduce":
            dist.all_reduce(own)
        else:
            dist.all_gather(outputs, own)
    return _largest((time.perf_counter() - begin_s) / times)


def _tournament(size: int) -> Iterator[list[int | None]]:
    """Yield rounds in which every rank has at most one partner, until each has met every other."""
    slots = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(slots) - 1):
        partners: list[int | None] = [None] * size
        for a, b in zip(slots[: len(slots) // 2], reversed(slots), strict=False):
            if a is not None and b is not None:
                partners[a], partners[b] = b, a
        yield partners
        slots = [slots[0], slots[-1], *slots[1:-1]]
