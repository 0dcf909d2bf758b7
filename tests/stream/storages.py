"""A file system of fsspec that fails as real ones do, when a test says so.

`faulty:///a/folder` is that folder of this machine, in each process that imports this module. It
writes to the final name, so that readers may see half a file; `faulty-mv` has a rename besides.
`Faults(folder)` brings faults about, in all processes, and tells what they called: all state lies
beside the folder, so that neither a new instance nor a new process forgets it.
"""

import contextlib
import errno
import fcntl
import fnmatch
import io
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

_EVERY = "read write list remove move"
Entry = dict[str, Any]


class ServiceError(Exception):
    """An error as packages of cloud storages have them: no OSError."""


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), path.name)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


@contextlib.contextmanager
def _state(folder: Path) -> Iterator[Entry]:
    """Yield the faults of a folder and when its names appeared, to one process at a time."""
    path = _beside(folder, "faults.json")
    with _beside(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = path.read_text() if path.exists() else '{"faults": {}, "born": {}}'
        state = json.loads(text)
        yield state
        if (changed := json.dumps(state)) != text:
            path.write_text(changed)


def _matching(state: Entry, kinds: str, on: str, name: str) -> list[tuple[str, Entry]]:
    return [
        (key, fault)
        for key, fault in state["faults"].items()
        if fault["kind"] in kinds.split() and on in fault["on"].split()
        if fault["count"] > 0 and time.time() < fault["end_s"]
        if fnmatch.fnmatch(name, fault["name"])
    ]


def _is_hidden(state: Entry, name: str) -> bool:
    born_s = state["born"].get(name, 0)
    return any(
        born_s > max(late["begin_s"], time.time() - late["seconds"])
        for _, late in _matching(state, "late", "list", name)
    )


def _used(path: Path, kind: str, on: str) -> Entry | None:
    """Return the fault that this call meets, and count that."""
    with _state(path.parent) as state:
        for _, fault in _matching(state, kind, on, path.name):
            fault["count"] -= 1
            return fault
    return None


def _note(path: Path, kind: str, size: int = 0) -> None:
    with _beside(path.parent, "calls").open("a") as file:
        file.write(json.dumps([kind, path.name, size]) + "\n")


def _hang(path: Path, key: str, seconds: float) -> None:
    """Wait until the fault has ended, or for so many seconds."""
    _note(path, "hang")
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        with _state(path.parent) as state:
            if key not in state["faults"]:
                return
        time.sleep(0.01)


def _begin(path: Path, on: str) -> set[str]:
    """Meet what may happen to any call; return the faults by which it hung."""
    _note(path, on)
    with _state(path.parent) as state:
        hung = {}
        for key, fault in _matching(state, "hang", on, path.name):
            if not fault["after"]:
                fault["count"] -= 1
                hung[key] = fault["seconds"]
    for key, seconds in hung.items():
        _hang(path, key, seconds)
    if fault := _used(path, "fail", on):
        error = fault["error"]
        raise _error(error, path) if isinstance(error, int) else ServiceError(error)
    return set(hung)


class _Stream(io.RawIOBase):
    """An open file, whose bytes pass as the faults say."""

    def __init__(self, path: Path, on: str, file: Any, size: int, hung: set[str]) -> None:
        super().__init__()
        self._path, self._on, self._file, self._hung, self.size = path, on, file, hung, size
        self._passed = self._since_seek = 0

    def readable(self) -> bool:
        return self._on == "read"

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = 0) -> int:
        self._since_seek = 0  # servers are asked anew
        return int(self._file.seek(offset + (self.size if whence == 2 else 0), whence % 2))

    def readinto(self, buffer: Any) -> int:
        wanted, done = min(len(buffer), max(0, self.size - self.tell())), 0
        while done < wanted:
            part = self._file.read(self._allowed(wanted - done))
            if not part:
                break
            buffer[done : done + len(part)] = part
            done += len(part)
        return done

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            end = done + self._allowed(len(view) - done)
            self._file.write(view[done:end])
            self._file.flush()
            done = end
        return done

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if isinstance(self._file, io.BytesIO):  # given up: it lands when the test says so
            (landing := _beside(self._path.parent, "landing")).mkdir(exist_ok=True)
            aside = landing / f"{time.time_ns()}-{self._path.name}"
            aside.write_bytes(self._file.getvalue())
            raise _error(errno.ETIMEDOUT, self._path)
        self._file.close()

    def _left(self, key: str, fault: Entry) -> float:
        """Return the bytes that pass before this fault has a part in it."""
        if fault["kind"] == "slow":
            return max(1, fault["rate"] // 20)
        if fault["kind"] == "hang":
            return inf if key in self._hung else fault["after"] - self._passed
        done = {"reset": self._since_seek, "full": fault["used"]}
        return fault["after"] - done[fault["kind"]]

    def _allowed(self, wanted: int) -> int:
        """Return how many bytes pass now, after the time that they take."""
        with _state(self._path.parent) as state:
            found = _matching(state, "hang reset full slow", self._on, self._path.name)
            allowed = int(min([wanted, *(max(0, self._left(*each)) for each in found)]))
            key, fault = next((each for each in found if self._left(*each) <= 0), ("", {}))
            if fault:
                fault["count"] -= 1
            for _, each in found:
                each["used"] += allowed
        if not fault:
            time.sleep(sum(allowed / each["rate"] for _, each in found if each["kind"] == "slow"))
            self._passed += allowed
            self._since_seek += allowed
            _note(self._path, f"{self._on} bytes", allowed)
            return allowed
        if fault["kind"] != "hang":
            raise _error(errno.ENOSPC if fault["kind"] == "full" else errno.ECONNRESET, self._path)
        self._hung.add(key)
        _hang(self._path, key, fault["seconds"])
        return self._allowed(wanted)


class FaultyFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A folder, without a rename. It keeps its listings, whatever it is asked, where that is a
    fault of the test.
    """

    protocol = "faulty"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listings: dict[Path, dict[str, int]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return urlsplit(path).path.rstrip("/")  # without the query

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        parts = urlsplit(path)
        given = {"username": parts.username, "password": parts.password, "query": parts.query}
        return {name: value for name, value in given.items() if value}

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listings.clear()

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        Path(path).mkdir(parents=create_parents, exist_ok=True)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = Path(self._strip_protocol(path))
        _begin(folder / "*", "list")
        found = [
            {"name": str(folder / name), "size": size, "type": "file"}
            for name, size in self._sizes(folder).items()
        ]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = Path(self._strip_protocol(path))
        if file.is_dir():
            return {"name": str(file), "size": 0, "type": "directory"}
        _begin(file, "list")
        return {"name": str(file), "size": self._sized(file)[1], "type": "file"}

    def rm_file(self, path: str) -> None:
        file = Path(self._strip_protocol(path))
        _begin(file, "remove")
        file.unlink()

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _Stream:
        file = Path(path)
        if mode == "rb":
            hung = _begin(file, "read")
            source, size = self._sized(file)
            if old := _used(file, "old", "read"):
                kept = Path(old["kept"], file.name)
                source, size = (kept, kept.stat().st_size) if kept.exists() else (source, size)
            size = size // 2 if _used(file, "halve", "read") else size
            return _Stream(file, "read", source.open("rb"), size, hung)
        if mode != "wb":
            raise NotImplementedError(mode)
        hung = _begin(file, "write")
        if _used(file, "give_up", "write"):
            return _Stream(file, "write", io.BytesIO(), 0, hung)
        file.parent.mkdir(parents=True, exist_ok=True)
        with _state(file.parent) as state:
            if not file.exists():
                state["born"][file.name] = time.time()
        return _Stream(file, "write", file.open("wb"), 0, hung)

    def _sized(self, file: Path) -> tuple[Path, int]:
        sizes = self._sizes(file.parent)
        if file.name not in sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return file, sizes[file.name]

    def _sizes(self, folder: Path) -> dict[str, int]:
        """Return the names that can be seen, from a listing of before if that is a fault."""
        with _state(folder) as state:
            if not (_matching(state, "cache", "list", "") and folder in self._listings):
                self._listings[folder] = {
                    path.name: path.stat().st_size
                    for path in sorted(folder.iterdir())
                    if not _is_hidden(state, path.name)
                }
            return self._listings[folder]


class MovingFileSystem(FaultyFileSystem):
    """One with a rename of its own, in place of fsspec's, which copies."""

    protocol = "faulty-mv"

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        source, target = (Path(self._strip_protocol(path)) for path in (path1, path2))
        _begin(target, "move")
        with _state(target.parent) as state:
            if not target.exists():
                state["born"][target.name] = time.time()
        source.replace(target)


for kind in (FaultyFileSystem, MovingFileSystem):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


class Fault(contextlib.AbstractContextManager["Fault"]):
    """One fault, until it is ended."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key

    def end(self) -> None:
        with _state(self._folder) as state:
            state["faults"].pop(self._key, None)

    def __exit__(self, *_: object) -> None:
        self.end()


class Faults:
    """What happens to the calls for one folder, and what was called.

    `on` has some words of read, write, list (also `info`), remove and move (the rename of
    `faulty-mv`); `name` is a pattern of file names; `count` calls meet the fault, or all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"faulty://{folder}"
        folder.parent.mkdir(parents=True, exist_ok=True)

    def hang(self, on: str = _EVERY, name: str = "*", after: int = 0, **more: Any) -> Fault:
        """Calls hang once so many bytes have passed, until the fault ends or for `seconds`.

        Of a write after some bytes, readers see half.
        """
        return self._put("hang", on, name, after=after, **more)

    def fail(
        self, error: int | str, on: str = _EVERY, name: str = "*", count: float = inf
    ) -> Fault:
        """Calls raise: OSError of a number, or with a text an error that is none."""
        return self._put("fail", on, name, count, error=error)

    def reset(self, after: int, name: str = "*", count: float = inf, on: str = "read") -> Fault:
        """The connection is reset after so many bytes; a seek makes a new one."""
        return self._put("reset", on, name, count, after=after)

    def halve(self, name: str = "*", count: float = inf) -> Fault:
        """Files end in the middle when they are read."""
        return self._put("halve", "read", name, count)

    def old(self, name: str = "*", count: float = inf, seconds: float = inf) -> Fault:
        """Reads give what the files that exist now have now."""
        kept = _beside(self.folder, f"old-{uuid.uuid4().hex}")
        shutil.copytree(self.folder, kept)
        return self._put("old", "read", name, count, kept=str(kept), end_s=time.time() + seconds)

    def late(self, seconds: float = inf, name: str = "*") -> Fault:
        """Nobody sees a new name before so many seconds, or before the fault ends."""
        return self._put("late", "list", name, seconds=seconds)

    def cache(self) -> Fault:
        """Listings, sizes and what exists are remembered until `invalidate_cache`."""
        return self._put("cache", "list")

    def full(self, after: int, name: str = "*") -> Fault:
        """There is room for so many bytes more."""
        return self._put("full", "write", name, after=after)

    def slow(self, rate: float, on: str = "read write", name: str = "*") -> Fault:
        """So many bytes a second pass."""
        return self._put("slow", on, name, rate=rate)

    def give_up(self, name: str = "*", count: float = inf) -> Fault:
        """Writes fail by a time-out after all bytes, which arrive when the test calls `land`."""
        return self._put("give_up", "write", name, count)

    def land(self) -> int:
        """Let the writes arrive that were given up; return how many."""
        waiting = sorted(_beside(self.folder, "landing").glob("*"))
        for path in waiting:
            path.replace(self.folder / path.name.partition("-")[2])
        return len(waiting)

    def end(self) -> None:
        """End all faults."""
        with _state(self.folder) as state:
            state["faults"].clear()

    def calls(self, kind: str, name: str = "*") -> int:
        """Return how many calls began; of kind "hang", how many hang or have hung."""
        return len(self._noted(kind, name))

    def bytes(self, kind: str, name: str = "*") -> int:
        """Return how many bytes were read or written ("read", "write")."""
        return sum(self._noted(f"{kind} bytes", name))

    def _noted(self, kind: str, name: str) -> list[int]:
        log = _beside(self.folder, "calls")
        lines = log.read_text().splitlines() if log.exists() else []
        noted = map(json.loads, lines)
        return [size for what, of, size in noted if what == kind and fnmatch.fnmatch(of, name)]

    def _put(self, kind: str, on: str, name: str = "*", count: float = inf, **fields: Any) -> Fault:
        key = uuid.uuid4().hex
        usual = {"seconds": inf, "begin_s": time.time(), "end_s": inf, "after": 0, "used": 0}
        given = {"kind": kind, "on": on, "name": name, "count": count}
        with _state(self.folder) as state:
            state["faults"][key] = {**usual, **given, **fields}
        return Fault(self.folder, key)
