"""Compilation of the loops for the CPU, and their cache on disk.

There is one file per loop and types, with a checksum. Compiling is expensive, and the first user of
each machine waits for it. Four rules keep it cheap. A loop calls no array functions of numba
(`np.empty` and a view cost 0.1 s each, a minimum 0.5 s, assigning to a slice 2 s, once for each
type), so scratch is an argument. An argument has one type, so counts that a loop passes on are
`i64`. Rarely needed code is not in a loop, such as the codes of several bits in the loop for one.

numba's own cache has three defects here. One damaged byte in it makes every later start fail. A
folder that cannot be written is skipped silently. Processes that start together each compile
everything.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core import compiler, serialize
from numba.core.caching import _Cache

from thinwire._files import replacing

try:
    import fcntl
except ImportError:  # on Windows: processes that start together each compile everything
    fcntl = None  # type: ignore[assignment]

_settings: Any = numba.config
_dumps: Any = serialize.dumps
_rebuilt: Any = compiler.CompileResult._rebuild
_MAGIC = b"thinwire loop 1\n"
_DIGEST_BYTES = 32
_PATIENCE_S = 120.0
"""Time limit of waiting for another process that compiles the same loop; it may be stopped."""
_POLL_S = 0.02
_log = logging.getLogger("thinwire")


class Compilations:
    """Loops that this process has compiled so far, for the progress line."""

    def __init__(self) -> None:
        self.count = 0
        self.warned = False
        self.begins: Callable[[], None] | None = None
        """Called whenever a compilation begins."""


compilations = Compilations()


class LoopCache(_Cache):
    """Cache of one function, with the interface of numba's dispatcher."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def cache_path(self) -> str | None:
        """The folder that is written to."""
        folder = _writable_folder()
        return None if folder is None else str(folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled loop for these types. None: the caller compiles, and saves."""
        target_context.refresh()
        name = self._file_name(sig, target_context.codegen())
        found = self._found(name, target_context)
        if found is None and _locks.acquire(name):
            # the process that had the lock may have written it
            found = self._found(name, target_context)
            if found is not None:
                _locks.release(name)
        if found is None:
            compilations.count += 1
            if compilations.begins is not None:
                compilations.begins()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the compiled loop for these types. The loop works even if that fails."""
        name, folder = self._file_name(sig, data.codegen), _writable_folder()
        try:
            if folder is None:
                wanted = next(iter(_folders()), None)
                danger = _danger(wanted.stat()) if wanted and wanted.exists() else None
                _warn_once(danger or "no cache folder is writable", wanted)
            elif not data.library.has_dynamic_globals:
                _write(folder / name, _dumps((sources_digest(), data._reduce())))
        except OSError as error:
            _warn_once(str(error), folder)
        finally:
            _locks.release(name)

    def enable(self) -> None:
        """Do nothing: the cache is always enabled."""

    def disable(self) -> None:
        """Do nothing: the cache is always enabled."""

    def flush(self) -> None:
        """Do nothing: changed sources are detected by their digest."""

    def _file_name(self, sig: Any, codegen: Any) -> str:
        machine = (
            codegen.magic_tuple(),
            sys.implementation.cache_tag,
            platform.machine(),
            _settings.BOUNDSCHECK,
        )
        text = repr((str(sig), machine, numba.__version__, llvmlite.__version__))
        return f"{self._name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.loop"

    def _found(self, name: str, target_context: Any) -> Any:
        for folder in _folders():
            path = folder / name
            try:
                if _danger(folder.stat()):
                    continue
                with path.open("rb") as file:
                    raw, danger = file.read(), _danger(os.fstat(file.fileno()))
            except OSError:
                continue
            try:
                if danger:
                    raise ValueError(danger)
                sources, reduced = pickle.loads(_payload(raw))
                if sources == sources_digest():
                    return _rebuilt(target_context, *reduced)
            except Exception as error:
                _log.warning(
                    "%s is ignored (%s): the loop is compiled again",
                    path,
                    error or type(error).__name__,
                )
                with contextlib.suppress(OSError):
                    path.unlink()
        return None


def _danger(status: os.stat_result) -> str | None:
    """Return why others may have written this executable file or folder, or None."""
    if os.name == "nt":  # no such owners and modes there
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    return "others can write to it" if status.st_mode & 0o022 else None


def _payload(raw: bytes) -> bytes:
    start = len(_MAGIC) + _DIGEST_BYTES
    if (
        not raw.startswith(_MAGIC)
        or hashlib.sha256(raw[start:]).digest() != raw[len(_MAGIC) : start]
    ):
        raise ValueError("it does not hold what was written into it")
    return raw[start:]


def _write(path: Path, payload: bytes) -> None:
    with replacing(path) as draft:
        draft.touch(0o644, exist_ok=False)
        draft.write_bytes(_MAGIC + hashlib.sha256(payload).digest() + payload)


@functools.cache
def sources_digest() -> str:
    """Return the digest of this folder's files: all that a loop calls is compiled into it."""
    sources = sorted(
        (
            path
            for path in resources.files("thinwire.kernels.cpu").iterdir()
            if path.name.endswith(".py")
        ),
        key=lambda path: path.name,
    )
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@functools.cache
def _folders() -> tuple[Path, ...]:
    """Return the cache: the environment's, or beside the sources, then in the user's cache."""
    own = hashlib.sha256(str(Path(__file__).parent).encode()).hexdigest()[:12]
    if _settings.CACHE_DIR:
        return (Path(_settings.CACHE_DIR) / f"thinwire-{own}",)
    home = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home
        home = home or str(Path.home() / ".cache")
    users = [] if not home else [Path(home) / "thinwire" / own]
    beside = Path(__file__).parent
    return tuple([beside / "__pycache__", *users] if beside.is_dir() else users)


@functools.cache
def _writable_folder() -> Path | None:
    for folder in _folders():
        probe = folder / f"probe.{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if _danger(folder.stat()):
                continue
            probe.touch()
            probe.unlink()
        except OSError:
            continue
        return folder
    return None


def _warn_once(why: str, folder: Path | None) -> None:
    if compilations.warned:
        return
    compilations.warned = True
    where = "anywhere" if folder is None else f"in {folder}"
    warnings.warn(
        f"compiled loops cannot be cached {where} ({why}), so every start compiles them again for "
        "several seconds: set NUMBA_CACHE_DIR to a persistent folder that only this user can write",
        RuntimeWarning,
        stacklevel=2,
    )


class _Locks:
    """Locks among the processes of a machine on loops that are being compiled.

    They are byte ranges of one file. A process that ends frees its locks. While a loop is locked,
    so are the loops that it calls. Calls have no cycles, so there is no deadlock.
    """

    def __init__(self) -> None:
        self._file: Any = None
        self._held: set[str] = set()
        self._mutex = threading.Lock()
        self.waits_to = True

    def acquire(self, name: str) -> bool:
        """Wait for the lock. False if there are no locks, or another process holds it for too long.

        Raises:
            BlockingIOError: Another process has it and `waits_to` is off, unless a loop that calls
                this one is held.
        """
        file = self._opened()
        if file is None:
            return False
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_byte(name))
            except BlockingIOError:
                if not self.waits_to and not self._held:
                    raise
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                return False
            else:
                self._held.add(name)
                return True

    def release(self, name: str) -> None:
        """Release the lock, if it is held."""
        if name in self._held:
            self._held.discard(name)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _lock_byte(name))

    def release_all(self) -> None:
        """Release the locks that remain after an error."""
        for name in list(self._held):
            self.release(name)

    def _opened(self) -> Any:
        with self._mutex:
            folder = _writable_folder()
            if fcntl is not None and folder is not None and self._file is None:
                with contextlib.suppress(OSError):
                    self._file = (folder / "loops.lock").open(
                        "ab"
                    )  # never closed: closing would release all locks
            return self._file


def _lock_byte(name: str) -> int:
    """Return the byte that stands for a loop."""
    return int(name.rsplit("-", 1)[1][:7], 16)


_locks = _Locks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.__init__)  # type: ignore[misc]


@contextlib.contextmanager
def holding_no_lock(*, waiting: bool) -> Iterator[None]:
    """Return a context that leaves no lock behind.

    Without `waiting` it raises BlockingIOError where others compile.
    """
    _locks.waits_to = waiting
    try:
        yield
    finally:
        _locks.waits_to = True
        _locks.release_all()


Int: TypeAlias = Any
"""An int64. Python's and NumPy's integers are both converted to it."""
i64: Any = np.int64
u64: Any = np.uint64
"""Type of array indices in hot loops. A signed index might count from the end, which costs a
comparison.
"""
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile with numba without the GIL, cached on disk if a folder for it can be written.

    Division follows the processor: Python's error on zero would prevent vectorisation.
    """
    compiled: Any = numba.njit(**_OPTIONS)(function)
    compiled._cache = LoopCache(f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}")
    return cast("F", compiled)


def jit_inline(function: F) -> F:
    """Compile into each of its callers, which costs less if there is only one."""
    return cast("F", numba.njit(inline="always", **_OPTIONS)(function))
