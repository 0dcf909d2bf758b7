"""Stages are the model, each module once under its name; the largest is as small as can be."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.api import split_model
from tests.api import split_partition as partition
from thinwire import Pipeline, StrategyError


def tree() -> nn.Sequential:
    """Links: 0, 1, blocks.0, blocks.1.0, blocks.1.1, blocks.2, head."""
    blocks = nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Block())
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.add_module("blocks", blocks)
    model.add_module("head", nn.Linear(4, 2))
    return model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


def names(stage: nn.Module) -> list[str]:
    return [name for name, _ in stage.named_parameters()]


@pytest.mark.parametrize(
    "points",
    [
        (),
        ("blocks",),
        ("blocks.0",),
        ("blocks.1",),
        ("blocks.1", "blocks.2", "head"),
        ("blocks.0", "blocks.1", "head"),
    ],
)
def test_stages_are_the_model(points: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = tree()
    stages = split_model(model, Pipeline(len(points) + 1 if points else 3, 2, split_points=points))
    x = torch.randn(5, 4)
    value = x
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(x))
    assert [pair for stage in stages for pair in named(stage)] == named(model)


def named(module: nn.Module) -> list[tuple[str, int]]:
    """Names and identities of parameters and buffers: the trained tensors are the model's own."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    order = {name: i for i, (name, _) in enumerate(tree().state_dict().items())}
    return sorted(((name, id(tensor)) for name, tensor in tensors), key=lambda pair: order[pair[0]])


@pytest.mark.parametrize(
    ("point", "first"),
    [
        ("blocks", "blocks.0.inner.weight"),
        ("blocks.1.1", "blocks.2.inner.weight"),
        ("head", "head.weight"),
    ],
)
def test_a_stage_begins_at_its_split_point(point: str, first: str) -> None:
    model = tree()
    before, after = split_model(model, Pipeline(2, 2, split_points=(point,)))
    assert names(before) + names(after) == names(model)
    assert names(after)[0] == first
    assert dict(after.named_modules())[point] is model.get_submodule(point)


def test_one_stage_is_the_model_whatever_it_is() -> None:
    block = Block()
    assert split_model(block, Pipeline(1, 2)) == [block]


def test_stages_keep_the_mode() -> None:
    assert not any(
        module.training
        for stage in split_model(tree().eval(), Pipeline(4, 4))
        for module in stage.modules()
    )


def test_activations_stay_with_the_module_before() -> None:
    first, second = split_model(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.Linear(2, 2)), Pipeline(2, 2)
    )
    assert [len(first), len(second)] == [3, 1]


def best_by_trying(sizes: list[int], parts: int) -> tuple[int, int]:
    """(largest part, sum of squares) of the best among all cuts."""
    options = []
    for inner in combinations(range(1, len(sizes)), parts - 1):
        sums = [sum(sizes[a:b]) for a, b in pairwise([0, *inner, len(sizes)])]
        options.append((max(sums), sum(s * s for s in sums)))
    return min(options)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_cut_is_the_best_there_is(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    begins = partition(sizes, parts)
    assert begins[0] == 0 and len(begins) == parts and begins == sorted(set(begins))
    sums = [sum(sizes[a:b]) for a, b in pairwise([*begins, len(sizes)])]
    assert (max(sums), sum(s * s for s in sums)) == best_by_trying(sizes, parts)


def tied() -> nn.Sequential:
    model = tree()
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    model[0].weight = model.head.weight
    return model


def shared_buffer() -> nn.Sequential:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.running_mean = first.running_mean
    return nn.Sequential(first, second)


def hooked() -> nn.Sequential:
    model = tree()
    model.blocks.register_forward_hook(lambda *_: None)
    return model


def with_own_weight() -> nn.Sequential:
    model = tree()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model


def with_own_forward() -> nn.Sequential:
    class Skipping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    return Skipping(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (("blocks.9",), "did you mean 'blocks.2'"),
        (("haed",), "did you mean 'head'"),
        (("head", "blocks"), "'blocks', which runs before 'head'"),
        (("blocks", "blocks.0"), "'blocks.0', which runs at the same place as 'blocks'"),
        (("0",), "'0' is the first module"),
    ],
)
def test_wrong_split_points_are_named(points: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        split_model(tree(), Pipeline(len(points) + 1, 2, split_points=points))
    assert not isinstance(caught.value, StrategyError)


@pytest.mark.parametrize(
    ("model", "stages", "points", "text"),
    [
        (tree(), 2, ("blocks.0.norm",), "'blocks.0.norm' lies inside 'blocks.0', a Block"),
        (hooked(), 2, ("blocks.1",), "inside 'blocks', a Sequential.*hooks"),
        (tree(), 3, ("1", "blocks"), "stage 2 of 3, '1' to '1', has no parameters"),
        (tree(), 6, (), "6 stages, but the model has only 5"),
        (tied(), 2, (), "'0.weight' on stage 1 and 'head.weight' on stage 2"),
        (shared_buffer(), 2, (), "'0.running_mean' on stage 1 and '1.running_mean' on stage 2"),
        (Block(), 2, (), "a Block, cannot be cut into 2"),
        (with_own_weight(), 2, (), "outside its modules"),
        (with_own_forward(), 2, (), "Skipping, .*its own forward"),
        (nn.Sequential(), 2, (), "empty"),
    ],
)
def test_model_that_cannot_be_cut_is_refused(
    model: nn.Module, stages: int, points: tuple[str, ...], text: str
) -> None:
    with pytest.raises(StrategyError, match=text):
        split_model(model, Pipeline(stages, 2, split_points=points))


def test_tied_modules_may_share_a_stage() -> None:
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.ReLU(), linear, nn.ReLU(), nn.Linear(4, 4))
    first, _ = split_model(model, Pipeline(2, 2, split_points=("4",)))
    assert [name for name, _ in first.named_children()] == ["0", "1", "3"]
    x = torch.ones(1, 4)
    assert torch.equal(first(x), model[:4](x))
