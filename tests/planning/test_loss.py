"""What a plan says of the loss: the law by hand, what was measured, and a line's two directions."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

import thinwire as tw
from tests.api import crowding, law, law_beta, loss_gap, steps_to_dense_loss
from tests.api import network_Network as Network

SMALL = 869_504
NUMBERS: dict[str, Any] = {"params": "124M", "step_seconds": 0.35, "latency": "20ms"}
ONE_BIT = {"quantized": {"value_bits": 1}}


def local(k_steps: int = 16, **more: Any) -> dict[str, Any]:
    return {"localsgd": {"k_steps": k_steps, **more}}


def test_the_law_by_hand() -> None:
    assert law_beta("muon", SMALL) == pytest.approx(0.03101, abs=1e-5)
    assert law_beta("adamw", SMALL) == pytest.approx(0.04325, abs=1e-5)
    assert law("muon", SMALL, 1) == 0
    for workers, gap in ((2, 0.0217), (4, 0.0439), (8, 0.0666), (16, 0.0898)):
        assert law("muon", SMALL, workers) == pytest.approx(gap, abs=1e-4)
    for workers, gap in ((2, 0.0081), (4, 0.0162), (8, 0.0244), (16, 0.0327)):
        assert law("muon", 124_000_000, workers) == pytest.approx(gap, abs=3e-4)


@pytest.mark.parametrize(
    ("method", "document", "optimizer", "mid"),
    [
        ("muon-local", local(compression=ONE_BIT), "muon", 0.0439),  # 0.8 x 1.25
        ("muon-local", local(), "muon", 0.0439 * 0.8),
        (
            "muon-local",
            local(compression={"sparse": {"sparsity": 0.97, "value_bits": 2, "mean_over": "all"}}),
            "muon",
            0.0439 * 0.8 * 1.9,
        ),
        ("muon-local", local(64, compression=ONE_BIT), "muon", 0.0439 * 2.2974),  # 4^0.6
        ("muon-local", local(delay=4, compression=ONE_BIT), "muon", 0.0439 * 1.35),
        ("quantized-local", local(compression={"quantized": {"value_bits": 4}}), None, 0.0772),
        (
            "sparse-local",
            local(compression={"sparse": {"sparsity": 0.9, "value_bits": 2}}),
            None,
            0.0888,
        ),
        ("localsgd", local(32), None, 0.0772 * 1.5157),  # 2^0.6
        ("diloco", local(32, outer_momentum=0.9), None, 0.0772 * 1.5157 * 2.3),
        ("diloco", local(outer_momentum=0.3), None, 0.0772),
    ],
)
def test_interval_bits_and_delay_multiply_the_law(
    method: str, document: dict[str, Any], optimizer: str | None, mid: float
) -> None:
    strategy = tw.DistributedStrategy.from_dict(document)
    gap = loss_gap(method, strategy, optimizer, SMALL, 4)
    assert gap.mid == pytest.approx(mid, rel=2e-3)
    assert gap.low * gap.high == pytest.approx(gap.mid**2)
    assert "arXiv 2505.23725" in gap.source


@pytest.mark.parametrize(("workers", "twice_from"), [(2, 1000), (4, 32), (8, 1)])
def test_the_rate_follows_workers_and_steps(workers: int, twice_from: int) -> None:
    plan = tw.plan(workers=workers, link="20mbit", **NUMBERS)
    found = [
        (row.lr_factor, row.document["localsgd"]["k_steps"])
        for row in plan.strategies
        if row.document and row.lr_factor
    ]
    assert {steps for _, steps in found} >= {4, 8, 16, 32}
    assert all(factor == (2 if steps >= twice_from else 1) for factor, steps in found)


@pytest.mark.parametrize("params", ["1M", "124M", "8B"])
@pytest.mark.parametrize("workers", [2, 4, 8, 16, 17, 64, 512])
def test_the_best_at_its_pessimistic_end_is_recommended(params: str, workers: int) -> None:
    """Whatever was measured: on a slow line no count of workers makes dense training better."""
    for step_seconds, link in ((0.05, "50mbit"), (3.0, "50mbit"), (10.0, "1gbit")):
        plan = tw.plan(
            params=params, step_seconds=step_seconds, workers=workers, link=link, latency="20ms"
        )
        best, dense = plan[plan.recommended], plan["dense"]
        reaching = [row for row in plan.strategies if row.reaches_dense_loss]
        assert dense.loss_gap[1] == 0
        assert dense.measured == (dense.loss_gap == (0, 0, 0)) == (workers <= 96)
        assert best.time_at_worst <= 1.05 * min(row.time_at_worst for row in reaching)
        # 64 workers lose much of what they save with a model as small as that
        assert best is not dense or dense.waiting_share < (0.7 if params == "1M" else 0.55)
        unmeasured = best.loss_gap_source.partition("not measured: ")[2]
        assert bool(unmeasured) == (not best.measured)
        assert unmeasured in plan.reason
        for row in plan.strategies:
            own = (row.document or {}).get("localsgd")
            if row.optimizer is None:  # times are over dense's with the same optimizer
                steps = steps_to_dense_loss(row.loss_gap[2], plan.model["parameters"])
                late_s = row.step_seconds[2] * steps
                assert row.time_at_worst == pytest.approx(late_s / dense.step_seconds[1]), row.name
            if own is not None and row.measured:
                assert workers <= 96
                assert 4 <= own["k_steps"] <= 32
                assert (own["delay"], own["fragments"]) == (0, 1)
            assert row.measured or "; not measured: " in row.loss_gap_source


@pytest.mark.parametrize("workers", [4, 8, 16, 24, 64])
def test_an_unmeasured_setting_has_a_wider_interval(workers: int) -> None:
    plan = tw.plan(**NUMBERS, workers=workers, link="50mbit")
    for other in ("muon-local k16 d4", "muon-local k16 b1 split", "muon-local k64"):
        low, mid, high = plan[other].loss_gap
        own_low, own_mid, own_high = plan["muon-local"].loss_gap
        assert not plan[other].measured
        assert mid / low > 1.4 * own_mid / own_low
        assert high / mid > 1.4 * own_high / own_mid


def test_intervals_grow_with_the_distance_to_measured_settings() -> None:
    doubts = []
    for workers in (16, 17, 96, 97, 128, 256, 1000):
        plan = tw.plan(**NUMBERS, workers=workers, link="50mbit")
        low, mid, high = plan["muon-local"].loss_gap
        assert high / mid == pytest.approx(mid / low)
        doubts.append(high / mid)
        doubts_of_k = [plan[f"muon-local k{k}"].loss_gap for k in (32, 64, 128)]
        wider = [gap[2] / gap[1] for gap in doubts_of_k]
        assert wider == sorted(wider)
        assert wider[1] > 1.3 * wider[0]
    assert doubts[0] == doubts[1] == doubts[2] < doubts[3] < 1.05 * doubts[2]
    assert doubts == sorted(doubts)


def test_dense_is_off_by_its_batch_alone_beyond_measured_workers() -> None:
    # 124 million parameters: B_crit = 5 x 22.91 x 2480^0.47 / 16 = 282 workers of 16 sequences
    dense = tw.DistributedStrategy()
    assert loss_gap("dense", dense, None, 124_000_000, 192).high == pytest.approx(
        (1 + 96 / (282 + 96)) ** 0.0799 - 1, rel=2e-3
    )
    counts = (2, 16, 96, 97, 128, 192, 512, 100_000)
    for numel in (45_216, 124_000_000, 8_000_000_000):
        gaps = [loss_gap("dense", dense, None, numel, workers) for workers in counts]
        highs = [gap.high for gap in gaps]
        assert highs[:3] == [0, 0, 0]
        assert all(less < more for less, more in itertools.pairwise(highs[2:]))
        assert all((gap.low, gap.mid) == (-gap.high, 0) for gap in gaps)
        assert [bool(gap.unmeasured) for gap in gaps] == [workers > 96 for workers in counts]
        larger = loss_gap("dense", dense, None, 10 * numel, 128)
        assert larger.high < gaps[4].high


def test_steps_to_close_a_gap_by_hand() -> None:
    assert steps_to_dense_loss(0.0, 124_000_000) == 1
    assert steps_to_dense_loss(0.02, 124_000_000) == pytest.approx(1.281, abs=2e-3)
    assert steps_to_dense_loss(-0.1, 1) == 1
    assert steps_to_dense_loss(9.0, 10**13) == 1e6


@pytest.mark.parametrize("workers", [2, 8, 64, 100_000])
def test_every_row_has_a_gap_its_source_and_a_finite_time(workers: int) -> None:
    made = tw.plan(**NUMBERS, workers=workers, link="20mbit").to_dict()
    json.dumps(made, allow_nan=False)
    times = [row["time_at_worst"] for row in made["strategies"] if row["progress"] >= 1 / 4]
    assert times == sorted(times)
    for row in made["strategies"]:
        low, mid, high = row["loss_gap"]
        assert low <= mid <= high
        assert row["loss_gap_source"]
        assert (mid == 0) == (row["name"] in ("dense", "fp16"))


def test_gap_that_cannot_close_is_never_and_after_dense() -> None:
    plan = tw.plan(**NUMBERS, workers=8, link="5mbit")
    assert plan["dgc"].times_sooner == plan["powersgd"].times_sooner == "never"
    assert plan["muon-local"].times_sooner != "never"
    for row in plan.strategies:
        if row.times_sooner == "never":
            assert row.time_to_dense_loss > 4
    assert plan["low-rank"].loss_gap_source.endswith("not measured: 8 workers, more than 4")


def test_more_workers_and_longer_intervals_cost_more_loss_and_larger_models_less() -> None:
    gaps = [tw.plan(**NUMBERS, workers=w)["muon-local"].loss_gap[1] for w in (2, 4, 8, 16, 64)]
    assert gaps == sorted(gaps)
    plan = tw.plan(**NUMBERS, workers=8)
    assert plan["muon-local k8"].loss_gap < plan["muon-local"].loss_gap
    larger = tw.plan(**{**NUMBERS, "params": "3B"}, workers=8)
    assert larger["muon-local"].loss_gap < plan["muon-local"].loss_gap


def test_both_directions_count_by_their_own_rates() -> None:
    both, slow = (Network(rate, 0.0, 8, call_s=0.0) for rate in (1e8, 1e7))
    adsl = Network(1e7, 0.0, 8, call_s=0.0, down_bit_s=1e8)
    reverse = Network(1e8, 0.0, 8, call_s=0.0, down_bit_s=1e7)
    for nbytes in (1e3, 1e7):
        for line in (adsl, reverse):
            assert line.all_reduce_s(nbytes) == slow.all_reduce_s(nbytes)
        assert adsl.all_gather_s(nbytes) == slow.all_gather_s(nbytes) > both.all_gather_s(nbytes)
        # strings meet where they are received, and hardly wait for a faster line there
        sent_s = nbytes / slow.bytes_s
        assert sent_s < adsl.all_to_all_s(nbytes) < 1.05 * sent_s
        assert reverse.all_to_all_s(nbytes) == slow.all_to_all_s(nbytes)
        assert slow.all_to_all_s(nbytes) == pytest.approx(sent_s * (1 + crowding(8, 7)))


def test_up_and_down_in_a_plan() -> None:
    one = tw.plan(**NUMBERS, workers=4, link="10mbit")
    same = tw.plan(**NUMBERS, workers=4, up="10mbit", down="10mbit")
    adsl = tw.plan(**NUMBERS, workers=4, up="10mbit", down="100mbit")
    assert same == one
    assert (adsl.link["rate_bit_s"], adsl.link["down_bit_s"]) == (1e7, 1e8)
    for row in adsl.strategies:
        direct = one[row.name.removesuffix(" relay")]
        assert row.step_seconds[1] <= direct.step_seconds[1]


def test_an_upload_counts_once_through_a_relay_and_once_a_member_directly() -> None:
    nbytes, up, down = 1e6, Network(1e7, 0.0, 8).bytes_s, Network(1e8, 0.0, 8).bytes_s
    adsl = Network(1e7, 0.0, 8, call_s=0.0, down_bit_s=1e8)
    assert adsl.relayed_s(nbytes) == pytest.approx(max(nbytes / up, 7 * nbytes / down))
    both = Network(1e7, 0.0, 8, call_s=0.0)
    assert both.relayed_s(nbytes) == pytest.approx(7 * nbytes / up)
    far = replace(both, latency_s=0.1)
    assert far.relayed_s(nbytes) == pytest.approx(both.relayed_s(nbytes) + 0.2)


def test_a_home_line_ranks_relay_and_split_as_rows() -> None:
    given: dict[str, Any] = {"params": "1B", "step_seconds": 10.0, "latency": "20ms"}
    for workers in (4, 8):
        home = tw.plan(**given, workers=workers, up="10mbit", down="50mbit")
        for name in ("muon-local k16 b1", "quantized-local k16 b4", "sparse-local k16 10% b2"):
            direct, relay = home[f"{name} gather"], home[f"{name} gather relay"]
            assert relay.bytes_per_step == pytest.approx(
                direct.bytes_per_step / (workers - 1), rel=0.01
            )
            assert relay.step_seconds < direct.step_seconds
            assert (relay.loss_gap, relay.measured) == (direct.loss_gap, True)
            assert relay.document == direct.document
            assert not home[f"{name} split"].measured
        assert home.recommended.endswith(" relay")
        assert "relay=True" in home.reason
    for others in (
        tw.plan(**given, workers=4, link="10mbit").strategies,
        tw.plan(**given, workers=2, up="10mbit", down="50mbit").strategies,
    ):
        assert not [row.name for row in others if "relay" in row.name]


def test_adapters_are_sent_and_frozen_weights_are_kept() -> None:
    whole, lora = (
        tw.plan(params="3B", step_seconds=1.0, workers=2, link="20mbit", trainable=trainable)
        for trainable in (None, "25M")
    )
    assert lora["dense"].bytes_per_step == 4 * 25_000_000
    assert lora.model["frozen"] == 3_000_000_000 - 25_000_000
    assert (
        lora["dense"].memory["weights and gradients"] == 8 * 25_000_000 + 2 * lora.model["frozen"]
    )
    assert not [row.name for row in lora.strategies if row.optimizer], "AdamW trains adapters"
    low, mid, high = lora["localsgd k16"].loss_gap
    assert low < mid < high
    assert mid == pytest.approx(0.0048, rel=0.02)
    assert lora["localsgd k16"].measured
    assert not lora["quantized-local"].measured
    assert lora["quantized-local"].loss_gap < whole["quantized-local"].loss_gap
    more = tw.plan(params="3B", step_seconds=1.0, workers=8, link="20mbit", trainable="25M")
    assert more["localsgd k16"].loss_gap[1] > mid
    assert more["localsgd k16"].loss_gap[2] / more["localsgd k16"].loss_gap[1] > high / mid
    assert not more["localsgd k16"].measured


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"params": "1M", "trainable": "2M"}, "trainable='2M' is more than params='1M'"),
        ({"params": "1M", "trainable": "many"}, "trainable='many' is not a number"),
        ({"params": None, "trainable": "1M"}, "params is missing"),
    ],
)
def test_wrong_numbers_of_adapters_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tw.plan(step_seconds=1.0, **given)
