"""Whoever reaches the host goes on, however few they are, and there are never two sides."""

import contextlib
import io
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import thinwire as tw
from tests.api import KeyValueView, Link, Watcher, network
from tests.faults.lines import blackhole
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home
from tests.members.places import host_command, met
from tests.members.training import deaf, member
from tests.ranks import Lost, Pool, Raised
from tests.waiting import time_out, until

SPARSE = tw.LocalSGD(4, begin_step=1, compression=tw.Sparse(0.9))
STEPS = 24


def trained(rank: int, size: int, address: str, options: Any) -> dict[str, Any]:
    """What `member` tells, and what was written to the terminal."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        found = member(rank, size, address, SPARSE, **options)
    return {**found, "told": told.getvalue()}


@pytest.mark.fault("two halves without a way between them")
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (1, 0)])
def test_one_that_is_left_trains_to_its_goal(ranks: Pool, size: int, rank: int) -> None:
    """It says once that it is alone, and what a batch is then; one that began alone does not."""
    fault = {"rank": rank, "phase": "once sent", "at": 3, "how": "kill"} if size == 2 else None
    found = met(ranks, trained, {"fault": fault}, size=size, errors=True)
    [one] = [each for each in found if not isinstance(each, Lost)]
    assert one["step"] == STEPS
    assert [there for _, there, _ in one["rounds"].values()][-1] == 1
    lines = [line for line in one["told"].splitlines() if "alone" in line]
    assert len(lines) == size - 1
    assert all("batch_share 0.5" in line for line in lines)


@pytest.mark.parametrize("at", [0, 1])
def test_one_that_dies_before_the_first_averaging_of_a_joiner_ends_nobody(
    ranks: Pool, tmp_path: Path, at: int
) -> None:
    fault = {"rank": at, "phase": "admitting", "at": 1, "how": "kill"}
    options = {"founders": 2, "flag": str(tmp_path / "go"), "step_s": 0.05, "steps": 100}
    found = met(ranks, trained, {"fault": fault, **options}, size=3, errors=True)
    assert isinstance(found.pop(at), Lost)
    first, joiner = (one["rounds"] for one in found)
    assert joiner
    assert joiner.items() <= first.items()
    assert {one["step"] for one in found} == {100}
    assert [size for _, size, _ in first.values()][-1] == 2


def late(rank: int, size: int, address: str, how: str) -> dict[str, Any]:
    """One or all but one of them are late: by three seconds, or with each question to the host."""
    call, decide = KeyValueView.call, Watcher._next_decision

    def far(self: KeyValueView, request: Any) -> Any:
        time.sleep(0.5 if threading.current_thread().name == "thinwire-members" else 0.0)
        return call(self, request)

    def slow(self: Watcher, *given: Any) -> Any:
        time.sleep(3.0)
        return decide(self, *given)

    with contextlib.ExitStack() as ends:
        if how == "far from the host" and rank == size - 1:
            ends.enter_context(patch.object(KeyValueView, "call", far))
        if how == "all but one are stopped" and rank:
            ends.enter_context(patch.object(Watcher, "_next_decision", slow))
        ends.enter_context(deaf(at=0 if rank or how == "busy" else 5))
        busy_s = 3.0 if how == "busy" and rank == size - 1 else 0.0
        return member(rank, size, address, SPARSE, steps=9, step_s=busy_s, timeout_s=40.0)


@pytest.mark.parametrize("how", ["busy", "far from the host", "all but one are stopped"])
def test_one_that_is_late_is_not_left_out(ranks: Pool, how: str) -> None:
    found = met(ranks, late, how, size=8)
    for one in found:
        assert one["step"] == 9
        assert {size for _, size, _ in one["rounds"].values()} == {8}
        assert len(one["changes"]) == (how != "busy")


@needs_netns
@pytest.mark.parametrize(
    ("sides", "least"),
    [
        ([[0, 1], [2, 3]], 1),
        ([[0, 1], [2, 3]], 3),
        pytest.param([[0], [1]], 1, marks=pytest.mark.slow),
        pytest.param([[0], [1, 2]], 1, marks=pytest.mark.slow),
    ],
)
def test_members_without_a_way_between_them_never_make_two_sides(
    ranks: Pool, token_file: str, tmp_path: Path, sides: list[list[int]], least: int
) -> None:
    """The largest side goes on, of equal ones that of the lowest rank; the others are evicted."""
    flag, size = tmp_path / "go", sum(map(len, sides))
    options = {"flag": str(flag), "step_s": 0.05, "steps": 60, "timeout_s": time_out(3.0)}
    options |= {"token_file": token_file, "min_members": least, "founders": size}

    def cut() -> None:
        until(flag.exists, "the first averaging")
        for own, others in (sides, sides[::-1]):
            for one in own:
                there = [net.addresses[1 + other] for other in others]
                blackhole(net.namespace_fds[1 + one], there)

    with network(1 + size, Link.parse("1gbit")) as net:
        bind = ["--bind", f"{net.addresses[0]}:29400", "--token-file", token_file]
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            cutting = threading.Thread(target=cut)
            cutting.start()
            found = at_home(
                ranks, [*net.namespace_fds[1:]], trained, address, options, expect_errors=True
            )
            cutting.join()
    kinds = [one.type_name if isinstance(one, Raised) else "" for one in found]
    if least == 3:
        assert kinds == ["QuorumLost"] * size
        return
    stay = max(sides, key=lambda side: (len(side), any(not kinds[one] for one in side)))
    assert kinds == ["" if one in stay else "Evicted" for one in range(size)]
    assert len({tuple(found[one]["rounds"].items()) for one in stay}) == 1
    assert {found[one]["step"] for one in stay} == {60}
    lowest = min(found[one]["rank"] for one in stay)
    assert lowest == 0 or len(stay) > size / 2
