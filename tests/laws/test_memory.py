"""A step allocates nothing of the full size of momentum buffer and residual."""

import gc
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.allocations import Allocations

NUMEL = 400_000


def words_of_a_step(step: Any) -> float:
    """What one step held at its peak beyond what was there, in words per parameter."""
    step()
    step()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with Allocations(NUMEL // 5) as torchs:
            step()
        numpys = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # The room for candidates of a small tensor is a fixed number of entries, which no longer counts
    # in a large one.
    return (torchs.peak + max(0, numpys - 1_000_000)) / (4 * NUMEL)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_compressed_step_makes_nothing_of_full_size(
    grad_dtype: Any, state_dtype: Any, nesterov: bool
) -> None:
    param = nn.Parameter(torch.randn(NUMEL).to(grad_dtype))
    optimizer = tw.optim.DGCMomentum([param], lr=0.1, nesterov=nesterov, state_dtype=state_dtype)
    param.grad = torch.randn(NUMEL).to(grad_dtype)
    assert words_of_a_step(optimizer.step) == 0
    kept = sum(t.numel() * t.element_size() for t in optimizer.state[param].values())
    assert kept == 2 * NUMEL * (4 if state_dtype is None else 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_decay": 0.1}, 1),
        ({"local_grad_clip_norm": 0.1}, 1),
        ({"weight_decay": 0.1, "local_grad_clip_norm": 0.1}, 2),
        ({"rampup_begin_step": 99}, 1),
        ({"rampup_begin_step": 99, "state_dtype": "bfloat16"}, 2),
        ({"maximize": True}, 1),
    ],
    ids=str,
)
def test_options_set_for_a_moment_are_restored(options: dict[str, Any], words: int) -> None:
    param = nn.Parameter(torch.randn(NUMEL))
    optimizer = tw.optim.DGCMomentum([param], lr=0.1, **options)
    param.grad = torch.randn(NUMEL)
    assert words_of_a_step(optimizer.step) == pytest.approx(words, abs=0.2)


@pytest.mark.parametrize("merged", [1, 2])
def test_under_another_optimizer_there_is_no_second_set_of_gradients(merged: int) -> None:
    model = nn.Linear(400, NUMEL // 400, bias=False)
    strategy = tw.DistributedStrategy(dgc=tw.DGC(), gradient_merge=tw.GradientMerge(merged))
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=1e-4, foreach=False, momentum=0, maximize=False
    )
    optimizer.step = lambda: None  # what it makes for itself is not ours
    engine = strategy.prepare(model, optimizer, lambda y, _: y.square().mean())

    def update() -> None:
        for _ in range(merged):
            engine.train_step(torch.randn(2, 400), None)

    # The gradient itself, which is there when the step begins too, and the sum of those that are
    # merged.
    assert words_of_a_step(update) == pytest.approx(merged, abs=0.2)
    engine.close()
