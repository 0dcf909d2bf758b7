"""Late workers of a round, and workers that train as one batch."""

import random
from pathlib import Path

import pytest
import torch

from benchmarks.gaps import Cell
from benchmarks.late import late_ranks
from benchmarks.law import Training, alone, works_of


def test_more_than_half_answer_in_every_round() -> None:
    late = [len(ranks) for ranks in late_ranks("0.5", 5, 400)]
    assert set(late) == {0, 1, 2, 3}
    assert 0.3 < sum(late) / (8 * len(late)) < 0.375


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_workers_train_as_one_batch_as_they_do_in_turn(tmp_path: Path, optimizer: str) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(random.Random(3).choices(b"ab cd\n", k=50_000)))
    cell = Cell(
        part="held_out",
        size="0.04M",
        workers=3,
        interval=4,
        bits=32,
        optimizer=optimizer,
        steps=50,
        batch=2,
        lr=0.024,
        seed=5,
        data=str(text),
    )
    ends = []
    with alone():
        for fast in (False, True):
            training = Training(cell, works_of(cell, "cpu", tmp_path))
            begin = torch.cat([p.detach().flatten() for p in training.models[2].parameters()])
            if fast:
                training.train_together()
            for _ in range(7):
                training.step()
            ends.append(torch.cat([p.detach().flatten() for p in training.models[2].parameters()]))
    assert (ends[0] - begin).abs().max() > 1e-2
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-4)
    assert training.sync is not None
    assert training.sync.rounds == 2
