"""A rank that writes another wire format."""

import pytest

from tests.api import dgc_momentum, prepare, updates
from tests.ranks import Pool
from tests.strategy.test_alike import start


def prepared(rank: int, size: int, way: str) -> None:
    places = (updates, dgc_momentum, prepare)
    versions = [place.WIRE_VERSION for place in places]
    try:
        for place in places:
            place.WIRE_VERSION = versions[0] + rank  # type: ignore[attr-defined]
        start(way)
    finally:
        for place, version in zip(places, versions, strict=True):
            place.WIRE_VERSION = version  # type: ignore[attr-defined]


@pytest.mark.fault("another version of the wire format on one rank")
@pytest.mark.parametrize("way", ["engine", "DGCMomentum", "local_sgd"])
def test_another_wire_version_on_one_rank_is_a_mismatch_on_all(way: str, ranks: Pool) -> None:
    ranks.raise_alike("Mismatch", ["wire", "rank 0 has 2, rank 1 has 3"], prepared, way)
