"""Facts that ride on a dense step's last bucket say what a vote of their own would."""

import itertools
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import Group
from tests.ranks import Pool, Raised
from tests.strategy.training import batch, make_model
from tests.toys import arriving, bits, engine_of

cross_entropy = nn.functional.cross_entropy
STEPS = 8


class Twofold(nn.Module):
    """Parameters of two types, one of them complex, and a branch that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 64).double()
        self.turn = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.seldom, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.first(x.double()).float() * self.turn).abs().tanh()
        return self.last(self.seldom(hidden) if x.sum() > 0 else hidden)


SCALE = tw.DynamicLossScale(init_loss_scale=2.0**14, scale_window=3)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": {"fields": {"gradient_merge": tw.GradientMerge(2)}},
    "scaled": {"fields": {"amp": tw.AMP("float16", SCALE)}},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "float64": {"dtype": torch.float64},
    "types": {"model": Twofold, "told": {"find_unused_parameters": True}},
    "clipped": {"told": {"grad_clip": tw.ClipByGlobalNorm(0.1)}},
    "two optimizers": {"optimizers": True},
    "join": {"joins": True},
    "by gradients": {"by_gradients": True},
    "not a number": {"nan": True},
}


def trained(rank: int, size: int, case: str, verify: str) -> tuple[str, int, int, float]:
    """Bits of the model, updates, dropped steps, and the last loss scale."""
    how = CASES[case]
    dtype = how.get("dtype", torch.float32)
    model = how["model"]() if "model" in how else make_model(dtype=dtype, plain=True)
    own = list(model.parameters())
    optimizer: Any = torch.optim.SGD(own, 0.05, momentum=0.9)
    if how.get("optimizers"):
        optimizer = [torch.optim.SGD(own[:2], 0.05), torch.optim.AdamW(own[2:], 0.01)]
    told = {"verify": verify, **how.get("told", {})}
    fields = how.get("fields", {})
    engine = engine_of(model, cross_entropy, optimizer=optimizer, options=told, **fields)
    joins = bool(how.get("joins"))
    with engine.join() if joins else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped steps
        for step in range(STEPS + joins * rank):
            x, y = batch(step, rank, dtype=dtype)
            if how.get("nan") and step in (4, 5) and rank == size - 1:
                x = x / 0
            if how.get("by_gradients"):
                cross_entropy(model(x), y).backward()
                engine.apply_gradients()
                model.zero_grad()
            else:
                engine.train_step(x, y)
    stats = engine.stats()
    return bits(own), engine.step, int(stats["dropped_steps"]), stats["loss_scale"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_the_same_whether_facts_ride_or_not(case: str, size: int, ranks: Pool) -> None:
    riding = ranks.run(trained, case, "after", size=size)
    asked = ranks.run(trained, case, "before", size=size)
    assert len(set(riding)) == 1
    assert riding == asked


def summed(rank: int, size: int, near: bool, streams: int | None, timeout_s: float) -> str:
    model = nn.Linear(700, 800)
    nn.init.zeros_(model.weight)
    told = {"streams": streams, "timeout": timeout_s, "verify": "after"}
    engine = engine_of(model, lr=1.0, options=told)
    generator = torch.Generator().manual_seed(rank)
    with patch.object(Group, "seems_near", near):
        for _ in range(5):
            x = torch.randn(8, 700, generator=generator)
            engine.train_step(x, torch.randn(8, 800, generator=generator))
    return bits(model.parameters())


@pytest.mark.parametrize("size", [3, 4])
def test_bits_of_a_sum_depend_on_no_line(size: int, ranks: Pool) -> None:
    lines = [(True, None, 60.0), (False, None, 60.0), (False, 1, 60.0), (False, 3, 4.0)]
    found = [ranks.run(summed, *line, size=size) for line in lines]
    assert len(set(itertools.chain(*found))) == 1


def raised(
    rank: int, size: int, where: str, begin: int, fields: dict[str, Any], verify: str
) -> list[Any]:
    """Rank 1 has an error in one forward pass, and goes on as the others do."""
    model = make_model(plain=True)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        if where == "loss" and failing:
            raise ZeroDivisionError("of the user")
        return cross_entropy(out, y)

    def forward(*_: object) -> None:
        if where == "forward" and failing:
            raise ZeroDivisionError("of the user")

    model[1].register_forward_pre_hook(forward)
    engine = engine_of(model, loss_of, options={"verify": verify}, **fields)
    texts = []
    for step in range(begin + 4):
        failing = rank == 1 and step == begin
        try:
            engine.train_step(*batch(step, rank))
        except (ZeroDivisionError, tw.errors.ThinwireError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return [texts, bits(model.parameters()), engine.step]


FIELDS = {"dense": {}, "dgc": {"dgc": tw.DGC(sparsity=(0.5,), min_numel=64)}}


@pytest.mark.fault("an exception on one rank: in its backward pass, forward pass, or update")
@pytest.mark.parametrize("kind", FIELDS)
@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("where", ["forward", "loss"])
@pytest.mark.parametrize("verify", ["after", "before"])
def test_error_before_the_backward_pass_is_reported_to_all(
    where: str, begin: int, kind: str, verify: str, ranks: Pool
) -> None:
    how = where, begin, FIELDS[kind], verify
    answers = ranks.run(raised, *how, size=3, group_timeout_s=20.0)
    assert len({(model, step) for _, model, step in answers}) == 1
    for rank, ([text], _, step) in enumerate(answers):
        assert step == begin + 3
        begins = "ZeroDivisionError: of" if rank == 1 else "ThinwireError: rank 1: its forward"
        assert text.startswith(begins)


def published(rank: int, size: int, folder: str) -> list[int]:
    """Steps of the versions of a run in which rank 1 receives another sum in step 4."""
    engine = engine_of(nn.Linear(400, 200), options={"verify": "after"})
    engine.publish(folder, updates=1, keep=20)

    def damaged(total: Tensor, action: str) -> Tensor:
        if rank == 1 and "step 4" in action:
            total[3] += 1
        return total

    with arriving(Group, "all_reduce_", damaged), pytest.raises(tw.errors.PayloadCorrupt):
        for step in range(8):
            x = torch.randn(8, 400, generator=torch.Generator().manual_seed(2 * step + rank))
            engine.train_step(x, x[:, :200])
    return [int(engine.stats()["published_step"])]


@pytest.mark.fault("one bit flipped in a message")
def test_no_version_is_published_of_a_sum_that_was_damaged(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(published, str(tmp_path))
    follower = tw.follow(tmp_path)
    assert follower.latest(wait=20.0).step <= 4
    assert max(follower.versions()) <= 4


def saved(rank: int, size: int, folder: str) -> str:
    """Error of a save right after the step in which rank 1 receives another sum."""
    engine = engine_of(nn.Linear(400, 200), options={"verify": "after"})

    def damaged(total: Tensor, action: str) -> Tensor:
        if rank == 1 and "step 4" in action:
            total[3] += 1
        return total

    with arriving(Group, "all_reduce_", damaged):
        for step in range(5):
            x = torch.randn(8, 400, generator=torch.Generator().manual_seed(2 * step + rank))
            engine.train_step(x, x[:, :200])
    with pytest.raises(tw.errors.PayloadCorrupt) as caught:
        engine.save(folder)
    return str(caught.value)


@pytest.mark.fault("one bit flipped in a message")
def test_nothing_is_saved_of_a_sum_that_was_damaged(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(saved, str(tmp_path / "run"))
    assert first == second
    assert "sums of dense tensors" in first
    assert not list(tmp_path.rglob("*.safetensors"))


def hurt(rank: int, size: int, dtype: torch.dtype, at: int) -> None:
    """One number of a slot changes on its way to rank 1."""
    model = nn.Linear(400, 200, dtype=dtype)
    engine = engine_of(model, options={"verify": "after"})

    def damaged(total: Tensor, action: str) -> Tensor:
        if rank == 1 and "step 4" in action:
            total[-at] += 1
        return total

    with arriving(Group, "all_reduce_", damaged):
        for step in range(6):
            x = torch.randn(8, 400, generator=torch.Generator().manual_seed(2 * step + rank)).to(
                dtype
            )
            engine.train_step(x, x[:, :200])


@pytest.mark.fault("one bit flipped in a message")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_slot_that_was_damaged_ends_the_exchange_on_all(
    dtype: torch.dtype, at: int, ranks: Pool
) -> None:
    first, second = ranks.run(hurt, dtype, at, expect_errors=True, group_timeout_s=20.0)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert first.type_name in ("PayloadCorrupt", "PeerLost"), first.traceback
    assert second.type_name == "PayloadCorrupt", second.traceback
