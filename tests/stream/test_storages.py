"""Versions over a storage that hangs, fails, forgets and tears: training goes on, and what is read
is right or an error.
"""

import contextlib
import errno
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.processes import ran, running
from tests.stream.storages import Fault, Faults
from tests.waiting import PATIENCE_S, time_out, until
from thinwire.errors import StreamError

T = TypeVar("T")
State = dict[str, Tensor]
Publish = Callable[..., tw.Publisher]
MIB = 1 << 20


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(width, width)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.01)


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def require_same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def begun(call: Callable[[], T]) -> "Future[T]":
    """Begin a call on a thread, which no test has to wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def more(count: Callable[[], int], by: int = 3) -> None:
    """Wait until a count has grown."""
    least = count() + by
    until(lambda: count() >= least, f"{by} more calls")


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def follow(faults: Faults, model: nn.Module | None = None, **more: Any) -> tw.Follower:
    return tw.follow(faults.address, model, **{"poll": 0.01, "patience": PATIENCE_S, **more})


def require_newest(faults: Faults, step: int, model: nn.Module) -> None:
    """Require that followers find the model as it is now."""
    version = follow(faults).latest()
    assert version.step == step
    require_same(version.state_dict(), state_of(model))


def write(publisher: tw.Publisher, model: nn.Module, step: int) -> State:
    """Publish the next version of a model; return its values."""
    change(model)
    publisher.update(step)
    publisher.wait()
    return state_of(model)


def fails(publisher: tw.Publisher) -> StreamError:
    """Return the error of a version that `update` raises sooner or later."""
    with pytest.raises(StreamError) as caught:
        until(lambda: publisher.update(99) < 0, "the error of a version")
    return caught.value


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "versions")


@pytest.fixture
def publish(faults: Faults) -> Iterator[Publish]:
    """`tw.publish` in the faulty folder; the publishers are closed at the end."""
    publishers = []

    def opened(model: nn.Module, **more: Any) -> tw.Publisher:
        publishers.append(tw.publish(faults.address, model, **{"timeout": PATIENCE_S, **more}))
        return publishers[-1]

    yield opened
    faults.end()
    with quiet():
        for publisher in publishers:
            with contextlib.suppress(StreamError):
                publisher.close()


# writing


def test_updates_while_a_storage_hangs_return_and_reach_the_next_version(
    faults: Faults, publish: Publish
) -> None:
    model = net()
    publisher = publish(model)  # whoever waited for this storage would do so for minutes
    write(publisher, model, 0)
    begin_s = time.monotonic()
    with quiet(), faults.hang("write move"):
        for step in range(1, 6):
            change(model)
            publisher.update(step)
            until(lambda: faults.calls("hang"), "a write that hangs")
    assert time.monotonic() - begin_s < PATIENCE_S / 2
    publisher.close()
    require_newest(faults, 5, model)


def test_a_storage_that_hangs_is_one_warning_with_its_seconds(
    faults: Faults, publish: Publish
) -> None:
    model = net()
    publisher = publish(model, timeout=time_out(0.5))
    write(publisher, model, 0)
    change(model)
    with quiet() as caught, faults.hang("write move"):
        publisher.update(1)
        until(lambda: faults.calls("hang"), "a write that hangs")
        until(lambda: publisher.update(1) > 0 and caught, "a warning")
        for _ in range(5):
            publisher.update(1)
    assert len(caught) == 1
    assert re.search(r"\d+(\.\d+)? s", str(caught[0].message))
    with quiet():
        publisher.update(2)
        with contextlib.suppress(StreamError):
            publisher.wait()
        write(publisher, model, 3)
    require_newest(faults, 3, model)


def test_close_while_bytes_move_waits_longer_than_its_timeout(
    faults: Faults, publish: Publish
) -> None:
    limit_s, model = time_out(1.0), net(1150)  # 5 MiB
    publisher = publish(model, timeout=limit_s)
    with quiet(), faults.slow(rate=4 * MIB / limit_s, on="write"):
        begin_s = time.monotonic()
        publisher.update(0)
        publisher.close()
        assert time.monotonic() - begin_s > limit_s
    require_newest(faults, 0, model)


def test_close_of_a_storage_that_hangs_is_an_error_with_the_bytes_that_are_left(
    faults: Faults, publish: Publish
) -> None:
    model = net(1024)  # 4 MiB
    publisher = publish(model, timeout=time_out(0.5))
    with (
        quiet(),
        faults.hang("write", "*.safetensors", after=2 * MIB),
        pytest.raises(StreamError, match=r"[\d,]+ of the [\d,]+ bytes") as caught,
    ):
        publisher.update(0)
        publisher.close()
    left, whole = (
        int(number.replace(",", ""))
        for number in re.findall(r"([\d,]+) of the ([\d,]+) bytes", str(caught.value))[0]
    )
    assert 4 * MIB < whole < 5 * MIB
    assert MIB < left < 4 * MIB


@pytest.mark.parametrize("name", ["*.safetensors", "*.step", "latest.json"])
@pytest.mark.parametrize("error", [errno.EACCES, "503 Slow Down"])
def test_the_error_of_a_version_is_raised_by_an_update_and_the_next_versions_are_right(
    faults: Faults, publish: Publish, error: int | str, name: str
) -> None:
    model = net()
    publisher = publish(model, timeout=time_out(0.3), every=1)
    write(publisher, model, 0)
    with quiet(), faults.fail(error, "write move", name):
        change(model)
        publisher.update(1)
        text = str(fails(publisher))
    assert ("503 Slow Down" if error == "503 Slow Down" else "denied") in text
    with quiet(), contextlib.suppress(StreamError):
        publisher.wait()  # whatever was on its way
    write(publisher, model, 2)
    require_newest(faults, 2, model)


def test_wait_and_close_raise_the_error_of_their_version(faults: Faults, publish: Publish) -> None:
    model = net()
    with quiet(), faults.fail(errno.EACCES, "write move"):
        publisher = publish(model, timeout=time_out(0.3))
        for end in (publisher.wait, publisher.close):
            publisher.update(0)
            with pytest.raises(StreamError, match="denied"):
                end()


def test_a_full_storage_is_an_error_and_no_version(faults: Faults, publish: Publish) -> None:
    model, reader = net(200), net(200)
    publisher = publish(model, timeout=time_out(0.3))
    write(publisher, model, 0)
    held = state_of(model)
    with quiet(), faults.full(50_000):
        change(model)
        publisher.update(1)
        assert "space" in str(fails(publisher))
        assert follow(faults, reader).latest().step == 0
        require_same(state_of(reader), held)
    with quiet(), contextlib.suppress(StreamError):
        publisher.wait()
    write(publisher, model, 2)
    require_newest(faults, 2, model)


@pytest.mark.parametrize("protocol", ["faulty", "faulty-mv"])
def test_a_storage_of_either_kind_is_followed_and_continued(
    faults: Faults, publish: Publish, protocol: str
) -> None:
    faults.address = faults.address.replace("faulty", protocol)
    model = net()
    for step in range(4):
        change(model)
        publisher = publish(model)
        assert publisher.update(step) == step + 1
        publisher.wait()
        require_newest(faults, step, model)
    moved = faults.calls("move", "latest.json")
    assert moved == (4 if protocol == "faulty-mv" else 0)
    assert (faults.calls("write", "latest.json") == 0) == (protocol == "faulty-mv")


def test_a_torn_record_is_followed_by_a_base_beyond_the_highest_number(
    faults: Faults, publish: Publish
) -> None:
    model, record = net(), faults.folder / "latest.json"
    first = publish(model)
    for step in range(3):
        write(first, model, step)
    content = record.read_bytes()
    record.write_bytes(content[: len(content) // 2])
    with quiet():
        second = publish(model, timeout=time_out(0.3))
        number = second.update(7)
        second.wait()
    assert number > 3
    assert [*faults.folder.glob(f"{number:09d}-*.safetensors")]
    require_newest(faults, 7, model)


def test_a_write_that_lands_late_takes_no_reader_back(faults: Faults, publish: Publish) -> None:
    model = net()
    publisher, follower = publish(model, timeout=time_out(0.3)), follow(faults)
    write(publisher, model, 0)
    with quiet(), faults.give_up("latest.json", count=1):
        change(model)
        publisher.update(1)
        with contextlib.suppress(StreamError):
            publisher.wait()
    write(publisher, model, 2)
    newest = follower.latest()
    assert newest.step == 2
    assert faults.land() == 1
    assert follower.latest().number == newest.number
    assert follower.latest(wait=0.1).number == newest.number
    write(publisher, model, 3)
    assert follower.latest().step == 3
    require_newest(faults, 3, model)


def test_a_late_record_of_an_earlier_publisher_takes_no_reader_back(
    faults: Faults, publish: Publish
) -> None:
    model, other, follower = net(), nn.Linear(4, 2), follow(faults)
    first = publish(model, timeout=time_out(0.3))
    write(first, model, 0)
    with quiet(), faults.give_up("latest.json", count=1):
        change(model)
        first.update(1)
        with contextlib.suppress(StreamError):
            first.wait()
    second = publish(other, replace=True)
    write(second, other, 2)
    newest = follower.latest()
    require_same(newest.state_dict(), state_of(other))
    assert faults.land() == 1
    for wait_s in (None, 0.1):
        assert follower.latest(wait=wait_s).digest == newest.digest
    write(second, other, 3)
    assert follower.latest().step == 3
    require_newest(faults, 3, other)


def test_a_write_that_hangs_until_after_its_timeout_takes_no_reader_back(
    faults: Faults, publish: Publish
) -> None:
    model = net()
    publisher, follower = publish(model, timeout=time_out(0.3)), follow(faults)
    write(publisher, model, 0)
    follower.latest()
    with quiet(), faults.hang("write", "latest.json", count=1):
        change(model)
        publisher.update(1)
        until(lambda: faults.calls("hang"), "a write that hangs")
        with pytest.raises(StreamError):
            publisher.wait()
        change(model)
        with contextlib.suppress(StreamError):
            write(publisher, model, 2)
    found = []
    for step in range(3, 6):
        change(model)
        with quiet(), contextlib.suppress(StreamError):
            write(publisher, model, step)
        found.append(follower.latest().step)
    assert found == sorted(found)
    require_newest(faults, 5, model)


def test_the_later_of_two_publishers_wins_and_the_earlier_one_ends(
    faults: Faults, publish: Publish
) -> None:
    model = net()
    first, second = publish(model), publish(model)
    for step, publisher in enumerate((first, second)):
        write(publisher, model, step)
    fails(first)
    with pytest.raises(StreamError):
        first.close()
    write(second, model, 5)
    require_newest(faults, 5, model)


def test_no_temporary_files_are_needed(
    faults: Faults, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(faults.folder / "there-is-no-such-folder"))
    model = net()
    publisher, follower = publish(model), follow(faults)
    for step in range(3):
        write(publisher, model, step)
        require_same(follower.latest().state_dict(), state_of(model))


# reading


@pytest.mark.parametrize("token", [None, "a token"])
@pytest.mark.parametrize("ending", ["safetensors", "step"])
def test_files_of_another_run_under_the_same_name_are_an_error_before_the_model_changes(
    tmp_path: Path, ending: str, token: str | None
) -> None:
    """Numbers, names and token are equal, and the values are not."""
    for seed, run in enumerate(("this", "that")):
        model = net()
        for _ in range(seed + 1):
            change(model)
        publisher = tw.publish(tmp_path / run, model, token=token)
        for step in range(2):
            write(publisher, model, step)
            if (run, step, ending) == ("this", 0, "step"):
                reader = net()
                follower = tw.follow(tmp_path / run, reader, token=token, patience=time_out(0.3))
                follower.latest()
        publisher.close()
    if ending == "safetensors":
        reader = net()
        follower = tw.follow(tmp_path / "this", reader, token=token, patience=time_out(0.3))
    [ours] = (tmp_path / "this").glob(f"*.{ending}")
    [theirs] = (tmp_path / "that").glob(f"*.{ending}")
    assert ours.name != theirs.name
    content = ours.read_bytes()
    ours.write_bytes(theirs.read_bytes())
    held = state_of(reader)
    with pytest.raises(StreamError, match=ours.name):
        follower.latest()
    require_same(state_of(reader), held)
    ours.write_bytes(content)
    with quiet():  # what arrived of the other file may cost a base
        assert follower.latest().number == 2


READS: dict[str, Callable[[Faults], Fault]] = {
    "resets": lambda faults: faults.reset(100_000, count=5),
    "resets for ever": lambda faults: faults.reset(100_000),
    "503": lambda faults: faults.fail("503 Slow Down", "read list", count=5),
    "input/output errors": lambda faults: faults.fail(errno.EIO, "read list", count=5),
    "no such file": lambda faults: faults.fail(errno.ENOENT, "read list", count=5),
    "half files": lambda faults: faults.halve(count=5),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("late", [False, True])
def test_readers_survive(faults: Faults, publish: Publish, what: str, late: bool) -> None:
    """One that begins reads a base, and one that has a version reads a difference."""
    model = net(600)  # 1.4 MB
    publisher, follower = publish(model), follow(faults)
    write(publisher, model, 0)
    if late:
        follower.latest()
    write(publisher, model, 1)
    with READS[what](faults):
        version = follower.latest(wait=PATIENCE_S)
    assert version.step == 1
    require_same(version.state_dict(), state_of(model))


def test_readers_and_writers_survive_a_cache_of_old_records(
    faults: Faults, publish: Publish
) -> None:
    model = net()
    publisher, follower = publish(model), follow(faults)
    for step in range(4):
        if step:
            faults.old("latest.json", count=2)
        write(publisher, model, step)
        version = follower.latest(wait=PATIENCE_S)
        assert version.step == step
        require_same(version.state_dict(), state_of(model))


def test_readers_wait_for_names_that_appear_late(faults: Faults, publish: Publish) -> None:
    model = net()
    publisher, follower = publish(model), follow(faults)
    write(publisher, model, 0)
    follower.latest()
    with faults.late():
        write(publisher, model, 1)
        found = begun(lambda: follower.latest(wait=PATIENCE_S))
        more(lambda: faults.calls("read", "latest.json"))
        assert not found.done()
    assert found.result(PATIENCE_S).step == 1


def test_listings_and_sizes_are_taken_from_no_cache(faults: Faults, publish: Publish) -> None:
    model = net()
    with faults.cache():
        publisher, follower = publish(model, every=2), follow(faults)
        for step in range(6):
            change(model)
            publisher.update(10**step)  # a record that grows
            publisher.wait()
            assert follower.latest(wait=PATIENCE_S).step == 10**step
        assert publish(model).update(7) == 7
        assert follower.versions()[-1] >= 6


def test_readers_take_the_newest_version_where_theirs_was_pruned(
    faults: Faults, publish: Publish
) -> None:
    model = net()
    publisher, follower = publish(model, every=1, keep=1), follow(faults)
    write(publisher, model, 0)
    with faults.hang("read", "000000001-*"):
        found = begun(follower.latest)
        until(lambda: faults.calls("hang"), "a read that hangs")
        for step in (1, 2):
            write(publisher, model, step)
        until(lambda: not [*faults.folder.glob("000000001-*")], "the end of version 1")
    assert found.result(PATIENCE_S).step == 2


def test_readers_wait_while_a_record_is_torn(faults: Faults, publish: Publish) -> None:
    model = net()
    publisher, follower = publish(model), follow(faults)
    write(publisher, model, 0)
    follower.latest()
    with quiet(), faults.hang("write", "latest.json", after=40):
        change(model)
        publisher.update(1)
        until(lambda: faults.calls("hang"), "half a record")
        assert (faults.folder / "latest.json").stat().st_size == 40
        early = begun(lambda: follower.latest(wait=PATIENCE_S))
        late = begun(lambda: follow(faults).latest(wait=PATIENCE_S))
        more(lambda: faults.calls("read", "latest.json"), 6)
        assert not (early.done() or late.done())
    assert early.result(PATIENCE_S).step == late.result(PATIENCE_S).step == 1


def test_a_transfer_that_moves_is_not_ended_by_patience(
    faults: Faults, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    limit_s, model = time_out(2.0), net(1024)  # 4 MiB
    publisher = publish(model)
    write(publisher, model, 0)
    took_s = max(1.3 * limit_s, 7.0)
    with faults.slow(rate=4 * MIB / took_s, on="read"):
        begin_s = time.monotonic()
        version = follow(faults, patience=limit_s).latest()
        assert time.monotonic() - begin_s > limit_s
    assert "of 4.2 MB" in caplog.text, "a reader that waits hears how far it is"
    require_same(version.state_dict(), state_of(model))


def test_parts_that_arrived_are_kept_for_the_next_call(faults: Faults, publish: Publish) -> None:
    model = net(1024)  # 4 MiB
    publisher = publish(model)
    write(publisher, model, 0)
    follower = follow(faults, patience=time_out(0.5))
    with faults.hang("read", "*.safetensors", after=3 * MIB):
        found = begun(follower.latest)
        until(lambda: faults.calls("hang"), "a read that hangs")
        with faults.hang("read"), pytest.raises(StreamError):
            found.result(PATIENCE_S)
    read = faults.bytes("read", "*.safetensors")
    require_same(follower.latest().state_dict(), state_of(model))
    assert faults.bytes("read", "*.safetensors") - read < 4 * MIB - MIB // 2


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("error", [errno.EIO, "503 Slow Down"])
def test_a_storage_that_fails_for_ever_is_an_error_with_the_last_cause(
    faults: Faults, publish: Publish, error: int | str, held: bool
) -> None:
    model = net()
    publisher, follower = publish(model), follow(faults, patience=time_out(0.3))
    write(publisher, model, 0)
    if held:
        follower.latest()
    cause = "503 Slow Down" if error == "503 Slow Down" else "Input/output error"
    with faults.fail(error, "read list"), pytest.raises(StreamError, match=cause):
        follower.latest()
    assert faults.calls("read") > 2
    assert follower.latest().step == 0


@pytest.mark.parametrize(("wait_s", "patience_s"), [(0.2, PATIENCE_S), (PATIENCE_S, 0.3)])
def test_latest_of_a_silent_storage_ends_after_the_smaller_of_wait_and_patience(
    faults: Faults, publish: Publish, wait_s: float, patience_s: float
) -> None:
    publisher, follower = publish(net()), follow(faults, patience=patience_s)
    publisher.update(0)
    publisher.wait()
    follower.latest()
    begin_s = time.monotonic()
    with faults.hang("read list"), contextlib.suppress(StreamError):
        assert follower.latest(wait=wait_s).number == 1
    assert time.monotonic() - begin_s < PATIENCE_S / 2
    assert follower.latest().number == 1


def test_no_secret_of_the_address_is_in_a_text(faults: Faults, publish: Publish) -> None:
    model, secrets = net(), ("pass-word", "5ecre7")
    address = f"faulty://user:{secrets[0]}@host{faults.folder}"
    signed = f"{address}?X-Amz-Signature={secrets[1]}"
    write(publish(model), model, 0)

    def reads() -> None:
        tw.follow(signed, patience=0.1).latest()

    def writes() -> None:
        with tw.publish(address, model, timeout=0.1) as publisher:
            publisher.update(1)

    texts = []
    for begin in (
        lambda: faults.fail(f"Forbidden: PUT {signed}"),
        lambda: faults.fail(errno.EACCES),
        faults.hang,
    ):
        for act in (reads, writes):
            with quiet() as caught, begin(), pytest.raises(StreamError) as raised:
                act()
            texts += ["".join(traceback.format_exception(raised.value))]
            texts += [str(warning.message) for warning in caught]
    assert len(texts) >= 6
    for text in texts:
        assert not [secret for secret in secrets if secret in text], text


def test_a_record_of_more_than_a_mebibyte_is_refused(faults: Faults) -> None:
    faults.folder.mkdir()
    with (faults.folder / "latest.json").open("wb") as file:
        file.write(b'["')
        file.truncate(64 * MIB)
    with pytest.raises(StreamError, match=r"latest\.json"):
        follow(faults, patience=0.1).latest()
    assert faults.bytes("read") <= 2 * MIB * faults.calls("read")


# the ends of scripts

_SCRIPT = """
import os, signal, sys, torch, thinwire as tw
from tests.stream import storages
where, limit_s, width, ending = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(1)
model = torch.nn.Linear(width, width)
publisher = tw.publish(where, model, timeout=limit_s)
for step in range(3):
    with torch.no_grad():
        model.weight.add_(1)
    publisher.update(step)
    publisher.wait()
exec(ending)
"""


def script(faults: Faults, ending: str, limit_s: float = PATIENCE_S, width: int = 8) -> list[str]:
    return [sys.executable, "-c", _SCRIPT, faults.address, str(limit_s), str(width), ending]


def followed(faults: Faults) -> tuple[list[int], "Future[None]"]:
    """Return the steps that a loop of a follower has seen, and its end."""
    seen: list[int] = []

    def loop() -> None:
        for version in follow(faults):
            seen.append(version.step)

    return seen, begun(loop)


@pytest.mark.parametrize("ending", ["", "sys.exit(0)"])
def test_a_script_that_ends_well_ends_the_loops_of_followers(faults: Faults, ending: str) -> None:
    done = ran(script(faults, ending))
    assert done.returncode == 0, done.stderr
    seen, end = followed(faults)
    end.result(PATIENCE_S)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    "ending",
    [
        "raise ValueError",
        "sys.exit(3)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_script_that_ends_otherwise_lets_followers_wait_for_the_next_one(
    faults: Faults, publish: Publish, ending: str
) -> None:
    assert ran(script(faults, ending)).returncode != 0
    seen, end = followed(faults)
    until(lambda: len(seen) == 3, "three versions")
    more(lambda: faults.calls("read", "latest.json"), 5)
    assert not end.done()
    model = net()
    publisher = publish(model)
    publisher.update(8)
    publisher.close()
    end.result(PATIENCE_S)
    assert seen == [0, 1, 2, 8]


def test_an_exception_in_the_with_block_is_not_the_end_of_the_run(
    faults: Faults, publish: Publish
) -> None:
    with pytest.raises(ZeroDivisionError), publish(net()) as publisher:
        publisher.update(0)
        publisher.wait()
        raise ZeroDivisionError
    seen, end = followed(faults)
    until(lambda: seen == [0], "a version")
    more(lambda: faults.calls("read", "latest.json"), 5)
    assert not end.done()
    with publish(net()) as publisher:
        publisher.update(4)
    end.result(PATIENCE_S)
    assert seen == [0, 4]


def test_a_script_ends_by_an_error_if_its_storage_hangs(faults: Faults) -> None:
    ending = "print(1, flush=True); input(); model.weight.data.add_(1); publisher.update(3)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(script(faults, ending, time_out(0.5)), text=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "1\n"
        faults.hang("write move")
        _, err = process.communicate("\n")
    assert process.returncode not in (0, -9)
    assert str(faults.folder) in err
    faults.end()
    assert follow(faults).latest().step == 2


def test_a_script_ends_well_after_all_bytes_have_moved(faults: Faults) -> None:
    limit_s = time_out(1.0)
    # the slow part begins with the last version, of which a base is written
    ending = (
        "from pathlib import Path\n"
        f"storages.Faults(Path({str(faults.folder)!r})).slow({4 * MIB / limit_s}, 'write')\n"
        "torch.manual_seed(2)\n"
        "torch.nn.init.normal_(model.weight)\n"
        "publisher.update(3)"
    )
    done = ran(script(faults, ending, limit_s, 1150))
    assert done.returncode == 0, done.stderr
    faults.end()
    seen, end = followed(faults)
    end.result(PATIENCE_S)
    assert seen == [0, 1, 2, 3]
