"""The real writer of TensorBoard, read back by TensorBoard."""

import warnings
from pathlib import Path

import pytest

import thinwire as tw
from tests.integrations.packages import needs
from tests.strategy.training import batch, make_engine

pytestmark = [pytest.mark.integrations, needs("tensorboard")]


def test_the_curves_are_in_the_file(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
    engine = make_engine((), plain=True)
    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            engine.train_step(*batch(step, 0))
            written = tw.log_stats(engine, writer)
    curves = EventAccumulator(str(tmp_path))
    curves.Reload()
    assert set(curves.Tags()["scalars"]) == written.keys()
    dense = curves.Scalars("thinwire/bytes_dense")
    assert [point.step for point in dense] == [1, 2, 3]
    assert dense[-1].value == written["thinwire/bytes_dense"]
