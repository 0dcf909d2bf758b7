"""With `keep_batch` an update takes equally many microbatches, however many members there are."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests.members.places import met
from tests.members.training import MOST_STEPS, TIMEOUT_S, wait_for
from tests.ranks import Pool, Raised
from tests.toys import engine_of

Seen = list[tuple[int, int, float]]
"""After each round: members, microbatches of each in an update, share of the first batch."""


def trained(
    rank: int, size: int, address: str, folder: str, options: dict[str, Any], fields: dict[str, Any]
) -> Any:
    """Seen by one of four members, of whom two leave and are replaced; or of those that resume."""
    flag, lines = f"{folder}/go", list[tuple[Any, ...]]()
    told = patch.object(logging.getLogger("thinwire"), "info", lambda *line: lines.append(line))
    wait_for(flag if rank >= 4 else "")
    torch.manual_seed(rank)
    net, seen, calls = torch.nn.Linear(8, 8), Seen(), 0
    options = {"start_members": min(size, 4), "timeout": TIMEOUT_S, **options}
    with told, tw.join(address, run="test", **options) as members:
        local = tw.LocalSGD(2, begin_step=0)
        engine = engine_of(net, localsgd=local, told={"members": members}, **fields)
        loaded = None if rank >= 4 else engine.load(folder, if_any=True)
        first, end = engine.stats(), members.step + 8 if loaded else MOST_STEPS
        while members.step < end and not members.left:
            x, step = torch.randn(4, 8), members.step
            engine.train_step(x, x)
            calls += 1
            if members.step == step or not engine.sync or not engine.sync.synced or members.left:
                continue
            now = engine.stats()
            seen.append((members.size, int(now["merge_steps"]), now["batch_share"]))
            if size == 6 and members.step == 4 and rank >= 2:
                members.leave()
            if rank == 0 and members.size == 2:
                Path(flag).touch()
            if Path(flag).exists() and members.size == 4:
                end = min(end, members.step + 4)
        if rank == 0:
            engine.save(folder)
        engine.close()
    return seen, (int(first["merge_steps"]), first["batch_share"]), lines, calls


@pytest.mark.parametrize(
    ("keep", "merged"),
    [(True, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, 3), (False, 1)))],
)
def test_batch_of_members_that_leave_and_join_stays_or_its_share_is_told(
    ranks: Pool, tmp_path: Path, keep: bool, merged: int
) -> None:
    fields = {"gradient_merge": tw.GradientMerge(merged)} if merged > 1 else {}
    common = str(tmp_path), {"keep_batch": keep}, fields
    found = met(ranks, trained, *common, size=6)
    more, share = (2 * merged, 1.0) if keep else (merged, 0.5)
    for rank in (0, 1):
        assert (2, more, share) in found[rank][0]
        assert found[rank][0][0] == found[rank][0][-1] == (4, merged, 1.0)
        assert (2, 4, more, share) in [line[1:] for line in found[rank][2]]
    for joiner in found[4:]:
        assert joiner[0][-1] == (4, merged, 1.0)
        assert joiner[1][1] in (1.0, 1.5 if keep else 0.75)  # they may join in two rounds
    resumed = met(ranks, trained, *common, size=3)
    fewer = -(-4 * merged // 3) if keep else merged
    for seen, first, _, calls in resumed:
        assert {*seen} == {(3, fewer, fewer * 3 / (4 * merged))}
        assert first == (fewer, fewer * 3 / (4 * merged))
        assert calls == 8 * fewer


def other(rank: int, size: int, address: str) -> str:
    with tw.join(address, run="t", timeout=TIMEOUT_S, keep_batch=bool(rank)):
        return ""


def test_members_that_differ_in_keep_batch_are_refused(ranks: Pool) -> None:
    refused = [one for one in met(ranks, other, size=2, errors=True) if isinstance(one, Raised)]
    assert [one.type_name for one in refused] == ["Mismatch"]
    assert "keep_batch" in refused[0].text


def without_microbatches(rank: int, size: int, address: str) -> list[str]:
    with tw.join(address, run="t", timeout=TIMEOUT_S, keep_batch=True) as members:
        net, config = torch.nn.Linear(8, 8), tw.LocalSGD(2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        fields = {"localsgd": config, "gradient_merge": tw.GradientMerge(2, avg=False)}
        told = {"members": members}
        with pytest.raises(ValueError) as loop:
            tw.local_sgd(net, optimizer, config, members=members).__enter__()
        with pytest.raises(tw.StrategyError) as added:
            engine_of(net, told=told, **fields)
        return [str(loop.value), str(added.value)]


def test_keep_batch_without_an_engine_or_with_a_sum_of_gradients_is_refused(ranks: Pool) -> None:
    ((loop, added),) = met(ranks, without_microbatches, size=1)
    assert "prepare(..., members=members)" in loop
    assert "GradientMerge(avg=True)" in added
