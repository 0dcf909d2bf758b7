"""What lines do to training: down for a while or for good, slower, late, lossy, apart."""

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import thinwire as tw
from tests.api import Link, cost_of
from tests.api import netns_Network as Network
from tests.api import network_Network as Line
from tests.api import work_Work as Work
from tests.faults.lines import TIMEOUT_S, blackhole, over_lines, state, trained, wide
from tests.faults.training import Seen, said_nothing_moved
from tests.lab.namespaces import needs_netns
from tests.ranks import Pool

FAST = Link.parse("200mbit")


def undisturbed(ranks: Pool, folder: Path, way: str, last: int) -> list[str]:
    folder.mkdir()
    seen = over_lines(ranks, trained, way, last, 30.0, folder=folder, size=3, link=FAST)
    return [one.common for one in seen]


@pytest.mark.slow
@pytest.mark.fault("a line is down for 3 s")
@needs_netns
@pytest.mark.parametrize("way", ["dgc", "local"])
def test_a_line_is_down_for_less_than_the_time_out(ranks: Pool, tmp_path: Path, way: str) -> None:
    """Nothing but time is lost: the bits are those of the run that nobody disturbed."""
    whole = undisturbed(ranks, tmp_path / "whole", way, 12)

    def down_and_up(net: Network) -> None:
        state(net.namespace_fds[2], "down")
        time.sleep(3)
        state(net.namespace_fds[2], "up")

    seen = over_lines(
        ranks, trained, way, 12, 30.0, folder=tmp_path, size=3, link=FAST, at=4, act=down_and_up
    )
    assert [one.error for one in seen] == [""] * 3
    assert [one.common for one in seen] == whole
    assert max(one.seconds for one in seen) > 2


@pytest.mark.fault("1 % of the packets lost")
@needs_netns
def test_every_hundredth_packet_is_lost(ranks: Pool, tmp_path: Path) -> None:
    whole = undisturbed(ranks, tmp_path / "whole", "dgc", 30)
    link = Link.parse("200mbit", loss="1%")
    seen = over_lines(ranks, trained, "dgc", 30, 30.0, folder=tmp_path, size=3, link=link)
    assert [one.error for one in seen] == [""] * 3
    assert [one.common for one in seen] == whole


def part(net: Network) -> None:
    """Ranks 0 and 1 on one side, 2 and 3 on the other."""
    for rank, namespace in enumerate(net.namespace_fds):
        blackhole(namespace, net.addresses[2:] if rank < 2 else net.addresses[:2])


def stopped(answers: list[object]) -> list[Seen]:
    """What all four ranks saw, each of which has ended with an error."""
    for one in answers:
        assert isinstance(one, Seen), one
        assert one.error in ("PeerStalled", "PeerLost")
    return [one for one in answers if isinstance(one, Seen)]


@pytest.mark.fault("two halves without a way between them")
@needs_netns
def test_two_halves_without_a_way_between_them_both_stop(ranks: Pool, tmp_path: Path) -> None:
    """Neither goes on alone, and nothing that only one half has exchanged is applied."""
    args = (ranks, trained, "dgc", 10**6, TIMEOUT_S, 4)
    seen = stopped(over_lines(*args, folder=tmp_path, size=4, link=FAST, at=4, act=part))
    assert all(one.before == one.after for one in seen)
    assert len({one.common for one in seen}) == 1


@pytest.mark.slow
@pytest.mark.fault("two halves without a way between them")
@needs_netns
@pytest.mark.parametrize("later_s", [n / 500 for n in range(12)])
def test_halves_that_part_in_a_step_both_stop(ranks: Pool, tmp_path: Path, later_s: float) -> None:
    """If one half heard the last agreement, they stop an update apart; each says what moved."""

    def later(net: Network) -> None:
        time.sleep(later_s)
        part(net)

    args = (ranks, trained, "dgc", 10**6, TIMEOUT_S)
    seen = stopped(over_lines(*args, folder=tmp_path, size=4, link=FAST, at=4, act=later))
    for one in seen:
        assert not said_nothing_moved(one.text) or one.before == one.after
    assert max(one.updates for one in seen) - min(one.updates for one in seen) <= 1
    assert len({one.common for one in seen}) <= 2


WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "low_rank": {"low_rank": tw.LowRank(4, begin_step=1)},
    "dgc gather": {"dgc": tw.DGC(sparsity=(0.9,), exchange="gather")},
    "dgc split": {"dgc": tw.DGC(sparsity=(0.9,), exchange="split")},
    "dgc nodes": {"dgc": tw.DGC(sparsity=(0.9,), node_size=2)},
    **{
        f"local {change}": {"localsgd": tw.LocalSGD(1, begin_step=0, compression=change)}
        for change in (
            *(None, tw.Quantized(1), tw.Quantized(4, exchange="split"), tw.Sparse(0.9)),
            tw.LowRank(4, begin_step=0),
        )
    },
}


def of_all_ways(rank: int, size: int, folder: str, names: list[str]) -> list[tuple[int, int]]:
    """For each way, bytes counted and sent in four steps, after two."""
    found = []
    for name in names:
        rows = wide(rank, size, folder, WAYS[name], 6)[2:]
        found.append((sum(row[0] for row in rows), sum(row[1] for row in rows)))
    return found


@pytest.mark.fault("copies on the wire")
@needs_netns
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_copy_on_the_wire_is_counted(ranks: Pool, tmp_path: Path, size: int) -> None:
    """By each rank's interface, whose counters have headers and acknowledgements; and planned."""
    names = [name for name in WAYS if size in (4, 6) or name != "dgc nodes"]
    every = over_lines(ranks, of_all_ways, names, folder=tmp_path, size=size, link=FAST)
    work = Work(2**20 + 1536, ((512, 1024), (512,), (1024, 512), (1024,)), 0.1)
    for name, *found in zip(names, *every, strict=True):
        assert all(counted <= sent <= 1.25 * counted for counted, sent in found), (name, found)
        strategy = tw.DistributedStrategy(**WAYS[name])
        planned = cost_of(strategy, "", work, Line(1e9, 0.0, size)).bytes
        counted = max(counted for counted, _ in found) / 4
        assert counted == pytest.approx(planned, rel=0.01, abs=256 * size)


@pytest.mark.slow
@pytest.mark.fault("1 Gbit/s becomes 20 Mbit/s")
@needs_netns
def test_line_fifty_times_slower_counts_bytes_on_the_wire(ranks: Pool, tmp_path: Path) -> None:
    def slow(net: Network) -> None:
        replace(net, link=Link.parse("20mbit")).limit()

    link = Link.parse("1gbit")
    rows, _ = over_lines(ranks, wide, {}, 6, 3, folder=tmp_path, size=2, link=link, at=3, act=slow)
    told, sent = (sum(row[n] for row in rows[1:]) for n in (0, 1))
    assert told == pytest.approx(sent, rel=0.05)
    assert min(row[2] for row in rows[3:]) > 4 * min(row[2] for row in rows[1:3])


@pytest.mark.slow
@pytest.mark.fault("50 ms one way")
@needs_netns
def test_step_over_a_late_line_takes_a_round_trip_an_exchange(ranks: Pool, tmp_path: Path) -> None:
    """50 ms one way: one message a bucket and two agreements, and a part for the work."""
    link = Link.parse("100mbit", latency="50ms")
    strategy = {"dgc": tw.DGC(sparsity=(0.999,))}
    rows, _ = over_lines(ranks, wide, strategy, 10, folder=tmp_path, size=2, link=link)
    assert median(row[2] for row in rows[4:]) < 3 * 0.110 + 0.1
