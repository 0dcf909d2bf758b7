"""Writes versions into a storage, one after the other, on a thread of its own."""

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._at_exit import before_exit, fail_at_exit, forget_hook
from thinwire._wording import warn_user
from thinwire.checkpoint.tensor_file import by_name, by_threads, digest
from thinwire.errors import StreamError
from thinwire.stream.coder import encode
from thinwire.stream.files import PART, Storage, file_name
from thinwire.stream.follower import Follower
from thinwire.stream.state import Held, Refused, difference, table_of

_CHAIN = 4
"""Size of the differences after a base, over its own, at which the next one is due."""
_RECENT = 64
"""Number of versions that a record lists; each difference lists those before it."""
_LATE_S = 1.0
_QUEUED_BYTES = 64 << 20
"""Age and bytes of versions that wait, beyond which the next one is left out."""
_NEWS_S = 5.0
_THREADS = min(4, max((os.cpu_count() or 1) // 2, 1))
_log = logging.getLogger("thinwire")
_Task = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `publish`, checked."""

    dtype: torch.dtype | None = None
    token: str | bytes | None = field(default=None, repr=False)
    every: int | None = None
    keep: int = 2
    timeout: float = 60.0
    replace: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        dtype = self.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point dtype or None, got {dtype!r}")
        check.integer("every", 1 if self.every is None else self.every, at_least=1)
        check.integer("keep", self.keep, at_least=1)
        check.real("timeout", self.timeout, above=0)
        check.boolean("replace", self.replace)
        check.boolean("shared", self.shared)


class Overtaken(StreamError):
    """Another publisher has begun later."""


class Writer:
    """Writes what it is given as versions, in turn. It knows neither model nor ranks.

    Attributes:
        number: The newest version that was written, or was there before.
        step: Step of the newest version that was written here; -1 before it.
    """

    def __init__(
        self,
        storage: Storage,
        settings: Settings,
        run: str = "",
        generation: int = 0,
        *,
        needs_close: bool = False,
    ) -> None:
        # run: identity of a run of members, whose generations order its publishers; else empty.
        # needs_close: the end of the script is not that of the run, or the last state of a sharded
        # model is not here
        self._storage = storage
        self._settings = settings
        self._needs_close = needs_close
        self._run = run
        self._generation = generation
        self._name = uuid.uuid4().hex
        self._record: dict[str, Any] = {}
        """The record that this writer has written last, or begins with."""
        self._held: Held | None = None
        """The last version; None if the next one is to be a base."""
        self._tasks: deque[tuple[float, int, _Task]] = deque()
        """Work in its order: since when it waits, the bytes that it keeps, what to do."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._problem: StreamError | None = None
        self._found: Follower | None = None
        self._warned = self._ended = False
        self.close: Callable[[], Callable[[], None] | None] = lambda: None
        """Weak reference to the method that publishes the last state and ends."""
        self._promised = 0
        self._given = False
        self.number = 0
        self.step = -1

    # called by the thread that trains

    def begin(self, table: Mapping[str, Any]) -> None:
        """Look at what is there now, and raise if it is of another model."""
        self._submit(0, partial(self._look, table))
        self.wait()

    def has_room(self, step: int) -> bool:
        """Return True if a version can be given now: it may wait for others while all are young and
        small. Else it is left out, with a warning if they are late.
        """
        with self._changed:
            if not self._tasks:
                return True
            age_s = time.monotonic() - self._tasks[0][0]
            late = age_s >= _LATE_S
            if not late and sum(size for _, size, _ in self._tasks) < _QUEUED_BYTES:
                return True
            warns = late and not self._warned
            self._warned |= late
        if warns:
            warn_user(
                f"the version of step {step} is left out: version {self.number + 1} has been on "
                f"its way to {self._storage.where} for {age_s:.1f} s{self._storage.left_text()}. "
                "The next one has these changes too"
            )
        return False

    @property
    def next_number(self) -> int:
        """Number of the next version that is given."""
        return max(self._promised, int(self._record.get("number", 0))) + 1

    def give(
        self, step: int, tensors: dict[str, Tensor], tied: dict[str, str], *, changed: bool = False
    ) -> int:
        """Write a version from tensors that belong to this writer from now on; return its number.

        With `changed` only if they differ from the version before.
        """
        self._given = True
        before_exit(self, self._at_exit)
        self._promised = self.next_number
        size = sum(tensor.nbytes for tensor in tensors.values())
        self._submit(size, partial(self._write, step, tensors, tied, changed=changed))
        return self._promised

    def take_problem(self) -> StreamError | None:
        """Return the error of a version that nobody has seen, once; None if there is none."""
        with self._changed:
            problem = self._problem
            self._problem = None
        fail_at_exit(self, None)
        return problem

    def wait(self) -> None:
        """Wait until all is written, while bytes move; raise the error of a version."""
        logged_s = time.monotonic()
        limit_s = self._settings.timeout
        with self._changed:
            while self._tasks:
                self._changed.wait(min(1.0, limit_s / 4))
                if self._storage.silent_s() >= limit_s:
                    raise StreamError(f"no byte moved for {limit_s:g} s: {self._left_text()}")
                if self._tasks and time.monotonic() - logged_s >= _NEWS_S:
                    logged_s = time.monotonic()
                    _log.warning("waiting: %s", self._left_text())
        if (problem := self.take_problem()) is not None:
            raise problem

    def end(self) -> None:
        """Wait for all that was given, and say that no version will follow."""
        self._ended = True
        problem = self.take_problem()
        try:
            self._submit(0, self._say_closed)
            self.wait()
        finally:
            forget_hook(self)
        if problem is not None:
            raise problem

    def abandon(self, *, collected: bool = False) -> None:
        """Write what was given, but never say the end."""
        if collected and not self._ended and self.step >= 0:
            _log.warning(
                "a publisher was collected before close(): followers of %s wait for more",
                self._storage.where,
            )
        self._ended = True
        with self._changed:
            if not self._tasks and self._problem is None:
                forget_hook(self)

    def _at_exit(self, ended_well: bool) -> None:
        """Write what was given; say the end if the script ended well and nobody has spoken."""
        problem = self.take_problem()
        self.wait()
        close = self.close()
        if ended_well and not self._ended and close is not None:
            if self._needs_close:
                _log.warning(
                    "the script ends without close() of the engine or publisher: followers of %s "
                    "wait for more",
                    self._storage.where,
                )
            else:
                close()
        if problem is not None:
            raise problem

    def _left_text(self) -> str:
        return (
            f"version {self.number + 1} and {len(self._tasks) - 1} more tasks are on their way to "
            f"{self._storage.where}{self._storage.left_text()}"
        )

    def _submit(self, size: int, task: _Task) -> None:
        with self._changed:
            self._tasks.append((time.monotonic(), size, task))
            if self._thread is None:
                name = "thinwire-publisher"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    # called by the writer's thread

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._thread = None
                    break
                begun_s, _, task = self._tasks[0]
            problem: StreamError | None = None
            try:
                task()
            except StreamError as error:
                problem = error
            except BaseException as error:  # such as memory that is missing
                problem = StreamError(f"{type(error).__name__}: {error}")
                problem.__cause__ = error
            with self._changed:
                if problem is None:
                    self._tasks.popleft()
                    self._warned &= time.monotonic() - begun_s >= _LATE_S
                else:
                    self._problem = problem
                    self._promised = 0
                    self._tasks.clear()  # the next version has these changes too
                    if self._given:  # else the call that begins has raised, and waits no more
                        fail_at_exit(self, f"thinwire: a version was not published: {problem}")
                self._changed.notify_all()
        if self._ended and self._problem is None:
            forget_hook(self)

    def _look(self, table: Mapping[str, Any]) -> None:
        """Choose number and term, and raise if what is there is of another model."""
        storage = self._storage
        settings = self._settings
        follower = self._follower()
        found = None
        number = 0
        try:
            found = follower.look(None)
        except StreamError as error:
            if isinstance(error, Refused) and not settings.replace:
                raise
            # such as a record that was cut while it was written: go on beyond all files
            number = max(storage.numbers().values(), default=0)
            warn_user(f"the next version is a base, since the last one is lost: {error}")
        start = time.time_ns() // 1000
        same_run = False
        if found is not None:
            number = found["number"]
            term, generation = found["term"]
            same_run = bool(self._run) and found["run"] == self._run
            start = term if same_run else max(start, term + 1)
            if same_run and generation > self._generation:
                raise self._overtaken()
        self._record = {
            "number": number,
            "term": [start, self._generation],
            "run": self._run,
            "writer": self._name,
            "stream": self._name,
            "written": 0,
            "bases": [],
            "recent": [],
        }
        self.number = number
        if found is None or (settings.replace and not same_run):
            return
        with _warned():
            held, *_ = follower.base_head(found, found["bases"][-1][0])
            if (text := difference(held.table, table)) is not None:
                raise Refused(
                    f"{storage.where} has versions of another model: {text}. Give another place, "
                    "or replace=True to go on with this model"
                )
            self._found = follower
            if found["closed"]:  # from now on followers wait for more
                storage.name_newest({**found, **self._own(), "closed": False})

    def _own(self) -> dict[str, Any]:
        """Return what a record says of its publisher."""
        return {key: self._record[key] for key in ("term", "run", "writer")}

    def _take_over(self) -> None:
        """Hold the last version, if it can be read."""
        if self._found is None:
            return
        follower = self._found
        self._found = None
        with _warned():
            follower.latest()
            assert follower.newest is not None, "read"
            self._record = {**follower.newest, **self._own()}
            self._held = follower.held

    def _follower(self) -> Follower:
        timeout = self._settings.timeout
        return Follower(self._storage, None, timeout / 20, timeout / 4)

    def _require_newest(self) -> None:
        """Raise if another publisher has taken over."""
        # a storage may name a new file late
        wait_s = None if self.step < 0 else self._settings.timeout / 4
        try:
            there = self._follower().look(wait_s)
        except Refused:  # with another token
            if self._settings.replace and self.step < 0:
                return
            raise self._overtaken() from None
        except StreamError as error:
            _log.warning("writing over a record that cannot be read: %s", error)
            return
        own = self._record
        if there is None:
            if self.step >= 0:
                warn_user(f"{self._storage.where}: the files were deleted: the next one is a base")
            self._go_beyond(own["number"])
            return
        if there["writer"] == self._name:
            return
        if (there["term"], there["writer"]) > (own["term"], self._name):
            raise self._overtaken()
        if there["number"] > own["number"]:  # of one that had begun earlier
            self._go_beyond(there["number"])

    def _go_beyond(self, number: int) -> None:
        """Make the next version a base with a number after this one."""
        self._held = None
        self._record |= {"number": number, "bases": [], "recent": []}

    def _overtaken(self) -> Overtaken:
        return Overtaken(
            f"{self._storage.where}: another process publishes there too, and began later: give "
            "each publisher a place of its own"
        )

    def _write(
        self, step: int, tensors: dict[str, Tensor], tied: dict[str, str], *, changed: bool
    ) -> None:
        table = table_of(tensors)
        if not self._record:
            self._look(table)
        self._take_over()
        self._require_newest()
        record = dict(self._record)
        held = self._held
        # names in the same order, dtypes, shapes and ties
        if held and ([*held.table.items()], held.tied) != ([*table.items()], tied):
            held = None
        number = record["number"] + 1
        bases = list(record["bases"])
        digests: dict[str, bytes] = {}
        payload: list[bytes] = []
        if held is not None:
            for name, message, sha256 in self._differences(held, tensors):
                payload.append(message)
                digests[name] = sha256
        else:
            digests = by_name(digest, tensors)
            bases = []
        written = record["written"] + sum(map(len, payload))
        new = Held(number, step, record["stream"], "", written, table, tied, digests, tensors)
        new.digest = new.whole_digest()
        if changed and held is not None and new.digest == held.digest:
            return
        about = {
            "number": number,
            "step": step,
            "stream": new.stream,
            "digest": new.digest,
            "written": written,
        }
        size = 0
        if held is not None:
            chain = {
                "previous": held.digest,
                "recent": record["recent"],
                "lengths": [*map(len, payload)],
            }
            content = torch.from_numpy(np.frombuffer(bytearray().join(payload), np.uint8))
            size = self._storage.write_version("step", {**about, **chain}, {"payload": content})
        if due := self._base_due(bases, number, written):
            whole = {**about, "table": table, "tied": tied}
            base_size = self._storage.write_version("safetensors", whole, new.tensors)
            bases.append([number, base_size, written, new.digest])
        recent = [*record["recent"], [new.digest[:PART], size]][-_RECENT:]
        kept = bases[-self._settings.keep :]
        record |= about
        record |= {"bases": kept, "oldest": kept[0][0], "recent": recent, "closed": False}
        self._require_newest()  # another one may have begun while this one worked
        if self._record["number"] >= number:  # or one that had begun earlier has gone on
            self._write(step, tensors, tied, changed=False)
            return
        self._go_beyond(number)  # if this fails, it may be there all the same, or come later
        self._storage.name_newest(record)
        self._held = new
        self._record = record
        self.number = number
        self.step = step
        if due:
            self._clean()

    def _differences(
        self, held: Held, tensors: dict[str, Tensor]
    ) -> list[tuple[str, bytes, bytes]]:
        """Return the name, the message and the digest of each tensor."""

        def of(name: str) -> tuple[str, bytes, bytes]:
            if message := encode(held.tensors[name], tensors[name]):
                return name, message, digest(tensors[name])
            tensors[name] = held.tensors[name]  # one copy is enough
            return name, message, held.digests[name]

        return by_threads(of, list(tensors), _THREADS)

    def _base_due(self, bases: list[Any], number: int, written: int) -> bool:
        if not bases:
            return True
        last, size, until, _ = bases[-1]
        every = self._settings.every
        return bool(number - last >= every if every else written - until >= _CHAIN * size)

    def _clean(self) -> None:
        """Delete the files that no reader of the record needs; those of later numbers stay."""
        bases = {
            file_name(number, whole, "safetensors") for number, *_, whole in self._record["bases"]
        }
        oldest = self._record["oldest"]
        newest = self._record["number"]
        try:
            outdated = [
                name
                for name, number in self._storage.numbers().items()
                if name not in bases
                and (number <= oldest or (number <= newest and not name.endswith(".step")))
            ]
            self._storage.discard(outdated)
        except StreamError as error:  # the next base cleans again
            _log.warning("files that nobody needs were not deleted: %s", error)

    def _say_closed(self) -> None:
        self._take_over()
        if self._record.get("bases"):
            self._require_newest()
            self._storage.name_newest({**self._record, "closed": True})


@contextmanager
def _warned() -> Iterator[None]:
    """Warn of a version that cannot be read: the next one is a base."""
    try:
        yield
    except Refused:
        raise
    except StreamError as error:
        warn_user(f"the next version is a base, since the last one is lost: {error}")
