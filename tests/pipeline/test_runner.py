"""A pipeline is one process: equal gradients, losses, buffers, random numbers on any stages."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import Grid, PipelineRunner, split_model
from tests.ranks import Lost, Pool, Raised
from tests.toys import engine_of
from thinwire import Pipeline
from thinwire.errors import PayloadCorrupt

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
"""float64; the sums over micro-batches are taken in another order."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()


def batch(size: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def prepared(
    model: nn.Module, config: Pipeline, **options: Any
) -> tuple[nn.Module, PipelineRunner]:
    grid = Grid(config.stages)
    stage = split_model(model, config)[grid.stage]
    loss_fn = options.pop("loss_fn", nn.functional.cross_entropy)
    return stage, PipelineRunner(stage, config, grid, loss_fn, **options)


class Tokens(nn.Module):
    """Ids -> (vectors, mask of ids that count): a tuple with an integer type in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        return {"x": self.embed(ids), "counts": (ids > 0), "width": 6}


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert value["width"] == 6
        return self.linear(value["x"]) * value["counts"].unsqueeze(-1), value["counts"]


class Pooled(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, counts = value
        return x.sum(1) / counts.sum(1, keepdim=True).clamp(min=1)


class Turned(nn.Module):
    """Neither its output nor the gradient of its input lies in memory in order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().flip(0).t() if x.ndim == 2 else x


def language() -> nn.Sequential:
    return nn.Sequential(Tokens(), Mixer(), Mixed(), Pooled(), nn.Linear(6, 3))


class Mixed(nn.Module):
    """Passes the mask on, and the vectors through a module that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Dropout(0.5))

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.inside(value[0]), value[1]


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), Turned(),
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3),
    )  # fmt: skip


def in_place() -> nn.Sequential:
    relus = [nn.ReLU(inplace=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 8), relus[0], nn.Linear(8, 8), relus[1], nn.Linear(8, 3))


def frozen_front() -> nn.Sequential:
    model = mlp().float()
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[str, ...]]] = {
    "a dict and a tuple between stages": (language, ("1", "2")),
    "batch norm, dropout, strides": (normed, ("4", "7")),
    "a stage that begins in place": (in_place, ("1", "3")),
    "a first stage without gradients": (frozen_front, ("2", "6")),
}


def mini_batches(case: str) -> list[tuple[Tensor, Tensor]]:
    """The second and the fourth are smaller, as at the end of an epoch."""
    pairs = [batch(size, seed) for seed, size in enumerate([16, 8, 16, 8])]
    if case.startswith("a dict"):
        return [(x[:, :5].mul(3).long().remainder(7), y) for x, y in pairs]
    return [(x.float(), y) for x, y in pairs]


def made(case: str) -> nn.Sequential:
    torch.manual_seed(3)
    return CASES[case][0]()


def train_case(rank: int, size: int, case: str, schedule: str) -> dict[str, Any]:
    config = Pipeline(3, 4, schedule, CASES[case][1])
    stage, runner = prepared(made(case), config)
    torch.manual_seed(5)
    losses = [runner.step(*pair) for pair in mini_batches(case)]
    return {"losses": losses, "gradients": gradients(stage), "buffers": buffers(stage)}


def case_alone(case: str) -> dict[str, Any]:
    """A plain loop over the micro-batches; random numbers are drawn in no stage but one."""
    model = made(case)
    torch.manual_seed(5)
    losses = []
    for inputs, targets in mini_batches(case):
        parts = [
            nn.functional.cross_entropy(model(x), y)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)
        ]
        losses.append(sum(parts) / 4)
        losses[-1].backward()
    return {
        "losses": [loss.detach() for loss in losses],
        "gradients": gradients(model),
        "buffers": buffers(model),
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", CASES)
def test_models_of_all_kinds_train_as_in_one_process(ranks: Pool, case: str, schedule: str) -> None:
    answers = ranks.run(train_case, case, schedule, size=3)
    alone = case_alone(case)
    for answer in answers:
        torch.testing.assert_close(answer["losses"], alone["losses"])
        for kind in ("gradients", "buffers"):
            assert set(answer[kind]) <= set(alone[kind])
            torch.testing.assert_close(
                answer[kind], {name: alone[kind][name] for name in answer[kind]}
            )
    for kind in ("gradients", "buffers"):
        assert {name for answer in answers for name in answer[kind]} == set(alone[kind])


def train_autocast(rank: int, size: int) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    stage, runner = prepared(mlp().float(), Pipeline(2, 2), dtype=torch.bfloat16, loss_fn=seen_loss)
    seen.clear()
    inputs, targets = batch()
    return runner.step(inputs.float(), targets), gradients(stage), list(seen)


seen: list[str] = []


def seen_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    seen.append(str(outputs.dtype))
    return nn.functional.cross_entropy(outputs, targets)


def test_autocast_covers_every_stage_and_the_loss(ranks: Pool) -> None:
    answers = ranks.run(train_autocast)
    model = mlp().float()
    inputs, targets = batch()
    losses = []
    for x, y in zip(inputs.float().chunk(2), targets.chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(nn.functional.cross_entropy(model(x), y))
        (losses[-1] / 2).backward()
    assert [types for _, _, types in answers] == [[], ["torch.bfloat16"] * 2]
    for loss, grads, _ in answers:
        assert loss.dtype == torch.float32
        assert torch.equal(loss, sum(losses).detach() / 2)
        for name, grad in grads.items():
            assert torch.equal(grad, gradients(model)[name]), name


def evaluated(rank: int, size: int) -> tuple[list[Tensor], int, Tensor]:
    stage, runner = prepared(
        made("batch norm, dropout, strides"), Pipeline(2, 4, split_points=("4",))
    )
    inputs, targets = mini_batches("batch norm, dropout, strides")[0]
    runner.step(inputs, targets)
    stage.zero_grad()
    stage.eval()
    losses = [runner.evaluate(inputs, targets)]
    count = len(gradients(stage))
    stage.train()
    return losses, count, runner.step(inputs, targets)


def test_evaluation_is_the_forward_pass_in_the_mode_of_the_modules(ranks: Pool) -> None:
    answers = ranks.run(evaluated)
    model = made("batch norm, dropout, strides")
    inputs, targets = mini_batches("batch norm, dropout, strides")[0]
    for x in inputs.chunk(4):
        model(x)
    loss = nn.functional.cross_entropy(model.eval()(inputs), targets).detach()
    for losses, count, _ in answers:
        torch.testing.assert_close(losses, [loss])
        assert count == 0
    assert answers[0][2] == answers[1][2]


def unfreezing(rank: int, size: int) -> dict[str, Tensor]:
    stage, runner = prepared(frozen_front(), Pipeline(2, 2, split_points=("2",)))
    inputs, targets = batch()
    runner.step(inputs.float(), targets)
    stage.requires_grad_(True)
    stage.zero_grad()
    runner.step(inputs.float(), targets)
    return gradients(stage)


def test_unfrozen_parameters_train_from_then_on(ranks: Pool) -> None:
    model = mlp().float()
    inputs, targets = batch()
    nn.functional.cross_entropy(model(inputs.float()), targets).backward()
    answers = ranks.run(unfreezing)
    torch.testing.assert_close(answers[0] | answers[1], gradients(model))


def attempt(rank: int, size: int, trouble: str) -> tuple[str, str, Tensor]:
    """What goes wrong, then the same pipeline once more without it."""
    model = mlp()
    if trouble == "forward":
        model[2].register_forward_pre_hook(Trip())
    if trouble == "backward":
        model[4].register_full_backward_hook(Trip())
    wrong = {"loss of two": 2, "no tensor": 3, "integer": 4, "detached": 5}.get(trouble, 0)
    troubles = [wrong]

    def loss_fn(outputs: Tensor, targets: Tensor) -> Any:
        loss = nn.functional.cross_entropy(outputs, targets)
        return {0: loss, 2: outputs[:2, 0], 3: 1.0, 4: loss.long(), 5: loss.detach()}[troubles[0]]

    stage, runner = prepared(model, Pipeline(2, 4, split_points=("4",)), loss_fn=loss_fn)
    inputs, targets = batch()
    if trouble == "indivisible":
        inputs, targets = batch(7)
    if trouble == "no batch":
        inputs = torch.tensor(1.0)
    if trouble == "other targets" and rank == 1:
        targets = batch(seed=9)[1]
    if trouble == "no gradients":
        torch.set_grad_enabled(False)
    try:
        runner.step(inputs, targets)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "nothing", ""
    finally:
        torch.set_grad_enabled(True)
    troubles[0] = 0
    Trip.armed = False
    stage.zero_grad()
    loss = runner.step(*batch())
    Trip.armed = True
    return kind, text, loss


class Trip:
    """A hook that fails in the third micro-batch."""

    armed = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.armed and self.calls == 3:
            raise KeyError("tripped")


@pytest.mark.parametrize(
    ("trouble", "kinds", "texts"),
    [
        ("indivisible", "ValueError", "7 cannot be cut into micro_batches=4"),
        ("no batch", "ValueError", "same first dimension"),
        ("no gradients", "RuntimeError", "use evaluate"),
        ("other targets", "Mismatch", "content of targets"),
        ("forward", "KeyError ThinwireError", "tripped|stage 1 of 2 failed"),
        ("backward", "ThinwireError KeyError", "stage 2 of 2 failed|tripped"),
        ("loss of two", "ValueError", "stage 2 of 2|got shape (2,)"),
        ("no tensor", "TypeError", "stage 2 of 2|got float"),
        ("integer", "TypeError", "stage 2 of 2|got torch.int64"),
        ("detached", "ValueError", "stage 2 of 2|depends on no parameter"),
    ],
)
def test_error_of_one_stage_is_of_all(ranks: Pool, trouble: str, kinds: str, texts: str) -> None:
    """Kinds and texts of both stages, or one for both."""
    answers = ranks.run(attempt, trouble)
    assert [kind for kind, _, _ in answers] == (2 * kinds.split())[:2]
    for (_, text, loss), expected in zip(answers, (2 * texts.split("|"))[:2], strict=True):
        assert expected in text
        inputs, targets = batch()
        torch.testing.assert_close(
            loss, nn.functional.cross_entropy(mlp()(inputs), targets), **TIGHT
        )


class Unsteady(nn.Module):
    """Returns less in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[self.calls :] * self.weight


def change_shapes(rank: int, size: int) -> None:
    model = nn.Sequential(Unsteady(), nn.Linear(6, 3)).double()
    _, runner = prepared(
        model, Pipeline(2, 2, "gpipe", ("1",)), loss_fn=lambda outputs, _: outputs.mean()
    )
    runner.step(*batch())


def return_an_object(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Odd(), nn.Linear(6, 3)).double()
    prepared(model, Pipeline(2, 2, "gpipe", ("2",)))[1].step(*batch())


class Odd(nn.Module):
    def forward(self, x: Tensor) -> set[Tensor]:
        return {x}


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (change_shapes, "ValueError", "same layout"),
        (return_an_object, "TypeError", "a part of type set"),
    ],
)
def test_value_that_cannot_travel_is_refused(
    ranks: Pool, function: Callable[..., None], kind: str, text: str
) -> None:
    ranks.raise_alike(kind, text, function)


def damaged(rank: int, size: int, stage: int, steps: int) -> tuple[str, bool]:
    """How a step ends whose stage receives a wrong bit; `steps` > 1 averages now and then."""
    fields: dict[str, Any] = {"localsgd": tw.LocalSGD(steps)} if steps > 1 else {}
    fields["pipeline"] = Pipeline(2, 2, split_points=("4",))
    engine = engine_of(mlp(), nn.functional.cross_entropy, momentum=0.9, **fields)
    for seed in range(3):
        engine.train_step(*batch(seed=2 * seed + rank // 2))
    before = [p.clone() for p in engine.model.parameters()]
    transfer, times = Grid.transfer, []

    def flipped(self: Grid, leaving: Any, to: int, arriving: Any = (), source: int = 0) -> Any:
        works = transfer(self, leaving, to, arriving, source)
        if rank == stage and arriving and not times:
            times.append(1)
            arriving[0].view(torch.int64).view(-1)[3] ^= 1
        return works

    with mock.patch.object(Grid, "transfer", flipped), pytest.raises(PayloadCorrupt) as refused:
        engine.train_step(*batch(seed=6 + rank // 2))
    return str(refused.value), all(map(torch.equal, before, engine.model.parameters()))


@pytest.mark.fault
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_damaged_bit_between_stages_is_refused(ranks: Pool, stage: int, steps: int) -> None:
    """By all ranks that make the update: both replicas, or the one that is by itself."""
    size = 4 if steps == 1 else 2
    for told, unmoved in ranks.run(damaged, stage, steps, size=size):
        assert f"stage {stage + 1} of 2 received damaged bits from stage {2 - stage}" in told
        assert unmoved


def lose_a_stage(rank: int, size: int, how: int) -> None:
    model = mlp()
    _, runner = prepared(model, Pipeline(3, 3, split_points=("2", "4")))
    runner.step(*batch(6))
    if rank == 1:
        model[2].register_forward_hook(lambda *_: os.kill(os.getpid(), how))
    start = time.monotonic()
    try:
        runner.step(*batch(6))
    finally:
        if rank != 1:
            assert time.monotonic() - start < 12
            with pytest.raises(RuntimeError):
                runner.step(*batch(6))


@pytest.mark.slow
@pytest.mark.fault("a rank dies between two averagings; a joiner; a stage of a pipeline dies")
@pytest.mark.parametrize(
    ("how", "kinds"), [(signal.SIGKILL, {"PeerLost"}), (signal.SIGSTOP, {"PeerStalled"})]
)
def test_the_others_raise_when_a_stage_is_gone(ranks: Pool, how: int, kinds: set[str]) -> None:
    # starts what the short time-out is not for
    ranks.run(train_case, "a stage that begins in place", "1f1b", size=3)
    answers = ranks.run(lose_a_stage, how, size=3, group_timeout_s=5, expect_errors=True)
    assert not isinstance(answers[1], Raised)
    assert isinstance(answers[1], Lost) == (how == signal.SIGKILL)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, Raised)
        assert answer.type_name in kinds, answer.traceback
        assert "rank 1" in answer.text
