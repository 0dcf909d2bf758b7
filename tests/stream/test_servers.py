"""Versions over real servers: web servers in `make test`, others in `make test-integrations`."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import thinwire as tw
from tests.integrations.packages import needs
from tests.stream.servers import Served, hub, s3, sftp, web
from tests.stream.test_storages import (
    begun,
    change,
    more,
    net,
    quiet,
    require_same,
    state_of,
    write,
)
from tests.waiting import PATIENCE_S, time_out
from thinwire.errors import StreamError

MIB = 1 << 20
both = pytest.mark.parametrize("ranges", [False, True])


def follow(served: Served, model: nn.Module | None = None, **more: Any) -> tw.Follower:
    return tw.follow(served.address, model, **{"poll": 0.01, "patience": PATIENCE_S, **more})


def published(where: Path | str, model: nn.Module, **more: Any) -> tw.Publisher:
    """A publisher of the first version."""
    publisher = tw.publish(where, model, **more)
    publisher.update(0)
    publisher.wait()
    return publisher


# web servers


@both
def test_a_web_server_of_the_folder_is_enough_for_readers(tmp_path: Path, ranges: bool) -> None:
    model = net()
    with web(tmp_path, ranges=ranges) as served, published(tmp_path, model) as publisher:
        follower = follow(served)
        for step in range(1, 6):
            wanted = write(publisher, model, step)
            served.refuse(step)
            version = follower.latest(wait=PATIENCE_S)
            assert version.step == step
            require_same(version.state_dict(), wanted)
        publisher.close()
        assert [version.step for version in follow(served)] == list(range(6))


@both
def test_a_base_on_a_thin_line_that_breaks_arrives_and_continues_by_ranges(
    tmp_path: Path, ranges: bool
) -> None:
    model, limit_s = net(1150), time_out(2.0)  # 5 MiB
    with web(tmp_path, ranges=ranges) as served, published(tmp_path, model):
        served.line.rate = 4 * MIB / limit_s
        # without ranges each attempt begins anew, which is no progress
        served.line.break_after(MIB // 8 if ranges else 2 * MIB, times=3)
        begin_s = time.monotonic()
        version = follow(served, patience=limit_s if ranges else PATIENCE_S).latest()
        assert time.monotonic() - begin_s > limit_s
        require_same(version.state_dict(), state_of(model))
        assert not served.line.breaks
        assert (served.line.sent < 6 * MIB) == ranges


@both
def test_readers_of_a_web_server_outlast_a_cut_line(tmp_path: Path, ranges: bool) -> None:
    model = net()
    with web(tmp_path, ranges=ranges) as served, published(tmp_path, model) as publisher:
        follower = follow(served)
        follower.latest()
        with served.line.cut():
            wanted = write(publisher, model, 1)
            found = begun(lambda: follower.latest(wait=PATIENCE_S))
            more(lambda: served.line.connections)
            assert not found.done()
        version = found.result(PATIENCE_S)
        assert version.step == 1
        require_same(version.state_dict(), wanted)


@both
def test_waits_for_a_silent_web_server_end(tmp_path: Path, ranges: bool) -> None:
    with web(tmp_path, ranges=ranges) as served, published(tmp_path, net()):
        follower = follow(served, patience=time_out(0.5))
        assert follower.latest().step == 0
        begin_s = time.monotonic()
        with served.line.silent():
            for wait_s in (0.1, PATIENCE_S):
                with pytest.raises(StreamError):
                    follower.latest(wait=wait_s)
        assert time.monotonic() - begin_s < PATIENCE_S / 2
        assert follower.latest().step == 0


# servers with packages of their own

SERVERS = [
    pytest.param("s3", marks=needs("s3fs")),
    pytest.param("sftp", marks=needs("paramiko")),
]


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    servers: dict[str, Callable[[], AbstractContextManager[Served]]] = {
        "s3": s3,
        "sftp": lambda: sftp(tmp_path),
    }
    with quiet(), servers[request.param]() as served:
        served.address += "/run/versions"
        yield served


@pytest.mark.integrations
@pytest.mark.parametrize("served", SERVERS, indirect=True)
def test_versions_on_a_server_are_followed_and_continued(served: Served) -> None:
    model, reader = net(100), net(100)
    follower = follow(served, reader)
    for life in range(2):
        publisher = tw.publish(served.address, model, every=2, keep=1)
        for step in range(4 * life, 4 * life + 4):
            wanted = write(publisher, model, step)
            assert follower.latest().step == step
            require_same(state_of(reader), wanted)
    require_same(follow(served).latest().state_dict(), wanted)
    assert follow(served).versions()[-1] == 8
    publisher.close()
    assert [version.step for version in follow(served)][-1] == 7


@pytest.mark.integrations
@needs("paramiko")
def test_records_on_an_sftp_server_are_moved_to_their_name(tmp_path: Path) -> None:
    with quiet(), sftp(tmp_path) as served, published(served.address + "/versions", net()):
        assert served.moved.count("latest.json") == 1
        assert {path.name.partition("-")[0] for path in (tmp_path / "versions").iterdir()} == {
            "latest.json",
            "000000001",
        }


@pytest.mark.integrations
@pytest.mark.parametrize("how", ["cut", "silent"])
@pytest.mark.parametrize("served", SERVERS, indirect=True)
def test_a_server_that_is_away_for_a_time_costs_no_reader_and_no_publisher(
    served: Served, how: str
) -> None:
    model, line = net(100), served.line
    publisher, follower = published(served.address, model), follow(served)
    assert follower.latest().step == 0
    with quiet():
        with line.cut() if how == "cut" else line.silent():
            change(model)
            publisher.update(1)
            found = begun(lambda: follower.latest(wait=PATIENCE_S))
            time.sleep(0.3)
            assert not found.done()
        with suppress(StreamError):
            publisher.wait()  # what was on its way may be lost
        change(model)
        publisher.update(2)
        publisher.wait()
        assert found.result(PATIENCE_S).step in (1, 2)
        version = follower.latest()
    assert version.step == 2
    require_same(version.state_dict(), state_of(model))
    publisher.close()


@pytest.mark.integrations
@needs("huggingface_hub")
def test_versions_on_the_hub_are_followed_as_they_come(tmp_path: Path) -> None:
    """Its file system keeps listings, sizes and what exists."""
    model = net(100)
    with quiet(), hub(tmp_path) as served:
        served.address += "/run"
        with published(tmp_path / "run", model, every=3) as publisher:
            follower = follow(served)
            assert follower.latest().step == 0
            for step in (10**number for number in range(6)):
                wanted = write(publisher, model, step)
                version = follower.latest(wait=PATIENCE_S)
                assert version.step == step
                require_same(version.state_dict(), wanted)
        assert [version.step for version in follow(served)][-1] == step
