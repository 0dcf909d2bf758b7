"""Rounds that end by time, at sites that make unequal numbers of steps."""

from typing import Any

import pytest
from torch import Tensor

import thinwire as tw
from tests.local.rounds import rounds_of
from tests.ranks import Pool
from tests.sharded.models import same, site_of, whole_values
from tests.sharded.test_equal_to_whole import adamw, loss_of, setting

STEPS = (3, 1)
"""That each site makes in a round."""
TOKENS = (5, 40)
CONFIGS = {
    "plain": tw.LocalSGD(50, begin_step=0, round_seconds=1e9),
    "one bit": tw.LocalSGD(50, begin_step=0, round_seconds=1e9, compression=tw.Quantized(1)),
    "fragments": tw.LocalSGD(50, begin_step=0, round_seconds=1e9, fragments=2, delay=2),
}


def rounds(
    rank: int, size: int, name: str, tokens: bool, by_engine: bool
) -> tuple[dict[str, Tensor], int]:
    mesh, model = setting(size)
    site = site_of(mesh)
    optimizer, config = adamw(model), CONFIGS[name]
    # the second rank of a site would end its rounds at other steps, and does not
    own = STEPS[site] if size == 2 or rank % 2 == 0 else 7
    told = TOKENS[site] // (size // 2) + (site == 0 and size == 4 and rank == 1)
    with rounds_of(own):
        if by_engine:
            engine = tw.DistributedStrategy(localsgd=config).prepare(model, optimizer, mesh=mesh)
            sync: Any = engine.sync
            for step in range(4 * STEPS[site]):
                engine.minimize(loss_of(model, site, step), tokens=told if tokens else None)
            engine.flush()
            return whole_values(model), sync.step
        with tw.local_sgd(model, optimizer, config, mesh=mesh) as sync:
            for step in range(4 * STEPS[site]):
                optimizer.zero_grad()
                loss_of(model, site, step).backward()
                sync.observe(0.0, tokens=told if tokens else None)
                optimizer.step()
                assert sync.synced == ((step + 1) % STEPS[site] == 0)
        return whole_values(model), sync.step


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("plain", False), ("one bit", False), ("plain", True), ("fragments", False)],
)
def test_sites_count_by_their_steps(ranks: Pool, name: str, tokens: bool, by_engine: bool) -> None:
    whole = ranks.run(rounds, name, tokens, by_engine, size=2)
    sharded = ranks.run(rounds, name, tokens, by_engine, size=4)
    assert [step for _, step in [*whole, *sharded]] == [4 * max(STEPS)] * 6
    for values, _ in sharded:
        same(values, whole[0][0])
