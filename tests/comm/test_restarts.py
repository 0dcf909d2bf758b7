"""A job that torchrun may restart is told what the restart needs."""

import os
from unittest.mock import patch

import pytest

from tests.api import Group, warn_of_restarts
from tests.ranks import Pool
from tests.toys import warned

MAY_FAIL = {"RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def texts_of(rank: int, size: int, environment: dict[str, str]) -> list[str]:
    warn_of_restarts.cache_clear()
    with patch.dict(os.environ, environment), warned() as texts:
        Group()
        Group()
    return texts


def test_a_restart_that_is_likely_to_fail_is_warned_of_once(ranks: Pool) -> None:
    told, _ = ranks.run(texts_of, MAY_FAIL)
    assert len(told) == 1
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun" in told[0]


@pytest.mark.parametrize(
    "other",
    [{"RANK": "1"}, {"TORCHELASTIC_MAX_RESTARTS": "0"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}],
)
def test_nothing_is_reported_where_nothing_is_to_do(ranks: Pool, other: dict[str, str]) -> None:
    assert ranks.run(texts_of, {**MAY_FAIL, **other}) == [[], []]
