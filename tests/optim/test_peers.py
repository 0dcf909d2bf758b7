"""LAMB and LARS next to those of timm, where that package is there; only its two files are
loaded."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.optim.cases import model, train
from thinwire import optim


def peer(name: str) -> types.ModuleType:
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        pytest.skip("timm is not installed")
    package = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(found.origin).parent / "optim")]
    sys.modules.setdefault("timm_optim", package)
    return importlib.import_module(f"timm_optim.{name}")


@pytest.mark.parametrize("trust_clip", [None, (0.0, 1.0)])
def test_lamb(trust_clip: tuple[float, float] | None) -> None:
    ours, theirs = model(torch.float64), model(torch.float64)
    a = optim.Lamb(ours.parameters(), lr=0.02, weight_decay=0.05, trust_clip=trust_clip)
    b = peer("lamb").Lamb(
        theirs.parameters(),
        lr=0.02,
        weight_decay=0.05,
        max_grad_norm=None,
        trust_clip=trust_clip is not None,
    )
    for p, q in zip(train(ours, a, range(50)), train(theirs, b, range(50)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_at_a_constant_rate(nesterov: bool) -> None:
    """timm's rate stands outside the momentum, so the two agree at a constant rate only."""
    ours, theirs = model(torch.float64), model(torch.float64)
    a = optim.Lars(
        ours.parameters(),
        lr=0.5,
        momentum=0.9,
        weight_decay=0.01,
        trust_coefficient=0.02,
        nesterov=nesterov,
    )
    b = peer("lars").Lars(
        theirs.parameters(),
        lr=0.5,
        momentum=0.9,
        weight_decay=0.01,
        trust_coeff=0.02,
        eps=0.0,
        nesterov=nesterov,
    )
    for p, q in zip(train(ours, a, range(50)), train(theirs, b, range(50)), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
