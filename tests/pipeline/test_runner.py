"""A pipeline is one process: same gradients, losses, buffers and random numbers, on any number of stages."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import Lost, Pool, Raised
from thinwire import Pipeline
from thinwire.comm.grid import Grid
from thinwire.pipeline.cut import cut
from thinwire.pipeline.runner import PipelineRunner

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
"""float64; the sums over micro-batches are taken in another order."""
LAYOUTS = [(0, 1, 4), (2, 1, 2), (2, 2, 4), (4, 4, 8), (4, 4, 2), (4, 2, 2)]
"""Ranks, stages, micro-batches."""


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


def prepared(model: nn.Module, config: Pipeline, **options: Any) -> tuple[nn.Module, PipelineRunner]:
    grid = Grid(config.stages)
    stage = cut(model, config)[grid.stage]
    loss_fn = options.pop("loss_fn", nn.functional.cross_entropy)
    return stage, PipelineRunner(stage, config, grid, loss_fn, **options)


def train(rank: int, size: int, config: Pipeline) -> tuple[list[Tensor], dict[str, Tensor]]:
    stage, runner = prepared(mlp(), config, scale=lambda: 16.0)
    grid = Grid(config.stages)
    losses = [runner.step(*batch(seed=2 * step + grid.replica)) for step in range(2)]  # both add to p.grad
    if grid.replicas > 1:
        for p in stage.parameters():
            dist.all_reduce(p.grad, group=grid.replica_group)
            p.grad /= grid.replicas
    return losses, gradients(stage)


def trained_alone(replicas: int) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The same with a plain loop over whole mini-batches."""
    model = mlp()
    losses: list[list[Tensor]] = [[] for _ in range(replicas)]
    for step in range(2):
        for replica in range(replicas):
            inputs, targets = batch(seed=2 * step + replica)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses[replica].append(loss.detach())
            (loss * 16.0 / replicas).backward()
    return losses, gradients(model)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("size", "stages", "micro"), LAYOUTS)
def test_a_pipeline_equals_one_process(ranks: Pool, size: int, stages: int, micro: int, schedule: str) -> None:
    answers = ranks.run(train, Pipeline(stages, micro, schedule), size=size)
    losses, grads = trained_alone(replicas=max(size, 1) // stages)
    for rank, (mine, own) in enumerate(answers):
        torch.testing.assert_close(mine, losses[rank // stages], **TIGHT)
        torch.testing.assert_close(own, {name: grads[name] for name in own}, **TIGHT)
    assert {name for _, own in answers for name in own} == set(grads)


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
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), Turned(), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.Dropout(0.3), nn.Linear(8, 3),
    )  # fmt: skip


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def frozen_front() -> nn.Sequential:
    model = mlp().float()
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[str, ...]]] = {
    "a dict and a tuple between stages": (language, ("1", "2")),
    "batch norm, dropout, strides": (normed, ("4", "7")),
    "a stage that begins in place": (in_place, ("1", "2")),
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
    """A plain loop over the micro-batches. Random numbers are drawn in no stage but one, so they are the same."""
    model = made(case)
    torch.manual_seed(5)
    losses = []
    for inputs, targets in mini_batches(case):
        parts = [
            nn.functional.cross_entropy(model(x), y) for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)
        ]
        losses.append(sum(parts) / 4)
        losses[-1].backward()
    return {"losses": [loss.detach() for loss in losses], "gradients": gradients(model), "buffers": buffers(model)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", CASES)
def test_models_of_all_kinds_train_as_in_one_process(ranks: Pool, case: str, schedule: str) -> None:
    answers = ranks.run(train_case, case, schedule, size=3)
    alone = case_alone(case)
    for answer in answers:
        torch.testing.assert_close(answer["losses"], alone["losses"])
        for kind in ("gradients", "buffers"):
            assert set(answer[kind]) <= set(alone[kind])
            torch.testing.assert_close(answer[kind], {name: alone[kind][name] for name in answer[kind]})
    for kind in ("gradients", "buffers"):
        assert {name for answer in answers for name in answer[kind]} == set(alone[kind])
