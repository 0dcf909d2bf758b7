"""What one stage of a pipeline cannot apply, no stage applies."""

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import thinwire as tw
from tests.api import Grid, Group, PipelineRunner, take_clip_
from tests.ranks import Pool, Raised
from tests.strategy.training import flat

STEPS, BAD = 4, 2
FIELDS: list[dict[str, Any]] = [
    {},
    {"amp": tw.AMP(loss_scale=tw.FixedLossScale(8.0))},
    {"dgc": tw.DGC(sparsity=(0.5,), min_numel=4)},
    {"amp": tw.AMP(), "dgc": tw.DGC(sparsity=(0.5,), min_numel=4)},
    {"low_rank": tw.LowRank(rank=1, begin_step=1, min_numel=4)},
]


class Branch(nn.Module):
    """Has a gradient for its second layer where that is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if self.both else self.first(x)


def prepared(clip: Any = None, **fields: Any) -> tw.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(Branch(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = tw.DistributedStrategy(pipeline=tw.Pipeline(2, 2, split_points=("1",)), **fields)
    return strategy.prepare(model, optimizer, mse_loss, grad_clip=clip)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank // 2)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def partial_gradients(rank: int, size: int, fields: dict[str, Any]) -> tuple[str, list[float]]:
    """What was raised at one step, and the parameters after further ones."""
    engine, told = prepared(**fields), ""
    for step in range(STEPS):
        if rank == 2:
            engine.model[0].both = step != BAD
        before = flat(engine.model)
        try:
            engine.train_step(*batch(step, rank))
        except tw.errors.Mismatch as error:
            told += str(error)
            assert step == BAD
            assert flat(engine.model) == before
        else:
            assert step != BAD
            assert flat(engine.model) != before
    assert engine.step == STEPS - 1
    return told, flat(engine.model)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields) or "dense")
def test_failed_exchange_of_a_stage_applies_nowhere(ranks: Pool, fields: dict[str, Any]) -> None:
    answers = ranks.run(partial_gradients, fields, size=4)
    told = {text for text, _ in answers}
    assert len(told) == 1
    (text,) = told
    assert "parameter 0.second.weight has a gradient on ranks [0] but none on ranks [2]" in text
    for one, other in ((0, 2), (1, 3)):
        assert answers[one][1] == answers[other][1]


def unlike_stages(rank: int, size: int, case: str) -> tuple[int, list[float]]:
    """Steps of a model whose stages become steady at different times, or never."""
    torch.manual_seed(0)
    model = nn.Sequential(Branch(), nn.Linear(4, 4))
    if case == "frozen":
        model[0].requires_grad_(False)
    if case == "row-sparse":
        model[0] = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True, mode="sum"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    strategy = tw.DistributedStrategy(pipeline=tw.Pipeline(2, 2, split_points=("1",)))
    engine = strategy.prepare(model, optimizer, mse_loss, find_unused_parameters=case == "seldom")
    for step in range(7):
        x, y = batch(step, rank)
        if case == "seldom" and rank % 2 == 0:
            engine.model[0].both = step % 4 != 3
        engine.train_step((x * 3).long().abs() % 8 if case == "row-sparse" else x, y)
    return engine.step, flat(engine.model)


@pytest.mark.parametrize("case", ["frozen", "row-sparse", "seldom"])
def test_stages_without_steady_gradients_train(ranks: Pool, case: str) -> None:
    answers = ranks.run(unlike_stages, case, size=4)
    assert [step for step, _ in answers] == [7] * 4
    for one, other in ((0, 2), (1, 3)):
        assert answers[one][1] == answers[other][1]


def too_large_a_sum(
    rank: int, size: int, clip: Any, fields: dict[str, Any]
) -> tuple[list[str], float, int]:
    """Each gradient of one stage is finite, and the sum over the replicas is not."""
    engine, told = prepared(clip, **fields), []
    for step in range(STEPS):
        before, hook = flat(engine.model), None
        if step == BAD and rank % 2 == 0:
            param = next(engine.model.parameters())
            hook = param.register_hook(lambda grad: torch.full_like(grad, 1e38))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_step(*batch(step, rank))
        told += [str(each.message) for each in caught if "dropped" in str(each.message)]
        assert (flat(engine.model) == before) == (step == BAD)
        if hook is not None:
            hook.remove()
    return told, engine.stats()["dropped_steps"], engine.step


@pytest.mark.parametrize("clip", [None, tw.ClipByGlobalNorm(1.0)], ids=["", "clip"])
def test_sum_of_one_stage_that_is_not_finite_drops_step_on_all(ranks: Pool, clip: Any) -> None:
    for told, dropped, step in ranks.run(too_large_a_sum, clip, {}, size=4):
        assert told == [
            f"step {BAD} was dropped on every rank: the gradient of parameter 0.first.weight on "
            "rank 0, added to those of other ranks, is not finite"
        ]
        assert dropped == 1
        assert step == STEPS - 1


def poisoned_in_turn(rank: int, size: int) -> tuple[str, int, list[float]]:
    """Stages take turns in dropping the step: each of them half as often in a row."""
    engine, told = prepared(), ""
    for param in engine.model.parameters():
        param.register_hook(lambda grad: grad * factor)
    for step in range(12):
        factor = float("nan") if step >= 1 and rank == (2, 1)[step % 2] else 1.0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine.train_step(*batch(step, rank))
        except tw.errors.NonFinite as error:
            return str(error), step, flat(engine.model)
    return told, -1, flat(engine.model)


def test_stages_count_their_drops_together(ranks: Pool) -> None:
    answers = ranks.run(poisoned_in_turn, size=4)
    assert {(text, step) for text, step, _ in answers} == {(answers[0][0], 10)}
    assert "on rank 2 is not finite; this was dropped step 10 in a row" in answers[0][0]


def spoiled(rank: int, size: int) -> list[str]:
    engine, told = prepared(), []

    def refuse(*_: Any) -> None:
        raise ValueError("no more")

    engine.train_step(*batch(0, rank))
    hook = engine.optimizer.register_step_pre_hook(refuse) if rank == 3 else None
    for step in (1, 2):
        before = flat(engine.model)
        try:
            engine.train_step(*batch(step, rank))
        except (ValueError, tw.errors.ThinwireError) as error:
            told.append(str(error))
            assert flat(engine.model) == before
        if hook is not None:
            hook.remove()
    return told


def test_update_that_one_rank_could_not_finish_is_reported_to_all_stages(ranks: Pool) -> None:
    *others, third = ranks.run(spoiled, size=4)
    assert third[0] == "no more"
    for told in (*others, third[1:]):
        assert len(told) == 1
        assert told[0].startswith("rank 3: ")
        assert "ValueError: no more" in told[0]


def diverged(rank: int, size: int, folder: str) -> None:
    engine = prepared()
    engine.train_step(*batch(0, rank))
    if rank == 3:
        with torch.no_grad():
            next(engine.model.parameters()).view(-1)[0] += 1.0
    engine.save(folder)


def test_replicas_of_one_stage_that_differ_are_saved_by_none(ranks: Pool, tmp_path: Path) -> None:
    ranks.raise_alike(
        "Diverged",
        ["in the stage of rank 1", "parameter 1.weight"],
        diverged,
        str(tmp_path / "saved"),
        size=4,
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def bytes_of_another_call(rank: int, size: int, who: str) -> None:
    if who == "clip":
        group = Group()
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        clip = take_clip_(optimizer, tw.ClipByGlobalNorm(1.0), ExitStack(), stages=group)
        if rank:
            group.gather_bytes(b"\xff\x00\xff", action="another call")
        else:
            clip({"weight": torch.ones(4)}, [])
        return
    grid = Grid(2)
    runner = PipelineRunner(nn.Linear(4, 4), tw.Pipeline(2, 2), grid, mse_loss)
    if rank:
        grid.peers.gather_bytes(b"\xff\x00\xff", action="another call")
    else:
        runner.step(*batch(0, rank))


@pytest.mark.parametrize("who", ["clip", "runner"])
def test_a_stage_in_another_call_is_a_mismatch(ranks: Pool, who: str) -> None:
    first, other = ranks.run(bytes_of_another_call, who, size=2, expect_errors=True)
    assert isinstance(first, Raised)
    assert first.type_name == "Mismatch"
    assert "rank 1 is in another exchange" in first.text
    assert other is None
