"""Mean gradients of N ranks in float64, dense or with error feedback, one entry at a time."""

import math

import numpy as np


class MeanOracle:
    """The residuals of all ranks, and what each step brings; tensors are NumPy arrays by name."""

    def __init__(
        self,
        ranks,
        *,
        begin=0,
        rampup=1,
        levels=None,
        clip=None,
        trainers=None,
        min_numel=1,
        bits=32,
    ):
        self.begin, self.rampup, self.levels, self.min_numel, self.bits = (
            begin,
            rampup,
            levels,
            min_numel,
            bits,
        )
        self.limit = None if clip is None else clip * math.sqrt(trainers or ranks)
        self.residuals = [{} for _ in range(ranks)]

    def mean(self, step, grads):
        """By name the mean of `grads`, one dictionary per rank; residuals change."""
        return {name: self._one(step, name, [g[name] for g in grads]) for name in grads[0]}

    def _one(self, step, name, grads):
        shape, size = grads[0].shape, grads[0].size
        if self.levels is None or step < self.begin or size < self.min_numel:
            return sum(np.asarray(g, np.float64) for g in grads) / len(grads)
        place = min(len(self.levels) - 1, (step - self.begin) * len(self.levels) // self.rampup)
        count = max(1, round(size * (1 - self.levels[place])))
        total = [0.0] * size
        for rank, grad in enumerate(grads):
            for i, q in self._sent(rank, name, grad, count):
                total[i] += q
        return np.array(total).reshape(shape) / len(grads)

    def _sent(self, rank, name, grad, count):
        g = [float(x) for x in grad.reshape(-1)]
        if self.limit is not None:
            norm = math.sqrt(math.fsum(x * x for x in g))
            g = [x * min(1.0, self.limit / norm) for x in g]
        v = self.residuals[rank].setdefault(name, [0.0] * len(g))
        for i, x in enumerate(g):
            v[i] += x
        chosen = sorted(sorted(range(len(v)), key=lambda i: (-abs(v[i]), i))[:count])
        scale = float(np.float32(math.fsum(abs(v[i]) for i in chosen) / count))
        pairs = [
            (i, float(np.float32(v[i])) if self.bits == 32 else math.copysign(scale, v[i]))
            for i in chosen
        ]
        for i, q in pairs:
            v[i] -= q
        return pairs
