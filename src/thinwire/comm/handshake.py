"""Exchanges outside of a step: comparing facts once, and reporting long work of one rank."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cache
from typing import Any, TypeVar

from thinwire._watchdog import started
from thinwire._wording import warn_user
from thinwire.comm.group import Group
from thinwire.comm.waiting import own_deadlines
from thinwire.errors import Mismatch, ThinwireError

_SAME_SCRIPT = "All ranks must run the same script with the same settings"
_CALL = "call"
_VERSIONS = "versions"


def require_agreement(
    group: Group,
    facts: Mapping[str, Any],
    *,
    action: str,
    cures: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Raise on all ranks unless `facts` are equal on all of them."""
    own_facts = {_CALL: action, **facts} | ({_VERSIONS: dict(versions)} if versions else {})
    answers = group.gather_bytes(json.dumps(own_facts).encode(), action=action)
    rows = [mapping_of(answer) for answer in answers]
    for rank, row in enumerate(rows):
        if row.pop(_CALL, None) != action:
            raise wrong_call_site(action, rank, answers[rank])
    builds = [row.pop(_VERSIONS, None) for row in rows]
    if None not in builds:  # else a rank makes another comparison, which is reported below
        _warn_of_versions(builds)
    first, *others = ({path: repr(leaf) for path, leaf in leaves("", row)} for row in rows)
    for rank, other in enumerate(others, start=1):
        pairs = {
            path: (first.get(path, "nothing"), other.get(path, "nothing")) for path in first | other
        }
        differ = {path: both for path, both in pairs.items() if both[0] != both[1]}
        # if one rank has an empty mapping or list, show the entries of the other one
        clear = [path for path, both in differ.items() if not {"{}", "[]"} & {*both}]
        clear = clear or list(differ)
        if clear:
            path = clear[0]
            ours, theirs = differ[clear[0]]
            cure = (cures or {}).get(path.split(".")[0], _SAME_SCRIPT)
            raise Mismatch(
                f"{action}: {path} differs: rank 0 has {ours}, rank {rank} has {theirs}. {cure}"
            )


def _warn_of_versions(rows: Sequence[Mapping[str, Any]]) -> None:
    """Warn of different builds that share a wire format: they may round differently."""
    for key, first in rows[0].items():
        others = {row.get(key): rank for rank, row in enumerate(rows) if row.get(key) != first}
        for other, rank in list(others.items())[:1]:
            _warn_once(
                f"{key} is {first} on rank 0 and {other} on rank {rank}. They train together; "
                "where builds round differently replicas part, which is then an error. The same "
                "build everywhere is safest"
            )


_warn_once = cache(warn_user)


def wrong_call_site(action: str, rank: int, answer: bytes | Mapping[str, Any] = b"") -> Mismatch:
    """Return the error for a rank whose answer belongs to another call than `action`."""
    facts = mapping_of(answer) if isinstance(answer, bytes) else answer
    key, value = next(iter(facts.items()), ("", ""))
    call = value if isinstance(value, str) else key
    if "phase" in facts:
        call = f"agreeing on step {facts['step']}"
    which = f", {call}" if call else ""
    return Mismatch(
        f"{action}: rank {rank} is in another exchange of this library{which}. All ranks must make "
        "the same calls. Call add_param_group, engine.flush() and engine.save on every rank too: "
        "save writes one checkpoint for all of them"
    )


def mapping_of(answer: bytes) -> dict[str, Any]:
    """Return the mapping that a rank sent as JSON, or an empty one if its bytes are not one."""
    try:
        value = json.loads(answer)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and lists, by dotted paths that begin with `path`."""
    if isinstance(value, dict | list) and value:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{path}.{key}" if path else str(key), entry)
    else:
        yield path, value


_T = TypeVar("_T")
_Answer = dict[str, Any]
_PACE_S = 5.0
"""Longest time that a rank works without a report to the others."""
_log = logging.getLogger("thinwire")


def while_busy(
    group: Group,
    action: str,
    act: Callable[[], _T],
    *,
    limit_s: float = math.inf,
    moved: Callable[[], float] = float,
    error: type[ThinwireError] = ThinwireError,
) -> list[_T]:
    """Run `act` on every rank and wait for all of them, while it has `moved` within the limit."""
    # on a second thread, so that the main thread can report that it is still running. Work that
    # exceeds `limit_s` keeps running, and its result is lost
    outcome = started(act, "thinwire-work")
    begun = logged_s = time.monotonic()

    def left_s() -> float:
        return max(limit_s - (time.monotonic() - max(begun, moved())), 0.0)

    while True:
        # all ranks see the same answers, so all leave the loop in the same round
        wait([outcome], min(group.timeout_s / 4, _PACE_S, left_s()))
        answer: _Answer = _answer(outcome) if outcome.done() else {"busy": True}
        if not outcome.done() and left_s() == 0:
            answer = {"problem": f"it made no progress for {limit_s:g} s", "late": True}
        own = json.dumps({"work": action, **answer}).encode()
        with own_deadlines():
            rows = [*map(mapping_of, group.gather_bytes(own, action=action))]
        for rank, row in enumerate(rows):
            if row.get("work") != action:
                raise wrong_call_site(action, rank, row)
        busy = [rank for rank, row in enumerate(rows) if "busy" in row]
        if not busy or any("late" in row for row in rows):
            break
        if time.monotonic() - logged_s >= _PACE_S:
            logged_s = time.monotonic()
            text = "%s: %.0f s so far, still running on ranks %s"
            _log.info(text, action, logged_s - begun, busy)
    problems = by_rank([row.get("problem") for row in rows])
    if problems:
        cause = outcome.exception() if outcome.done() else None
        if isinstance(cause, ThinwireError | OSError):  # the text has all of it
            cause = cause.__cause__
        kinds = {row.get("kind") for row in rows if "problem" in row}
        kind = next((one for one in error.__subclasses__() if kinds == {one.__name__}), error)
        failure = kind(f"{action} failed on {'; '.join(problems)}")
        raise failure from cause
    return [row["result"] for row in rows]


def by_rank(texts: Sequence[str | None]) -> list[str]:
    """Return every text once, with the ranks that reported it; None is left out."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_by_text.setdefault(text, []).append(rank)
    return [
        f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(map(str, r))}: {text}"
        for text, r in ranks_by_text.items()
    ]


def _answer(outcome: Future[Any]) -> _Answer:
    failure = outcome.exception()
    if failure is None:
        return {"result": outcome.result()}
    kind = type(failure).__name__
    problem = str(failure) if isinstance(failure, ThinwireError) else f"{kind}: {failure}"
    return {"problem": problem, "kind": kind}
