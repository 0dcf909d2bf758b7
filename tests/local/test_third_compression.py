"""A compression that is not the library's needs nothing but the protocol: two sums and a state."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests import api
from tests.local.test_laws import bag, digest, one_step
from tests.ranks import Pool
from tests.toys import arriving


class OneFactor(api.ChangeCompression):
    """Rank 1 of PowerSGD (arXiv 1905.13727) for matrices; all else travels whole."""

    def begin(self, anchor: Tensor) -> dict[str, Tensor]:
        return {**super().begin(anchor), "factors": torch.ones(anchor.shape[1], dtype=anchor.dtype)}

    def compresses(self, param: Tensor) -> bool:
        return param.dim() == 2

    def send(
        self, context: api.Context, folded: Mapping[str, Tensor], kept: api.Kept
    ) -> api.Sending:
        left = torch.cat([m @ kept["factors"][n] for n, m in folded.items()])
        [left] = yield [api.AllReduce(left, "adding up left factors")]
        sums = [api.checked_mean_(left, context.sources, bits=context.read_sums)]
        columns = [p / p.norm() for p in left.split([m.shape[0] for m in folded.values()])]
        right = torch.cat([m.T @ p for m, p in zip(folded.values(), columns, strict=True)])
        [right] = yield [api.AllReduce(right, "adding up right factors")]
        sums.append(api.checked_mean_(right, context.sources, bits=context.read_sums))
        rows = right.split([m.shape[1] for m in folded.values()])
        arrived = Factors(context, list(folded))
        arrived.factors = dict(zip(folded, zip(columns, rows, strict=True), strict=True))
        arrived.sums = sums
        return arrived


class Factors(api.MeanChange):
    factors: dict[str, tuple[Tensor, Tensor]]

    def take_mean_(self, name: str, folded: Tensor, kept: api.Kept) -> Tensor:
        column, row = self.factors[name]
        mean = torch.outer(column, row)
        torch.sub(folded, mean, out=kept[api.ERRORS][name])
        kept["factors"][name].copy_(row)
        return mean


def trained(rank: int, size: int, stop: int, state: Any, last: int) -> dict[str, Any]:
    model, optimizer = bag()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    changed = {n: torch.zeros_like(p) for n, p in start.items()}
    with patch.object(api.updates, "compression_of", lambda *_: OneFactor()):
        sync = api.updates.LocalUpdates(model, optimizer, tw.LocalSGD(2, 0, delay=1)).__enter__()
        if state is not None:
            sync.load_state_dict(state[rank])
        saved = None
        for step in range(sync.step + 1, last + 1):
            one_step(model, optimizer, step, rank)
            for n, p in model.named_parameters():
                changed[n] += 0.1 * p.grad  # type: ignore[operator]
            saved = sync.state_dict() if step == stop else saved
        sync.flush()
        kept = sync.state_dict()["errors"]
        sync.close()
    lost = {n: (start[n] - p.detach()) * size for n, p in model.named_parameters()}
    return {
        "digest": digest(model),
        "saved": saved,
        "changed": changed,
        "kept": kept,
        "moved": lost,
    }


def test_it_trains_keeps_books_and_resumes(ranks: Pool) -> None:
    """1e-12: float64 sums of values of size 1."""
    straight = ranks.run(trained, 7, None, 21, size=3)
    assert len({each["digest"] for each in straight}) == 1
    assert set(straight[0]["kept"]) == set(straight[0]["saved"]["factors"]) == {"a", "c"}
    for name in straight[0]["moved"]:
        changed = sum(each["changed"][name] for each in straight)
        kept = sum(each["kept"].get(name, torch.zeros(())) for each in straight)
        torch.testing.assert_close(straight[0]["moved"][name] + kept, changed, rtol=0, atol=1e-12)
    resumed = ranks.run(trained, 0, [each["saved"] for each in straight], 21, size=3)
    assert [each["digest"] for each in resumed] == [each["digest"] for each in straight]


def summed(rank: int, size: int, flipped: bool) -> int:
    """The digest of two sums, one of which arrives with another bit on rank 1."""

    def hurt(total: Tensor, action: str) -> Tensor:
        if flipped and rank == 1 and "factors" in action:
            total.view(torch.uint8)[0] ^= 1
        return total

    folded = {"m": torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))}
    one_round, kept = api.Round(api.Group(), 1), {"factors": {"m": torch.ones(4)}}
    with arriving(api.Group, "all_reduce_", hurt):
        bucket = one_round.bucket(0, (), lambda at, _: [OneFactor().send(at, folded, kept)])
        one_round.launch(folded, bucket)
        one_round.finish()
    return one_round.sums_digest


@pytest.mark.fault
def test_sums_are_compared_by_their_bits(ranks: Pool) -> None:
    assert len(set(ranks.run(summed, False))) == 1
    assert len(set(ranks.run(summed, True))) == 2
