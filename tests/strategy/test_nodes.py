"""Ranks of a node that see the same data are, bit for bit, one rank in its place."""

import warnings
from typing import Any

import pytest

import thinwire as tw
from tests.ranks import Pool
from tests.strategy.training import batch, digest, make_engine


def trained(
    rank: int, size: int, fields: tuple[str, ...], options: dict[str, Any], alike: int
) -> dict[str, Any]:
    """Replicas in groups of `alike` see the same mini-batches."""
    warnings.filterwarnings("ignore", message="the gradients of all ranks are equal")
    dgc = tw.DGC(rampup_begin_step=1, sparsity=(0.75, 0.9), rampup_step=4, min_numel=64, **options)
    engine = make_engine(fields, replace={"dgc": dgc}, plain=True)
    replica = rank // 2 if "pipeline" in fields else rank
    losses = [engine.train_step(*batch(step, replica // alike)).item() for step in range(10)]
    engine.flush()
    found = {"losses": losses, "digest": digest(engine), "stats": engine.stats()}
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "split"])
@pytest.mark.parametrize(
    "fields",
    [
        ("dgc",),
        ("amp", "gradient_merge", "dgc"),
        ("recompute", "dgc", "lars"),
        ("dgc", "lamb"),
        ("pipeline", "dgc"),
    ],
    ids="-".join,
)
def test_a_node_of_two_is_one_rank_with_their_data(
    ranks: Pool, fields: tuple[str, ...], exchange: str
) -> None:
    """The mean of two equal gradients is exact, so nothing but the grouping differs."""
    in_nodes = ranks.run(trained, fields, {"node_size": 2, "exchange": exchange}, 2, size=4)
    single = ranks.run(trained, fields, {"node_size": 1, "exchange": exchange}, 1, size=2)
    for rank, answer in enumerate(in_nodes):
        twin = single[rank % 2 if "pipeline" in fields else rank // 2]
        assert answer["losses"] == twin["losses"]
        assert answer["digest"] == twin["digest"]
        assert answer["stats"]["step"] == twin["stats"]["step"]
