"""Members that are far from the host and from each other: limits grow with the round trip."""

import time
from typing import Any
from unittest.mock import patch

import torch

import thinwire as tw
from tests.api import Link, network, watcher
from tests.lab.namespaces import needs_netns
from tests.members.homes import at_home
from tests.members.places import host_command
from tests.members.training import in_run
from tests.ranks import Pool
from tests.waiting import PATIENCE_S

ROUND_TRIP_S = 0.4
SHORT_S = 0.5


def far_away(rank: int, size: int, address: str, token_file: str) -> Any:
    net = torch.nn.Linear(8, 8)
    config = tw.LocalSGD(1, begin_step=0)
    options = {"token_file": token_file, "start_members": size, "timeout": 60.0}
    with (
        patch.object(watcher, "_CONNECT_S", SHORT_S),
        in_run(address, net, config, **options) as (members, sync, optimizer),
    ):
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        return members.size, members.generation, sync.stats()["averagings"]


@needs_netns
def test_a_generation_connects_in_a_time_that_grows_with_members_and_round_trip(
    ranks: Pool, token_file: str
) -> None:
    """Each pair takes a round trip, one after the other, twice: together more than `SHORT_S`."""
    size = 4
    link = Link.parse("50mbit", f"{500 * ROUND_TRIP_S:.0f}ms")
    with network(1 + size, link) as net:
        bind = "--bind", f"{net.addresses[0]}:0", "--token-file", token_file
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            found = at_home(ranks, [*net.namespace_fds[1:]], far_away, address, token_file)
    assert found == [(size, 0, 1)] * size


def entering(rank: int, size: int, address: str, token_file: str) -> int:
    net = torch.nn.Linear(8, 8)
    config = tw.LocalSGD(1, begin_step=0, compression=tw.Quantized(1))
    time.sleep(4.0 * rank)
    with in_run(address, net, config, token_file=token_file, timeout=60.0) as (members, _, opt):
        end_s = time.monotonic() + PATIENCE_S
        while members.size < size and time.monotonic() < end_s:
            net(torch.randn(4, 8)).square().mean().backward()
            opt.step()
            time.sleep(0.02)
        return members.size


@needs_netns
def test_a_joiner_enters_where_rounds_are_shorter_than_a_round_trip(
    ranks: Pool, token_file: str
) -> None:
    """A lone member averages about ten times while a message travels."""
    with network(3, Link.parse("50mbit", "100ms")) as net:
        bind = "--bind", f"{net.addresses[0]}:0", "--token-file", token_file
        with host_command(*bind, namespace=net.namespace_fds[0]) as (_, address):
            found = at_home(ranks, [*net.namespace_fds[1:]], entering, address, token_file)
    assert found == [2, 2]
