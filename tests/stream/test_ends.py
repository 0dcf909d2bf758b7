"""The end of a stream, and publishers that overlap."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.processes import ran_code
from tests.stream.storages import Faults
from tests.stream.test_publish import Net, change, published, require_same, state_of
from tests.waiting import until
from thinwire.errors import StreamError

_LEFT_OUT = """
import torch, thinwire as tw
model = {{"w": torch.zeros(9_000_000)}}
publisher = tw.publish({folder!r}, model)
for step in range(1, 5):
    model["w"].fill_(step)
    publisher.update(step)
"""


def test_last_version_that_was_left_out_is_published_at_the_end(tmp_path: Path) -> None:
    assert ran_code(_LEFT_OUT.format(folder=str(tmp_path))).returncode == 0
    versions = [(v.step, float(v.state_dict()["w"][0])) for v in tw.follow(tmp_path)]
    assert versions[-1] == (4, 4.0)


def test_later_publisher_takes_over_the_followers_of_an_earlier_one(tmp_path: Path) -> None:
    faults = Faults(tmp_path / "versions")
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    earlier, follower = tw.publish(faults.address, first), tw.follow(faults.address, poll=0.05)
    published(earlier, 0)
    later = tw.publish(faults.address, second)
    hang = faults.hang("write", "000000002-*", count=1)
    later.update(100)
    until(lambda: faults.calls("hang") > 0)
    for step in (1, 2, 3):
        change(first)
        published(earlier, step)
    held = follower.latest().number
    earlier.abandon()
    hang.end()
    later.wait()
    later.close()
    assert follower.latest(wait=30).number > held
    require_same(follower.latest().state_dict(), state_of(second))


def test_base_is_fetched_once_while_a_difference_is_missing(tmp_path: Path) -> None:
    faults, model = Faults(tmp_path / "versions"), Net()
    publisher = tw.publish(faults.address, model)
    for step in range(3):
        change(model)
        published(publisher, step)
    [base] = faults.folder.glob("*.safetensors")
    [missing] = faults.folder.glob("000000003-*.step")
    missing.unlink()
    follower = tw.follow(faults.address, poll=0.05, patience=1)
    with pytest.raises(StreamError, match="000000003"):
        follower.latest()
    assert faults.bytes("read", "*.safetensors") <= base.stat().st_size


def test_publisher_that_goes_on_after_the_end_opens_it_and_can_end_it_again(
    tmp_path: Path,
) -> None:
    model = Net()
    with tw.publish(tmp_path, model) as publisher:
        published(publisher, 0)
    assert [version.step for version in tw.follow(tmp_path)] == [0]
    again, versions = tw.publish(tmp_path, model), iter(tw.follow(tmp_path, poll=0.01))
    assert next(versions).step == 0
    change(model)
    published(again, 1)
    assert next(versions).step == 1
    again.close()
    assert [*versions] == []
    tw.publish(tmp_path, model).close()  # without a version of its own
    assert [version.step for version in tw.follow(tmp_path)] == [0, 1]


def test_wait_for_a_newer_version_after_the_end_takes_its_time(tmp_path: Path) -> None:
    with tw.publish(tmp_path, {"w": torch.ones(3)}) as publisher:
        published(publisher, 0)
    follower = tw.follow(tmp_path, poll=0.01)
    follower.latest()
    begin_s = time.monotonic()
    assert follower.latest(wait=0.3).number == 1
    assert time.monotonic() - begin_s >= 0.3
