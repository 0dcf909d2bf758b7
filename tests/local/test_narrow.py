"""bfloat16 parameters lose no change to their type, and copies of weights that an optimizer keeps
follow the averagings.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.ranks import Pool
from tests.toys import engine_of

SMALL = 2.0**-7
"""One unit in the last place of a bfloat16 1.0."""


class OneWeight(nn.Module):
    """Four equal weights, each 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 2, dtype=dtype))


CONFIGS = {
    "32 bits": tw.LocalSGD(1),
    "4 bits": tw.LocalSGD(1, compression=tw.Quantized(4)),
    "1 bit": tw.LocalSGD(1, compression=tw.Quantized(1)),
    "sparse": tw.LocalSGD(1, compression=tw.Sparse(0.5, decay=1.0, mean_over="all")),
    "outer": tw.LocalSGD(1, outer_lr=0.5, outer_momentum=0.5),
    "delay": tw.LocalSGD(2, delay=1, compression=tw.Quantized(1)),
    "by time": tw.LocalSGD(1, round_seconds=1000.0),
    "nodes": tw.LocalSGD(1, node_size=2, compression=tw.Quantized(1)),
    "fragments": tw.LocalSGD(3, fragments=3, compression=tw.Quantized(1)),
}


def one_rank_moves(rank: int, size: int, config: tw.LocalSGD, dtype: torch.dtype) -> list[float]:
    """Rank 0 adds one unit in the last place a step, the others nothing."""
    model = nn.ModuleList(OneWeight(dtype) for _ in range(config.fragments))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tw.local_sgd(model, optimizer, config):
        for _ in range(40):
            for p in model.parameters():
                p.grad = torch.full_like(p, -SMALL if rank == 0 else 0.0)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_small_changes_of_bfloat16_weights_arrive_at_any_bits(ranks: Pool, name: str) -> None:
    """0.02: the steps of one rank after the last averaging, and half a unit in the last place."""
    size = 4 if name == "nodes" else 3
    narrow = ranks.run(one_rank_moves, CONFIGS[name], torch.bfloat16, size=size)
    wide = ranks.run(one_rank_moves, CONFIGS[name], torch.float32, size=size)
    assert all(values == narrow[0] for values in narrow)
    assert narrow[0] == pytest.approx(wide[0], abs=0.02)
    assert wide[0][0] > 1 + 20 * SMALL / size


def resumed(rank: int, size: int, folder: str, halves: int) -> tuple[list[float], str]:
    """40 steps of an engine, in one or in two processes' worth of engines."""
    values = ""
    for half in range(halves):
        model = OneWeight(torch.bfloat16)
        local = tw.LocalSGD(1, compression=tw.Quantized(1))
        engine = engine_of(model, lr=1.0, localsgd=local)
        engine.load(folder, if_any=True)
        for _ in range(20 if halves == 2 else 40):
            engine.minimize((model.w.float() * (-SMALL if rank == 0 else 0.0)).sum())
        if half == 0 and halves == 2:
            engine.save(folder)
        anchors = engine.state_dict()
        values = str(anchors["local"]["anchors"]) if "local" in anchors else ""
        engine.close()
    return model.w.detach().flatten().tolist(), values


def test_bfloat16_part_below_a_weight_survives_a_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    straight = ranks.run(resumed, str(tmp_path / "one"), 1, size=3)
    stopped = ranks.run(resumed, str(tmp_path / "two"), 2, size=3)
    assert straight == stopped
    assert straight[0][0][0] == pytest.approx(1 + 40 * SMALL / 3, abs=0.02)


def loaded_weights(rank: int, size: int, config: tw.LocalSGD) -> float:
    """All ranks write much smaller weights after an averaging of weights about 1."""
    model = OneWeight(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(1, 12):
            if step == 6:
                with torch.no_grad():
                    model.w.fill_(2.0**-20)
            model.w.grad = torch.full_like(model.w, -SMALL if rank == 0 and step < 6 else 0.0)
            optimizer.step()
        sync.flush()
    return float(model.w[0, 0].detach())


@pytest.mark.parametrize("name", ["32 bits", "1 bit"])
def test_weights_that_are_loaded_on_all_ranks_replace_exact_anchors(ranks: Pool, name: str) -> None:
    assert ranks.run(loaded_weights, CONFIGS[name], size=3) == [2.0**-20] * 3


# ---- optimizers with weights of their own


class Masters(torch.optim.SGD):
    """SGD on float32 copies of the weights: one for each, or flat for each group, with zeros after.

    `kept`: in its "state" or an "attribute", "flat state" or "flat attribute".
    """

    def __init__(self, params: Any, lr: float, *, kept: str) -> None:
        super().__init__(params, lr)
        self.groups_of_masters: list[dict[str, Any]] = []
        self._kept, self._of_groups = kept, SimpleNamespace(masters=[])  # not to be found there

    def _make_masters(self, params: list[Tensor]) -> None:
        flat = torch.cat([*(p.detach().float().flatten() for p in params), torch.zeros(3)])
        parts = zip(flat[:-3].split([p.numel() for p in params]), params, strict=True)
        masters = [part.view_as(p) for part, p in parts]
        if "flat" not in self._kept:
            masters = [master.clone() for master in masters]
        self._of_groups.masters.append(masters)
        for p, master in zip(params, masters, strict=True):
            self.state[p] = {"momentum": torch.zeros(p.shape)}
            if self._kept == "state":
                self.state[p]["master"] = master
        if "attribute" in self._kept:
            self.groups_of_masters.append({"params": flat if "flat" in self._kept else masters})
        if self._kept == "flat state":
            self.state[params[0]] |= {"flat": flat, "flat momentum": torch.zeros_like(flat)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for index, group in enumerate(self.param_groups):
            if index == len(self._of_groups.masters):
                self._make_masters(group["params"])
            for p, master in zip(group["params"], self._of_groups.masters[index], strict=True):
                self.state[p]["momentum"].mul_(0.5).add_(p.grad)
                master.sub_(group["lr"] * p.grad.float())
                p.copy_(master)


def own_weights(rank: int, size: int, kept: str, config: Any, step_size: float) -> list[float]:
    """Rank 0 moves up, the others stay; every step's first weight."""
    model = nn.ModuleDict({name: OneWeight(torch.bfloat16) for name in "abc"})
    with torch.no_grad():
        model["b"].w.fill_(0.0)  # type: ignore[operator, union-attr]
    a, b, c = model.parameters()
    optimizer = Masters([{"params": [a, b]}, {"params": [c]}], 1.0, kept=kept)
    found = []
    with tw.local_sgd(model, optimizer, config):
        for _ in range(40):
            for p in model.parameters():
                p.grad = torch.full_like(p, -step_size if rank == 0 else 0.0)
            optimizer.step()
            found.append(float(c[0, 0].detach()))
    assert a[0, 0] == c[0, 0]
    return found


MASTERED = {
    "state": tw.LocalSGD(4, average_state=True),
    "attribute": CONFIGS["1 bit"],
    "flat state": tw.LocalSGD(4, delay=2, average_state=True),
    "flat attribute": CONFIGS["1 bit"],
}


@pytest.mark.parametrize("config", [tw.LocalSGD(4), tw.LocalSGD(4, delay=2), None], ids=str)
@pytest.mark.parametrize("kept", MASTERED)
def test_float32_masters_start_from_the_mean(ranks: Pool, config: Any, kept: str) -> None:
    """Steps of a quarter unit, which bfloat16 alone would not hold. 0.03: ten steps and a half."""
    first, second = ranks.run(own_weights, kept, config or MASTERED[kept], SMALL / 4)
    assert first[-1] == pytest.approx(1 + 40 * SMALL / 4 / 2, abs=0.03)
    assert abs(first[-1] - second[-1]) <= 4 * SMALL


def momentum_alone(rank: int, size: int) -> list[float]:
    """A weight that stays zero on rank 0 has a momentum of zeros there, which is no copy of it."""
    model = nn.ModuleDict({"a": OneWeight(torch.float32), "b": OneWeight(torch.float32)})
    with torch.no_grad():
        model["b"].w.zero_()  # type: ignore[operator, union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with tw.local_sgd(model, optimizer, tw.LocalSGD(1)):
        model["a"].w.grad = torch.full((2, 2), 0.25)  # type: ignore[union-attr]
        model["b"].w.grad = torch.full((2, 2), float(rank))  # type: ignore[union-attr]
        optimizer.step()
    return optimizer.state[model["b"].w]["momentum_buffer"].flatten().tolist()  # type: ignore[union-attr, index, no-any-return]


def test_a_momentum_of_zeros_is_not_taken_for_a_copy(ranks: Pool) -> None:
    assert ranks.run(momentum_alone) == [[0.0] * 4, [1.0] * 4]
