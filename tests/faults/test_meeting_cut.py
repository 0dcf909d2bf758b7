"""Whatever a member asks of the meeting place ends in time, though torch's store never does."""

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.api import Decision, KeyValueView, Link, connect, listeners, network, parse_address
from tests.faults.lines import state
from tests.faults.proxy import Proxy, proxy
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home
from tests.members.places import host_command, meeting_place
from tests.members.training import in_run, model, wait_for
from tests.ranks import Lost, Pool
from thinwire.errors import PeerLost, PeerStalled

TIMEOUT_S = 3.0
LIMIT_S = TIMEOUT_S + 2
CONFIG = tw.LocalSGD(2, begin_step=0)
pytestmark = pytest.mark.slow  # time-outs that a loaded machine keeps


@pytest.fixture(scope="module", autouse=True)
def _entered_before() -> None:
    """What a process does once, on entering its first block, is no wait for the meeting place."""
    net = model(0)
    with tw.local_sgd(net, torch.optim.SGD(net.parameters(), 0.1), CONFIG):
        pass


@pytest.fixture
def line() -> Iterator[Proxy]:
    """To a meeting place."""
    with meeting_place(None) as address:
        place = parse_address("address", address, scheme=True)
        with proxy(place.host, place.port) as made:
            yield made


def in_time(act: Callable[[], Any], error: type[Exception], text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=text):
        act()
    assert time.monotonic() - begun < LIMIT_S


def blocks(members: tw.Members) -> Any:
    net = model(0)
    return tw.local_sgd(net, torch.optim.SGD(net.parameters(), 0.1), CONFIG, members=members)


def joined(line: Proxy) -> tw.Members:
    return tw.join(line.address, run="test", timeout=TIMEOUT_S)


@pytest.mark.fault("nobody at the meeting point, at the start or later")
def test_the_line_is_cut_before_a_run_is_entered(line: Proxy) -> None:
    with joined(line) as members:
        line.cut()
        in_time(blocks(members).__enter__, PeerStalled, "meeting place did not answer within 3 s")


def test_nothing_waits_for_the_meeting_point_any_more_once_members_are_closed(line: Proxy) -> None:
    members = joined(line)
    line.cut()
    in_time(blocks(members).__enter__, PeerStalled, "meeting place did not answer")
    members.close()
    until = time.monotonic() + 2
    while time.monotonic() < until and ours():
        time.sleep(0.02)
    assert ours() == []


def ours() -> list[str]:
    """The threads of members in this process."""
    names = ("thinwire-members", "thinwire-board")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def test_the_line_is_cut_while_members_meet(line: Proxy) -> None:
    threading.Timer(0.5, line.cut).start()
    in_time(
        lambda: tw.join(line.address, run="test", min_members=2, timeout=TIMEOUT_S),
        PeerStalled,
        "meeting place did not answer",
    )


@pytest.mark.fault("nobody at the meeting point, at the start or later")
def test_the_line_is_cut_before_anybody_joins(line: Proxy) -> None:
    line.cut()
    in_time(lambda: joined(line), PeerStalled, "did not answer within 3 s")


@pytest.mark.fault("nobody at the meeting point, at the start or later")
@pytest.mark.parametrize("cut_s", [0.05, 0.5, 0.95])
def test_the_line_is_cut_while_a_joiner_waits(line: Proxy, cut_s: float) -> None:
    """Another member gives signs of life until then, over a line of its own."""
    host, port = line._target
    kv = KeyValueView(connect(f"tcp://{host}:{port}", "test", None, timedelta(seconds=TIMEOUT_S)))
    kv.put_if_absent("members/0", Decision(("ann",), ("ann",)).to_dict())
    over = threading.Event()

    def live() -> None:
        beats = 0
        while not over.wait(0.1):
            beats += 1
            kv.put("hb/ann", {"beat": beats, "trip_s": 0.0})

    beating = threading.Thread(target=live)
    beating.start()
    try:
        with joined(line) as members:
            assert members.generation == -1
            threading.Timer(cut_s, line.cut).start()
            begun = time.monotonic()
            with pytest.raises(PeerStalled, match=r"meeting place|none of its members sent"):
                blocks(members).__enter__()
            assert time.monotonic() - begun - cut_s < LIMIT_S
    finally:
        over.set()
        beating.join()


def test_the_host_has_ended_before_a_run_is_entered(line: Proxy) -> None:
    with joined(line) as members:
        line.close()
        in_time(blocks(members).__enter__, PeerLost, r"meeting place closed the connection")


def test_connections_that_are_lost_are_made_anew(line: Proxy) -> None:
    with joined(line) as members:
        line.reset()
        with blocks(members) as sync:
            assert (members.size, sync.step) == (1, 0)


def test_another_life_of_the_host_knows_the_run_again(line: Proxy) -> None:
    with meeting_place(None) as other, joined(line) as members:
        place = parse_address("address", other, scheme=True)
        line._target = place.host, place.port
        line.reset()
        with blocks(members) as sync:
            assert (members.size, sync.step) == (1, 0)
        store = connect(other, "test", None, timedelta(seconds=4 * TIMEOUT_S))
        assert json.loads(store.get("members/0"))["ids"] == [members.id]


@pytest.mark.fault("nobody at the meeting point, at the start or later")
def test_rounds_go_on_without_the_meeting_point(ranks: Pool, tmp_path: Path, line: Proxy) -> None:
    """All lines to it are cut at step 10; a member dies some steps later, and not even then does
    anybody wait for longer than the time-out and 2 s."""
    flag = tmp_path / "cut"

    def cut() -> None:
        wait_for(str(flag))
        line.cut()

    threading.Thread(target=cut).start()
    found = ranks.run(_trains, line.address, str(flag), size=3, group=False, expect_errors=True)
    assert isinstance(found[1], Lost)
    for rank in (0, 2):
        error, text, waited_s, step, left = found[rank]
        assert left <= 0, "listeners of gloo groups that are over"
        assert error == "PeerStalled"
        assert "meeting place did not answer" in text
        assert waited_s < LIMIT_S
        assert step >= 14, "rounds went on for a while"


def _trains(rank: int, size: int, address: str, flag: str) -> Any:
    net, data = model(0), torch.Generator().manual_seed(rank)
    begun, before = time.monotonic(), len(listeners())
    options = {"min_members": 2, "start_members": 3, "timeout": TIMEOUT_S, "rejoin": False}
    try:
        with in_run(address, net, CONFIG, **options) as (members, sync, optimizer):
            while True:
                net(torch.randn(4, 24, generator=data)).square().mean().backward()
                if sync.step == 10 and rank == 0:
                    Path(flag).touch()
                if sync.step == 14 and rank == 1:
                    os._exit(1)
                time.sleep(0.05)
                begun = time.monotonic()
                optimizer.step()
    except tw.errors.ThinwireError as error:
        told = type(error).__name__, str(error), time.monotonic() - begun, sync.step
        error.__traceback__ = error.__cause__ = error.__context__ = None
    del members, sync
    gc.collect()
    return *told, len(listeners()) - before


@pytest.mark.fault
@needs_netns
@pytest.mark.timeout(200)
def test_the_hosts_line_is_cut_and_back_before_members_go(ranks: Pool, tmp_path: Path) -> None:
    """Averagings go on meanwhile; the others go on after the loss too."""
    with (
        network(5, Link.parse("200mbit")) as net,
        host_command(
            "--bind", f"{net.addresses[0]}:29400", "--quiet", namespace=net.namespace_fds[0]
        ) as (_, address),
    ):

        def cut() -> None:
            wait_for(str(tmp_path / "cut"))
            state(net.namespace_fds[0], "down")
            time.sleep(15)
            state(net.namespace_fds[0], "up")
            time.sleep(6.4)
            (tmp_path / "die").touch()

        cutting = threading.Thread(target=cut)
        cutting.start()
        namespaces = list(net.namespace_fds[1:])
        more = {"expect_errors": True, "timeout_s": 150}
        found = at_home(ranks, namespaces, _goes_on, address, str(tmp_path), **more)
        cutting.join()
    assert isinstance(found[3], Lost)
    assert found[:3] == [(3, 21)] * 3, found


def _goes_on(rank: int, size: int, address: str, folder: str) -> tuple[int, int]:
    """Averages until one is lost, and 20 times more."""
    net, data = model(0), torch.Generator().manual_seed(rank)
    rounds_of_three, options = 0, {"min_members": 2, "start_members": 4, "timeout": 6.0}
    with in_run(address, net, tw.LocalSGD(1), **options) as (members, sync, optimizer):
        while rounds_of_three <= 20:
            net(torch.randn(4, 24, generator=data)).square().mean().backward()
            if sync.step == 10 and rank == 0:
                Path(folder, "cut").touch()
            if rank == 3 and Path(folder, "die").exists():
                os._exit(1)
            time.sleep(0.05)
            optimizer.step()
            rounds_of_three += members.size == 3
        return members.size, rounds_of_three
