"""A plan promises exact bytes and predictions that grow, and says in one line what cannot be."""

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

import thinwire as tw
from tests import api
from tests.api import network_Network as Network
from tests.api import work_Work as Work
from tests.processes import ran_thinwire

MEMORY = Path(__file__).parents[2] / "research" / "plan" / "memory.json"
NUMBERS: dict[str, Any] = {"params": "124M", "step_seconds": 0.35, "workers": 8}
KEYS = {
    *("name", "step_seconds", "bytes_per_step", "memory_bytes", "memory", "waiting_share"),
    *("progress", "progress_source", "loss_gap", "loss_gap_source"),
    *("measured", "time_to_dense_loss", "time_at_worst", "lr_factor"),
}


def cost_of(document: Mapping[str, Any], work: Any, line: Any, hook: str = "") -> Any:
    return api.cost_of(tw.DistributedStrategy.from_dict(document), hook, work, line)


def test_a_row_says_all_that_is_promised() -> None:
    plan = tw.plan(**NUMBERS, link="100mbit", latency="20ms")
    made = plan.to_dict()
    assert {"recommended", "strategies", "link"} <= made.keys()
    assert made["recommended"] == made["strategies"][0]["name"]
    for row in made["strategies"]:
        assert row.keys() == KEYS
        low, mid, high = row["step_seconds"]
        assert 0 < low <= mid <= high
        assert 0 <= row["waiting_share"] < 1
        assert row["time_to_dense_loss"] > 0
        assert row["progress_source"]
    dense = plan["dense"]
    assert (dense.progress, dense.time_to_dense_loss) == (1.0, 1.0)
    assert dense.bytes_per_step == 2 * 7 / 8 * 4 * 124_000_000


def test_a_site_of_shards_is_a_worker_with_a_share_of_everything() -> None:
    """Four sites of two ranks beside four workers: the same line, loss and updates."""
    shared = {**NUMBERS, "link": "100mbit", "latency": "20ms"}
    whole = tw.plan(**{**shared, "workers": 4})
    shards = tw.plan(**shared, shard=2)
    assert (shards.link["workers"], shards.link["shard"]) == (8, 2)
    for row in shards.best():
        other = whole[row.name]
        assert row.loss_gap == other.loss_gap
        assert row.bytes_per_step == pytest.approx(other.bytes_per_step / 2, rel=0.01)
        assert row.step_seconds[1] <= 1.01 * other.step_seconds[1]
        # an owner has whole matrices while it updates them
        shared_out, of_one = (sum({**r.memory, "update": 0}.values()) for r in (row, other))
        assert shared_out < 0.6 * of_one
        assert row.memory["update"] <= other.memory["update"]
    # FSDP moves half of the parameters twice and of the gradients once, as Muon does its matrices:
    # see the bytes of a step in tests/sharded/test_muon.py
    numel = 124_000_000
    assert shards["dense"].bytes_inside_site == 4 * 3 * numel / 2
    muon = next(row for row in shards.best() if row.optimizer)
    hidden = sum(prod(shape) for shape in api.transformer(numel)[1:] if len(shape) > 1)
    assert muon.bytes_inside_site == 4 * (3 * numel / 2 + 2 * (hidden / 2) / 2)
    assert muon.to_dict().keys() == KEYS | {"bytes_inside_site"}
    # hooks of DDP need whole models
    assert {"fp16", "powersgd", "low-rank"}.isdisjoint(row.strategy for row in shards.strategies)


@pytest.mark.parametrize(("workers", "shard"), [(4, 3), (4, 4), (2, 0), (3, 2)])
def test_shards_leave_two_sites_or_more(workers: int, shard: int) -> None:
    with pytest.raises(ValueError, match=rf"shard={shard} does not divide {workers} workers"):
        tw.plan(**{**NUMBERS, "workers": workers}, link="100mbit", shard=shard)


@pytest.mark.parametrize("workers", [2, 16])
@pytest.mark.parametrize(
    ("easier", "harder"),
    [
        ({"link": "1gbit", "latency": "1ms"}, {"link": "900mbit", "latency": "2ms"}),
        ({"params": "3M"}, {"params": "350M"}),
        ({"step_seconds": 0.1}, {"step_seconds": 0.11}),
    ],
)
def test_less_to_do_is_never_predicted_longer(easier: dict, harder: dict, workers: int) -> None:
    shared = {**NUMBERS, "link": "50mbit", "latency": "5ms", "workers": workers, "device": "cpu"}
    fast, slow = (tw.plan(**{**shared, **change}) for change in (easier, harder))
    for row in fast.strategies:
        for less, more in zip(row.step_seconds, slow[row.name].step_seconds, strict=True):
            assert less <= more, row.name


SIZES = (1, 16_383, 2**18 - 1, 2**19 - 1, 2**20 - 1, 17_500_000, 100_000_000, 123_900_000, 10**13)
LINES = ("10kbit", "1mbit", "20mbit", "100mbit", "300mbit", "1gbit", "10gbit", "400gbit")
LATENCIES = ("0ms", "0.5ms", "20ms", "100ms", "1000ms")


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_fewer_parameters_and_a_better_line_never_take_longer(data: st.DataObject) -> None:
    sizes = st.sampled_from(SIZES) | st.floats(0, 12).map(lambda digits: int(10**digits))
    few, many = sorted((data.draw(sizes, "params"), data.draw(sizes, "params")))
    fewest = max(1, few - data.draw(st.sampled_from((1, few // 1000, few // 20)), "fewer by"))
    fast, slow = sorted(data.draw(st.tuples(*[st.sampled_from(range(8))] * 2), "link"))[::-1]
    short, far = sorted(data.draw(st.tuples(*[st.sampled_from(range(5))] * 2), "latency"))
    shared = {
        "workers": data.draw(st.sampled_from((2, 3, 8, 16, 17, 512)), "workers"),
        "step_seconds": data.draw(st.sampled_from((1e-3, 0.05, 0.35, 5.0)), "step_seconds"),
        "device": data.draw(st.sampled_from((None, "cpu", "cuda")), "device"),
        "loss": data.draw(st.sampled_from((None, "0.2%")), "loss"),
    }
    down = data.draw(st.sampled_from((None, "5mbit", "2gbit")), "down")
    plans = []
    for params, rate, delay in (
        *((fewest, fast, short), (few, fast, short), (many, fast, short)),
        *((many, slow, short), (many, slow, far)),
    ):
        line = {"link": LINES[rate]} if down is None else {"up": LINES[rate], "down": down}
        plans.append(tw.plan(params=params, latency=LATENCIES[delay], **line, **shared))
    for easier, harder in itertools.pairwise(plans):
        beside = {row.name: row.step_seconds for row in harder.strategies}
        # with other rates, a relay may be no choice any more
        for row in (row for row in easier.strategies if row.name in beside):
            for less_s, more_s in zip(row.step_seconds, beside[row.name], strict=True):
                assert less_s <= more_s * (1 + 1e-12), row.name
        assert (easier["dense"].progress, easier["dense"].time_to_dense_loss) == (1, 1)
        ranks = [(not row.reaches_dense_loss, row.time_at_worst) for row in easier.strategies]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("params", [868_000, 3_300_000, 124_000_000, 8_000_000_000])
@pytest.mark.parametrize("workers", [4, 17])
def test_usual_sizes_cost_as_their_shapes(params: int, workers: int) -> None:
    """Where buckets change, a bucket's latencies are between those of two sizes near each other."""
    work, line = Work(params, api.transformer(params), 9.0), Network(1e9, 0.001, workers)
    found = tw.plan(
        params=params, step_seconds=9.0, workers=workers, link="1gbit", latency="1ms", device="cpu"
    )
    for row in (row for row in found.strategies if row.optimizer is None):
        own = cost_of(row.document or {}, work, line, hook=row.name)
        assert row.step_seconds[1] == approx(own.step_s, rel=0.02), row.name
        assert row.bytes_per_step == own.bytes


def test_connections_that_were_idle_begin_slowly_and_never_slower_on_a_faster_line() -> None:
    for latency_s, nbytes in itertools.product((0.001, 0.05, 0.1), (1e4, 1e6, 1e8)):
        lines = [Network(rate, latency_s, 2) for rate in (1e6, 1e7, 1e8, 1e9, 1e10)]
        took = [line.transfer_s(nbytes, idle_s=1.0) for line in lines]
        assert took == sorted(took, reverse=True)
        assert all(line.transfer_s(nbytes) <= s for line, s in zip(lines, took, strict=True))
    for idle_s, nbytes in itertools.product((0.3, 1.0, 4.0), (1e4, 1e6, 1e8)):
        far = [Network(1e8, ms / 1e3, 2).transfer_s(nbytes, idle_s) for ms in range(200)]
        assert all(near <= s * (1 + 1e-12) for near, s in itertools.pairwise(far))
    lines = [Network(1e8, 0.05, 2).transfer_s(1e6, idle_s) for idle_s in (0.2, 0.4, 1, 3, 30)]
    assert lines == sorted(lines)
    assert lines[0] == Network(1e8, 0.05, 2).transfer_s(1e6) < lines[1]
    assert Network(1e8, 0.05, 2, restarts=False).transfer_s(1e6, 30) == lines[0]
    line = Network(1e8, 0.025, 2)
    extra_s = line.transfer_s(1.4e6, idle_s=10.0) - line.transfer_s(1.4e6, idle_s=0.1)
    assert extra_s == pytest.approx(0.223, abs=0.001)


def test_a_ring_has_two_pieces_on_their_way() -> None:
    """What gloo took on such lines, by hand: 12 MiB in 12 pieces, of which each rank owns three."""
    line = Network(1e8 / api.FRAMES, 0.02, 4, call_s=0.0)
    assert line.all_reduce_s(0) == pytest.approx(6 * 0.04)
    assert line.all_gather_s(0) == pytest.approx(3 * 0.04)
    assert line.all_to_all_s(0) == pytest.approx(0.04)
    piece_s = 2**17 / 12.5e6
    assert line.all_reduce_s(2**20) == pytest.approx(6 * (0.04 + piece_s) + piece_s)
    assert [api.reduce_pairs(4, mib * 2**20) for mib in (0, 1, 8, 9, 12, 13)] == [6, 6, 6, 9, 9, 12]
    assert line.all_reduce_s(12 * 2**20) == pytest.approx(0.04 + 1.5 * 12 * 2**20 / 12.5e6)
    sent_s = 2**20 / 12.5e6
    assert line.all_to_all_s(2**20) == pytest.approx(0.04 + sent_s * (1 + api.crowding(4, 3)))


@pytest.mark.parametrize(
    "compression",
    [
        {"sparse": {"sparsity": 0.9, "value_bits": 2}},
        {"quantized": {"value_bits": 4}},
    ],
)
def test_bytes_of_local_updates_equal_the_real_messages(compression: Mapping[str, Any]) -> None:
    config = tw.DistributedStrategy.from_dict(
        {"localsgd": {"k_steps": 1, "compression": dict(compression)}}
    ).localsgd
    assert config is not None
    assert config.compression is not None
    work = Work(1_000_000, api.transformer(1_000_000), 0.1)
    shapes = [torch.Size(shape) for shape in work.shapes]
    message = config.compression.sent_bytes(100, shapes)
    document = {"localsgd": {"k_steps": 1, "compression": compression}}
    assert cost_of(document, work, Network(1e8, 0.0, 2)).bytes - 256 == message


def test_latencies_of_several_buckets_pass_at_the_same_time() -> None:
    work = Work(8_000_000, api.transformer(8_000_000), 0.1)  # more than one bucket of 25 MiB
    line = Network(1e9, 0.1, 2)
    for document, collectives in (
        ({"low_rank": {"rank": 2}}, 2 * line.all_reduce_s(0)),
        ({"dgc": {"exchange": "gather"}}, line.all_gather_s(0)),
    ):
        step_s = cost_of(document, work, line).step_s
        latency_s = collectives + line.all_gather_s(0)  # and the vote
        assert latency_s + 0.1 <= step_s + 0.1 < latency_s + 0.35


@pytest.mark.parametrize(("width", "layers", "measured_s"), [(256, 20, 0.67), (448, 14, 2.36)])
def test_muons_own_time_follows_from_its_shapes(width: int, layers: int, measured_s: float) -> None:
    """One thread of an EPYC, 16 and 34 million parameters, beyond AdamW's update."""
    sides = [(width, times * width) for times in (1, 3, 4, 4)] * layers
    assert api.muon_seconds(sides, cuda=False) == pytest.approx(measured_s, rel=0.25)


def test_muons_time_is_in_the_step_of_both_its_rows_and_their_dense() -> None:
    slow = tw.plan(params="124M", step_seconds=3.0, workers=4, link="50mbit")
    fast = tw.plan(params="124M", step_seconds=3.0, workers=4, link="50mbit", device="cuda")
    assert (slow.model["device"], fast.model["device"]) == ("cpu", "cuda")
    longer_s = slow["muon-local"].step_seconds[1] - fast["muon-local"].step_seconds[1]
    assert 8 < longer_s < 11
    sharded = tw.plan(params="124M", step_seconds=3.0, workers=8, link="100mbit", shard=2)
    assert sharded["muon-local"].step_seconds[1] < slow["muon-local"].step_seconds[1] - 4


def test_an_update_by_muon_takes_longer_as_the_probe_has_measured() -> None:
    work = Work(1_000_000, api.transformer(1_000_000), 0.1)
    assert work.by("muon") is work
    measured = replace(work, muon_s=0.02)
    assert measured.by(None) is measured
    line = Network(1e7, 0.0, 2)
    change = {"localsgd": {"k_steps": 16, "compression": {"quantized": {"value_bits": 1}}}}
    own, muon = (cost_of(change, each, line).step_s for each in (work, measured.by("muon")))
    assert muon - own == pytest.approx(0.02)


@pytest.mark.parametrize("value_bits", [1, 4])
@pytest.mark.parametrize(("ranks", "params", "rel"), [(64, 4_000_000, 0), (512, 40_000_000, 0.05)])
def test_shares_are_sent_on_in_a_ring(value_bits: int, ranks: int, params: int, rel: float) -> None:
    """Each rank of the ring passes on owners' rows; those between many follow from few."""
    sparse = {"sparse": {"sparsity": 0.9, "value_bits": value_bits}}
    work = Work(params, api.transformer(params), 0.1)
    numels = [prod(shape) for shape in work.shapes]
    layout = api.Layout(tuple(api.Slot(n, api.count_sent(n, 0.9)) for n in numels), value_bits)
    plan = api.split_plan(layout, ranks)
    whole = api.whole_split(api.WholeLayout(tuple(numels), value_bits), ranks)
    assert whole is not None

    def sent(compression: Mapping[str, Any]) -> float:
        document = {"localsgd": {"k_steps": 1, "compression": compression}}
        return cost_of(document, work, Network(1e8, 0.0, ranks)).bytes - 256 * (ranks - 1)

    dealt = sum(each.nbytes for each in plan.first) + (ranks - 1) * plan.row_bytes
    assert any(sent(sparse) == approx(dealt - own.nbytes, rel=rel) for own in plan.first)
    dealt = sum(each.nbytes for each in whole.first[1:]) + (ranks - 1) * whole.row_bytes
    assert sent({"quantized": {"value_bits": value_bits}}) == approx(dealt, rel=rel, abs=0)


BYTE_MODEL = """
import torch, thinwire as tw
def task(seed):
    width, layers = {sizes}
    linear = lambda fewer, more: torch.nn.Linear(fewer * width, more * width, bias=False)
    layer = lambda: torch.nn.Sequential(linear(1, 3), linear(1, 1), linear(1, 4), linear(4, 1))
    model = torch.nn.Sequential(
        torch.nn.Embedding(384, width), *(layer() for _ in range(layers)),
        torch.nn.Linear(width, 256, bias=False))
    return tw.Task(model=model, loss_fn=print, batches=print, evaluate=print)
"""


def test_memory_is_within_a_tenth_of_resident_memory(tmp_path: Path) -> None:
    """Of two ranks, less a process that trained a tiny model (`research.plan.check memory`)."""
    found = json.loads(MEMORY.read_text())
    assert {line["strategy"] for line in found} >= {"dense", "muon-local", "quantized-local"}
    plans = {}
    for numel, sizes in ((34_017_984, (448, 14)), (124_627_616, (928, 12))):
        path = tmp_path / f"of_{numel}.py"
        path.write_text(BYTE_MODEL.format(sizes=sizes))
        task = {"task": f"{path}:task", "step_seconds": 1.0, "device": "cpu"}
        plans[numel] = tw.plan(**task, workers=2)
        assert plans[numel].model["parameters"] == pytest.approx(numel, rel=0.01)
    for line in found:
        row = plans[line["parameters"]][line["strategy"]]
        assert row.memory_bytes == pytest.approx(line["measured_bytes"], rel=0.1), line["strategy"]


def test_peak_has_one_of_the_brief_parts_of_memory() -> None:
    row = tw.plan(**NUMBERS)["muon-local"]
    *kept, update, exchange = row.memory.values()
    assert row.memory_bytes == sum(kept) + max(update, exchange)
    numel = 124_000_000
    assert row.memory["weights and gradients"] == row.memory["method"] == 8 * numel
    embedded = prod(api.transformer(numel)[0])  # trained by AdamW
    assert row.memory["optimizer"] == pytest.approx(4 * (numel + embedded), rel=1e-4)


def test_shapes_make_up_the_number_of_parameters() -> None:
    for params in (1, 7, 16_384, 868_000, 124_000_000):
        made = sum(map(prod, api.transformer(params)))
        assert params - params**0.5 <= made <= params


def test_loss_is_reported_with_two_digits_and_as_an_interval() -> None:
    plan = tw.plan(params="124M", step_seconds=0.35, workers=8, link="100mbit", latency="20ms")
    assert plan.recommended == "muon-local"
    text = "use muon-local: a step of 0.57 s instead of dense's 73 s. At equal steps its loss is "
    assert plan.reason.startswith(f"{text}expected 0.98 to 6.1 % above dense's; ")
    assert "about 94 times as fast as dense, 54 times at the pessimistic end; " in plan.reason


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"link": "fast"}, ValueError, "link='fast'.*100mbit"),
        ({"link": "500gbit"}, ValueError, "400gbit"),
        ({"latency": "-3ms"}, ValueError, "latency='-3ms'"),
        ({"params": 0}, ValueError, "params=0"),
        ({"params": "many"}, ValueError, "params='many'.*124M"),
        ({"params": 1.5}, TypeError, "params.*1.5"),
        ({"step_seconds": 0}, ValueError, "step_seconds=0"),
        ({"workers": 1}, ValueError, "workers=1"),
        ({"link": ""}, ValueError, "link=''"),
        ({"link": 100}, TypeError, "link must be a text such as .*, got 100"),
        ({"latency": 0.02}, TypeError, "latency must be a text such as .*, got 0.02"),
        ({"device": "tpu"}, ValueError, "device='tpu'.*cpu, cuda"),
    ],
)
def test_impossible_arguments_are_one_clear_line(change: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        tw.plan(**{**NUMBERS, **change})


@pytest.mark.slow
def test_the_command_prints_json_and_writes_a_strategy_file(tmp_path: Path) -> None:
    words = ["--params", "124M", "--step-seconds", "0.35", "--link", "20mbit"]
    said = ran_thinwire("plan", *words, "--json", "--out", str(tmp_path / "best.yaml"))
    assert said.returncode == 0, said.stderr
    made = json.loads(said.stdout)
    text = (tmp_path / "best.yaml").read_text()
    assert made["recommended"] in text.splitlines()[0]
    strategy = tw.DistributedStrategy.load(tmp_path / "best.yaml")
    assert strategy.localsgd is not None
    table = ran_thinwire("plan", *words)
    assert made["recommended"] in table.stdout


def test_wrong_numbers_are_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys, thinwire as tw\ntry:\n    tw.plan(params='1M', step_seconds=-1.0)\n"
        "except ValueError:\n    sys.exit('torch' in sys.modules)\nsys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
