"""PowerSGD: laws over real ranks, against loops in float64."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import thinwire as tw
from tests import toys
from tests.api import Group, LowRank, Overlap, prepare
from tests.ranks import Pool
from tests.sync.means import GradientMean
from tests.toys import bits

SHAPES = {"wide": (5, 17), "cube": (6, 3, 5), "vector": (40,), "tall": (31, 4), "square": (3, 3)}


def sent(rank: int, size: int) -> tuple[set[str], int]:
    """What has factors, and the bytes of the third update."""
    params = {
        name: Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()
    }
    mean = GradientMean(Group(), params, LowRank(2, begin_step=0, min_numel=9))
    factors = set(mean.state_dict()["factors"])
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        before = mean.counted()["bytes_sent"]
        mean.reduce(step, {name: torch.randn_like(p) for name, p in params.items()})
    return factors, mean.counted()["bytes_sent"] - before


def test_bytes_equal_the_formula(ranks: Pool) -> None:
    """r (n + m) numbers of each matrix and all of the rest, here of 8 bytes; what is dense and
    small has a checksum of 8 bytes, and the two agreements have 24 bytes each."""
    matrices = {"wide": 5 + 17, "cube": 6 + 15, "tall": 31 + 4, "square": 3 + 3}
    numbers = 2 * sum(matrices.values()) + 40
    assert ranks.run(sent) == [(set(matrices), 8 * numbers + 8 + 2 * 24)] * 2


class Skip(nn.Linear):
    """x + tanh(W x + b)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Skip(24, 24) for _ in range(10)), nn.Linear(24, 4))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 24, generator=generator)
    return x, (x[:, :4] * 3).argmax(1)


def engine_of(model: nn.Module, **settings: Any) -> Any:
    low_rank = tw.LowRank(**{"rank": 2, "begin_step": 3, "min_numel": 64, **settings})
    loss_fn = nn.functional.cross_entropy
    return toys.engine_of(model, loss_fn, lr=0.02, momentum=0.9, low_rank=low_rank)


def in_ten_buckets(params: Any, gradients: Any, **_: Any) -> Any:
    overlap = Overlap(params, gradients, bucket_bytes=2000, first_bytes=2000)
    assert len(gradients.buckets) >= 10
    return overlap


def long_training(rank: int, size: int, steps: int, buckets: int) -> tuple[float, float, str]:
    torch.set_num_threads(1 + rank % 2)  # the bits may not depend on it
    with pytest.MonkeyPatch.context() as patch:
        if buckets > 1:
            patch.setattr(prepare, "Overlap", in_ten_buckets)
        engine = engine_of(model_of())
    losses = [float(engine.train_step(*batch(rank, step))) for step in range(steps)]
    engine.close()
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10, bits(engine.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "buckets"), [(500, 1), (100, 10)])
def test_four_ranks_have_same_bits_after_many_steps(ranks: Pool, steps: int, buckets: int) -> None:
    answers = ranks.run(long_training, steps, buckets, size=4, timeout_s=300)
    assert len({answer[2] for answer in answers}) == 1
    assert all(last < 0.5 * first for first, last, _ in answers)


def lost_columns(rank: int, size: int) -> list[Any]:
    """Gradients of rank 1 under a rank of 2: then the second column is nothing but rounding."""
    params = {"w": Parameter(torch.zeros(8, 6, dtype=torch.float64))}
    mean = GradientMean(Group(), params, LowRank(2, begin_step=0, min_numel=1))
    found = []
    for step in range(12):
        grad = torch.outer(torch.arange(8.0), torch.ones(6)).double() * (1 + step % 3) + 0 * rank
        if step >= 6:  # a second direction appears: the column must be alive again
            grad[:, 0] += torch.arange(8.0).flip(0) * (1 + rank)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the gradients of all ranks are equal")
            got = mean.reduce(step, {"w": grad})
        assert got is not None
        found.append((grad, got["w"]))
    return [*found, mean.residuals["w"]]


def test_a_column_without_content_is_drawn_anew(ranks: Pool) -> None:
    *steps, kept = zip(*ranks.run(lost_columns), strict=True)
    for number, pairs in enumerate(steps):
        mean = sum(grad for grad, _ in pairs) / 2
        if number < 6:  # of rank 1: exact at once
            torch.testing.assert_close(pairs[0][1], mean, rtol=0, atol=1e-12)
    total = sum(sum(grad for grad, _ in pairs) / 2 for pairs in steps)
    applied = sum(pairs[0][1] for pairs in steps)
    torch.testing.assert_close(applied + sum(kept) / 2, total, rtol=0, atol=1e-9)
    # of rank 2 from the seventh on: all of it is applied but for the first steps of the new
    # direction
    assert float((sum(kept) / 2).norm()) < 0.1 * float(total.norm())


def warned_with(rank: int, size: int, fields: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What `prepare` warns of by optimizer, and in which file."""
    told = []
    for kind in (torch.optim.AdamW, torch.optim.SGD, tw.optim.Muon):
        model = model_of()
        groups = tw.optim.muon_groups(model) if kind is tw.optim.Muon else model.parameters()
        optimizers = [kind(groups, lr=0.01)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tw.DistributedStrategy(**fields).prepare(model, optimizers).close()
        texts = [f"{Path(each.filename).name}: {each.message}" for each in caught]
        told.append((kind.__name__, texts))
    return told


def test_adam_and_muon_are_warned_of_once_and_on_rank_0(ranks: Pool) -> None:
    silent = [("AdamW", []), ("SGD", []), ("Muon", [])]
    (first, sgd, muon), second = ranks.run(warned_with, {"low_rank": LowRank(1, min_numel=1)})
    for name, [text] in (first, muon):
        assert text.startswith(f"test_low_rank.py: low_rank with {name}: ")
        assert "SGD with momentum" in text
    assert (sgd, second) == (silent[1], silent)
    assert ranks.run(warned_with, {}) == [silent, silent]
