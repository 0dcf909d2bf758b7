"""Local updates simulated in one process with NumPy float64: all ranks in turn, no shared code."""

import math
from dataclasses import dataclass, field

import numpy as np

from tests.reference import whole_codes


def interval(init, most, loss, first_loss, rate, first_rate):
    """The adaptive rule, with exact fractions where doubles would do."""
    if first_loss == 0:
        return init
    return int(
        min(max(math.ceil(math.sqrt((first_rate * loss) / (rate * first_loss)) * init), 1), most)
    )


def intervals(losses, rates, *, init, most, begin):
    """Interval after each step, and the steps that average; `losses` are means over ranks."""
    k, last, first, found, averaged = init, begin, None, [], []
    for step, (loss, rate) in enumerate(zip(losses, rates, strict=True), start=1):
        if first is None and rate > 0:
            first = (loss, rate)
        if step <= begin:
            last = step
            averaged.append(step)
        elif step - last == k:
            last = step
            averaged.append(step)
            if rate > 0:
                k = interval(init, most, loss, first[0], rate, first[1])
        found.append(k)
    return found, averaged


@dataclass
class Rank:
    p: dict
    velocity: dict = field(default_factory=dict)
    error: dict = field(default_factory=dict)


class Simulation:
    """`size` ranks with SGD and momentum; every tensor is a NumPy array by name."""

    def __init__(self, start, size, *, k, begin=1, lr=0.1, momentum=0.0, outer=(1.0, 0.0, False),
                 parts=None, delay=0, sparsity=None, decay=1.0, ramp=None, senders=False,
                 bits=None):  # fmt: skip
        self.names = list(start)
        self.ranks = [Rank({n: v.copy() for n, v in start.items()}) for _ in range(size)]
        self.anchor = {n: v.copy() for n, v in start.items()}
        self.buffer = {n: np.zeros_like(v) for n, v in start.items()}
        self.k, self.begin, self.lr, self.momentum, self.outer = k, begin, lr, momentum, outer
        self.parts = parts or [self.names]
        self.delay, self.sparsity, self.decay, self.ramp = delay, sparsity, decay, ramp
        self.senders, self.bits = senders, bits
        self.step, self.last, self.turn, self.waiting = 0, begin, 0, None
        self.sent = {n: np.zeros_like(v) for n, v in start.items()}

    def advance(self, gradient):
        """One local step on every rank and its consequences; `gradient(step, rank, name, p)`."""
        self.step += 1
        for number, rank in enumerate(self.ranks):
            for name in self.names:
                g = gradient(self.step, number, name, rank.p[name])
                rank.velocity[name] = self.momentum * rank.velocity.get(name, 0.0) + g
                rank.p[name] = rank.p[name] - self.lr * rank.velocity[name]
        if self.waiting is not None and self.step == self.waiting[0] + self.delay:
            self.land()
        if self.step <= self.begin:
            self.average(self.names)
            self.last = self.step
            return True
        if self.step - self.last == max(1, self.k // len(self.parts)):
            names = self.parts[self.turn % len(self.parts)]
            self.turn += 1
            self.last = self.step
            if self.waiting is not None:
                self.land()
            if self.delay:
                measured = [{n: rank.p[n].copy() for n in names} for rank in self.ranks]
                self.waiting = (self.step, measured)
            else:
                self.average(names)
            return True
        return False

    def finish(self):
        if self.waiting is not None:
            self.land()
        self.average(self.names)

    def land(self):
        at, measured = self.waiting
        self.waiting = None
        for name in measured[0]:
            new = self.new_anchor(name, [m[name] for m in measured], at)
            for rank, m in zip(self.ranks, measured, strict=True):
                rank.p[name] = rank.p[name] + (new - m[name])

    def average(self, names):
        for name in names:
            new = self.new_anchor(name, [rank.p[name] for rank in self.ranks], self.step)
            for rank in self.ranks:
                rank.p[name] = new

    def new_anchor(self, name, values, at):
        changes = [self.anchor[name] - v for v in values]
        sparsity = self.sparsity_at(at, values[0].size)
        if sparsity is not None:
            changes = [
                self.compressed(rank, name, c, sparsity)
                for rank, c in zip(self.ranks, changes, strict=True)
            ]
        elif self.bits is not None:
            changes = [
                self.quantized(rank, name, c) for rank, c in zip(self.ranks, changes, strict=True)
            ]
        mean = sum(changes) / len(changes)
        if self.senders:
            mean = sum(changes) / np.maximum(sum(c != 0 for c in changes), 1)
        rate, momentum, nesterov = self.outer
        self.buffer[name] = momentum * self.buffer[name] + mean
        step = mean + momentum * self.buffer[name] if nesterov else self.buffer[name]
        self.anchor[name] = self.anchor[name] - rate * step
        return self.anchor[name]

    def sparsity_at(self, step, size):
        """After local step `step`; a ramp is (begin, length, levels, smallest size) in updates."""
        if self.ramp is None:
            return self.sparsity
        begin, length, levels, smallest = self.ramp
        updates = step - 1
        if updates < begin or size < smallest:
            return None
        return levels[min(len(levels) - 1, (updates - begin) * len(levels) // length)]

    def compressed(self, rank, name, change, sparsity):
        e = self.decay * rank.error.get(name, np.zeros_like(change)) + change
        flat = e.reshape(-1)
        count = max(1, round(flat.size * (1 - sparsity)))
        order = sorted(range(flat.size), key=lambda i: (-abs(flat[i]), i))
        q = np.zeros_like(flat)
        for i in order[:count]:
            q[i] = np.float64(np.float32(flat[i]))
        rank.error[name] = (flat - q).reshape(e.shape)
        return q.reshape(e.shape)

    def quantized(self, rank, name, change):
        e = self.decay * rank.error.get(name, np.zeros_like(change)) + change
        q = np.array(whole_codes.sent(e.reshape(-1).tolist(), self.bits)).reshape(e.shape)
        rank.error[name] = e - q
        return q
