"""Deep gradient compression of N ranks in one process, float64, from the specification alone."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Oracle:
    """Parameters by name; per rank momentum and residual by name."""

    params: dict[str, Array]
    ranks: int
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    begin: int = 0
    rampup: int = 1
    levels: tuple[float, ...] = (0.999,)
    decay: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    clip: float | None = None
    """c of ClipByNorm: full value on dense tensors, c / sqrt(N) on a rank's share of compressed
    ones."""
    local_clip: float | None = None
    num_trainers: int | None = None
    centralize: bool = False
    min_numel: int = 16384
    bits: int = 32
    step: int = 0
    u: list[dict[str, Array]] = field(default_factory=list)
    v: list[dict[str, Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.u = [{n: np.zeros(p.shape) for n, p in self.params.items()} for _ in range(self.ranks)]
        self.v = [{n: np.zeros(p.shape) for n, p in self.params.items()} for _ in range(self.ranks)]

    def update(self, grads: list[dict[str, Array]]) -> None:
        for name in self.params:
            if name not in grads[0]:
                continue
            if self.params[name].size < self.min_numel:
                self._dense(name, [g[name] for g in grads], clip=True)
            elif self.step < self.begin:
                self._dense(name, [g[name] for g in grads], clip=False)
            else:
                self._sparse(name, [g[name] for g in grads])
        self.step += 1

    def _shaped(self, name: str, g: Array) -> Array:
        p = self.params[name]
        g = g + (self.decay + self.l2) * p + self.l1 * np.sign(p)
        if self.centralize and g.ndim >= 2:
            g = g - g.mean(axis=tuple(range(1, g.ndim)), keepdims=True)
        return g

    def _dense(self, name: str, grads: list[Array], *, clip: bool) -> None:
        mean = sum(grads) / self.ranks
        if clip and self.clip is not None:
            mean = mean * min(1.0, self.clip / max(np.sqrt((mean**2).sum()), 1e-300))
        g = self._shaped(name, mean)
        for u in self.u:
            u[name] = self.momentum * u[name] + g
        self.params[name] = self.params[name] - self.lr * (
            g + self.momentum * self.u[0][name] if self.nesterov else self.u[0][name]
        )

    def sparsity(self) -> float:
        index = ((self.step - self.begin) * len(self.levels)) // self.rampup
        return self.levels[min(len(self.levels) - 1, index)]

    def _sparse(self, name: str, grads: list[Array]) -> None:
        n = self.params[name].size
        k = max(1, round(n * (1 - self.sparsity())))
        total = np.zeros(n)
        for rank, own in enumerate(grads):
            g = own
            limit = self.local_clip if self.local_clip is not None else self.clip
            if limit is not None:
                trainers = self.num_trainers or self.ranks
                g = g * min(1.0, limit * math.sqrt(trainers) / max(np.sqrt((g**2).sum()), 1e-300))
            g = self._shaped(name, g).reshape(-1)
            u, v = self.u[rank][name].reshape(-1), self.v[rank][name].reshape(-1)
            if self.nesterov:
                u = self.momentum * (u + g)
                v = v + u + g
            else:
                u = self.momentum * u + g
                v = v + u
            chosen = sorted(range(n), key=lambda i: (-abs(v[i]), i))[:k]
            q = self._coded(v[chosen])
            total[chosen] += q
            v[chosen] -= q
            u[chosen] = 0.0
            self.u[rank][name], self.v[rank][name] = u.reshape(own.shape), v.reshape(own.shape)
        self.params[name] = self.params[name] - self.lr * (total / self.ranks).reshape(
            self.params[name].shape
        )

    def _coded(self, values: Array) -> Array:
        if self.bits == 32:
            return values.astype(np.float32).astype(np.float64)
        assert self.bits == 1, "the other widths have oracles of their own"
        return np.sign(values) * float(np.float32(np.abs(values).mean()))
