"""Table of the method chooser: what `thinwire plan` recommends, as Markdown."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from itertools import product
from typing import Any

import thinwire as tw
from benchmarks.common import markdown
from thinwire.tools.planning.plan import Plan, Row

LINKS = {
    "20 Mbit/s, 20 ms": ("20mbit", "20ms"),
    "50 Mbit/s, 20 ms": ("50mbit", "20ms"),
    "100 Mbit/s, 20 ms": ("100mbit", "20ms"),
    "1 Gbit/s, 20 ms": ("1gbit", "20ms"),
    "1 Gbit/s, one switch": ("1gbit", "0ms"),
    "10 Gbit/s, one switch": ("10gbit", "0ms"),
}
"""Rate and latency of a line."""
WORKERS = (2, 4, 8)
MODELS = {
    "1 M, 0.05 s": ("1M", 0.05),
    "124 M, 0.35 s": ("124M", 0.35),
    "1 B, 2 s": ("1B", 2.0),
}
"""Parameters, and seconds of a step without exchange."""
MUON = "Muon"
OPTIMIZERS = {
    MUON: ("dense", "muon-local"),
    "AdamW, SGD, other": ("dense", "quantized-local"),
}
"""Strategies to start with, by the optimizer that the user would take."""
WORTH = 1.05
"""Smallest speed-up for which an answer is not DDP, as in the planner."""


def code(config: Any) -> str:
    """Expression of a config, without the fields that have their defaults."""
    if not is_dataclass(config):
        return repr(config)
    if isinstance(config, tw.Quantized) and config == tw.Quantized(config.value_bits):
        return f"tw.Quantized({config.value_bits})"
    changed = [f.name for f in fields(config) if getattr(config, f.name) != f.default]
    changed.sort(key=lambda name: name != "k_steps")
    inside = [
        ("" if name == "k_steps" else f"{name}=") + code(getattr(config, name)) for name in changed
    ]
    return f"tw.{type(config).__name__}({', '.join(inside)})"


def soonest(rows: Iterable[Row], plan: Plan) -> Row:
    """First row, or dense where that is hardly slower."""
    row = min(rows, key=lambda row: row.time_to_dense_loss)
    return row if row.time_to_dense_loss * WORTH <= 1 else plan["dense"]


def offered(row: Row, optimizer: str) -> bool:
    """Whether a row is for an optimizer, with settings that were measured."""
    return (row.optimizer is None or optimizer == MUON) and row.measured


def answer(row: Row) -> str:
    """Method of a row as code, and its speed-up, as a cell of a table."""
    if row.document:
        method = f"`{code(tw.DistributedStrategy.from_dict(row.document).localsgd)}`"
    else:
        method = {"dense": "DDP", "fp16": "DDP with `fp16_compress_hook`"}[row.strategy]
    return f"{method}: {row.times_sooner} x"


def table() -> str:
    """Answers for every network, model and optimizer."""
    titles = ("link", "workers", "model, step", "optimizer", "start with", "then try")
    rows = []
    for link, workers, model in product(LINKS, WORKERS, MODELS):
        (rate, latency), (params, step_s) = LINKS[link], MODELS[model]
        plan = tw.plan(
            params=params, step_seconds=step_s, workers=workers, link=rate, latency=latency
        )
        for optimizer, names in OPTIMIZERS.items():
            first = soonest(map(plan.__getitem__, names), plan)
            fits = (row for row in plan.strategies if offered(row, optimizer))
            then = soonest(fits, plan)
            rows.append([link, workers, model, optimizer, answer(first), answer(then)])
    return "\n".join(markdown(titles, rows))
