"""Parts of the model take turns: how they are cut, all have theirs, and nothing is lost."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.local.test_laws import digest
from tests.ranks import Pool


class Stack(nn.Module):
    """The names of a small transformer."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.double()


# ---- over ranks


def set_gradients(model: nn.Module, step: int, rank: int) -> None:
    """Of a bowl that is not quite the same for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = (0.3 * p.detach() + noise).to(p.dtype)


ALL_IN_TIME = {
    "dense": None,
    "sparse": tw.Sparse(0.8, decay=1.0, mean_over="all"),
    "quantized, 1 bit": tw.Quantized(1),
    "quantized, 4 bits": tw.Quantized(4),
    "low rank": tw.LowRank(2, begin_step=5, min_numel=40),
}


def overlapped(compression: Any, fragments: int = 3) -> tw.LocalSGD:
    return tw.LocalSGD(9, fragments=fragments, delay=2, compression=compression)


def keep_books(rank: int, size: int, config: Any, steps: int) -> tuple[float, str, bool]:
    """Largest error of: anchors moved by the mean of all changes less the mean of what is kept."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    changed = {name: torch.zeros_like(p) for name, p in start.items()}
    with tw.local_sgd(model, optimizer, config) as sync:
        on_its_way = False
        for step in range(1, steps + 1):
            set_gradients(model, step, rank)
            for name, p in model.named_parameters():
                changed[name] += 0.1 * p.grad  # type: ignore[operator]
            optimizer.step()
            on_its_way |= sync.pending is not None
        sync.flush()
        errors = sync.state_dict()["residuals"]
    worst = 0.0
    for name, p in model.named_parameters():
        sums = torch.stack([changed[name], errors.get(name, torch.zeros_like(p))]).detach()
        torch.distributed.all_reduce(sums)
        moved = (start[name] - p.detach()) * size
        worst = max(worst, float((moved + sums[1] - sums[0]).abs().max()))
    return worst, digest(model), on_its_way


@pytest.mark.parametrize("name", ALL_IN_TIME)
def test_nothing_is_lost_and_flush_leaves_ranks_equal(ranks: Pool, name: str) -> None:
    """1e-10: sums of a few hundred float64 of size 1. A result is on its way at the end."""
    answers = ranks.run(keep_books, overlapped(ALL_IN_TIME[name]), 101, size=2)
    assert all(lost < 1e-10 and on_its_way for lost, _, on_its_way in answers)
    assert len({bits for _, bits, _ in answers}) == 1


# ---- saved and loaded


def resume(rank: int, size: int, config: Any, other: Any) -> list[list[str]]:
    """Straight on, and from the state that was saved while a result was on its way."""
    found: list[list[str]] = []
    state: Any = None
    for each in (config, other):
        model = Stack()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with tw.local_sgd(model, optimizer, each) as sync:
            if state is not None:
                sync.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            found.append([])
            while sync.step < 60:
                if state is None and sync.step >= 20 and sync.pending is not None:
                    state = copy.deepcopy((sync.state_dict(), optimizer.state_dict()))
                    found[0].clear()
                set_gradients(model, sync.step + 1, rank)
                optimizer.step()
                found[-1].append(digest(model))
            sync.flush()
            found[-1].append(digest(model))
    return found


def test_state_of_other_fragments_is_applied_to_measured_fragments(ranks: Pool) -> None:
    first, second = (overlapped(tw.Quantized(4), fragments) for fragments in (3, 2))
    answers = ranks.run(resume, first, second, size=2)
    for straight, resumed in answers:
        assert straight[0] == resumed[0]  # until the next part is due
        assert straight[-1] != resumed[-1]
    assert len({resumed[-1] for _, resumed in answers}) == 1
