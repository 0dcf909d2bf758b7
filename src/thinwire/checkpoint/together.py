"""Work that every rank does for itself and that counts only if it succeeded on all of them."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from thinwire.comm import Group, elsewhere, mapping_of
from thinwire.errors import CheckpointError

__all__ = ["by_rank", "together"]

_T = TypeVar("_T")
_Answer = dict[str, Any]


def together(group: Group, what: str, act: Callable[[], _T]) -> list[_T]:
    """Run `act` on every rank and wait for all of them, however long they take.

    The work is done beside the main thread, so that a rank with a slow disk can say in time that it is still at it: a
    rank that says nothing within the time-out of the group is one that is lost.

    Args:
        group: The ranks.
        what: The work in plain words, for errors.
        act: Local, without communication; returns what JSON holds.

    Returns:
        The results in rank order, lists for tuples.

    Raises:
        CheckpointError: On every rank with the same text, when it failed on any.
        Mismatch: A rank is at other work than this.
        PeerLost, PeerStalled: A rank died or stopped.
    """
    if group.size == 1:
        failure, answer = _outcome(act)
        answers = [answer]
    else:
        failure, answers = _answers(group, what, act)
    problems = by_rank([row.get("problem") for row in answers])
    if problems:
        raise CheckpointError(f"{what} failed on {'; '.join(problems)}") from failure
    return [row["result"] for row in answers]


def by_rank(texts: Sequence[str | None]) -> list[str]:
    """Every text once, with the ranks that say so; None says nothing."""
    speakers: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            speakers.setdefault(text, []).append(rank)
    return [f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(map(str, r))}: {text}" for text, r in speakers.items()]


def _answers(group: Group, what: str, act: Callable[[], Any]) -> tuple[Exception | None, list[_Answer]]:
    """This rank's failure, if any, and what every rank says about its work once all have ended it."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_outcome, act)
        while True:
            wait([future], timeout=group.timeout_s / 4)
            failure, answer = future.result() if future.done() else (None, {"busy": True})
            rows = group.gather_bytes(json.dumps({"work": what, **answer}).encode(), what=what)
            answers = [mapping_of(row) for row in rows]
            for rank, row in enumerate(answers):
                if row.get("work") != what:
                    raise elsewhere(what, rank)
            if not any("busy" in row for row in answers):
                return failure, answers


def _outcome(act: Callable[[], Any]) -> tuple[Exception | None, _Answer]:
    try:
        return None, {"result": act()}
    except Exception as error:
        named = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return error, {"problem": named}
