"""torchrun starts ranks again after a kill; the run ends with the bits of the undisturbed one."""

from pathlib import Path

import pytest

from tests.field.restarts import good_restarts, torchrun, train
from tests.ranks import Pool

RESTARTS = 1  # `python -m tests.field.restarts --restarts 30` makes more


def undisturbed(rank: int, size: int, folder: str) -> str:
    return train(Path(folder), RESTARTS, -1, 0)


@pytest.mark.slow  # torchrun starts its two workers twice
@pytest.mark.fault("SIGKILL at random moments, and a restart by torchrun")
def test_killed_and_started_again_it_ends_as_undisturbed(ranks: Pool, tmp_path: Path) -> None:
    disturbed = torchrun(tmp_path / "disturbed", restarts=RESTARTS, seed=1)
    assert good_restarts(disturbed, RESTARTS) == [1], disturbed["log"][-4000:]
    whole = tmp_path / "undisturbed"
    whole.mkdir()
    assert disturbed["digests"] == ranks.run(undisturbed, str(whole)), disturbed["log"][-4000:]
