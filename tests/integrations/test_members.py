"""Members that join, leave and die while frameworks train: with the real packages."""

from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.integrations.frameworks import losses_of
from tests.integrations.member_loops import (
    EVERY,
    LOOPS,
    STEPS,
    Ended,
    Events,
    adapted,
    member_trainer,
)
from tests.integrations.packages import needs
from tests.integrations.task import equal
from tests.members.places import meeting_place
from tests.ranks import Lost, Pool
from tests.waiting import time_out

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
FRAMEWORKS = [pytest.param(name, marks=needs(name)) for name in LOOPS]


def member(
    rank: int, size: int, address: str, framework: str, folder: Path, founders: int, events: Any
) -> Ended:
    return LOOPS[framework](Events(folder, rank, **events), address, founders)


def trained(
    ranks: Pool, framework: str, folder: Path, size: int, founders: int = 3, **events: Any
) -> list[Any]:
    folder.mkdir()
    options = {"size": size, "group": False, "expect_errors": True, "timeout_s": 150}
    with meeting_place(None) as address:
        return ranks.run(member, address, framework, folder, founders, events, **options)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_dies_and_another_joins(ranks: Pool, tmp_path: Path, framework: str) -> None:
    calm = trained(ranks, framework, tmp_path / "calm", 3)
    found = trained(ranks, framework, tmp_path / "run", 4, killed=0, joins=3)
    [joiner] = found[3:]
    others = [one for one in found if isinstance(one, Ended)]
    assert [isinstance(one, Lost) for one in found].count(True) == 1
    assert len(others) == 3, found
    for run in (calm, others):
        assert all(equal(run[0].parameters, one.parameters) for one in run)
        assert all(one.held_out == run[0].held_out for one in run)
        assert [one.saved for one in run].count(True) == 1
        assert [bool(one.evaluated) for one in run].count(True) == 1
    assert 26 < joiner.entered < STEPS
    assert joiner.steps == [*range(joiner.entered, joiner.steps[-1] + 1)]
    fell, undisturbed_fell = (calm[0].at_first - run[0].held_out for run in (others, calm))
    assert fell > 0.8 * undisturbed_fell
    # the first one evaluates; after its death the next one
    (undisturbed,) = (one.evaluated for one in calm if one.saved)
    (second,) = (one.evaluated for one in others if one.saved)
    assert undisturbed == [*range(EVERY, STEPS + 1, EVERY)]
    assert second == [*range(2 * EVERY, STEPS + 1, EVERY)]
    print("LOSS", framework, calm[0].at_first, calm[0].held_out, others[0].held_out, joiner.entered)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_leaves_and_the_others_train_on(ranks: Pool, tmp_path: Path, framework: str) -> None:
    found = trained(ranks, framework, tmp_path / "run", 3, leaves=0)
    assert all(isinstance(one, Ended) for one in found), found
    [left] = (one for one in found if one.steps[-1] < STEPS - EVERY)
    first, second = (one for one in found if one is not left)
    assert equal(first.parameters, second.parameters)
    assert left.evaluated == [*range(EVERY, 30, EVERY)] and not left.saved
    assert sorted([first.saved, second.saved]) == [False, True]
    assert sorted([*first.evaluated, *second.evaluated]) == [*range(3 * EVERY, STEPS + 1, EVERY)]


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "late, and one is away": (3, {"away": 1, "timeout_s": time_out(2.0)}),
    "parts, and a joiner has a checkpoint": (2, {"joins": 2, "loads": True}),
}
CONFIGS = {
    "late": tw.LocalSGD(4, begin_step=0, delay=2),
    "parts": tw.LocalSGD(4, begin_step=0, fragments=2, compression=tw.Quantized(4)),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_members_end_alike(ranks: Pool, tmp_path: Path, framework: str, name: str) -> None:
    founders, events = RUNS[name]
    strategy = tw.DistributedStrategy(localsgd=CONFIGS[name.partition(",")[0]])
    found = trained(ranks, framework, tmp_path / "run", 3, founders, strategy=strategy, **events)
    assert all(isinstance(one, Ended) for one in found), found
    late = found[events.get("away", 2)]
    for one in found:
        assert equal(one.parameters, found[0].parameters)
        assert one.steps == sorted({*one.steps}) and one.steps[-1] <= STEPS
        assert one.held_out < one.at_first
    assert [one.saved for one in found].count(True) == 1
    if "away" in events:
        jumps = [b - a for a, b in zip(late.steps, late.steps[1:], strict=False)]
        assert sum(jump > 1 for jump in jumps) == 1
    else:
        assert 26 < late.steps[0] < STEPS
    evaluated = sorted(step for one in found for step in one.evaluated)
    assert evaluated == [*range(EVERY, STEPS + 1, EVERY)]


def alone(rank: int, size: int, address: str, arguments: dict[str, Any], folder: Path) -> None:
    with tw.join(address, run="test", **arguments.pop("join", {})) as members:
        member_trainer(members, folder, **arguments).train()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"max_steps": -1}, "set max_steps"),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, "set 'steps'"),
        ({"load_best_model_at_end": True}, "choose among the checkpoints"),
        ({"metric_for_best_model": "loss"}, "choose among the checkpoints"),
        ({"eval_on_start": True}, "call evaluate"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau"),
        ({"train_sampling_strategy": "group_by_length"}, "set 'random'"),
        ({"join": {"keep_batch": True}}, "keep_batch=True"),
        (
            {"strategy": tw.DistributedStrategy(localsgd=tw.LocalSGD(4, round_seconds=1.0))},
            "round_seconds",
        ),
        ({"strategy": tw.DistributedStrategy(dgc=tw.DGC())}, "needs localsgd"),
    ],
    ids=str,
)
@needs("transformers")
def test_settings_that_do_not_go_with_members_are_refused(
    tmp_path: Path, arguments: dict[str, Any], advice: str
) -> None:
    with meeting_place(None) as address, pytest.raises(tw.StrategyError, match=advice):
        alone(0, 1, address, dict(arguments), tmp_path)


def resumed(rank: int, size: int, address: str, folder: Path, start: str | None) -> Any:
    with Events(folder, rank).run(address, 2) as members:
        steps = STEPS if start else 2 * EVERY
        trainer = member_trainer(members, folder, adapted(rank), max_steps=steps)
        trainer.train(resume_from_checkpoint=start)
        [sampler] = members._member._samplers
    parameters = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    return trainer.state.global_step, losses_of(trainer), parameters, sampler.epoch


@needs("transformers")
@needs("peft")
def test_a_run_is_started_again_from_a_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    options = {"size": 2, "group": False, "timeout_s": 150}
    with meeting_place(None) as address:
        before = ranks.run(resumed, address, tmp_path, None, **options)
    start = str(tmp_path / f"checkpoint-{2 * EVERY}")
    with meeting_place(None) as address:
        after = ranks.run(resumed, address, tmp_path, start, **options)
    for step, losses, _, epoch in after:
        assert (step, len(losses)) == (STEPS, STEPS)  # with those of the checkpoint
        assert epoch > before[0][3] > 0
    assert equal(after[0][2], after[1][2])
