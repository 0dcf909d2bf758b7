"""What is found between ranks, from what made-up ranks tell."""

from dataclasses import replace
from typing import Any

import pytest

from tests.api import Finding, Line, Reach, Reports, Seen, cross_findings, named
from tests.doctor.machines import LOOPBACK, made_up


def rank_of(rank: int, *, size: int = 2, **changes: Any) -> Seen:
    """A rank on a machine of its own that reaches all others."""
    reaches = tuple(Reach(to, latency_s=0.01, large=True) for to in range(size) if to != rank)
    machine = made_up(f"10.0.0.{rank + 1}", **changes)
    return Seen(machine, reaches=reaches, gloo="")


def reports_of(*ranks: Seen, size: int | None = None, tried: bool = True) -> Reports:
    return Reports(size or len(ranks), dict(enumerate(ranks)), {}, tried)


def bad(reports: Reports) -> list[Finding]:
    return [one for one in cross_findings(reports) if one.level != "ok"]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = list(cross_findings(reports_of(rank_of(0), rank_of(1))))
    assert {one.level for one in found} == {"ok"}
    assert [one.check for one in found] == [
        "addresses",
        "connections",
        "MTU",
        "clocks",
        "versions",
        "gloo group",
    ]
    assert "round trips take 10 ms to 10 ms" in found[1].found


@pytest.mark.parametrize(
    ("error", "to_do"),
    [
        ("time-out", "let host-1 (10.0.0.1) accept TCP on ports 32768 to 60999 from 10.0.0.2"),
        ("refused", "another machine has this address"),
        ("no route", "ip route get 10.0.0.1"),
        ("forbidden by this machine", "let it send to 10.0.0.1"),
        ("rank 1 answers", "two machines have the address 10.0.0.1"),
    ],
)
def test_unreachable_pairs_are_named(error: str, to_do: str) -> None:
    cut = replace(rank_of(1), reaches=(Reach(0, error),))
    (finding,) = bad(reports_of(rank_of(0), cut))
    assert (finding.level, finding.check) == ("wrong", "connections")
    assert finding.found == (
        f"rank 1 cannot reach rank 0 at 10.0.0.1: {error} (the other direction works)"
    )
    assert to_do in finding.advice


def test_a_pair_that_is_cut_both_ways_has_no_way_that_works() -> None:
    cut = [replace(rank_of(rank), reaches=(Reach(1 - rank, "time-out"),)) for rank in (0, 1)]
    assert [one.found for one in bad(reports_of(*cut))] == [
        "rank 0 cannot reach rank 1 at 10.0.0.2: time-out",
        "rank 1 cannot reach rank 0 at 10.0.0.1: time-out",
    ]


def test_ranks_of_one_machine_share_a_finding() -> None:
    ranks = [rank_of(rank, size=4) for rank in range(4)]
    for rank in (1, 3):  # the second machine
        machine = replace(ranks[rank].machine, namespace="b", host="b", gloo=("10.0.0.2",))
        ranks[rank] = replace(ranks[rank], machine=machine)
    for rank in (0, 2):
        machine = replace(ranks[rank].machine, namespace="a", host="a", gloo=("10.0.0.1",))
        cut = tuple(Reach(to, "time-out") if to in (1, 3) else Reach(to) for to in (1, 3, 2 - rank))
        ranks[rank] = replace(ranks[rank], machine=machine, reaches=cut)
    (finding,) = bad(reports_of(*ranks))
    assert finding.found.startswith("ranks 0, 2 cannot reach ranks 1, 3 at 10.0.0.2: time-out")


def test_a_path_that_loses_large_packets() -> None:
    stuck = replace(rank_of(0), reaches=(Reach(1, latency_s=0.01, large=False, fitting_mtu=1280),))
    (finding,) = bad(reports_of(stuck, rank_of(1)))
    assert (finding.level, finding.check) == ("wrong", "MTU")
    assert "from rank 0 to rank 1" in finding.found
    assert "packets of 1500 bytes are dropped" in finding.found
    assert "ip link set dev eth0 mtu 1280" in finding.advice
    none = replace(rank_of(0), reaches=(Reach(1, latency_s=0.01, large=False),))
    assert "nor of 1000 bytes" in bad(reports_of(none, rank_of(1)))[0].found


def test_path_of_a_machine_with_unseen_interfaces() -> None:
    reaches = (Reach(1, latency_s=0.01, large=False, fitting_mtu=1280),)
    blind = replace(rank_of(0, interfaces=()), reaches=reaches)
    (finding,) = bad(reports_of(blind, rank_of(1)))
    assert "packets of the usual size are dropped" in finding.found
    assert "ip link set dev INTERFACE mtu 1280" in finding.advice


@pytest.mark.parametrize(
    ("one", "several", "control", "level"),
    [(1e6, 5e6, "cubic", "note"), (1e6, 5e6, "bbr", "ok"), (4e6, 5e6, "cubic", "ok")],
)
def test_line_not_filled_is_a_note(one: float, several: float, control: str, level: str) -> None:
    line, other = Line(one, several, 16, 0.002, control), Line(9e6, 9e6, 16, 0.0, control)
    reports = replace(reports_of(rank_of(0), rank_of(1)), lines=((0, 1, other), (1, 0, line)))
    (finding,) = (one for one in cross_findings(reports) if one.check == "line")
    assert finding.level == level
    rates = f"{one * 8e-6:g} Mbit/s over one connection, {several * 8e-6:g} over 16"
    assert finding.found.startswith(f"rank 1 to 0: {rates}; 0.2 % of packets lost; {control}")
    assert ("tcp_congestion_control=bbr" in finding.advice) == (level == "note")


def clock_of(ahead_s: float, latency_s: float) -> Seen:
    return replace(rank_of(1), reaches=(Reach(0, "", latency_s, ahead_s, large=True),))


def other_version(name: str, value: str) -> Seen:
    return rank_of(1, versions={**made_up().versions, name: value})


@pytest.mark.parametrize(
    ("other", "level", "check", "fact"),
    [
        (clock_of(2.5, 0.04), "note", "clocks", "2.5 s ahead of rank 0's"),
        (clock_of(-70.0, 0.04), "note", "clocks", "70.0 s behind rank 0's"),
        (other_version("torch", "2.13.0+cu128"), "note", "versions", "2.13.0+cu128 on rank 1"),
        (other_version("thinwire", "0.9"), "note", "versions", "and 0.9 on rank 1"),
        (other_version("wire", "2"), "wrong", "versions", "and 2 on rank 1"),
        (rank_of(1, environment={"GLOO_SOCKET_IFNAME": "x"}), "note", "environment", "x on rank 1"),
        (
            rank_of(1, environment={"GLOO_DEVICE_TRANSPORT": "x"}),
            *("wrong", "environment", "is not set on rank 0 and x on rank 1"),
        ),
        (
            replace(rank_of(1), machine=made_up("10.0.0.1", namespace="another")),
            *("wrong", "addresses", "rank 0 and rank 1 are on different machines"),
        ),
        (replace(rank_of(1), gloo="Connection refused"), "wrong", "gloo group", "rank 1: Conn"),
    ],
)
def test_difference_between_ranks_is_named(other: Seen, level: str, check: str, fact: str) -> None:
    (finding,) = bad(reports_of(rank_of(0), other))
    assert (finding.level, finding.check) == (level, check)
    assert fact in finding.found


def test_skew_within_the_measurement_error_is_none() -> None:
    assert bad(reports_of(rank_of(0), clock_of(1.5, 1.4))) == []


def test_loopback_is_wrong_on_two_machines_and_right_on_one() -> None:
    changes = {"gloo": ("127.0.0.1",), "interfaces": (LOOPBACK, made_up().interfaces[1])}
    two = reports_of(rank_of(0, **changes), rank_of(1, **changes))
    assert {(one.level, one.check) for one in bad(two)} == {("wrong", "gloo")}
    one_stack = {**changes, "namespace": "here"}
    assert bad(reports_of(rank_of(0, **one_stack), rank_of(1, **one_stack))) == []


def test_ranks_that_did_not_come_or_tell() -> None:
    missing = bad(reports_of(rank_of(0), size=3, tried=False))
    assert missing[0].found.startswith("ranks 1, 2 of 3 did not reach")
    assert missing[-1].check == "gloo group"
    silent = bad(reports_of(rank_of(0), replace(rank_of(1), reaches=None, gloo=None)))
    assert [one.found for one in silent] == [
        "rank 1 did not report its connections in time",
        "rank 1: no report in time",
    ]
    stranger = Reports(2, {0: rank_of(0)}, {1: "0.9"}, False)
    assert (
        bad(stranger)[0].found
        == "rank 1 has thinwire 0.9, whose doctor sends another report format"
    )


def test_ranks_are_named_in_short() -> None:
    assert [named([3]), named([1, 0]), named([0, 2, 4, 5, 6, 7])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0, 2, 4-7",
    ]
