"""Parts of the model take turns, also those of a loaded state."""

import copy
from typing import Any

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


def set_gradients(model: nn.Module, step: int, rank: int) -> None:
    """Of a bowl that is not quite the same for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = (0.3 * p.detach() + noise).to(p.dtype)


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
    first, second = (
        tw.LocalSGD(12, fragments=fragments, delay=3, compression=tw.Quantized(4))
        for fragments in (3, 2)
    )
    answers = ranks.run(resume, first, second, size=2)
    for straight, resumed in answers:
        assert straight[0] == resumed[0]  # until the next part is due
        assert straight[-1] != resumed[-1]
    assert len({resumed[-1] for _, resumed in answers}) == 1
