"""Bits and bytes of twelve steps of every method through every frontend, as JSON.

    python -m tests.laws.answers > FILE

`python -m benchmarks.golden` compares those of two states of the library.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch

import thinwire as tw
from tests.laws.frontends import (
    GRADIENTS,
    PARAMETERS,
    Case,
    batches,
    bits_of,
    cross_entropy,
    make_model,
    trained,
)
from tests.laws.test_frontends import CASES, COMPRESSED
from tests.laws.test_matrix import AVERAGING, SENDING
from tests.members.places import met
from tests.ranks import Pool
from tests.strategy.test_pairs import conflicting, some_combinations
from tests.strategy.test_rules import PAIRS
from tests.strategy.training import FIELDS, digest, make_engine, train

STEPS = 12


def engine_steps(rank: int, size: int, fields: tuple[str, ...]) -> tuple[str, int, int]:
    """Bits, bytes and dropped steps of an engine with these fields."""
    engine = make_engine(fields)
    train(engine, fields, 0, STEPS)
    engine.flush()
    stats = engine.stats()
    bits = digest(engine)[:16]
    engine.close()
    return bits, int(stats["bytes_sent"]), int(stats["dropped_steps"])


def two_optimizers(rank: int, size: int, fields: dict[str, Any]) -> tuple[str, int, int]:
    """Bits, bytes and dropped steps of an engine whose matrices and vectors have two optimizers."""
    model = make_model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [tw.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    engine = tw.DistributedStrategy(**fields).prepare(model, optimizers, cross_entropy)
    for x, y in batches(Case(), rank, 0, STEPS):
        engine.train_step(x, y)
    engine.flush()
    stats = engine.stats()
    engine.close()
    return bits_of(model), int(stats["bytes_sent"]), int(stats["dropped_steps"])


def member(rank: int, size: int, address: str, config: tw.LocalSGD) -> tuple[str, int]:
    """Bits after six averagings of members, and their number; a member's data is by its rank."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        tw.join(address, run="golden", start_members=size, timeout=60) as members,
        tw.local_sgd(model, optimizer, config, members=members) as sync,
    ):
        for x, y in batches(Case(), members.rank, 0, 6 * config.k_steps):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return bits_of(model), int(sync.stats()["averagings"])


MEMBERS = {
    "plain": tw.LocalSGD(4, begin_step=0),
    "one bit": tw.LocalSGD(4, begin_step=0, compression=tw.Quantized(1)),
    "sparse, delay": tw.LocalSGD(4, begin_step=0, delay=2, compression=tw.Sparse(0.9)),
}


def jobs() -> dict[str, tuple[Any, tuple[Any, ...], int]]:
    """By name the function that ranks run, its arguments, and the number of ranks."""
    found: dict[str, tuple[Any, tuple[Any, ...], int]] = {}
    for ways, cases in ((GRADIENTS, CASES), (PARAMETERS, {**CASES, **COMPRESSED})):
        for way in ways:
            for name, case in cases.items():
                if way.__name__ != "LocalBlock" or case.nan_at is None:
                    found[f"{way.__name__}, {name}"] = (_trained, (way, case), 2)
    for name, row in {**SENDING, **AVERAGING}.items():
        found[f"row, {name}"] = (_trained, (row.frontend, row.case), row.size)
        at = 9 if row.case.steps > STEPS else 4
        resumed = replace(row.case, resume_at=at)
        found[f"row, resumed, {name}"] = (_trained, (row.frontend, resumed), row.size)
    local = tw.LocalSGD(3, compression=tw.Quantized(1))
    found["two optimizers, dense"] = (two_optimizers, ({},), 2)
    found["two optimizers, local"] = (two_optimizers, ({"localsgd": local},), 2)
    singles = [(), *((name,) for name in FIELDS)]
    for fields in [*singles, *PAIRS, *some_combinations(20)]:
        if not conflicting(fields):
            size = 4 if "pipeline" in fields else 3
            found[f"engine, {' '.join(fields) or 'dense'}"] = (engine_steps, (fields,), size)
    return found


def _trained(rank: int, size: int, way: Any, case: Case) -> tuple[str, int, int]:
    found = trained(rank, size, way, case)
    return found.bits, found.bytes_sent, found.dropped


def measured() -> dict[str, Any]:
    """By name the answer of every rank."""
    pool, found = Pool(), {}
    everything = jobs()
    try:
        for number, (name, (function, given, size)) in enumerate(everything.items(), 1):
            print(f"{number} of {len(everything)}: {name}", file=sys.stderr)
            answers = pool.run(function, *given, size=size, expect_errors=True, timeout_s=300)
            found[name] = [
                list(answer) if isinstance(answer, tuple) else str(answer) for answer in answers
            ]
        for name, config in MEMBERS.items():
            print(f"members, {name}", file=sys.stderr)
            answers = met(pool, member, config, size=3)
            found[f"members, {name}"] = [list(answer) for answer in answers]
    finally:
        pool.close()
    return found


if __name__ == "__main__":
    print(json.dumps(measured(), indent=1))
