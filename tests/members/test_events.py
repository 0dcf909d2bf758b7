"""The table "What happens when" of docs/members.md: each of its rows is a test."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api import Link, network, parse_address
from tests.faults import test_meeting_cut as meeting_cut
from tests.faults.lines import blackhole
from tests.faults.proxy import proxy
from tests.lab.namespaces import needs_netns
from tests.members import (
    test_busy,
    test_ends,
    test_few_left,
    test_late,
    test_rejoining,
    test_restarts,
    test_rounds,
    test_split,
)
from tests.members.homes import at_home
from tests.members.places import host_command, meeting_place
from tests.members.test_few_left import trained
from tests.members.training import TIMEOUT_S
from tests.ranks import Pool, Raised
from tests.waiting import time_out, until

PAGE = Path(__file__).parents[2] / "docs" / "members.md"


def _by_rank(rank: int, size: int, addresses: list[str], options: list[dict[str, Any]]) -> Any:
    return trained(rank, size, addresses[rank], options[rank])


def test_members_average_on_once_the_host_has_ended(
    ranks: Pool, token_file: str, tmp_path: Path
) -> None:
    """They warn once, and nothing else changes."""
    flag = tmp_path / "flag"
    options = {"token_file": token_file, "flag": str(flag), "step_s": 0.05, "steps": 60}
    with host_command("--bind", "127.0.0.1:0", "--token-file", token_file) as (host, address):
        thread = threading.Thread(target=lambda: (until(flag.exists), host.kill()))
        thread.start()
        found = ranks.run(_by_rank, [address] * 2, [options] * 2, size=2, group=False)
        thread.join()
    assert [one["step"] for one in found] == [60, 60]
    assert found[0]["rounds"] == found[1]["rounds"]
    assert {(size, number) for _, size, number in found[0]["rounds"].values()} == {(2, 0)}
    assert [one["told"].count("rounds continue") for one in found] == [1, 1]


@pytest.mark.slow
def test_line_of_one_member_to_the_host_is_cut(ranks: Pool, tmp_path: Path) -> None:
    """Longer than the time-out. Then the other one leaves, which the host alone says."""
    flag = tmp_path / "flag"
    steps, leaves_at = int(4 * TIMEOUT_S / 0.05), int(3 * TIMEOUT_S / 0.05)
    options = {"flag": str(flag), "step_s": 0.05, "steps": steps, "leave_at": {0: leaves_at}}

    def cut() -> None:
        until(flag.exists, "the first averaging")
        line.cut()
        time.sleep(1.5 * TIMEOUT_S)
        line.resume()

    with meeting_place(None) as address:
        host = parse_address("address", address, scheme=True)
        with proxy(host.host, host.port) as line:
            thread = threading.Thread(target=cut)
            thread.start()
            addresses = [address, line.address]
            left, cut_off = ranks.run(_by_rank, addresses, [options] * 2, size=2, group=False)
            thread.join()
    assert left["left"]
    assert left["rounds"].items() <= cut_off["rounds"].items()
    assert {(size, number) for _, size, number in left["rounds"].values()} == {(2, 0)}
    assert cut_off["step"] == steps
    assert [*cut_off["rounds"].values()][-1][1:] == (1, 1)


@pytest.mark.slow
@needs_netns
def test_joiner_that_cannot_reach_one_member_is_evicted(
    ranks: Pool, token_file: str, tmp_path: Path
) -> None:
    """After three attempts; the others go on as before."""
    options = {"founders": 2, "flag": str(tmp_path / "go"), "step_s": 0.1, "steps": 600}
    with network(4, Link.parse("1gbit")) as net:
        blackhole(net.namespace_fds[2], [net.addresses[3]])
        bind = ["--bind", f"{net.addresses[0]}:29400", "--token-file", token_file]
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            given = trained, address, {"token_file": token_file, **options}
            found = at_home(ranks, [*net.namespace_fds[1:]], *given, expect_errors=True)
    first, second, joiner = found
    assert isinstance(joiner, Raised)
    assert joiner.type_name == "Evicted"
    assert "could not connect to all of them" in joiner.text
    assert first["rounds"] == second["rounds"]
    assert {size for _, size, _ in first["rounds"].values()} == {2}
    assert [size for _, size in first["changes"]][-1] == 2


@needs_netns
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("side", ["joiner", pytest.param("members", marks=pytest.mark.slow)])
def test_joiner_that_reaches_no_member_ends_with_their_names(
    ranks: Pool, token_file: str, tmp_path: Path, side: str, size: int
) -> None:
    """Whoever's packets are lost; the others go on as before."""
    steps = 250 if side == "joiner" else 600
    options = {"founders": size, "flag": str(tmp_path / "go"), "step_s": 0.1, "steps": steps}
    options |= {"timeout_s": time_out(3.0), "token_file": token_file}
    with network(2 + size, Link.parse("1gbit")) as net:
        members, joiner = range(1, 1 + size), 1 + size
        for one in members:
            own, other = (joiner, one) if side == "joiner" else (one, joiner)
            blackhole(net.namespace_fds[own], [net.addresses[other]])
        bind = ["--bind", f"{net.addresses[0]}:29400", "--token-file", token_file]
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            given = trained, address, options
            *found, refused = at_home(ranks, [*net.namespace_fds[1:]], *given, expect_errors=True)
    assert isinstance(refused, Raised)
    assert refused.type_name == "PeerLost", refused.text
    assert "relay=True" in refused.text
    assert {(one["step"], len(one["changes"])) for one in found} == {(steps, 0)}
    assert len({tuple(one["rounds"].items()) for one in found}) == 1


EVENTS: dict[str, list[Callable[..., None]]] = {
    "a member dies": [
        test_rounds.test_whoever_is_killed_others_make_the_round_again,
        test_few_left.test_one_that_is_left_trains_to_its_goal,
        test_ends.test_one_that_is_killed_is_not_waited_for_until_the_time_out,
    ],
    "a member sleeps or is cut off for longer than the time-out": [
        test_rejoining.test_one_that_slept_trains_on_with_the_others,
        test_rejoining.test_no_step_is_lost_or_counts_twice,
        test_rejoining.test_one_that_was_cut_off_comes_back,
    ],
    "a member works alone for longer, inside `tw.busy`": [
        test_busy.test_a_member_that_says_that_it_is_busy_stays_one
    ],
    "a member comes late to an averaging": [
        test_late.test_late_member_takes_over_averagings_made_without_it,
        test_late.test_no_step_of_a_late_member_is_lost_or_counts_twice,
    ],
    "`members.leave()`, for instance on SIGTERM": [
        test_rounds.test_one_that_leaves_is_no_error_for_the_others,
        test_rounds.test_residual_of_a_leaving_member_goes_to_a_remaining_one,
    ],
    "a block or engine ends before the others'": [
        test_ends.test_one_that_ends_before_the_others_leaves_after_their_round
    ],
    "the `with` block of `tw.join` ends, or `members.close()`": [
        test_rounds.test_some_end_by_themselves
    ],
    "a process joins": [test_rounds.test_a_joiner_has_the_bits_of_the_others],
    "a joiner cannot reach one of the members": [
        test_joiner_that_cannot_reach_one_member_is_evicted,
        test_joiner_that_reaches_no_member_ends_with_their_names,
    ],
    "the joiner or a donor dies meanwhile": [
        test_rounds.test_joiner_that_dies_in_the_copy_delays_nobody
    ],
    "fewer than `min_members` are left": [
        test_few_left.test_members_without_a_way_between_them_never_make_two_sides
    ],
    "the network splits": [test_split.test_members_in_two_sides_make_one_run],
    "members reach the host and not each other": [
        test_few_left.test_members_without_a_way_between_them_never_make_two_sides
    ],
    "the host ends": [
        test_members_average_on_once_the_host_has_ended,
        meeting_cut.test_the_hosts_line_is_cut_and_back_before_members_go,
    ],
    "the host is restarted": [
        test_restarts.test_a_joiner_is_admitted_after_the_host_is_back,
        test_restarts.test_a_lost_member_is_noticed_after_the_host_is_back,
    ],
    "one member's line to the host is cut": [
        test_line_of_one_member_to_the_host_is_cut,
        test_rejoining.test_one_that_was_cut_off_comes_back,
    ],
    "no heartbeat from anybody for the time-out and 10 s": [
        test_rounds.test_a_run_of_which_nobody_is_left_begins_anew_from_the_last_copy
    ],
}
"""Tests of each event, where they are not here: what they find is what the table says."""


def test_events_of_the_table_have_a_test() -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## What happens when\n")
    rows = re.findall(r"^\| (.+?) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", row) for row in rows[1:]] == [*EVENTS]
