"""A pool of real gloo processes for the tests: reused by every test, rebuilt when a rank fails
hard.

They are forked from a server that has imported what they need, which makes a fresh one cheap.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

__all__ = ["BACKENDS", "Lost", "Pool", "Raised", "say", "wait_for_word"]

_PATIENCE = timedelta(seconds=PATIENCE_S)
_LEAVING = timedelta(seconds=30)
BACKENDS = ("gloo", None, "cpu:gloo", "cpu:gloo,cuda:gloo")
"""Names under which a job without a GPU runs over gloo; None: `init_process_group` was given
none."""


@dataclass(frozen=True)
class Raised:
    """What a rank raised, for tests that expect it (`expect_errors=True`)."""

    type_name: str
    text: str
    traceback: str
    bases: tuple[str, ...]


@dataclass(frozen=True)
class Lost:
    """A rank that died, for tests that kill one (`expect_errors=True`)."""

    exit_code: int | None


class Pool:
    """Processes that run one function on every rank of a fresh gloo group."""

    def __init__(self, *, fresh: bool = False) -> None:
        """`fresh`: processes that import everything anew, with the environment and path of the
        moment they start."""
        self._fresh = fresh
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._server: Any = None  # of the groups' stores; no rank that is stopped can hold it
        self._jobs = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int = 2,
        timeout_s: float = PATIENCE_S,
        group_timeout_s: float = 60.0,
        backend: str | None = "gloo",
        expect_errors: bool = False,
        group: bool = True,
        together: bool = True,
    ) -> list[Any]:
        """`[function(rank, size, *args) for every rank]`, each in a process of its own.

        With `expect_errors` a rank that raises, dies or does not answer within `timeout_s` is
        `Raised`, `Lost` or None, else it fails the test. size 0 is one process without a group; so
        are all with `group=False`. Without `together` a rank that returns ends its group at once.
        """
        count = max(size, 1)
        self._grow(count)
        self._server = self._server or _store(0, is_master=True)
        self._jobs += 1
        store = (self._server.port, f"job {self._jobs}")
        together = together and not expect_errors
        job = (function, args, size, group, backend, store, group_timeout_s, together)
        try:
            for rank in range(count):
                self._workers[rank][1].send((rank, *job))
            results = self._collect(count, timeout_s)
        except BaseException:  # such as a test's time-out: answers to come are nobody's
            self.close()
            raise
        broken = {r: a for r, a in enumerate(results) if isinstance(a, Lost | Raised | None)}
        # dead or hung; or it could not join, and torch counts groups under other names there now
        if any(
            not isinstance(answer, Raised) or "init_process_group" in answer.traceback
            for answer in broken.values()
        ):
            self.close()  # the next test starts from fresh processes
        results = [a[0] if isinstance(a, tuple) else a for a in results]
        late = [r for r, a in broken.items() if a is None]
        if broken and not expect_errors:
            texts = [
                f"rank {r}: {a.traceback if isinstance(a, Raised) else a or 'no answer'}"
                for r, a in broken.items()
            ]
            where = f"ranks {late} of {count} did not answer within {timeout_s} s"
            raise (TimeoutError if late else AssertionError)(
                "\n".join([where] * bool(late) + texts)
            )
        return results

    def raise_alike(
        self,
        kind: str,
        says: str | Sequence[str],
        function: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> None:
        """Every rank raises an error of this kind, whose text has all these parts."""
        for answer in self.run(function, *args, expect_errors=True, **options):
            assert isinstance(answer, Raised), answer
            assert answer.type_name == kind, answer.traceback
            for part in [says] if isinstance(says, str) else says:
                assert part in answer.text, answer.text

    def _grow(self, count: int) -> None:
        context: Any = mp.get_context("spawn" if self._fresh else "forkserver")
        if not self._fresh:
            context.set_forkserver_preload(["tests.preloaded"])  # once, before the first process
        while len(self._workers) < count:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _collect(self, count: int, timeout_s: float) -> list[Any]:
        """Per rank a 1-tuple with the result, `Raised`, `Lost`, or None where nothing came
        in time, or can come from a process that is stopped."""
        deadline = time.monotonic() + timeout_s
        results: list[Any] = [None] * count
        for rank in range(count):
            process, pipe = self._workers[rank]
            while not (came := pipe.poll(min(1.0, max(0.0, deadline - time.monotonic())))):
                if time.monotonic() > deadline or _is_stopped(process):
                    break
            if came:
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    process.join(5)
                    results[rank] = Lost(process.exitcode)
        return results

    def close(self) -> None:
        """End every process."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join(10)
        self._workers.clear()
        self._server = None


def say(word: str) -> None:
    """Let every rank of the pool go on that waits for this word."""
    _words().set(word, "")


def wait_for_word(word: str) -> None:
    """Until another rank has said it; other threads of this process go on."""
    _words().wait([word], _PATIENCE)


def _words() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _is_stopped(process: mp.process.BaseProcess) -> bool:
    """By SIGSTOP; False where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _store(port: int, *, is_master: bool) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, None, is_master, _PATIENCE, wait_for_workers=False)


def _met(port: int, job: str, rank: int, size: int) -> Any:
    """The store of a group whose ranks are all there: its time-out counts from here on."""
    from torch.distributed import PrefixStore

    store = PrefixStore(job, _store(port, is_master=False))
    store.set(f"rank {rank}", "")
    store.wait([f"rank {each}" for each in range(size)], _PATIENCE)
    return store


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.enable()
    while True:
        try:
            rank, function, args, size, group, *job = pipe.recv()
            backend, where, group_timeout_s, together = job
        except (EOFError, OSError):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # advice, with a test of its own
            warnings.filterwarnings("ignore", "low_rank with")
            store = None
            try:
                torch.manual_seed(0)
                if size and group:
                    store = _met(*where, rank, size)
                    dist.init_process_group(
                        backend,
                        store=store,
                        rank=rank,
                        world_size=size,
                        timeout=timedelta(seconds=group_timeout_s),
                    )
                    # who ends at once would close what another one still connects
                    dist.barrier()
                answer: Any = (function(rank, size, *args),)
                if store is not None and together:
                    store.set(f"returned {rank}", "")
                    # else another one, which still connects a group, would find this end closed
                    with contextlib.suppress(dist.DistStoreError):
                        store.wait([f"returned {each}" for each in range(size)], _LEAVING)
            except BaseException as error:  # the test decides; the process goes on to report it
                bases = tuple(kind.__name__ for kind in type(error).__mro__)
                answer = Raised(type(error).__name__, str(error), traceback.format_exc(), bases)
            with contextlib.suppress(
                Exception
            ):  # a broken group cannot always be left in good order
                if dist.is_initialized():
                    dist.destroy_process_group()
        try:
            pipe.send(answer)
        except OSError:
            os._exit(1)
