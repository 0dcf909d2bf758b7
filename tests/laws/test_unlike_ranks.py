"""A setting that one rank has otherwise is a mismatch on all, in words that name it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import thinwire as tw
from tests.laws.frontends import Case, Frontend, LocalBlock, LocalEngine, OwnStep, WithEngine
from tests.ranks import Pool

ENGINE = (WithEngine,)
COMPRESSED = (OwnStep, WithEngine)
LOCAL = (LocalBlock, LocalEngine)
ALL = (OwnStep, WithEngine, LocalBlock)


@dataclass(frozen=True)
class Unlike:
    ways: tuple[type[Frontend], ...]
    case: Callable[[int], Case]
    """By rank."""
    says: list[str]


def averaged(*compressions: Any) -> Callable[[int], Case]:
    """Local updates with a compression of each rank."""
    return lambda rank: Case(local=tw.LocalSGD(2, compression=compressions[rank]))


def excluding(patterns: Any) -> Callable[..., Any]:
    return lambda params: tw.optim.SGD(
        params, 0.1, weight_decay=0.1, exclude_from_weight_decay=patterns
    )


def plain(**settings: Any) -> Case:
    return Case(fields={}, **settings)


UNLIKE: dict[str, Unlike] = {
    "time-out": Unlike(
        ALL,
        lambda rank: Case(options={"timeout": 300 + rank}),
        ["timeout in seconds", "300", "301"],
    ),
    "nodes": Unlike(
        ALL,
        lambda rank: Case(dgc={"node_size": 1 + rank}, local=tw.LocalSGD(2, node_size=1 + rank)),
        ["node_size differs: rank 0 has 1, rank 1 has 2"],
    ),
    "unused parameters": Unlike(
        ENGINE,
        lambda rank: plain(options={"find_unused_parameters": rank == 1}),
        ["find_unused_parameters"],
    ),
    "microsteps": Unlike(
        ENGINE, lambda rank: Case(merge=2 + rank), ["gradient_merge.k_steps", "2", "3", "rank 1"]
    ),
    "fields": Unlike(
        ENGINE, lambda rank: Case(fields={"dgc": tw.DGC()} if rank else {}), ["strategy", "rank 1"]
    ),
    "rate": Unlike(ENGINE, lambda rank: plain(lr=0.1 * (1 + rank)), ["lr", "0.1", "0.2"]),
    "clipping of prepare": Unlike(
        ENGINE,
        lambda rank: plain(options={"grad_clip": tw.ClipByGlobalNorm(1.0 + rank)}),
        ["grad_clip", "c=1.0", "c=2.0"],
    ),
    "sparsity": Unlike(
        COMPRESSED,
        lambda rank: Case(dgc={"sparsity": (0.75 - 0.25 * rank,)}),
        ["sparsity", "0.75", "0.5"],
    ),
    "bits of gradients": Unlike(
        COMPRESSED, lambda rank: Case(dgc={"value_bits": 1 + 7 * rank}), ["value_bits", "1", "8"]
    ),
    "type of state": Unlike(
        COMPRESSED,
        lambda rank: Case(dgc={"state_dtype": "bfloat16"} if rank else {}),
        ["state_dtype", "bfloat16"],
    ),
    "clipping of dgc": Unlike(
        COMPRESSED,
        lambda rank: Case(clip=tw.optim.ClipByNorm(2.0) if rank else None),
        ["grad_clip", "None", "c=2.0"],
    ),
    "clipping": Unlike(
        ENGINE,
        lambda rank: plain(clip=tw.optim.ClipByNorm(1.0 + rank)),
        ["grad_clip", "c=1.0", "c=2.0"],
    ),
    "clipping on one": Unlike(
        ENGINE,
        lambda rank: plain(clip=tw.optim.ClipByValue(1.0) if rank else None),
        ["grad_clip", "None", "ClipByValue"],
    ),
    "exclusion": Unlike(
        ENGINE,
        lambda rank: plain(optimizer=excluding(("*.bias",) if rank else None)),
        ["excluded from weight decay", "bias"],
    ),
    "schedule": Unlike(
        COMPRESSED,
        lambda rank: Case(lr=tw.schedules.CosineDecay(0.0, 0.1, 100 + rank)),
        ["schedule", "decay_steps=100", "decay_steps=101"],
    ),
    "table": Unlike(
        ENGINE,
        lambda rank: plain(lr=[0.1] * 50 + [0.2 + rank] + [0.1] * 9),
        ["values of the schedule"],
    ),
    "number or table": Unlike(
        ENGINE, lambda rank: plain(lr=[0.1] * 5 if rank else 0.1), ["schedule", "None", "Table"]
    ),
    "interval": Unlike(
        LOCAL,
        lambda rank: Case(local=tw.LocalSGD(2 + rank)),
        ["k_steps differs: rank 0 has 2, rank 1 has 3"],
    ),
    "kind of compression": Unlike(
        (LocalBlock,),
        averaged(tw.Sparse(0.5), tw.Quantized()),
        ["compression differs: rank 0 has 'Sparse', rank 1 has 'Quantized'"],
    ),
    "compression on one": Unlike(LOCAL, averaged(None, tw.Quantized()), ["compression"]),
    "bits": Unlike(
        LOCAL,
        averaged(tw.Quantized(4), tw.Quantized(8)),
        ["value_bits differs: rank 0 has 4, rank 1 has 8"],
    ),
    "means": Unlike(
        LOCAL,
        averaged(tw.Sparse(0.5), tw.Sparse(0.5, mean_over="all")),
        ["mean_over differs: rank 0 has 'senders', rank 1 has 'all'"],
    ),
}


def started(rank: int, size: int, name: str, way: type[Frontend]) -> None:
    way(UNLIKE[name].case(rank)).train(rank, 0, 1)


@pytest.mark.fault("another setting on one rank")
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, unlike in UNLIKE.items() for way in unlike.ways]
)
def test_setting_of_one_rank_is_a_mismatch(ranks: Pool, name: str, way: type[Frontend]) -> None:
    ranks.raise_alike("Mismatch", UNLIKE[name].says, started, name, way)


def of_three(rank: int, size: int, way: type[Frontend]) -> None:
    way(Case(dgc={"node_size": 3}, local=tw.LocalSGD(2, node_size=3))).train(rank, 0, 1)


@pytest.mark.fault
@pytest.mark.parametrize("way", ALL)
def test_sizes_of_nodes_that_do_not_divide_are_refused(ranks: Pool, way: type[Frontend]) -> None:
    says = "node_size=3 does not divide the 4 ranks"
    ranks.raise_alike("ValueError", says, of_three, way, size=4)
