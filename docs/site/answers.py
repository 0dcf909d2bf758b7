"""Table of the method chooser: what `thinwire plan` recommends, as Markdown."""

import re
from collections.abc import Iterable
from itertools import product

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


def soonest(rows: Iterable[Row], plan: Plan) -> Row:
    """Best row at the pessimistic end, or dense where that is hardly slower."""
    row, dense = min(rows, key=lambda row: row.time_at_worst), plan["dense"]
    return row if row.time_at_worst * WORTH <= dense.time_at_worst else dense


def offered(row: Row, optimizer: str) -> bool:
    """Whether a row is for an optimizer."""
    return row.reaches_dense_loss and (row.optimizer is None or optimizer == MUON)


def answer(row: Row) -> str:
    """Method of a row as code, and its speed-up, as a cell of a table."""
    if row.document:
        method = "`" + re.sub(r"\b(?=[A-Z][A-Za-z]*\()", "tw.", row.python) + "`"
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
