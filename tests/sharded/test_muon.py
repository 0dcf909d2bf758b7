"""Muon on matrices in shards: the bits of whole matrices in one process."""

import os
import warnings
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss

import thinwire as tw
from tests import toys
from tests.api import Group, Pending, owners
from tests.ranks import Pool
from tests.sharded.models import mesh_of, same, site_of
from tests.toys import descend
from thinwire.errors import PayloadCorrupt

STEPS = 20
SHAPES = [(5, 7), (64, 64), (130, 17), (3, 256), (16, 16)]
"""Rows that do not divide, and fewer rows than ranks."""


class Net(nn.Module):
    """Matrices of many shapes, a kernel, one that is used twice, and one that is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)
        self.convolution = nn.Conv2d(3, 6, 3)
        self.once, self.again = nn.Linear(9, 9), nn.Linear(9, 9)
        self.again.weight = self.once.weight
        self.frozen = nn.Linear(9, 33)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        found = [layer(x[:, : layer.in_features]).tanh().mean(1) for layer in self.layers]
        found.append(self.convolution(x[:, :75].view(-1, 3, 5, 5)).tanh().flatten(1).mean(1))
        found.append(self.frozen(self.again(self.once(x[:, :9]).tanh())).mean(1))
        return torch.stack(found, 1)


def sharded(mesh: Any, dtype: torch.dtype) -> Net:
    model = Net(dtype)
    for layer in (*model.layers, model.convolution):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(site: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All ranks of a site see the same, so that its mean has the bits of one process."""
    generator = torch.Generator().manual_seed(100 * step + site)
    x = torch.randn(8, 256, generator=generator).to(dtype)
    return x, x[:, : len(SHAPES) + 2].sin()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def muon_of(model: nn.Module, **settings: Any) -> tw.optim.Muon:
    groups = [{"params": list(model.named_parameters()), "conv": True}]
    return tw.optim.Muon(groups, lr=0.02, **settings)


def trained(
    rank: int, size: int, way: str, place: tuple[int, int] | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """By FSDP alone, by an engine, or by local updates; whole models where there is no `place`."""
    mesh = None if place is None else mesh_of(*place)
    if mesh is None:
        model = Net(dtype)
    else:
        model = sharded(mesh if way == "hybrid" else mesh["shard"], dtype)
    optimizers: list[torch.optim.Optimizer] = [muon_of(model, nesterov=dtype == torch.float32)]
    if way.endswith("two"):
        matrices, rest = (
            [p for p in model.parameters() if (p.ndim > 1) is m] for m in (True, False)
        )
        groups = [{"params": matrices, "conv": True}]
        optimizers = [tw.optim.Muon(groups, lr=0.02), torch.optim.AdamW(rest, lr=0.02)]
    given: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    given["digest_every"] = 2
    site = 0 if way in ("bare", "hybrid") else site_of(mesh)
    if way.startswith("prepare"):
        engine = tw.DistributedStrategy().prepare(model, optimizers, mse_loss, **given)
        for step in range(STEPS):
            engine.train_step(*batch(site, step, dtype))
        return values_of(model)
    local: Any = nullcontext()
    if way.startswith("local"):
        local = tw.local_sgd(model, optimizers, tw.LocalSGD(4), **given)
    with local:
        for step in range(STEPS):
            x, y = batch(site, step, dtype)
            mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return values_of(model)


CASES = [
    *product(["bare", "hybrid", "prepare", "local"], [(2, 2), (1, 4)], ["float32", "bfloat16"]),
    *product(["prepare two", "local two"], [(2, 2)], ["float32"]),
]
SOON = [("bare", (1, 4), "float32"), ("prepare", (2, 2), "float32"), ("local", (2, 2), "bfloat16")]


@pytest.mark.parametrize(
    ("way", "place", "dtype"),
    [pytest.param(*case, marks=() if case in SOON else pytest.mark.slow) for case in CASES],
)
def test_bits_equal_whole_matrix(ranks: Pool, way: str, place: tuple[int, int], dtype: str) -> None:
    alone, kind = way in ("bare", "hybrid"), getattr(torch, dtype)
    whole = ranks.run(trained, way, None, kind, size=1 if alone else place[0])[0]
    begun = values_of(Net(kind))
    for values in ranks.run(trained, way, place, kind, size=4):
        same(values, whole)
    assert all(torch.equal(whole[n], begun[n]) == n.startswith("frozen") for n in begun)


def kept_whole(rank: int, size: int, dim: int) -> dict[str, Tensor]:
    """A parameter that FSDP leaves alone, and matrices that are cut along another dimension."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 8), nn.Linear(8, 12)).double()
    if size > 1:
        alone = {model[1].weight, model[1].bias}
        how: dict[str, Any] = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)} if dim else {}
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)), ignored_params=alone, **how)
    optimizer = muon_of(model)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
        descend(optimizer, model(x).square().mean())
    return values_of(model)


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_that_are_kept_whole_and_columns(ranks: Pool, dim: int) -> None:
    whole = ranks.run(kept_whole, dim, size=1)[0]
    for values in ranks.run(kept_whole, dim, size=4):
        same(values, whole)


def engine_of(place: tuple[int, int] | None, field: str) -> tuple[nn.Module, tw.Engine]:
    mesh = mesh_of(*place) if place is not None else None
    model = Net() if mesh is None else sharded(mesh["shard"], torch.float32)
    fields = {"localsgd": tw.LocalSGD(2)} if field == "localsgd" else {}
    if field == "lamb":
        fields["lamb"] = tw.LAMB()
    kind = torch.optim.AdamW(model.parameters(), lr=0.02) if field == "lamb" else muon_of(model)
    return model, toys.engine_of(model, optimizer=kind, options={"mesh": mesh}, **fields)


def resumed(
    rank: int, size: int, place: tuple[int, int] | None, field: str, folder: str, begin: int
) -> dict[str, Tensor]:
    """All sites see the same, so that any number of them trains alike."""
    model, engine = engine_of(place, field)
    if begin:
        engine.load(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the (gradients|changes) of all ranks are equal")
        for step in range(begin, begin + 4):
            engine.train_step(*batch(0, step, torch.float32))
    engine.save(folder)
    return values_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["none", "localsgd", "lamb"])
def test_training_goes_on_on_other_shards(ranks: Pool, field: str, tmp_path: Path) -> None:
    for begin, place in ((0, (2, 2)), (4, (1, 2)), (8, (2, 3))):
        folder, size = str(tmp_path / "whole"), place[0] * place[1]
        whole = ranks.run(resumed, None, field, folder, begin, size=place[0])[0]
        for values in ranks.run(resumed, place, field, str(tmp_path / "cut"), begin, size=size):
            # norms are summed by shards, and a third of three equal gradients is not exact
            if field == "lamb" or place[1] == 3:
                torch.testing.assert_close(values, whole, rtol=1e-3, atol=1e-4)
            else:
                same(values, whole)


def through_torch(
    rank: int, size: int, place: tuple[int, int], folder: str, begin: int
) -> dict[str, Tensor]:
    mesh = mesh_of(*place)
    model = sharded(mesh["shard"] if place[0] == 1 else mesh, torch.float32)
    optimizer = muon_of(model)
    if begin:
        state = get_state_dict(model, optimizer)
        dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    for step in range(begin, begin + 4):
        x, y = batch(0, step, torch.float32)
        descend(optimizer, mse_loss(model(x), y))
    state = get_state_dict(model, optimizer)
    if not begin:
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    return values_of(model)


@pytest.mark.slow
def test_torchs_checkpoints_go_on_on_other_shards(ranks: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "torch")
    for begin, places in ((0, [(2, 2)]), (4, [(1, 2), (1, 4)])):
        whole = ranks.run(resumed, None, "none", str(tmp_path / "own"), begin, size=1)[0]
        for place in places:
            size = place[0] * place[1]
            for values in ranks.run(through_torch, place, folder, begin, size=size):
                same(values, whole)


class Square(nn.Module):
    """Eight matrices without biases: two for each of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def given_gradients(model: nn.Module, skipped: int | None = None) -> None:
    for at, p in enumerate(model.parameters()):
        p.grad = None if at == skipped else torch.ones_like(p)


def bytes_of(rank: int, size: int, ns_dtype: str) -> float:
    model = Square()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = tw.optim.Muon(model.parameters(), ns_dtype=ns_dtype)
    sent = []
    for _ in range(3):
        given_gradients(model)
        before = Group.on_the_wire
        optimizer.step()
        sent.append(Group.on_the_wire - before)
    assert sent[1] == sent[2] < sent[0] < sent[1] + 10_000  # matrices are compared once
    return sent[1]


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_bytes_of_a_step(ranks: Pool, ns_dtype: str) -> None:
    """2 x matrix / ranks less what stays, half back in bfloat16; 16 bytes of sums for a pair."""
    matrices = 8 * 64 * 64 * 4
    words = 2 if ns_dtype == "float32" else 1.5
    for sent in ranks.run(bytes_of, ns_dtype, size=4):
        assert sent == words * matrices / 4 * 3 / 4 + (16 * 4 + 4) * 3


def wrong(rank: int, size: int, case: str) -> str:
    model, mesh = Square(), init_device_mesh("cpu", (size,))
    if case == "two cuts":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for layer in model.layers:
            cut = distribute_tensor(layer.weight, grid, [Shard(0), Shard(1)])
            layer.weight = nn.Parameter(cut)
    else:
        fully_shard(model, mesh=mesh)
    optimizer = tw.optim.Muon(model.named_parameters(), lr=0.1)
    try:
        if case != "others at once":
            given_gradients(model)
            if case == "gradient":
                p = next(model.parameters())
                p.grad = distribute_tensor(torch.zeros(64, 64), mesh, [Replicate()])
            optimizer.step()
        if case == "lost" and rank == 1:
            os._exit(9)
        given_gradients(model, skipped=2 if rank == 1 else None)
        optimizer.step()
    except Exception as error:
        with pytest.raises(Exception, match=r"out of step|" + str(error)[:10]):
            optimizer.step()
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("two cuts", ["ValueError: layers.0.weight has placements", "Set 'muon' to False"]),
        (
            "gradient",
            ["ValueError: the gradient of layers.0.weight has placements", "backward pass"],
        ),
        ("others at once", ["Mismatch: comparing the matrices", "matrices.2", "(64, 64)"]),
        ("others later", ["Mismatch: ", "moving matrices of Muon", "comparing the matrices"]),
        pytest.param("lost", ["Peer", "moving matrices"], marks=pytest.mark.fault),
    ],
)
def test_failed_check_is_reported(ranks: Pool, case: str, texts: list[str]) -> None:
    told = ranks.run(wrong, case, size=4, expect_errors=True, group_timeout_s=5)
    for rank, text in enumerate(told):
        if rank != 1 or case != "lost":
            assert all(each in text for each in texts), told


def damaged(rank: int, size: int, way: str, index: int) -> tuple[str, bool]:
    """How a step ends whose exchange damages a bit, if nothing moved; the next step ends well."""
    model, engine = engine_of((1, size), "none" if way == "bare" else way)
    optimizer, swap, launched = engine.optimizer, Group.swap, []
    if way == "bare":
        engine.close()

    def step(number: int) -> None:
        if way != "bare":
            engine.train_step(*batch(0, number, torch.float32))
            return
        given_gradients(model)
        optimizer.step()

    def flipped(*args: Any, **given: Any) -> Pending[Tensor]:
        pending = swap(*args, **given)
        launched.append(given["action"])
        if rank != 1 or len(launched) != index + 1:
            return pending
        return Pending(lambda: (content := pending.wait(), content[:1].bitwise_xor_(1))[0])

    def state() -> list[Tensor]:
        kept = [p for p in model.parameters() if p.requires_grad]
        kept += [optimizer.state[p]["momentum_buffer"] for p in kept if p.ndim > 1]
        return [t.to_local().clone() for t in kept]

    step(0)
    before = state()
    with mock.patch.object(Group, "swap", flipped), pytest.raises(PayloadCorrupt) as refused:
        step(1)
    unmoved = all(map(torch.equal, before, state()))
    if way == "bare":
        step(2)
    return str(refused.value), unmoved


@pytest.mark.fault
@pytest.mark.parametrize("way", ["bare", "none", "localsgd"])
@pytest.mark.parametrize("index", [0, 3])
def test_damaged_bit_of_a_matrix_is_refused_on_all(ranks: Pool, way: str, index: int) -> None:
    """Of a shard on its way to the owner, and of the last result."""
    for told, unmoved in ranks.run(damaged, way, index, size=4):
        assert "rank 1 refused parts of matrices from rank " in told
        assert unmoved


def order(rank: int, size: int) -> list[str]:
    model, seen = Square(), []
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = tw.optim.Muon(model.parameters())
    given_gradients(model)
    swap, orthogonal = Group.swap, owners.newton_schulz

    def swapped(*args: Any, **given: Any) -> Pending[Tensor]:
        seen.append("launch")
        pending = swap(*args, **given)
        return Pending(lambda: (seen.append("wait"), pending.wait())[1])

    def made(*args: Any) -> Tensor:
        seen.append("make")
        return orthogonal(*args)

    with (
        mock.patch.object(Group, "swap", swapped),
        mock.patch.object(owners, "newton_schulz", made),
    ):
        optimizer.step()
    return seen


def test_the_next_matrices_are_on_their_way_while_some_are_orthogonalised(ranks: Pool) -> None:
    first = ["launch", "launch", "wait", "make", "launch"]
    between = ["launch", "wait", "make", "launch", "wait"]
    last = ["wait", "make", "launch", "wait", "wait"]
    for seen in ranks.run(order, size=2):
        assert seen == [*first, *between * 2, *last]
