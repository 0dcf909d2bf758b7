"""Training of N ranks in one process, in NumPy float64, from the specification alone.

A gradient comes from a function of the rank and its parameters; all else is here: merging, limits,
dropped steps, compression with its residuals, SGD, local updates with outer steps, and nodes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.reference import dgc_codec, whole_codes
from tests.reference.local_training import interval
from tests.reference.low_rank import LowRankOracle

Array = np.ndarray[Any, np.dtype[np.float64]]
Arrays = dict[str, Array]
Clip = Callable[[Arrays], Arrays]
Gradient = Callable[[int, int, Arrays], tuple[float, Arrays]]
"""Loss and gradients by microstep, rank and parameters of that rank."""


@dataclass
class Compression:
    """What sources send of each tensor: here all of it, in a mean of residuals and new values."""

    names: Iterable[str] = ()
    begin: int = 0
    decay: float = 1.0

    def takes(self, name: str, step: int) -> bool:
        return name in self.names and step >= self.begin

    def send(self, name: str, step: int, folded: list[Array]) -> tuple[Array, list[Array]]:
        """The mean that all apply, and what of each source is in it."""
        raise NotImplementedError


@dataclass
class Largest(Compression):
    """The largest entries; the fraction `levels` of a ramp stays."""

    levels: tuple[float, ...] = (0.9,)
    rampup: int = 1
    bits: int = 32
    over_senders: bool = False

    def send(self, name: str, step: int, folded: list[Array]) -> tuple[Array, list[Array]]:
        at = min(len(self.levels) - 1, (step - self.begin) * len(self.levels) // self.rampup)
        sent = []
        for whole in folded:
            flat = whole.reshape(-1)
            count = max(1, round(flat.size * (1 - self.levels[at])))
            chosen = sorted(sorted(range(flat.size), key=lambda i: (-abs(flat[i]), i))[:count])
            part = np.zeros_like(flat)
            part[chosen] = dgc_codec.sent([float(flat[i]) for i in chosen], self.bits, count)
            sent.append(part.reshape(whole.shape))
        senders = sum((part != 0).astype(float) for part in sent)
        total: Array = sum(sent) / (np.maximum(senders, 1) if self.over_senders else len(sent))
        return total, sent


@dataclass
class Codes(Compression):
    """Every entry in a few bits."""

    bits: int = 4

    def send(self, name: str, step: int, folded: list[Array]) -> tuple[Array, list[Array]]:
        sent = [
            np.array(whole_codes.sent(e.reshape(-1).tolist(), self.bits)).reshape(e.shape)
            for e in folded
        ]
        return sum(sent) / len(sent), sent


@dataclass
class Factors(Compression):
    """Two factors, from those (r, columns) at the start."""

    factors: Arrays = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._oracles: dict[str, LowRankOracle] = {}

    def send(self, name: str, step: int, folded: list[Array]) -> tuple[Array, list[Array]]:
        rows = len(folded[0])
        if name not in self._oracles:
            start = self.factors[name].T.tolist()
            self._oracles[name] = LowRankOracle(start, rows, len(folded))
        oracle = self._oracles[name]
        # the residuals are already in what is folded
        oracle.errors = [[[0.0] * len(row) for row in error] for error in oracle.errors]
        mean = np.array(oracle.mean([each.reshape(rows, -1).tolist() for each in folded]))
        mean = mean.reshape(folded[0].shape)
        return mean, [mean] * len(folded)


@dataclass
class Local:
    """When changes are averaged, and the outer step."""

    k: int
    begin: int = 1
    outer: tuple[float, float, bool] = (1.0, 0.0, False)
    parts: list[list[str]] | None = None
    delay: int = 0
    most: int = 0
    """The longest interval that follows the loss; 0 for one that is fixed."""


class Training:
    """All ranks, step by step; `ranks[r]` are the parameters of one, `residuals[s]` of a source."""

    def __init__(
        self,
        start: Arrays,
        size: int,
        *,
        rate: Callable[[int], float] = lambda step: 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        shaped: Callable[[Array, Array], Array] = lambda p, g: g,
        clip: Clip = lambda grads: grads,
        local_clip: float | None = None,
        merge: int = 1,
        average: bool = True,
        compression: Compression | None = None,
        masked: bool = False,
        local: Local | None = None,
        node: int = 1,
    ) -> None:
        """`shaped`: gradient with decay; `masked`: momentum before compression, as in DGC."""
        self.start, self.size, self.node = start, size, node
        self.ranks = [{n: p.copy() for n, p in start.items()} for _ in range(size)]
        self.rate, self.momentum, self.nesterov, self.shaped = rate, momentum, nesterov, shaped
        self.clip, self.local_clip, self.merge, self.average = clip, local_clip, merge, average
        self.compression, self.masked, self.local = compression or Compression(), masked, local
        zeros = {n: np.zeros_like(p) for n, p in start.items()}
        self.velocity = [dict(zeros) for _ in range(size)]
        self.residuals = [dict(zeros) for _ in range(size // node)]
        self.microstep = self.step = 0
        self.dropped = [0] * size
        self.sums: list[Arrays] = []
        self.losses: list[float] = []
        if local is not None:
            self.anchor, self.buffer = dict(start), dict(zeros)
            self.k, self.last, self.part = local.k, local.begin, 0
            self.waiting: tuple[int, list[Arrays]] | None = None
            self.first: tuple[float, float] | None = None

    def train(self, gradient: Gradient) -> None:
        """One microstep of every rank."""
        found = [gradient(self.microstep, r, params) for r, params in enumerate(self.ranks)]
        self.microstep += 1
        grads = [each for _, each in found]
        self.losses.append(sum(loss for loss, _ in found) / self.size)
        share = self.merge if self.average else 1
        if not self.sums:
            self.sums = [dict.fromkeys(each, 0.0) for each in grads]  # type: ignore[arg-type]
        for total, each in zip(self.sums, grads, strict=True):
            for name, g in each.items():
                total[name] = total[name] + g / share
        if self.microstep % self.merge:
            return
        sums, self.sums = self.sums, []
        loss, self.losses = sum(self.losses) / self.merge, []
        bad = [any(not np.isfinite(g).all() for g in each.values()) for each in sums]
        if self.local is not None:
            self._local_step(sums, bad, loss)
        elif any(bad):
            self.dropped = [each + 1 for each in self.dropped]
        else:
            self._exchanged(sums)
            self.step += 1

    def _exchanged(self, grads: list[Arrays]) -> None:
        """One step by the means of gradients."""
        own = {name: self._by_source([g[name] for g in grads]) for name in grads[0]}
        sent = [name for name in own if self.compression.takes(name, self.step)]
        means = {name: sum(g) / len(g) for name, g in own.items() if name not in sent}
        steps: Arrays = {}
        for name in sent:
            (steps if self.masked else means)[name] = self._compressed(name, own[name])
        # with momentum, a limit on each source's share is none before compression begins
        free = self.compression.names if self.masked else ()
        means |= self.clip({name: mean for name, mean in means.items() if name not in free})
        for name, mean in means.items():
            steps[name] = self._momentum_step(0, name, mean)
            for velocity in self.velocity[1:]:
                velocity[name] = self.velocity[0][name]
        for params in self.ranks:
            for name, step in steps.items():
                params[name] = params[name] - self.rate(self.step) * step

    def _momentum_step(self, rank: int, name: str, grad: Array) -> Array:
        grad = self.shaped(self.ranks[rank][name], grad)
        v = self.velocity[rank][name] = self.momentum * self.velocity[rank][name] + grad
        return grad + self.momentum * v if self.nesterov else v

    def _compressed(self, name: str, own: list[Array]) -> Array:
        folded = []
        for source, grad in enumerate(own):
            most = math.inf if self.local_clip is None else self.local_clip * math.sqrt(len(own))
            new = _limited(grad, most)
            if self.masked:
                new = self._accumulated(source, name, new)
            folded.append(self.compression.decay * self.residuals[source][name] + new)
        mean, sent = self.compression.send(name, self.step, folded)
        for source, (whole, part) in enumerate(zip(folded, sent, strict=True)):
            self.residuals[source][name] = whole - part
            if self.masked:
                self.velocity[source][name] = np.where(part != 0, 0.0, self.velocity[source][name])
        return mean

    def _accumulated(self, source: int, name: str, grad: Array) -> Array:
        """The momentum of a source, of algorithm 4."""
        grad = self.shaped(self.ranks[0][name], grad)
        u = self.velocity[source][name]
        u = self.momentum * (u + grad) if self.nesterov else self.momentum * u + grad
        self.velocity[source][name] = u
        return u + grad if self.nesterov else u

    def _by_source(self, values: list[Array]) -> list[Array]:
        nodes = range(0, self.size, self.node)
        return [sum(values[at : at + self.node]) / self.node for at in nodes]  # type: ignore[misc]

    def _local_step(self, grads: list[Arrays], bad: list[bool], loss: float) -> None:
        local = self.local
        assert local is not None
        rate = self.rate(self.step)
        self.step += 1
        for rank, each in enumerate(grads):
            if bad[rank]:
                self.dropped[rank] += 1
                continue
            for name, grad in self.clip(each).items():
                moved = rate * self._momentum_step(rank, name, grad)
                self.ranks[rank][name] = self.ranks[rank][name] - moved
        if self.waiting is not None and self.step == self.waiting[0] + local.delay:
            self._land()
        if self.first is None and rate > 0:
            self.first = loss, rate
        names = [*grads[0]]
        parts = local.parts or [names]
        if self.step <= local.begin:
            self._average(names)
            self.last = self.step
        elif self.step - self.last == max(1, self.k // len(parts)):
            names = parts[self.part % len(parts)]
            self.part += 1
            self.last = self.step
            if self.waiting is not None:
                self._land()
            if local.delay:
                self.waiting = self.step, [{n: p[n] for n in names} for p in self.ranks]
            else:
                self._average(names)
            if local.most and rate > 0:
                assert self.first is not None
                self.k = interval(local.k, local.most, loss, self.first[0], rate, self.first[1])

    def finish(self) -> None:
        """What is on its way arrives, and all is averaged."""
        if self.waiting is not None:
            self._land()
        self._average([*self.anchor])

    def _land(self) -> None:
        assert self.waiting is not None
        at, measured = self.waiting
        self.waiting = None
        for name in measured[0]:
            new = self._new_anchor(name, [each[name] for each in measured], at)
            for params, each in zip(self.ranks, measured, strict=True):
                params[name] = params[name] + (new - each[name])

    def _average(self, names: list[str]) -> None:
        for name in names:
            new = self._new_anchor(name, [params[name] for params in self.ranks], self.step)
            for params in self.ranks:
                params[name] = new

    def _new_anchor(self, name: str, values: list[Array], at: int) -> Array:
        assert self.local is not None
        changes = self._by_source([self.anchor[name] - value for value in values])
        if self.compression.takes(name, at - 1):
            kept = self.residuals
            folded = [
                self.compression.decay * kept[source][name] + c for source, c in enumerate(changes)
            ]
            mean, sent = self.compression.send(name, at - 1, folded)
            for source, (whole, part) in enumerate(zip(folded, sent, strict=True)):
                kept[source][name] = whole - part
        else:
            mean = sum(changes) / len(changes)  # type: ignore[assignment]
        rate, momentum, nesterov = self.local.outer
        b = self.buffer[name] = momentum * self.buffer[name] + mean
        self.anchor[name] = self.anchor[name] - rate * (mean + momentum * b if nesterov else b)
        return self.anchor[name]


def by_norm(most: float) -> Clip:
    """Each tensor by its own norm."""
    return lambda grads: {name: _limited(grad, most) for name, grad in grads.items()}


def by_global_norm(most: float) -> Clip:
    """All of them by one norm."""

    def clip(grads: Arrays) -> Arrays:
        norm = math.sqrt(math.fsum(x * x for g in grads.values() for x in g.reshape(-1).tolist()))
        return {name: grad * min(1.0, most / norm) for name, grad in grads.items()}

    return clip


def by_value(most: float, least: float) -> Clip:
    """Each number."""
    return lambda grads: {name: grad.clip(least, most) for name, grad in grads.items()}


def _limited(values: Array, most: float) -> Array:
    norm = math.sqrt(math.fsum(x * x for x in values.reshape(-1).tolist()))
    return values * min(1.0, most / norm) if norm else values
