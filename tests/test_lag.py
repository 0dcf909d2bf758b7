"""The simulation behind the table of what shortens DGC's lag has the losses of real ranks."""

from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import evidence, lag
from benchmarks.evidence import Cell, as_it_is, measured
from benchmarks.lag import VARIANTS, Exchange, Threshold

CELL = lag.Cell(kind="tuning", variant="dense", workers=2, size="200k", steps=24, lr=0.1, seed=1)


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
    found = lag.train(replace(CELL, variant=variant), evaluations=3)
    assert [step for step, _ in found["losses"]] == [8, 16, 24]
    for (step, loss), (real_step, real_loss) in zip(
        found["losses"], real["losses"][1:], strict=True
    ):
        assert step == real_step
        assert loss == pytest.approx(real_loss, abs=2e-4)


def test_densities_of_the_ramp_and_of_stages() -> None:
    density = VARIANTS["1 %, then 0.1 %"].density
    assert [density(step, 3000) for step in (0, 19, 20, 80, 1999, 2000)] == [
        0.25,
        0.25,
        0.0625,
        0.01,
        0.01,
        0.001,
    ]
    assert VARIANTS["dense"].density(5, 3000) == 1


def gradients(steps: int, workers: int = 2, numel: int = 1000) -> torch.Tensor:
    """Of shape (steps, workers, numel)."""
    return torch.randn(steps, workers, numel, generator=torch.Generator().manual_seed(3))


def test_nothing_is_lost_where_momentum_is_not_cleared() -> None:
    exchange, sent, momentum, whole = Exchange(VARIANTS["1 %, unmasked"], 1000, 2, False), 0, 0, 0
    for grads in gradients(40):
        exchange.grads.copy_(grads)
        exchange.fold()
        sent = sent + 2 * exchange.update(0.01, None)
        momentum = 0.9 * momentum + grads
        whole = whole + momentum
    torch.testing.assert_close(sent + exchange.residual.sum(0), whole.sum(0), rtol=0, atol=1e-3)
    assert exchange.sent == 40 * 2 * 10


def test_mean_of_ranks_that_sent_and_of_all() -> None:
    for name, divisor in (("1 %", 2), ("1 %, senders", 1)):
        exchange = Exchange(VARIANTS[name], 1000, 2, False)
        exchange.grads[0, :10] = 3.0
        exchange.grads[1, 10:20] = 5.0
        exchange.fold()
        mean = exchange.update(0.01, None)
        assert mean[:10].tolist() == [3 / divisor] * 10
        assert mean[10:20].tolist() == [5 / divisor] * 10
        assert not exchange.buffer.any()


def test_one_threshold_for_all_tensors_keeps_the_density() -> None:
    variant, threshold = VARIANTS["1 %, threshold"], Threshold()
    quiet, loud = exchanges = [Exchange(variant, 1000, 2, False) for _ in range(2)]
    for grads in gradients(600):
        quiet.grads.copy_(0.1 * grads)
        loud.grads.copy_(grads)
        for exchange in exchanges:
            exchange.fold()
        least = threshold.follow(exchanges, 0.01)
        for exchange in exchanges:
            exchange.update(0.01, least)
    assert loud.sent > 3 * quiet.sent
    assert (quiet.sent + loud.sent) / (600 * 2 * 2000) == pytest.approx(0.01, rel=0.25)


def test_a_tensor_sends_more_while_its_gradient_changes() -> None:
    exchange, sent = Exchange(VARIANTS["0.1 %, switch"], 1000, 2, False), []
    for step, grads in enumerate(gradients(250)):
        exchange.grads.copy_(torch.ones(1000) + 0.1 * grads if step < 150 else 5 * torch.ones(1000))
        exchange.fold()
        before = exchange.sent
        exchange.update(0.001, None)
        sent.append((exchange.sent - before) // 2)
    assert sent[:100] == [10] * 99 + [1]
    assert sent[100:199] == [1] * 99
    assert sent[199:249] == [10] * 50
    assert sent[249] == 1


def test_table_sets_every_beside_dense_of_the_same_seeds() -> None:
    lines = []
    for name, seed, loss, workers in (
        ("dense", 5, 2.0, 2),
        ("dense", 6, 3.0, 2),
        ("dense", 5, 9.0, 4),
        ("1 %", 5, 2.1, 2),
        ("1 %", 6, None, 2),
        ("1 %", 7, 9.0, 2),
    ):
        cell = replace(CELL, kind="training", variant=name, seed=seed, workers=workers)
        lines.append({"cell": asdict(cell), "loss": loss, "sent_share": 0.0123})
    dense, other = lag.table(lines, CELL.size, 2, CELL.steps)[2:]
    assert dense.endswith("| 2 | 2.500 | +0.0 % |")
    assert other == "| 1 % | 1 % of every tensor: 1.23 % | 0.1 | 1, 1 diverged | 2.100 | +5.0 % |"
