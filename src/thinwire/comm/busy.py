"""Local work of which the other ranks are told that it goes on."""

import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from thinwire.comm.group import Group
from thinwire.comm.handshake import elsewhere, mapping_of
from thinwire.comm.waiting import busy_until, own_deadlines, say_busy_until, seconds_given
from thinwire.errors import ThinwireError

__all__ = ["busy", "by_rank", "while_busy"]

_T = TypeVar("_T")
_Answer = dict[str, Any]
_PACE_S = 5.0
"""At most this long a rank works without a word to the others."""
_log = logging.getLogger("thinwire")


@contextmanager
def busy(at_most: float | datetime.timedelta) -> Iterator[None]:
    """Around long work that this rank does alone, such as evaluating on rank 0: `with tw.busy(600):
    evaluate()`.

    The time-out of the others, which wait for it in their next exchange, begins anew when the block
    ends or `at_most` has passed. A rank that dies in the block is found at once, and one that is
    stopped or cut off a time-out after it was last heard of. Blocks may be nested; the one that
    ends last counts.

    Args:
        at_most: How long it may take, in seconds or as a timedelta; what takes longer is no error
            here.

    Raises:
        TypeError, ValueError: `at_most` is no time, or not positive.

    Communication: none; a thread of the library's own tells it through the rendezvous store. With
        nccl, and between the stages of a pipeline, the time-out stays as it is.
    """
    outer = busy_until()
    mine = time.monotonic() + seconds_given("at_most", at_most)
    say_busy_until(mine if outer is None else max(outer, mine))
    try:
        yield
    finally:
        now = time.monotonic()
        said = min(now, mine)
        say_busy_until(said if outer is None else max(outer, said))


def while_busy(
    group: Group,
    what: str,
    act: Callable[[], _T],
    *,
    limit_s: float | None = None,
    moved: Callable[[], float] | None = None,
    error: type[ThinwireError] = ThinwireError,
) -> list[_T]:
    """Run `act` on every rank and wait for all of them, however long they take.

    The work is done on a thread beside the main one, so that a slow rank can say in time that it is
    still at it: a rank that says nothing within the time-out of the group is one that is lost.
    Every wait for the others has a deadline of its own, and a line in the log of `thinwire` tells
    every now and then who is waited for.

    Args:
        group: The ranks; all of them must call this.
        what: The work in plain words, the same on all ranks, for errors and for the log.
        act: Local, without communication; returns what JSON holds.
        limit_s: How long, in seconds, the work may take on any rank before it is an error on all of
            them; None: as long as it takes. Work that has not ended by then goes on alone, and
            nobody hears what becomes of it.
        moved: When the work of this rank last made progress, on the clock of `time.monotonic`:
            `limit_s` is counted from there.
        error: What to raise when the work failed on a rank.

    Returns:
        The results in rank order, lists for tuples.

    Raises:
        error: On every rank with the same text, when the work failed on any or took longer than
            `limit_s`; the subclass of it that all who failed agree on, if there is one. The cause
            is this rank's own exception, if it has one.
        Mismatch: A rank is at other work than this.
        PeerLost, PeerStalled: A rank died or stopped.

    Communication: one `Group.gather_bytes` where all end within 5 s of each other, and one more for
    every 5 s (or quarter of the time-out, where that is shorter) in which a rank is still at it.
    """
    work = _Work(act)
    rows = (
        [work.outcome()]
        if group.size == 1 and limit_s is None
        else _answers(group, what, work, limit_s, moved)
    )
    problems = by_rank([row.get("problem") for row in rows])
    if problems:
        raise _kind(error, rows)(f"{what} failed on {'; '.join(problems)}") from work.failure
    return [row["result"] for row in rows]


def by_rank(texts: Sequence[str | None]) -> list[str]:
    """Every text once, with the ranks that say so; None says nothing."""
    speakers: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            speakers.setdefault(text, []).append(rank)
    return [
        f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(map(str, r))}: {text}"
        for text, r in speakers.items()
    ]


def _kind(error: type[ThinwireError], rows: Sequence[_Answer]) -> type[ThinwireError]:
    kinds = {row.get("kind") for row in rows if row.get("problem") is not None}
    return next((kind for kind in error.__subclasses__() if kinds == {kind.__name__}), error)


class _Work:
    """A call and what became of it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.failure: BaseException | None = None
        self._act = act
        self._answer: _Answer | None = None
        self._done = threading.Event()

    def start(self) -> None:
        """Begin on a thread that never holds up the end of the process."""
        threading.Thread(target=self.outcome, name="thinwire-work", daemon=True).start()

    def answer(self, patience_s: float) -> _Answer | None:
        """The outcome, None where it is not done within `patience_s` seconds."""
        self._done.wait(patience_s)
        return self._answer if self._done.is_set() else None

    def outcome(self) -> _Answer:
        """Do the work here and now."""
        try:
            self._answer = {"result": self._act()}
        except BaseException as failure:  # whatever it is, the others must hear of it
            self.failure = failure
            named = (
                str(failure)
                if isinstance(failure, ThinwireError)
                else f"{type(failure).__name__}: {failure}"
            )
            self._answer = {"problem": named, "kind": type(failure).__name__}
        self._done.set()
        return self._answer


def _answers(
    group: Group, what: str, work: _Work, limit_s: float | None, moved: Callable[[], float] | None
) -> list[_Answer]:
    """Answers of every rank about its work once all have ended it, or one has taken too long."""
    begun = told = time.monotonic()
    work.start()
    while True:
        since = begun if moved is None else max(begun, moved())
        left = _PACE_S if limit_s is None else max(limit_s - (time.monotonic() - since), 0.0)
        answer = work.answer(min(group.timeout_s / 4, _PACE_S, left))
        if answer is None:
            answer = {"busy": True}
            since = begun if moved is None else max(begun, moved())
            if limit_s is not None and time.monotonic() - since >= limit_s:
                told_s = "did not end within" if moved is None else "made no progress for"
                answer = {"problem": f"it {told_s} {limit_s:g} s", "late": True}
        with own_deadlines():
            rows = group.gather_bytes(json.dumps({"work": what, **answer}).encode(), what=what)
        answers = [mapping_of(row) for row in rows]
        for rank, row in enumerate(answers):
            if row.get("work") != what:
                raise elsewhere(what, rank, row)
        busy = [rank for rank, row in enumerate(answers) if "busy" in row]
        if not busy or any("late" in row for row in answers):
            return answers
        if time.monotonic() - told >= _PACE_S:
            told = time.monotonic()
            _log.info("%s: %.0f s so far, still at it: ranks %s", what, told - begun, busy)
