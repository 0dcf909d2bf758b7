"""Every method on a device that is not the CPU: the CPU's bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.device import stand_in
from tests.laws.frontends import Case, LocalBlock, LocalEngine, OwnStep, WithEngine, bits_of, ended
from tests.laws.test_matrix import AVERAGING, CONFIGS, DGC, ENGINES, SENDING, Row, adam
from tests.ranks import Pool


def muon(params: Any) -> torch.optim.Optimizer:
    # its dtype on a CPU
    return tw.optim.Muon(params, lr=0.01, ns_dtype=torch.float32)


def engine(optimizer: Any = None, steps: int = 12, clip: Any = None, **fields: Any) -> Row:
    return Row(WithEngine, Case(fields=fields, optimizer=optimizer, steps=steps, clip=clip))


def local(compression: Any, optimizer: Any = None, **more: Any) -> Row:
    config = tw.LocalSGD(5, compression=compression, begin_step=0, **more)
    return engine(optimizer, 16, localsgd=config)


MORE = {
    "lars": engine(lars=tw.LARS()),
    "lamb": engine(adam, lamb=tw.LAMB()),
    "muon": engine(muon),
    "clip": engine(clip=tw.ClipByGlobalNorm(0.5)),
    "recompute": engine(recompute=tw.Recompute(["2"])),
    "amp, float16": engine(adam, amp=tw.AMP("float16", tw.DynamicLossScale(2.0**8))),
    "local lamb": engine(adam, 16, lamb=tw.LAMB(), localsgd=tw.LocalSGD(5)),
    "local muon": local(tw.Quantized(1), muon),
    "1 bit": local(tw.Quantized(1)),
    "8 bits": local(tw.Quantized(8)),
    "16 bits": local(tw.Quantized(16, exchange="split")),
    "1 bit, host": local(tw.Quantized(1), state_device="cpu", delay=1, fragments=2),
    "sparse, host": local(tw.Sparse(0.9), state_device="cpu", outer_momentum=0.9),
}
"""Beside those of the matrix."""
EVERY = {**SENDING, **AVERAGING}
ROWS: dict[str, Row] = {
    **{way.__name__: EVERY[way.__name__] for way in (OwnStep, WithEngine, LocalBlock, LocalEngine)},
    **{f"dgc, {name}": EVERY[f"OwnStep, {name}"] for name in DGC},
    **{name: EVERY[f"WithEngine, {name}"] for name in ENGINES},
    **{name: EVERY[f"LocalEngine, {name}"] for name in CONFIGS},
    **MORE,
}
NEAR = ("dgc, schedule, limited", "amp, dgc, lamb, merged", "lars", "lamb", "local lamb", "clip")
NEAR += ("muon", "local muon")
"""Methods with a norm, which is summed in float64 or in another order on a device."""
DEVICES = (stand_in.FIRST, stand_in.SECOND)


def continued(rank: int, size: int, device: str, folder: str) -> tuple[str, str, float]:
    """Bits of a run, and of one that goes on from its checkpoint; a mean loss."""
    stand_in.library()
    local = tw.LocalSGD(3, compression=tw.Quantized(1))
    one, other = (LocalEngine(Case(local=local, device=device)) for _ in range(2))
    one.train(rank, 0, 6)
    one.engine.save(folder)
    loss = one.engine.mean_loss(torch.tensor(float(rank), device=device))
    other.engine.load(folder)
    for way in (one, other):
        way.train(rank, 6, 12)
        way.end()
    return bits_of(one.model), bits_of(other.model), float(loss)


@pytest.mark.parametrize("device", DEVICES)
def test_checkpoint_of_a_device_continues_there(ranks: Pool, device: str, tmp_path: Path) -> None:
    [(straight, resumed, loss), _] = ranks.run(continued, device, str(tmp_path))
    assert straight == resumed
    assert loss == 0.5


def parameters(rank: int, size: int, row: Row) -> tuple[str, list[torch.Tensor]]:
    stand_in.library()
    model = ended(rank, row.frontend, row.case)[0].model
    assert {str(p.device) for p in model.parameters()} == {row.case.device}
    return bits_of(model), [p.detach().cpu() for p in model.parameters()]


SLOW = {name for name, row in ROWS.items() if row.size == 4} - {
    "dgc, nodes",
    "nodes, sparse, split",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in ROWS]
)
def test_training_on_a_device_gives_bits_of_the_cpu(ranks: Pool, name: str) -> None:
    """Also where it goes on from its state halfway."""
    row = ROWS[name]
    here = ranks.run(parameters, row, size=row.size)
    for device in DEVICES:
        case = replace(row.case, device=device, resume_at=row.case.steps // 2)
        there = ranks.run(parameters, replace(row, case=case), size=row.size)
        assert len({bits for bits, _ in there}) == 1
        if name in NEAR:
            torch.testing.assert_close(there[0][1], here[0][1], rtol=1e-5, atol=1e-6)
        else:
            assert there[0][0] == here[0][0]
