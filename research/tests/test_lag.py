"""The simulation behind the table of what shortens DGC's lag has the losses of real ranks."""

from dataclasses import asdict, replace

import pytest

from benchmarks import evidence
from benchmarks.evidence import Cell, as_it_is, measured
from research.lag import variants

CELL = variants.Cell(
    kind="tuning", variant="dense", workers=2, size="200k", steps=24, lr=0.1, seed=1
)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "strategy"), [("dense", "dense"), ("0.1 %", "dgc")])
def test_losses_equal_real_ranks(
    variant: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "EVALUATIONS", 3)
    cell = {**asdict(CELL), **as_it_is(strategy, "sgd")}
    del cell["variant"]
    if strategy == "dgc":
        cell["options"]["value_bits"] = 32
    real = measured(Cell(**cell))
    found = variants.train(replace(CELL, variant=variant), evaluations=3)
    assert [step for step, _ in found["losses"]] == [8, 16, 24]
    for (step, loss), (real_step, real_loss) in zip(
        found["losses"], real["losses"][1:], strict=True
    ):
        assert step == real_step
        assert loss == pytest.approx(real_loss, abs=2e-4)
