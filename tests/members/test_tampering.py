"""What is altered between members with a token is refused by all; else it changes nothing."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.api import ElasticGroup, Pending
from tests.members.places import TOKEN, meeting_place, met
from tests.members.training import digest, model
from tests.ranks import Pool
from tests.toys import arriving, descend
from thinwire.errors import PayloadCorrupt

CONFIG = tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9))
STEPS = 14


def train(
    rank: int, size: int, address: str, token_file: str | None, tapped_at: int | None
) -> dict[str, Any]:
    """Train, and tell how it ended; on the way to rank 0 a bit of exchange `tapped_at` changes."""
    agreed, calls, agreements = ElasticGroup.launch_now, 0, 0

    def launch_now(self: ElasticGroup, payload: bytes, action: str) -> Pending[list[bytes]]:
        nonlocal agreements
        agreements += 1
        return agreed(self, payload, action)

    def exchanges() -> int:
        return calls + agreements

    def came(rows: Tensor, _: str) -> Tensor:
        nonlocal calls
        if rank == 0 and calls == tapped_at:
            rows[size - 1, rows.shape[1] // 2] ^= 1
        calls += 1
        return rows

    net, told, digests = model(0), "", []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    try:
        with (
            arriving(ElasticGroup, "all_gather", came),
            patch.object(ElasticGroup, "launch_now", launch_now),
            tw.join(address, run="test", token_file=token_file, min_members=size) as members,
            tw.local_sgd(net, optimizer, CONFIG, members=members, digest_every=0) as sync,
        ):
            place = members.rank
            batches = torch.Generator().manual_seed(place)
            sent_before, messages_before = sync.stats()["bytes_sent"], exchanges()
            try:
                while sync.step < STEPS:
                    x = torch.randn(8, 24, generator=batches)
                    before = digest(sync)
                    descend(optimizer, (net(x) - x.roll(1, 1)).square().mean())
                    if sync.synced:
                        digests.append(digest(sync))
            except PayloadCorrupt as error:
                told = str(error)
                assert digest(sync) == before
            sent = sync.stats()["bytes_sent"] - sent_before
            messages = exchanges() - messages_before
            averagings = sync.stats()["averagings"]
            if told:
                members.leave()
                raise PayloadCorrupt(told)
    except PayloadCorrupt:
        assert told
    return {
        "place": place,
        "told": told,
        "digests": digests,
        "sent": sent,
        "averagings": averagings,
        "messages": messages,
    }


@pytest.mark.fault
@pytest.mark.parametrize("tapped_at", [1, 4])
def test_bit_changed_on_its_way_is_refused(ranks: Pool, token_file: str, tapped_at: int) -> None:
    found = met(ranks, train, token_file, tapped_at, size=3, token=TOKEN)
    for one in found:
        assert "its MAC is wrong" in one["told"]
        assert one["digests"] == found[0]["digests"]
        assert one["averagings"] == found[0]["averagings"]


def test_token_changes_no_bit_of_training(ranks: Pool, token_file: str) -> None:
    found = []
    for token in (TOKEN, None):
        with meeting_place(token) as address:
            file = None if token is None else token_file
            found.append(ranks.run(train, address, file, None, size=2, group=False))
    for proven in found[0]:
        assert proven["told"] == ""
        assert len(proven["digests"]) == 4
        (plain,) = (one for one in found[1] if one["place"] == proven["place"])
        assert proven["digests"] == plain["digests"]
        assert proven["messages"] == plain["messages"] > 8
        assert proven["sent"] - plain["sent"] == 16 * proven["messages"]
