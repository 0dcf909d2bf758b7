"""Five members in two sides, also while the host is started again without its file: one run."""

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.api import KeyValueView, Link, connect, inside, network
from tests.api import netns_Network as Network
from tests.faults.lines import blackhole
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home
from tests.members.places import TIMEOUT, TOKEN, host_command
from tests.members.test_rejoining import away
from tests.ranks import Pool
from tests.waiting import time_out, until

HOST, SIDES = 0, ((1, 2), (3, 4, 5))
TWO, THREE = (frozenset(product([HOST], side)) for side in SIDES)
"""Lines of a side to the host."""
BETWEEN = frozenset(product(*SIDES))
TIMEOUT_S = time_out(3.0)
CONFIG = tw.LocalSGD(4, begin_step=1, compression=tw.Quantized(1))
Generations = dict[str, tuple[str, ...]]


class Fleet:
    """A host and five members in networks of their own, and the generations at each host."""

    def __init__(self, net: Network, token_file: str) -> None:
        self.net, self._token_file = net, token_file
        self.decided: list[Generations] = []
        self._cut: frozenset[tuple[int, int]] = frozenset()
        self._host = contextlib.ExitStack()

    def new_host(self) -> None:
        """Start the host, without the file of the one before, which is killed."""
        self._host.close()
        bind = ["--bind", f"{self.net.addresses[HOST]}:29400", "--token-file", self._token_file]
        journal = ["--journal", f"{tempfile.mkdtemp()}/runs"]
        host = host_command(*bind, *journal, namespace=self.net.namespace_fds[HOST])
        _, self.address = self._host.enter_context(host)
        self.decided.append({})

    def close(self) -> None:
        self._host.close()

    def cut(self, *lines: Collection[tuple[int, int]]) -> None:
        """Drop all packets on these lines, and on no others."""
        now = frozenset(chain(*lines))
        for pairs, ends in ((self._cut - now, True), (now - self._cut, False)):
            for one, other in pairs:  # at one end: attempts of the other have no answer
                there = [self.net.addresses[other]]
                blackhole(self.net.namespace_fds[one], there, ends=ends)
        self._cut = now

    def generations(self) -> Generations:
        """Those at the present host."""

        def read() -> dict[str, Any]:
            return KeyValueView(connect(self.address, "test", TOKEN, TIMEOUT)).entries("members/")

        found = inside(self.net.namespace_fds[HOST], read)
        self.decided[-1] = {number: tuple(one["ids"]) for number, one in found.items()}
        return self.decided[-1]

    def wait_for_loss(self) -> None:
        """Wait for a generation without some, and until it is connected."""
        until(lambda: any(len(ids) < 5 for ids in self.generations().values()), "a generation")
        time.sleep(1.0)


def the_two_reach_it(fleet: Fleet) -> None:
    fleet.cut(BETWEEN, THREE)
    fleet.wait_for_loss()


def the_two_reach_a_new_one_first(fleet: Fleet) -> None:
    fleet.cut(BETWEEN, THREE)
    fleet.new_host()
    time.sleep(TIMEOUT_S + 2)
    assert fleet.generations() == {}
    fleet.cut(BETWEEN)
    fleet.wait_for_loss()


def the_three_reach_a_new_one_first(fleet: Fleet) -> None:
    fleet.cut(BETWEEN, TWO)
    fleet.new_host()
    fleet.wait_for_loss()


def they_reach_a_new_one_alternately(fleet: Fleet) -> None:
    fleet.cut(BETWEEN, TWO, THREE)
    fleet.new_host()
    for side in (TWO, THREE, TWO, THREE):
        fleet.cut(BETWEEN, side)
        time.sleep(1.0)
    fleet.cut(BETWEEN)
    fleet.wait_for_loss()


def the_two_went_on_before_a_new_one(fleet: Fleet) -> None:
    """The three do not know the generation of the two."""
    the_two_reach_it(fleet)
    fleet.new_host()


def the_two_went_on_and_reach_a_new_one_last(fleet: Fleet) -> None:
    the_two_reach_it(fleet)
    fleet.new_host()
    fleet.cut(BETWEEN, TWO)
    time.sleep(TIMEOUT_S + 2)


def _away(rank: int, size: int, address: str, options: Any) -> Any:
    return away(rank, size, address, CONFIG, **options)


@pytest.mark.slow
@needs_netns
@pytest.mark.parametrize(
    "act",
    [
        the_two_reach_it,
        the_two_reach_a_new_one_first,
        the_three_reach_a_new_one_first,
        they_reach_a_new_one_alternately,
        the_two_went_on_before_a_new_one,
        the_two_went_on_and_reach_a_new_one_last,
    ],
)
def test_members_in_two_sides_make_one_run(
    ranks: Pool, token_file: str, tmp_path: Path, act: Callable[[Fleet], None]
) -> None:
    """A side goes on, whose bits all have in the end; the other one enters the run again."""
    flag, over = tmp_path / "cut", threading.Event()
    options = {"flag": str(flag), "token_file": token_file, "timeout": TIMEOUT_S}
    with network(6, Link.parse("1gbit")) as net:
        fleet = Fleet(net, token_file)
        fleet.new_host()

        def split() -> None:
            until(flag.exists, "the first averaging")
            fleet.generations()
            act(fleet)
            fleet.cut()
            over.wait()  # a host ends with the thread that started it
            fleet.generations()

        thread = threading.Thread(target=split)
        thread.start()
        try:
            found = at_home(ranks, [*net.namespace_fds[1:]], _away, fleet.address, options)
        finally:
            over.set()
            thread.join()
            fleet.close()
    assert len({one["state"] for one in found}) == 1
    sides = [{len(found[member - 1]["jumps"]) for member in side} for side in SIDES]
    assert {0} in sides
    for step in set().union(*(one["rounds"] for one in found)):
        assert len({one["rounds"].get(step, ("",))[0] for one in found} - {""}) == 1, step
    for number, ids in fleet.decided[0].items():
        assert set(ids) & set(fleet.decided[-1].get(number, ids)), "two sides"
