"""What compresses changes: nothing lost, sizes known, means over senders, the share applied."""

from collections import defaultdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests import api
from tests.local.test_laws import BITS, SHAPES, Bag, bag, set_gradients
from tests.ranks import Pool
from tests.reference import whole_codes

NUMELS = (30, 7, 12, 1)
SIZES = [torch.Size(shape) for shape in SHAPES.values()]


def by_shares(rank: int, size: int, compression: tw.Sparse, own: bool) -> dict[str, Tensor]:
    """What 40 rounds applied, changed and keep; `own`: no two ranks change the same entry."""
    torch.manual_seed(rank)
    model = Bag({"w": (40, 30), "v": (17,), "u": (3,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in start.items()}
    with tw.local_sgd(model, optimizer, tw.LocalSGD(1, 0, compression=compression)) as sync:
        for _ in range(40):
            for name, p in model.named_parameters():
                p.grad = torch.randn_like(p)
                if own:
                    p.grad *= torch.arange(p.numel()).view_as(p) % size == rank
                total[name] += p.grad
            optimizer.step()
        errors = sync.state_dict()["residuals"]
    applied = {name: start[name] - p.detach() for name, p in model.named_parameters()}
    found = {"applied": applied, "changed": total, "kept": errors}
    return {key: torch.cat([t[n].flatten() for n in total]) for key, t in found.items()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("own", [False, True])
def test_nothing_is_lost_by_shares(ranks: Pool, size: int, own: bool) -> None:
    """What owners do not pass on stays with them; values of 32 bits are rounded to float32."""
    compression = tw.Sparse(0.9, 32, decay=1.0, mean_over="all", exchange="split")
    found = ranks.run(by_shares, compression, own, size=size)
    applied = found[0]["applied"]
    assert all(torch.equal(each["applied"], applied) for each in found)
    changed, kept = (sum(each[key] for each in found) for key in ("changed", "kept"))
    torch.testing.assert_close(applied * size + kept, changed, rtol=0, atol=1e-4)
    assert applied.count_nonzero() > applied.numel() / 2


def much_alike(rank: int, size: int) -> float:
    """Which share of nearly equal changes of the ranks is applied in 60 rounds."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (7, 100 + rank))
    model = Bag({"w": (40, 30), "u": (30,)}, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    change = {n: torch.randn(p.shape, generator=common) for n, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    compression = tw.Sparse(0.9, 32, exchange="split")
    with tw.local_sgd(model, optimizer, tw.LocalSGD(1, 0, compression=compression)):
        for _ in range(60):
            for name, p in model.named_parameters():
                p.grad = change[name] + 0.05 * torch.randn(p.shape, generator=own)
            optimizer.step()
        applied = {name: start[name] - p.detach() for name, p in model.named_parameters()}
    products = [(60 * change[n] * applied[n]).sum() for n in change]
    return float(sum(products) / sum((60 * c).square().sum() for c in change.values()))


def test_sums_waiting_at_owners_are_applied_once(ranks: Pool) -> None:
    """0.87; with the means over senders kept it was 1.48, and training went wrong."""
    assert 0.75 < ranks.run(much_alike, size=4)[0] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mean_over", ["senders", "all"])
def test_shares_with_room_are_gathered_messages(ranks: Pool, mean_over: str, own: bool) -> None:
    gathered, shared = (
        ranks.run(
            by_shares,
            tw.Sparse(0.0, 32, mean_over=mean_over, exchange=exchange),  # type: ignore[arg-type]
            own,
            size=3,
        )
        for exchange in ("gather", "split")
    )
    for ours, theirs in zip(gathered, shared, strict=True):  # the means of owners are float32
        torch.testing.assert_close(ours["applied"], theirs["applied"], rtol=0, atol=1e-4)
    changed = sum(each["changed"] for each in gathered)
    share = 1 if own and mean_over == "senders" else 3
    torch.testing.assert_close(gathered[0]["applied"] * share, changed, rtol=0, atol=1e-4)


def test_bytes_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    sizes = [torch.Size((1024, 1024))] * 4
    by_ranks = [tw.Sparse(0.9).sent_bytes(1, sizes, ranks) for ranks in (2, 16, 128, 1024)]
    assert max(by_ranks) < 3 * by_ranks[0]
    by_ranks = [tw.Quantized(4).sent_bytes(1, sizes, ranks) for ranks in (2, 16, 128, 1024)]
    assert max(by_ranks) < 3 * by_ranks[0]


@pytest.mark.parametrize("bits", BITS)
def test_the_size_is_that_of_the_format(bits: int) -> None:
    assert tw.Quantized(bits).sent_bytes(1, SIZES) == whole_codes.message_bytes(NUMELS, bits)
    assert tw.Quantized(4).sent_bytes(1, [torch.Size([10**6])]) == 32 + 32 + 500_000


def sent_in_turns(rank: int, size: int, compression: Any, dgc: Any) -> list[tuple[int, int]]:
    """Per averaging what went over the wire in messages of changes, and what was predicted."""
    gathered: list[int] = []

    class Counting(api.Group):
        def all_gather(self, message: Tensor, *, action: str):  # type: ignore[no-untyped-def]
            gathered.append(message.numel() if "changes" in action else 0)
            return super().all_gather(message, action=action)

        def all_to_all(self, parts: Tensor, lengths: Any, *, action: str):  # type: ignore[no-untyped-def]
            gathered.append(parts.numel() - lengths[self.rank] if "changes" in action else 0)
            return super().all_to_all(parts, lengths, action=action)

    from tests.api import ranks, updates

    with patch.object(ranks, "Group", Counting):
        model, optimizer = bag()
        told = compression or dgc
        assert told is not None
        pairs = []
        with updates.LocalUpdates(
            model, optimizer, tw.LocalSGD(2, compression=compression), compression=dgc
        ) as sync:
            for step in range(1, 10):
                gathered.clear()
                set_gradients(model, step, rank)
                optimizer.step()
                if sync.synced:
                    early = step <= told.last_dense_step
                    taken = [
                        p.shape for p in model.parameters() if told.compresses(p) and not early
                    ]
                    predicted = told.sent_bytes(step, taken, size, rank) if taken else 0
                    pairs.append((sum(gathered), predicted))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "dgc"),
    [
        *((tw.Quantized(bits), None) for bits in BITS),
        (tw.Quantized(2, exchange="split"), None),
        (tw.Sparse(0.8), None),
        (tw.Sparse(0.8, exchange="split"), None),
        (None, tw.DGC(3, 4, (0.5, 0.9), min_numel=7, exchange="split")),
        (None, tw.DGC(3, 4, (0.5, 0.9), min_numel=7)),
    ],
    ids=str,
)
def test_bytes_equal_the_prediction(ranks: Pool, compression: Any, dgc: Any) -> None:
    for pairs in ranks.run(sent_in_turns, compression, dgc):
        assert len(pairs) == 5
        assert all(came == predicted for came, predicted in pairs)
        assert pairs[-1][0] > 0


def counted(rank: int, size: int, compression: Any) -> float:
    model, optimizer = bag()
    with tw.local_sgd(
        model, optimizer, tw.LocalSGD(1, begin_step=0, compression=compression)
    ) as sync:
        for step in range(1, 6):
            set_gradients(model, step, rank)
            before = sync.stats()["bytes_sent"]
            optimizer.step()
            sent = sync.stats()["bytes_sent"] - before
    return sent


def test_stats_count_the_message_and_the_scalars_that_ride_along(ranks: Pool) -> None:
    """Two agreements of 24 bytes; 64 float32 for the share, none at decay 1 with all ranks."""
    for compression, riders in [
        (tw.Quantized(4), 0),
        (tw.Quantized(4, decay=0.9), 4 * api.SKETCH_NUMEL + api.CHECKSUM_BYTES),
        (tw.Sparse(0.5), 4 * api.SKETCH_NUMEL + api.CHECKSUM_BYTES),
        (tw.Sparse(0.5, decay=1.0, mean_over="all"), 0),
    ]:
        each = compression.sent_bytes(5, SIZES, 3) + 2 * (riders + 2 * 24)
        assert ranks.run(counted, compression, size=3) == [each] * 3, compression


# ---- the mean over those who sent


# ---- the share that is applied


def steady(rank: int, size: int, config: Any, rounds: int) -> tuple[float, float]:
    """The estimate, and what it estimates, for a steady change with noise of each rank on top."""
    torch.manual_seed(0)
    model = Bag({"w": (64, 64), "v": (300,)}, dtype=torch.float32)
    slope = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tw.local_sgd(model, optimizer, config) as sync:
        for step in range(rounds):
            for name, p in model.named_parameters():
                noise = [torch.randn(p.shape) for _ in range(size)]
                p.grad = slope[name] * (1 + step % 2) + 0.5 * noise[rank]
                total[name] += slope[name] * (1 + step % 2) + 0.5 * sum(noise) / size
            optimizer.step()
        moved = {name: start[name] - a for name, a in sync.state_dict()["anchors"].items()}
        share = sync.stats()["applied_share"]
    products = [sum(float((x[n] * total[n]).sum()) for n in total) for x in (moved, total)]
    return share, products[0] / products[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "low", "high"),
    [
        (tw.Sparse(0.9, decay=0.9, mean_over="all"), 0.5, 0.9),
        (tw.Sparse(0.9), 1.0, 2.0),
        (tw.Quantized(4, decay=0.9), 0.95, 1.01),
    ],
    ids=str,
)
def test_applied_share_is_near_its_estimate(
    ranks: Pool, compression: Any, low: float, high: float
) -> None:
    """Decay eats what is sent seldom; over senders, an entry that one rank sends counts whole."""
    for share, truth in ranks.run(
        steady, tw.LocalSGD(1, begin_step=0, compression=compression), 60, size=2
    ):
        assert low < truth < high
        assert abs(share - truth) < 0.15


@pytest.mark.parametrize(("sparsity", "decay"), [(0.9, 0.95), (0.97, 0.95), (0.9, 0.5)])
def test_of_a_repeated_change_more_is_applied_than_reported(sparsity: float, decay: float) -> None:
    """Entries of one size take turns, which is better than chance, and is the sum of a geometric
    series: what waits T = 1 / p averagings is (1 - decay^T) / (1 - decay) of T changes."""
    compression = tw.Sparse(sparsity, value_bits=32, decay=decay, mean_over="all")
    model = Bag({"w": (64, 64)}, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    [p] = model.parameters()
    slope = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).sign()
    start = p.detach().clone()
    with tw.local_sgd(model, optimizer, tw.LocalSGD(1, 0, compression=compression)) as sync:
        for _ in range(300):
            p.grad = slope.clone()
            optimizer.step()
        applied = float((start - p.detach()).flatten() @ slope.flatten()) / (300 * slope.numel())
        estimate = sync.stats()["applied_share"]
    waits = 1 / (1 - sparsity)
    told = compression.steady_share
    assert told is not None
    assert told < applied < told + 0.12
    assert applied == pytest.approx((1 - decay**waits) / (1 - decay) / waits, abs=0.03)
    assert estimate == pytest.approx(applied, abs=0.02)


class Given(dict[str, Tensor], api.Computed):
    """Tensors as they are."""


@pytest.mark.parametrize("tag", api.COMPRESSIONS)
def test_every_compression_is_pure(tag: str) -> None:
    """`send` changes neither what it is given nor what is kept; `take_` only what is kept."""
    given: dict[str, Any] = {"sparse": {"sparsity": 0.5}, "low_rank": {"rank": 2}}
    compression: Any = api.COMPRESSIONS[tag](**given.get(tag, {}))
    folded = Given({"a": torch.randn(4, 5), "b": torch.randn(3, 3)})
    kept: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in folded.items():
        for kind, entry in compression.begin(value).items():
            kept[kind][name] = entry
        kept[api.RESIDUAL][name] = torch.ones_like(value)
    copies = [
        {name: value.clone() for name, value in each.items()}
        for each in (folded, kept[api.RESIDUAL])
    ]
    sending = compression.send(api.Context(1, 0, 0, 2), folded, kept)
    answers, nbytes = None, 0
    with pytest.raises(StopIteration) as end:
        while True:
            requests = next(sending) if answers is None else sending.send(answers)
            answers = []
            for request in requests:
                assert isinstance(request, api.AllGather | api.AllReduce)
                sent = request.message if isinstance(request, api.AllGather) else request.buffer
                checked = compression.has_checksums or isinstance(request, api.AllReduce)
                nbytes += sent.nbytes + (0 if checked else 8)
                answers.append(
                    torch.stack([sent, sent]) if isinstance(request, api.AllGather) else 2 * sent
                )
    assert nbytes == compression.sent_bytes(1, [value.shape for value in folded.values()])
    for each, copy in zip((folded, kept[api.RESIDUAL]), copies, strict=True):
        assert all(torch.equal(each[name], copy[name]) for name in copy)
    arrived = end.value.value
    if arrived.unread is not None:
        arrived.read(arrived.unread.tolist())
    for name, value in folded.items():
        mean = arrived.take_(name, folded, kept)
        assert torch.equal(value, copies[0][name])
        # two ranks that send the same: the mean is what was sent
        torch.testing.assert_close(mean + kept[api.RESIDUAL][name], value, rtol=0, atol=1e-6)
