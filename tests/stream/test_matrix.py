"""Models, storages and events: each version that is read is what was written, or an error.

The whole product of models and events on a folder, a quarter of it each time and the rest among the
slow tests, and all pairs of storages with either. A cell runs in a process of the pool, whose forks
are killed.
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.ranks import Pool
from tests.stream.models import CASES, Case, Walk, core_cases
from tests.stream.storages import Faults
from tests.toys import warned
from tests.waiting import until
from thinwire.errors import StreamError

PATIENT = {"patience": 20.0}
ANOTHER = [case for name in ("numbers", "complex") for case in CASES if case.name == name]
_watching: list[Callable[[str, bool], None]] = []
"""The last one is called before this process opens, renames or deletes a file."""


class Boom(Exception):
    """An error of a training script."""


class Place:
    """A storage by its kind, and what stands behind it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.faults = Faults(folder)
        self.address = {
            "folder": str(folder),
            "memory": f"memory://{folder}",
            "moving": f"faulty-mv://{folder}",
        }.get(kind, self.faults.address)

    def disturb(self) -> None:
        """Begin the faults of this kind."""
        faults = self.faults
        {
            "cached": faults.cache,
            "late": partial(faults.late, seconds=0.05),
            "torn": partial(faults.halve, count=3),
            "hanging": partial(faults.hang, seconds=0.05, count=6),
            "full": partial(faults.full, after=700),
            "failing": partial(faults.fail, "503 slow down", count=3),
            "reset": partial(faults.reset, after=64, count=5),
            "landing": partial(faults.give_up, count=2),
        }.get(self.kind, lambda: None)()

    def calm(self) -> None:
        if self.kind not in ("folder", "memory"):
            self.faults.land()
            self.faults.end()

    @property
    def may_fail(self) -> bool:
        """True if a version may be lost that is on its way."""
        return self.kind in ("full", "failing", "landing")

    def move_away(self) -> None:
        """Rename the folder."""
        files, path = fsspec.core.url_to_fs(
            self.address if self.kind == "memory" else str(self.folder)
        )
        files.mv(path, path + "-old", recursive=True)


class Cell:
    """A model in a storage, with a publisher, and a reader that follows in place."""

    def __init__(self, case: Case, place: Place) -> None:
        self.place, self.walk = place, Walk(case, place.address, every=3)
        self.walk.how["timeout"] = 0.1 if place.may_fail else 10.0
        # names change from one of its publishers to the next
        self.walk.how["replace"] = case.name == "lora"
        self.patient = {} if place.may_fail else PATIENT
        self.reader = case.reader()
        self.follower = self.walk.follow(self.reader, **PATIENT)

    def take_over(self, **how: Any) -> None:
        """Go on by a publisher as of a new process."""
        for _ in range(3 if self.place.may_fail else 0):
            with contextlib.suppress(StreamError):
                self.publisher = self.walk.publish(**how)
                return
        self.publisher = self.walk.publish(**how)

    def write(self, n: int | None = None) -> bool:
        """Write a version; return False if it was lost."""
        try:
            self.walk.write(self.publisher, n)
        except StreamError:
            if not self.place.may_fail:
                raise
            return False
        return True

    def step(self, n: int | None = None) -> None:
        """Write a version, and read it in place and afresh."""
        if self.write(n):
            self.read_newest()
        self.read_afresh()

    def read_newest(self) -> None:
        n, *_ = self.walk.written[self.walk.step]
        self.walk.case.adapt(self.reader, n)
        self.walk.read_newest(self.follower, self.reader)

    def read_afresh(self) -> int | StreamError:
        """Read by followers that hold nothing, in place too."""
        reader = self.walk.case.reader()
        self.walk.case.adapt(reader, self.walk.written[max(self.walk.written)][0])
        self.walk.read(self.walk.follow(reader), reader)
        return self.walk.read(self.walk.follow(**self.patient))

    def end(self) -> None:
        """Write one more version as a new process does, say the end, and read all that is kept."""
        self.place.calm()
        self.walk.how["timeout"] = 10.0
        self.take_over()
        self.walk.write(self.publisher)
        self.publisher.close()
        self.read_newest()
        assert self.walk.read_all(self.walk.follow(**PATIENT))[-1] == self.walk.step


@contextlib.contextmanager
def watched(act: Callable[[str, bool], None]) -> Iterator[None]:
    """Call this with each path that this process opens, renames or deletes, and if it writes."""
    if not _watching:
        sys.addaudithook(_hook)  # which nobody can take off again
    _watching.append(act)
    try:
        yield
    finally:
        _watching[-1] = lambda *_: None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in ("open", "os.rename", "os.remove") and isinstance(args[0], str | Path):
        flags = args[2] if event == "open" else os.O_WRONLY
        _watching[-1](str(args[0]), bool(flags & (os.O_WRONLY | os.O_RDWR)))


def forked(work: Callable[[], object]) -> int:
    """Do something in a fork; return its process id."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            signal.alarm(60)
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def survived(pid: int) -> bool:
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"a fork ended with {status}"
    return status == 0


def dying_at(call: int, folder: Path, work: Callable[[], object], *, reads: bool = False) -> bool:
    """Do something in a fork that is killed at a call for this folder; return if it survived."""
    count = itertools.count(1)

    def act(path: str, writes: bool) -> None:
        if path.startswith(f"{folder}/") and writes != reads and next(count) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched_work() -> None:
        with watched(act):
            work()

    return survived(forked(watched_work))


@contextlib.contextmanager
def cut_off(call: int) -> Iterator[None]:
    """Let every write into memory fail from this one on."""
    count, given = itertools.count(1), MemoryFileSystem._open

    def opened(self: Any, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode != "rb" and next(count) >= call:
            raise OSError("cut off")
        return given(self, path, mode, **more)

    with patch.object(MemoryFileSystem, "_open", opened):
        yield


def nothing(cell: Cell) -> None:
    for _ in range(4):
        cell.step()


def published(walk: Walk, steps: list[int], *, lenient: bool = False, **how: Any) -> None:
    """Publish states, as a process of its own does; if `lenient` where that can be done."""
    with contextlib.suppress(*[StreamError] * lenient):
        publisher = walk.publish(**how)
        for step in steps:
            walk.case.change(walk.model, walk.written[step][0])
            publisher.update(step)
            publisher.wait()


def killed(cell: Cell) -> None:
    """Kill the writer at any time, or while half a file is written."""
    place = cell.place
    chance = random.Random(f"{cell.walk.case.name} {place.kind}")
    for _ in range(3):
        steps = [cell.walk.change() for _ in range(4)]
        if place.kind == "memory":
            with cut_off(chance.randrange(1, 9)), contextlib.suppress(StreamError):
                published(cell.walk, steps, timeout=0.05)
        else:
            pid = forked(partial(published, cell.walk, steps))
            if place.kind == "folder":
                time.sleep(chance.uniform(0, 0.1))
                kill(pid)
            else:
                kill_at_half(pid, place.faults, after=chance.choice([3, 30, 300]))
        cell.read_afresh()
    cell.take_over()
    cell.step()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_at_half(pid: int, faults: Faults, after: int) -> None:
    """Kill a process that hangs in a write after so many bytes, or has ended."""
    hung, ended = faults.calls("hang"), os.WEXITED | os.WNOHANG | os.WNOWAIT
    with faults.hang("write", after=after):
        until(lambda: faults.calls("hang") > hung or os.waitid(os.P_PID, pid, ended))
        kill(pid)


def killed_at_every_write(cell: Cell) -> None:
    """Kill the writer before each of its calls that change what is there."""
    walk, place, before = cell.walk, cell.place, cell.walk.step
    done, calls = False, itertools.count(1)
    while not done:
        step, call = walk.change(), next(calls)
        work = partial(published, walk, [step], lenient=place.may_fail)
        if place.kind != "memory":
            done = dying_at(call, place.folder, work)
        else:
            with cut_off(call), contextlib.suppress(StreamError):
                published(walk, [step], timeout=0.05)
                done = True
        found = cell.read_afresh()
        assert found in (before, step) or (place.may_fail and isinstance(found, StreamError))
        before = step if found == step else before
    assert place.may_fail or 3 < next(calls) < 60


def killed_reader(cell: Cell) -> None:
    """Kill a reader before each of its first reads."""
    cell.write()
    for call in range(1, 4):
        if cell.place.kind != "memory":
            work = partial(cell.walk.read, cell.follower, cell.reader)
            dying_at(call, cell.place.folder, work, reads=True)
        cell.step()


def rolled_back(cell: Cell) -> None:
    for n in (2, 3, 4, 2, 2, 3):
        cell.step(n)
    cell.take_over()
    cell.step(2)


def renamed(cell: Cell) -> None:
    """Rename the folder, and publish another run under its name, while the first one goes on."""
    cell.step()
    cell.place.move_away()
    first = cell.publisher
    cell.take_over()
    cell.write(51)
    cell.walk.read(cell.follower, cell.reader)
    written = []
    for publisher in (first, cell.publisher, first, cell.publisher):
        with contextlib.suppress(StreamError):
            cell.walk.write(publisher)
            written.append(cell.walk.step)
    if not cell.place.may_fail:
        assert written, "neither of two publishers can go on"
        assert cell.read_afresh() == written[-1]
    cell.take_over()
    cell.step()


def changed_token(cell: Cell) -> None:
    walk = cell.walk
    with pytest.raises(StreamError, match="token"):
        published(walk, [walk.step], token="two", replace=False)
    cell.step()
    walk.how |= {"token": "two", "replace": True}
    cell.take_over()
    if cell.write():
        for follower in (cell.follower, *(walk.follow(cell.reader, token=t) for t in (None, "3"))):
            assert isinstance(walk.read(follower, cell.reader), StreamError)
    cell.follower = walk.follow(cell.reader, **PATIENT)


def pruned(cell: Cell) -> None:
    """Delete what a reader is about to read, at each file that it opens."""
    inside, pairs = threading.Lock(), [0, 0, 0]
    cell.take_over(keep=1, every=2)
    cell.step()

    def act(path: str, writes: bool) -> None:
        ours = path.startswith(f"{cell.place.folder}/") and not path.endswith("latest.json")
        if ours and pairs and not writes and inside.acquire(blocking=False):
            for _ in range(pairs.pop(), 2):
                cell.write()
            inside.release()

    with watched(act):
        for _ in range(3):
            found = cell.walk.read(cell.walk.follow(**cell.patient))
            assert cell.place.may_fail or isinstance(found, int), found
            with inside:
                cell.write()
    assert not pairs or cell.place.may_fail or cell.place.kind == "memory"


def another_model(cell: Cell) -> None:
    """Publish another model there, by accident and by intention."""
    walk, first, late = cell.walk, cell.publisher, cell.walk.follow()
    walk.read(late)
    other = Walk(ANOTHER[walk.case.name == "numbers"], walk.where, timeout=walk.how["timeout"])
    with pytest.raises(StreamError, match="replace") as caught:
        published(other, [other.change()])
    names = [*other.written[1][1], *walk.written[1][1]]
    assert any(name in str(caught.value) for name in names)
    cell.step()
    other.how["replace"] = True
    cell.walk = other
    cell.take_over()
    if cell.write():
        with pytest.raises(StreamError):
            walk.write(first)
        assert isinstance(walk.read(cell.follower, cell.reader), StreamError)
        other.read_newest(late)
    cell.reader = other.case.reader()
    cell.follower = other.follow(cell.reader, **PATIENT)


def raised(cell: Cell) -> None:
    """An error in the `with` is not the end of the versions."""
    seen: list[int] = []
    follower = cell.walk.follow(**PATIENT)
    thread = threading.Thread(target=lambda: seen.extend(cell.walk.read_all(follower)))
    thread.start()
    with contextlib.suppress(Boom), cell.publisher:
        cell.write()
        raise Boom
    time.sleep(0.05)  # in which a reader would see the end
    cell.place.calm()
    cell.take_over(timeout=10.0)
    cell.write()
    cell.publisher.close()
    thread.join(60)
    assert seen[-1] == cell.walk.step


EVENTS = {
    event.__name__: event
    for event in (
        nothing, killed, killed_at_every_write, killed_reader, rolled_back, renamed, changed_token,
        pruned, another_model, raised,
    )
}  # fmt: skip

KINDS = ["memory", "cached", "late", "torn", "hanging", "full"]
MORE_KINDS = ["moving", "failing", "reset", "landing"]
CORE = core_cases()


def of_pairs(kinds: list[str]) -> list[tuple[str, str, str]]:
    """Return cells in which each of these storages meets each model and each event."""
    assert len(CORE) >= len(EVENTS)
    names = [*EVENTS]
    return [
        (case.name, kind, names[(at + 3 * number) % len(names)])
        for number, kind in enumerate(kinds)
        for at, case in enumerate(CORE)
    ]


def live(_rank: int, _size: int, name: str, kind: str, event: str, folder: str) -> None:
    [case] = [case for case in CORE if case.name == name]
    place = Place(kind, Path(folder, "versions"))
    with warned():
        if case.unpublished and Walk(case, str(place.folder) + "-refused").refused():
            return
        cell = Cell(case, place)
        cell.take_over()
        cell.step()
        cell.place.disturb()
        EVENTS[event](cell)
        cell.end()


@pytest.mark.parametrize(
    ("name", "event"),
    [
        pytest.param(case.name, event, marks=[pytest.mark.slow] * bool((at + 3 * number) % 4))
        for number, case in enumerate(CORE)
        for at, event in enumerate(EVENTS)
    ],
)
def test_model_in_a_folder_is_right_or_refused_whatever_happens(
    ranks: Pool, tmp_path: Path, name: str, event: str
) -> None:
    ranks.run(live, name, "folder", event, str(tmp_path), size=0, group=False)


@pytest.mark.parametrize(("name", "kind", "event"), of_pairs(KINDS))
def test_model_in_a_storage_is_right_or_refused_whatever_happens(
    ranks: Pool, tmp_path: Path, name: str, kind: str, event: str
) -> None:
    ranks.run(live, name, kind, event, str(tmp_path), size=0, group=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "event"), of_pairs(MORE_KINDS))
def test_model_in_another_storage_is_right_or_refused_whatever_happens(
    ranks: Pool, tmp_path: Path, name: str, kind: str, event: str
) -> None:
    ranks.run(live, name, kind, event, str(tmp_path), size=0, group=False)
