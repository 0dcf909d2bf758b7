"""Muon and AdamW as one optimizer: bits of the two side by side, formula, and who gets which."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import MuonRule, muon_
from tests.precision import products_in
from thinwire.optim import Muon, muon_groups


class Language(nn.Module):
    """Embedding, two hidden layers, a norm and an output layer."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


HIDDEN = {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("adjust_lr_fn", "scale"), [("match_rms_adamw", 0.25), ("original", 1)])
def test_bits_equal_torchs_two_side_by_side(
    adjust_lr_fn: str, scale: float, *, nesterov: bool
) -> None:
    ours, theirs = Language(), Language()
    shared = {"lr": 0.02, "weight_decay": 0.2}
    of_muon = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov, "momentum": 0.9}
    groups = muon_groups(ours, adam_lr_scale=scale)
    optimizer = Muon(groups, **shared, **of_muon, ns_dtype=torch.bfloat16)
    matrices = [theirs.layers[0].weight, theirs.layers[2].weight]
    rest = [p for p in theirs.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, **shared, eps=1e-8, **of_muon)
    adamw = torch.optim.AdamW(rest, **{**shared, "lr": 0.02 * scale}, betas=(0.9, 0.95))
    before = copy.deepcopy(ours.state_dict())
    for seed in range(4):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        muon.step()
        adamw.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert not torch.equal(p, before[name]), name
        if q in muon.state:
            buffers = (of.state[p]["momentum_buffer"] for of, p in ((optimizer, p), (muon, q)))
            assert torch.equal(*buffers), name


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exponent", [64, 84, 120])
def test_update_does_not_depend_on_size_of_finite_gradient(ns_dtype: str, exponent: int) -> None:
    """Squares of the larger ones are beyond float32."""
    found = []
    for size in (1.0, 2.0**exponent):
        p = nn.Parameter(torch.zeros(24, 40))
        p.grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)) * size
        Muon([p], lr=0.1, ns_dtype=ns_dtype).step()
        found.append(p.detach())
    assert found[0].norm() > 0
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("coefficients", "ns_steps", "within"),
    [
        ((3.4445, -4.775, 2.0315), 1, 1e-5),
        ((3.4445, -4.775, 2.0315), 5, 1e-3),
        # rounding alone grows to this; with one X X^T for all ten it would grow without limit
        ((3.4445, -4.775, 2.0315), 10, 0.1),
        ((1.5, -0.5, 0.0), 12, 1e-4),
        ((0.9, -0.1, 0.0), 3, 1e-5),
    ],
)
@pytest.mark.parametrize("rank", [1, 5, 24])
@pytest.mark.parametrize("shape", [(24, 24), (24, 37), (96, 24)])
def test_a_matrix_of_any_shape_and_rank_follows_the_iteration_in_float64(
    shape: tuple[int, int],
    rank: int,
    coefficients: tuple[float, float, float],
    ns_steps: int,
    within: float,
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, columns = shape
    grad = torch.randn(rows, rank, generator=generator)
    grad = grad @ torch.randn(rank, columns, generator=generator)
    p = nn.Parameter(torch.zeros(shape))
    p.grad = grad
    rate = 1 / (0.2 * max(shape) ** 0.5)
    iteration = {"ns_coefficients": coefficients, "ns_steps": ns_steps}
    Muon([p], lr=rate, momentum=0.0, nesterov=False, **iteration).step()
    a, b, c = coefficients
    expected = grad.double() / grad.double().norm()
    for _ in range(ns_steps):
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    assert (p.detach().double() + expected).norm() <= within * expected.norm()


@pytest.mark.parametrize("way", ["autocast", "high", "medium"])
@pytest.mark.parametrize("shape", [(64, 512), (512, 64)])
def test_fewer_bits_in_products_do_not_make_an_update_grow(way: str, shape: tuple) -> None:
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0], bias=False)
    model.weight.grad = torch.randn(shape[0], 4) @ torch.randn(4, shape[1])
    before = model.weight.detach().clone()
    optimizer = Muon([{"params": [model.weight], "muon": True}], lr=1.0, weight_decay=0.0)
    with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else products_in(way):
        optimizer.step()
    update = (before - model.weight.detach()) / (0.2 * max(shape) ** 0.5)
    assert 0.5 < torch.linalg.matrix_norm(update.double(), 2) < 1.3


def test_autocast_around_a_step_changes_no_bit() -> None:
    models = [Language(), Language()]
    for model, around in zip(models, (False, True), strict=True):
        optimizer = Muon(muon_groups(model), lr=0.01)
        for seed in range(3):
            give_gradients(model, seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_float32_on_a_cpu_is_computed_in_float32() -> None:
    def trained(ns_dtype: object) -> Tensor:
        model = Language()
        optimizer = Muon(muon_groups(model), lr=0.02, ns_dtype=ns_dtype)
        give_gradients(model, 0)
        optimizer.step()
        return model.layers[0].weight.detach()

    assert torch.equal(trained(None), trained("float32"))
    assert not torch.equal(trained(None), trained("bfloat16"))


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    optimizer = Muon(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


def test_embeddings_and_the_output_layer_are_adamws() -> None:
    hidden, rest = muon_groups(Language())
    assert (hidden["muon"], rest["muon"]) == (True, False)
    assert {name for name, _ in hidden["params"]} == HIDDEN | {"norm.weight", "norm.bias"}
    assert {name for name, _ in rest["params"]} == {"embedding.weight", "head.weight"}
    tied = muon_groups(Language(tied=True))
    assert [name for name, _ in tied[1]["params"]] == ["embedding.weight"]


def test_muon_groups_of_no_model_has_a_remedy() -> None:
    for given in (Language().parameters(), list(Language().named_parameters())):
        with pytest.raises(TypeError, match=r"model must be a Module.*muon_groups\(model\)"):
            muon_groups(given)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("local", [None, tw.LocalSGD(2)])
def test_an_embedding_that_muon_would_train_is_named_once(tied: bool, local: Any) -> None:
    def said(start: Any, params: Any) -> list[str]:
        model = Language(tied=tied)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start(model, Muon(params(model)))
        assert all(each.filename == __file__ for each in caught)
        return [str(each.message) for each in caught]

    starts = [lambda m, o: tw.DistributedStrategy(localsgd=local).prepare(m, o).close()]
    starts += [lambda m, o: tw.local_sgd(m, o, local)] if local else []
    for start in starts:
        (text,) = said(start, nn.Module.parameters)
        assert "embedding.weight" in text and "muon_groups(model)" in text
        assert ("head.weight" in text) != tied
        assert said(start, muon_groups) == []


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 9), (6, 12), (12, 6), (4, 3, 3), (0, 5)])
def test_a_batch_of_matrices_moves_as_one_by_one(
    shape: tuple[int, ...], dtype: torch.dtype, *, nesterov: bool
) -> None:
    """Zeros among them, sizes beyond float32's squares, and other strides."""
    rule = MuonRule(0.1, 0.9, nesterov, (3.4445, -4.775, 2.0315), 5, 1e-8, True, torch.float32)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(3, *shape, generator=generator).to(dtype) for _ in range(3)]
    start[0] = start[0].mT.contiguous().mT
    start[1] *= torch.tensor([0.0, 1.0, 2.0**70]).view(-1, *[1] * len(shape)).to(dtype)
    start[2] *= start[1].abs() > 0
    batch, singles = ([t.clone() for t in start] for _ in range(2))
    for _ in range(2):
        muon_(*(t.unbind() for t in batch), 0.02, rule)
        for i in range(3):
            muon_(*([t[i]] for t in singles), 0.02, rule)
    assert torch.equal(batch[2], singles[2])
    assert all(t.isfinite().all() for t in batch)
    assert not torch.equal(batch[0], start[0]) or not batch[0].numel()
    within = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(batch[0], singles[0], rtol=within, atol=within)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv1d(8, 4, 5)
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_are_matrices_where_that_is_asked_for(layout: torch.memory_format) -> None:
    model, flat = Convolutional(), Convolutional()
    model.first.to(memory_format=layout)
    kernels = [flat.first.weight, flat.second.weight]
    matrices = [nn.Parameter(p.detach().flatten(1).clone()) for p in kernels]
    hidden, rest = muon_groups(model, conv=True)
    assert (hidden["conv"], rest["muon"]) == (True, False)
    optimizers = Muon([hidden, rest], lr=0.02), Muon(matrices, lr=0.02)
    for seed in range(3):
        give_gradients(model, seed)
        for matrix, kernel in zip(matrices, (model.first.weight, model.second.weight), strict=True):
            matrix.grad = kernel.grad.flatten(1).clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(model.first.weight.flatten(1), matrices[0])
    assert torch.equal(model.second.weight.flatten(1), matrices[1])


def test_tensors_not_matrices_are_trained_by_adamw_in_every_group() -> None:
    model = Language()
    optimizer = Muon(muon_groups(model), lr=0.01)
    give_gradients(model, 0)
    optimizer.step()
    for name, p in model.named_parameters():
        of_muon = name in HIDDEN and name.endswith("weight")
        assert ("momentum_buffer" in optimizer.state[p]) is of_muon, name
        assert ("exp_avg" in optimizer.state[p]) is not of_muon, name
