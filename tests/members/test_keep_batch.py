"""Engines of members; with `keep_batch` an update takes equally many microbatches of any number."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import thinwire as tw
from tests.members.places import met
from tests.members.training import MOST_STEPS, TIMEOUT_S, model, wait_for
from tests.ranks import Pool
from tests.toys import engine_of

SPARSE = tw.LocalSGD(2, begin_step=1, compression=tw.Sparse(0.9))


def trained(rank: int, size: int, address: str, folder: str, keep: bool, merged: int) -> Any:
    """Seen by one of four members, of whom two leave and are replaced; or of those that resume."""
    flag, lines = f"{folder}/go", list[tuple[Any, ...]]()
    log = patch.object(logging.getLogger("thinwire"), "info", lambda *line: lines.append(line))
    wait_for(flag if rank >= 4 else "")
    fields = {"localsgd": SPARSE, "amp": tw.AMP(dtype="bfloat16")}
    if merged > 1:
        fields["gradient_merge"] = tw.GradientMerge(merged)
    options = {"start_members": min(size, 4), "timeout": TIMEOUT_S, "keep_batch": keep}
    net, seen, calls = model(rank), list[tuple[int, int, float]](), 0
    with log, tw.join(address, run="test", **options) as members:
        engine = engine_of(net, options={"members": members}, **fields)
        loaded = None if rank >= 4 else engine.load(folder, if_any=True)
        first, end = engine.stats(), members.step + 8 if loaded else MOST_STEPS
        begun = members.step
        while members.step < end and not members.left:
            x, step = torch.randn(8, 24), members.step
            engine.train_step(x, x.roll(1, 1))
            calls += 1
            if members.step == step or not engine.sync or not engine.sync.synced or members.left:
                continue
            now = engine.stats()
            seen.append((members.size, int(now["merge_steps"]), now["batch_share"]))
            if size == 6 and members.step == 5 and rank >= 2:
                members.leave()
            if rank == 0 and members.size == 2:
                Path(flag).touch()
            if Path(flag).exists() and members.size == 4:
                end = min(end, members.step + 4)
        engine.flush()
        if rank == 0:
            engine.save(folder)
        engine.close()
        # batch norm has a count of its batches, which no averaging touches
        state = {name: value.sum().item() for name, value in net.state_dict().items()}
    return seen, (begun, first["merge_steps"], first["batch_share"]), lines, calls, state


@pytest.mark.parametrize(
    ("keep", "merged"),
    [(True, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, 1), (False, 1)))],
)
def test_batch_stays_or_is_reported(ranks: Pool, tmp_path: Path, keep: bool, merged: int) -> None:
    found = met(ranks, trained, str(tmp_path), keep, merged, size=6)
    of_two, of_three = (2 * merged, -(-4 * merged // 3)) if keep else (merged, merged)
    share = of_three * 3 / (4 * merged)
    assert found[0][4] == found[1][4] == found[4][4] == found[5][4]
    for seen, _, lines, *_ in found[:2]:
        assert seen[0] == seen[-1] == (4, merged, 1.0)
        assert (2, of_two, of_two / (2 * merged)) in seen
        assert (2, 4, of_two, of_two / (2 * merged)) in [line[1:] for line in lines]
    for seen, (entered, *_, entered_share), *_ in found[4:]:
        assert entered > 1
        assert seen[-1] == (4, merged, 1.0)
        assert entered_share in (1.0, share)  # they may join in two rounds
    for seen, (_, *first), _, calls, _ in met(ranks, trained, str(tmp_path), keep, merged, size=3):
        assert {*seen, (3, *first)} == {(3, of_three, share)}
        assert calls == 8 * of_three


def refused(rank: int, size: int, address: str) -> list[str]:
    """Errors of a loop or a sum with `keep_batch`, of a member without it, and of a mean loss."""
    with tw.join(address, run="t", timeout=TIMEOUT_S, keep_batch=True) as members:
        net = torch.nn.Linear(8, 8)
        fields = {"localsgd": SPARSE, "gradient_merge": tw.GradientMerge(2, avg=False)}
        sync = tw.local_sgd(net, torch.optim.SGD(net.parameters(), 0.1), SPARSE, members=members)
        with pytest.raises(tw.errors.Mismatch) as other, tw.join(address, run="t"):
            pass
        with pytest.raises(ValueError) as loop:
            sync.__enter__()
        with pytest.raises(tw.StrategyError) as added:
            engine_of(net, options={"members": members}, **fields)
        engine = engine_of(net, options={"members": members}, localsgd=SPARSE)
        with pytest.raises(RuntimeError) as mean:
            engine.mean_loss(torch.tensor(1.0))
        engine.close()
        return [str(each.value) for each in (loop, added, other, mean)]


def test_calls_that_do_not_go_with_members_are_refused(ranks: Pool) -> None:
    ((loop, added, other, mean),) = met(ranks, refused, size=1)
    assert "prepare(..., members=members)" in loop
    assert "GradientMerge(avg=True)" in added
    assert "keep_batch is" in other
    assert "does not work with members" in mean
