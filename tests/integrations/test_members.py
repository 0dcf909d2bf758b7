"""Members that join, leave and die while frameworks train: with the real packages."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.integrations.frameworks import PIECES, losses_of
from tests.integrations.member_loops import LOOPS, Ended, Events, own_warnings
from tests.integrations.member_trainers import EVERY, STEPS, TRAINERS, falling
from tests.integrations.packages import needs
from tests.integrations.task import BATCH, equal
from tests.members.places import meeting_place, met
from tests.ranks import Lost, Pool, Raised
from tests.waiting import time_out

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(240)]
FRAMEWORKS = [pytest.param(name, marks=needs(name)) for name in LOOPS]
WITH_TRAINERS = [pytest.param(name, marks=needs(name)) for name in TRAINERS]


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
    assert len(others) == 3, [getattr(one, "traceback", "") for one in found]
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


def early_stopping() -> list[Any]:
    from lightning.pytorch.callbacks import EarlyStopping

    return [EarlyStopping("held_out")]


def early_stopping_of_transformers() -> list[Any]:
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback()]


EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"join": {"keep_batch": True}}, "keep_batch=True"),
    (
        {"strategy": tw.DistributedStrategy(localsgd=tw.LocalSGD(4, round_seconds=1.0))},
        "round_seconds",
    ),
    ({"strategy": tw.DistributedStrategy(dgc=tw.DGC())}, "needs localsgd"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "transformers": [
        *EVERYWHERE,
        ({"max_steps": -1}, "set max_steps"),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, "set 'steps'"),
        ({"callbacks": early_stopping_of_transformers}, "EarlyStoppingCallback"),
        ({"eval_on_start": True}, "call evaluate"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau"),
        ({"train_sampling_strategy": "group_by_length"}, "set 'random'"),
    ],
    "lightning": [
        *EVERYWHERE,
        ({"max_steps": -1, "max_epochs": 2}, "set max_steps"),
        ({"max_epochs": 2}, "max_epochs, since members share an epoch"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval"),
        ({"callbacks": early_stopping}, "early stopping"),
        ({"make": lambda: partial(falling, interval="epoch")}, "schedules by epochs"),
        ({"make": lambda: partial(falling, frequency=2)}, "every few steps"),
        ({"form": "ddp"}, "UnwrappedDDP"),
    ],
}


def refused(
    rank: int, size: int, address: str, folder: Path, framework: str
) -> list[tuple[bool, str]]:
    """By row, whether all is as before, and the error."""
    found = []
    for number, (arguments, _) in enumerate(REFUSED[framework]):
        given = {name: make() if callable(make) else make for name, make in arguments.items()}
        join = given.pop("join", {})
        with own_warnings(), tw.join(address, run=f"row{number}", **join) as members:
            made = TRAINERS[framework](members, folder, **given)
            before = made.facts()
            with pytest.raises(ValueError) as raised:
                made.train(None)
            found.append((made.facts() == before, f"{raised.type.__name__}: {raised.value}"))
    return found


@pytest.mark.parametrize("framework", WITH_TRAINERS)
def test_settings_that_do_not_go_with_members_are_refused(
    ranks: Pool, tmp_path: Path, framework: str
) -> None:
    [found] = met(ranks, refused, tmp_path, framework, size=1)
    for (as_before, text), (_, advice) in zip(found, REFUSED[framework], strict=True):
        assert advice in text
        assert as_before, text


def with_the_best(rank: int, size: int, address: str, folder: Path) -> tuple[list[float], float]:
    """The losses that this member has evaluated, and that of its model in the end."""
    worst = {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 2}
    with Events(folder, rank).run(address, 2) as members:
        made = TRAINERS["transformers"](members, folder, rank, **worst)
        made.train(None)
        log = [*made.trainer.state.log_history]
        evaluated = [line["eval_loss"] for line in log if "eval_loss" in line]
        return evaluated, made.trainer.evaluate()["eval_loss"]


@needs("transformers")
@needs("peft")
def test_the_first_member_ends_with_the_best_model(ranks: Pool, tmp_path: Path) -> None:
    """The best is that of the highest loss here; the other one ends with the last model."""
    [(_, last), (evaluated, best)] = sorted(met(ranks, with_the_best, tmp_path, size=2))
    assert len(evaluated) == STEPS // EVERY
    assert best == pytest.approx(max(evaluated))
    assert last == pytest.approx(evaluated[-1])


def unequal(rank: int, size: int, address: str, folder: Path, framework: str) -> int:
    with Events(folder, rank).run(address, 2) as members:
        TRAINERS[framework](members, folder, max_steps=EVERY * (rank + 1)).train(None)
        return members.step


@pytest.mark.parametrize("framework", WITH_TRAINERS)
def test_other_max_steps_are_an_error_of_one(ranks: Pool, tmp_path: Path, framework: str) -> None:
    found = met(ranks, unequal, tmp_path, framework, size=2, errors=True)
    [refused] = [rank for rank, one in enumerate(found) if isinstance(one, Raised)]
    assert found[refused].type_name == "Mismatch"
    assert all(part in found[refused].text for part in ("max_steps", "12", "24")), found[refused]
    assert found[1 - refused] == EVERY * (2 - refused)


def resumed(
    rank: int, size: int, address: str, folder: Path, framework: str, start: str | None
) -> Any:
    with Events(folder, rank).run(address, 2) as members:
        steps = STEPS if start else EVERY
        made = TRAINERS[framework](members, folder, rank, max_steps=steps)
        made.train(start)
        [sampler] = members._member._samplers
    losses = getattr(made.model, "losses", None) or losses_of(made.trainer)
    state = sampler.state_dict()
    left = state["length"] - state["dealt"] - len(state["dealt_beyond"]) + len(state["left_before"])
    taken = (state["epoch"] + 1) * state["length"] - left
    return len(losses), taken, made.parameters()


@pytest.mark.parametrize("framework", WITH_TRAINERS)
@needs("peft")
def test_a_run_is_started_again_in_mid_epoch(ranks: Pool, tmp_path: Path, framework: str) -> None:
    met(ranks, resumed, tmp_path, framework, None, size=2)
    start = {"lightning": f"step={EVERY}.ckpt", "transformers": f"checkpoint-{EVERY}"}[framework]
    after = met(ranks, resumed, tmp_path, framework, str(tmp_path / start), size=2)
    assert equal(after[0][2], after[1][2])
    for made, taken, _ in after:
        if framework == "lightning":  # whose users save their samplers
            assert (made, taken) == (STEPS - EVERY, (STEPS - EVERY) * 2 * BATCH)
        else:  # with the log of the checkpoint; Accelerate draws a batch ahead in each epoch
            assert made == STEPS
            assert 0 <= taken - STEPS * 2 * PIECES <= 3 * 2 * PIECES


def again(rank: int, size: int, address: str, folder: Path, framework: str) -> Any:
    """A training that fails, one that ends, and one of another Trainer with the same arguments."""
    failing = [True]

    def stepped(step: int, _: float) -> None:
        if step == 10 and failing:
            failing.clear()
            raise ZeroDivisionError

    given = {"publish": {"where": str(folder / "versions"), "shared": True, "replace": True}}
    with Events(folder, rank).run(address, 2) as members:
        make = partial(TRAINERS[framework], members, folder, rank, stepped)
        made = make(**given if framework == "transformers" else {})
        found, before = [], made.facts()
        with pytest.raises(ZeroDivisionError):
            made.train(None)
        assert made.facts() == before
        made.train(None)
        assert made.facts() == before
        found.append(made.parameters())
        if framework == "transformers":
            made.train(None)
            assert made.facts() == before
            found.append(made.parameters())
        another = make(**{"args": made.trainer.args} if framework == "transformers" else {})
        another.train(None)
        found.append(another.parameters())
        named = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    return found, named


@pytest.mark.parametrize("framework", WITH_TRAINERS)
@needs("peft")
def test_a_training_leaves_all_as_it_was(ranks: Pool, tmp_path: Path, framework: str) -> None:
    (one, named), (other, _) = met(ranks, again, tmp_path, framework, size=2)
    assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    if framework == "transformers":
        version = tw.follow(tmp_path / "versions").latest()
        assert version.step == STEPS
        published = version.state_dict()
        assert all(torch.equal(published[name], p) for name, p in named.items())
