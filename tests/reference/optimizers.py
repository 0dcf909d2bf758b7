"""Slow oracles of the optimizers in NumPy float64, written from the formulas; nothing of the
library is imported.

A run is a list of updates; each update has one gradient per parameter: an array, None, or for rows
(indices, values).
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
Grad = Array | None


@dataclass
class Options:
    """The common part: everything that is decided outside a method's own formula."""

    weight_decay: float = 0.0
    excluded: tuple[str, ...] = ()
    clip: tuple[str, float, float] | None = None  # ("global" | "norm", c, 0) or ("value", max, min)
    l1_decay: float = 0.0
    l2_decay: float = 0.0
    centralize: bool = False
    maximize: bool = False
    hyper: dict[str, Any] = field(default_factory=dict)


def norm(x: Array) -> float:
    return math.sqrt(math.fsum(float(v) * float(v) for v in x.ravel()))


def clip_all(grads: dict[str, Array], clip: tuple[str, float, float] | None) -> dict[str, Array]:
    if clip is None:
        return grads
    kind, c, low = clip
    if kind == "value":
        return {k: np.minimum(np.maximum(g, low), c) for k, g in grads.items()}
    if kind == "global":
        total = math.sqrt(math.fsum(norm(g) ** 2 for g in grads.values()))
        return {k: g * (c / max(total, c)) for k, g in grads.items()}
    return {k: g * (c / norm(g)) if norm(g) > c else g for k, g in grads.items()}


def centre(g: Array) -> Array:
    if g.ndim < 2:
        return g
    out = np.empty_like(g)
    for i in range(g.shape[0]):
        out[i] = g[i] - sum(g[i].ravel().tolist()) / g[i].size
    return out


COUPLED = {"SGD", "Adam", "RMSprop", "Adagrad", "LazyAdam", "Ftrl", "ProximalAdagrad"}


def run(
    method: str,
    params: dict[str, Array],
    updates: list[dict[str, Grad]],
    rates: list[float],
    o: Options,
) -> dict:
    """Parameters after all updates (the arrays given stay as they are)."""
    p = {k: v.astype(np.float64).copy() for k, v in params.items()}
    state: dict[str, dict[str, Any]] = {k: {"t": 0} for k in p}
    ratios: dict[str, float] = {}
    for grads, lr in zip(updates, rates, strict=True):
        present = {k: (-g if o.maximize else g) for k, g in grads.items() if g is not None}
        for k, clipped in clip_all(present, o.clip).items():
            wd = 0.0 if k in o.excluded else o.weight_decay
            coupled = wd if method in COUPLED else 0.0
            g = clipped + (coupled + o.l2_decay) * p[k] + o.l1_decay * np.sign(p[k])
            g = centre(g) if o.centralize else g
            state[k]["t"] += 1
            p[k], ratios[k] = METHODS[method](p[k], g, state[k], lr, wd, **o.hyper)
    p["__ratios__"] = ratios
    return p


def sgd(p, g, s, lr, wd, momentum=0.0, dampening=0.0, nesterov=False):
    if momentum:
        s["b"] = g if "b" not in s else momentum * s["b"] + (1 - dampening) * g
        g = g + momentum * s["b"] if nesterov else s["b"]
    return p - lr * g, 1.0


def adam(p, g, s, lr, wd, betas=(0.9, 0.999), eps=1e-8):
    m = s["m"] = betas[0] * s.get("m", 0.0) + (1 - betas[0]) * g
    v = s["v"] = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * g * g
    m_hat = m / (1 - betas[0] ** s["t"])
    v_hat = v / (1 - betas[1] ** s["t"])
    return p - lr * m_hat / (np.sqrt(v_hat) + eps), 1.0


def adamw(p, g, s, lr, wd, betas=(0.9, 0.999), eps=1e-8):
    return adam(p - lr * wd * p, g, s, lr, wd, betas, eps)


def rmsprop(p, g, s, lr, wd, alpha=0.99, eps=1e-8, momentum=0.0, centered=False):
    v = s["v"] = alpha * s.get("v", 0.0) + (1 - alpha) * g * g
    if centered:
        a = s["a"] = alpha * s.get("a", 0.0) + (1 - alpha) * g
        v = v - a * a
    step = g / (np.sqrt(v) + eps)
    if momentum:
        step = s["b"] = momentum * s.get("b", 0.0) + step
    return p - lr * step, 1.0


def adagrad(p, g, s, lr, wd, lr_decay=0.0, eps=1e-10, initial_accumulator_value=0.0):
    a = s["a"] = s.get("a", initial_accumulator_value) + g * g
    return p - lr / (1 + (s["t"] - 1) * lr_decay) * g / (np.sqrt(a) + eps), 1.0


def lamb(p, g, s, lr, wd, betas=(0.9, 0.999), eps=1e-6, trust_clip=None):
    m = s["m"] = betas[0] * s.get("m", 0.0) + (1 - betas[0]) * g
    v = s["v"] = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * g * g
    r = (m / (1 - betas[0] ** s["t"])) / (np.sqrt(v / (1 - betas[1] ** s["t"])) + eps) + wd * p
    ratio = 1.0
    if norm(p) > 0 and norm(r) > 0:
        ratio = norm(p) / norm(r)
        if trust_clip is not None:
            ratio = min(max(ratio, trust_clip[0]), trust_clip[1])
    return p - lr * ratio * r, ratio


def lars(p, g, s, lr, wd, momentum=0.9, trust_coefficient=1e-3, eps=0.0, nesterov=False):
    ratio = 1.0
    if wd > 0 and norm(p) > 0 and norm(g) > 0:
        ratio = trust_coefficient * norm(p) / (norm(g) + wd * norm(p) + eps)
    d = lr * ratio * (g + wd * p)
    b = s["b"] = momentum * s.get("b", 0.0) + d
    return (p - (d + momentum * b) if nesterov else p - b), ratio


def ftrl(p, g, s, lr, wd, lr_power=-0.5, l1=0.0, l2=0.0, initial_accumulator=0.1):
    a = s.setdefault("a", np.full(p.shape, initial_accumulator))
    z = s.setdefault("z", np.zeros(p.shape))
    out = np.empty_like(p)
    for i in np.ndindex(p.shape):
        new = a[i] + g[i] ** 2
        sigma = (new ** (-lr_power) - a[i] ** (-lr_power)) / lr
        z[i] = z[i] + g[i] - sigma * p[i]
        a[i] = new
        if abs(z[i]) <= l1:
            out[i] = 0.0
        else:
            out[i] = (math.copysign(l1, z[i]) - z[i]) / (a[i] ** (-lr_power) / lr + 2 * l2)
    return out, 1.0


def proximal_adagrad(p, g, s, lr, wd, l1=0.0, l2=0.0, initial_accumulator=0.1):
    a = s.setdefault("a", np.full(p.shape, initial_accumulator))
    out = p.copy()
    for i in np.ndindex(p.shape):
        a[i] += g[i] ** 2
        if a[i] == 0:
            continue
        e = lr / math.sqrt(a[i])
        w = p[i] - e * g[i]
        out[i] = math.copysign(max(abs(w) - e * l1, 0.0) / (1 + e * l2), w)
    return out, 1.0


METHODS = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adamw,
    "RMSprop": rmsprop,
    "Adagrad": adagrad,
    "Lamb": lamb,
    "Lars": lars,
    "LazyAdam": adam,
    "Ftrl": ftrl,
    "ProximalAdagrad": proximal_adagrad,
}


def run_rows(
    method: str, table: Array, updates: list[tuple[Array, Array]], rates: list[float], o: Options
) -> Array:
    """One table with gradients of (row numbers, values): every row is a parameter of its own."""
    p = table.astype(np.float64).copy()
    state: list[dict[str, Any]] = [{} for _ in p]
    for t, ((rows, values), lr) in enumerate(zip(updates, rates, strict=True), start=1):
        summed: dict[int, Array] = {}
        for row, value in zip(rows.tolist(), values, strict=True):
            summed[row] = summed.get(row, 0.0) + value.astype(np.float64)
        if not summed:
            continue
        order = sorted(summed)
        stacked = clip_all({"": np.stack([summed[r] for r in order])}, o.clip)[""]
        for r, clipped in zip(order, stacked, strict=True):
            g = clipped + (o.weight_decay + o.l2_decay) * p[r] + o.l1_decay * np.sign(p[r])
            g = g - g.sum() / g.size if o.centralize else g
            state[r]["t"] = t
            p[r] = METHODS[method](p[r], g, state[r], lr, 0.0, **o.hyper)[0]
    return p
