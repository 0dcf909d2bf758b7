"""Agreements: no rank changes anything before all ranks have the same view of the step.

An agreement is one message per rank and a list of checks. Each check adds the facts it knows about
this rank and judges the answers of all ranks. All ranks judge the same answers, so either all of
them continue or all raise the same error.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from thinwire.comm import Group, wrong_call_site
from thinwire.errors import Diverged, Mismatch, NonFinite, PayloadCorrupt, ThinwireError

__all__ = [
    "COMPARING",
    "MAX_DROPS_IN_A_ROW",
    "Agreement",
    "Among",
    "Answers",
    "Check",
    "Drops",
    "Said",
    "Turn",
    "Verdict",
    "verdict_of",
]

COMPARING = "comparing everything"
"""Phase in which ranks compare all replicated state, before a checkpoint."""

Said = dict[str, Any]
"""Report of one rank by key, with values that JSON holds. A key without a value is left out."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One agreement."""

    group: Group
    step: int
    """Updates made before."""
    phase: str
    """Phase of the step. Ranks in different phases are out of step."""
    first: bool
    """True for the first agreement of an update."""
    last: bool
    """True once messages have arrived, so that the update follows."""

    @property
    def what(self) -> str:
        """The occasion, for error messages."""
        return f"agreeing on step {self.step}"


class Answers(Sequence[Said]):
    """Reports of all ranks, in rank order.

    Where ranks hold different parts of the model and all is well, the reports of other parts are
    shortened to the keys that are common to all ranks, such as `step` and `phase`.

    >>> answers = Answers([{"step": 3}, {"step": 3, "failure": "x"}], (), 0)
    >>> answers.unanimous, list(answers.of("failure"))
    (False, [(1, 'x')])
    """

    def __init__(self, said: Sequence[Said], parts: Sequence[int], rank: int) -> None:
        self._said, self._parts, self._rank = said, parts or [0] * len(said), rank
        self.unanimous = all(each is said[0] for each in said)
        """True if all ranks sent the same report."""

    def __getitem__(self, rank: Any) -> Any:
        return self._said[rank]

    def __len__(self) -> int:
        return len(self._said)

    def of(self, key: str) -> Iterator[tuple[int, Any]]:
        """Yield rank and value of each report that contains this key."""
        return ((rank, said[key]) for rank, said in enumerate(self._said) if key in said)

    def by_part(self) -> list[dict[int, Said]]:
        """Return the reports by rank, one dict for each part of the model."""
        found: dict[int, dict[int, Said]] = {}
        for rank, (part, said) in enumerate(zip(self._parts, self._said, strict=True)):
            found.setdefault(part, {})[rank] = said
        return list(found.values())

    def of_my_part(self) -> list[Said]:
        """Return the reports of the ranks that hold the same part as this one."""
        if self.unanimous:
            return list(self._said)
        return next(list(part.values()) for part in self.by_part() if self._rank in part)

    def of_my_replica(self, key: str) -> list[Any]:
        """Return the values from the ranks of this rank's replica, in the order of parts.

        The ranks of a replica are consecutive. Empty if no rank reported this key.
        """
        width = len(set(self._parts))
        first = self._rank - self._rank % width
        return [said[key] for said in self._said[first : first + width] if key in said]

    def unlike(self, key: str, default: Any = None) -> Iterator[tuple[int, Any, int, Any]]:
        """Yield differences under this key among ranks that hold the same part.

        Each item is the first rank of the part, its value, the rank that differs and its value.
        """
        for part in [] if self.unanimous else self.by_part():
            first = min(part)
            value = part[first].get(key, default)
            for rank, said in part.items():
                if said.get(key, default) != value:
                    yield first, value, rank, said.get(key, default)


class Check(Protocol):
    """One fact that ranks report to each other. It has no effect before `judge`."""

    def say(self, turn: Turn) -> Said:
        """Return this rank's report, or nothing. The keys belong to this check alone."""

    def judge(self, turn: Turn, answers: Answers) -> None:
        """Raise the error that follows from the answers, or store the agreed facts."""


_PLACE = ("engine", "step", "phase")
_COMMON = (*_PLACE, "ready")
"""Keys that must be equal on the ranks of all parts."""
_QUIET = {*_COMMON, "kinds", "rates", "settings", "digest", "sums", "likeness", "buffers"}
"""Keys that are not sent to ranks of other parts."""
_FAILURES = {kind.__name__: kind for kind in (Diverged, Mismatch, NonFinite, PayloadCorrupt)}
"""Errors that keep their type on the ranks they are reported to. All others become
`ThinwireError`.
"""


@dataclass(frozen=True, slots=True)
class Among:
    """Additional participants and facts of an agreement."""

    checks: Sequence[Check] = ()
    job: Group | None = None
    """All ranks, where they hold different stages. None if only the exchanging ranks agree."""
    names_of_stages: Sequence[Sequence[str]] = ()
    """Names of the parameters of each stage."""


class Agreement:
    """The agreements of one training.

    Args:
        group: All ranks that must agree.
        checks: In the order in which they judge.
        engine: Identity of this engine or optimizer among those over the same ranks, in the order
            of creation.

    Communication: `Group.gather_parts`, 24 bytes per rank if all reports are equal. Where ranks
    hold different parts of the model, the reports of each part must be equal, and no rank may
    report an event.

    Example::

        agreement = Agreement(group, [presence])
        answers = agreement(step, "proposed", misuse=None)
    """

    def __init__(self, group: Group, checks: Sequence[Check] = (), *, engine: str = "") -> None:
        self.group, self.checks, self.engine = group, list(checks), engine

    def __call__(
        self,
        step: int,
        phase: str,
        *,
        first: bool = True,
        last: bool = False,
        **said: Any,
    ) -> Answers:
        """Gather the reports of all ranks and judge them.

        Args:
            step: Updates made before.
            phase: See `Turn`.
            first: See `Turn`.
            last: See `Turn`.
            said: Further facts of the caller; None is left out. Keys with a meaning here:
                `failure`, the type and text of an error that stops this rank; `misuse`, a user
                error; `corrupt`, the reason for which this rank rejected a message.

        Raises:
            PayloadCorrupt: A rank rejected a message.
            ThinwireError: A rank reported a user error or a failure. The type is kept where it is
                one of the exchange's errors.
            Mismatch: Ranks are at different steps, or in different engines.

        Checks may raise further errors.
        """
        turn = Turn(self.group, step, phase, first, last)
        told: Said = {"engine": self.engine, "step": step, "phase": phase}
        for check in self.checks:
            told |= check.say(turn)
        told |= {key: value for key, value in said.items() if value is not None}
        answers = self._heard(told, turn.what)
        # most specific cause first; a unanimous report without an event needs no look
        if not (answers.unanimous and told.keys() <= _QUIET):
            _refuse_failures(answers)
            _refuse_misuse(answers)  # before `corrupt`: a user error is the cause of bad messages
            _refuse_different_places(answers, turn.what)
            _refuse_corrupt(answers)
        for check in self.checks:
            check.judge(turn, answers)
        return answers

    def alike(self, content: bytes, what: str) -> bool:
        """Return True if the ranks of each part hold the same content.

        Communication: 24 bytes per rank if so.
        """
        rows = self.group.gather_parts(content, b"", action=what)
        said = [{} if row is None else {"row": row} for row in rows]
        return not any(self._answers(said).unlike("row"))

    def _heard(self, told: Said, what: str) -> Answers:
        mine = _written(told)
        quiet = {key for key, value in told.items() if value} <= _QUIET
        common = _written(_common(told)) if quiet else mine
        return self._answers(
            _read(self.group.gather_parts(mine, common, action=what), mine, told, what)
        )

    def _answers(self, said: Sequence[Said]) -> Answers:
        return Answers(said, self.group.parts, self.group.answer_index)


def _common(told: Said) -> Said:
    return {key: told[key] for key in _COMMON if key in told}


def _written(said: Said) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _read(rows: Sequence[bytes | None], mine: bytes, told: Said, what: str) -> list[Said]:
    found = []
    for rank, row in enumerate(rows):
        if row is None or row == mine:
            # None: a rank of another part, known by the common keys only
            found.append(told if row else _common(told))
            continue
        try:
            said = json.loads(row)
        except ValueError as error:
            raise wrong_call_site(what, rank, row) from error
        if not isinstance(said, dict) or not said.keys() >= set(_PLACE):
            raise wrong_call_site(what, rank, said if isinstance(said, dict) else b"")
        found.append(said)
    return found


def _refuse_failures(answers: Answers) -> None:
    for _, (kind, text) in answers.of("failure"):
        raise _FAILURES.get(kind, ThinwireError)(text)


def _refuse_misuse(answers: Answers) -> None:
    for rank, text in answers.of("misuse"):
        raise ThinwireError(f"rank {rank}: {text}. Nothing was applied on any rank")


def _refuse_corrupt(answers: Answers) -> None:
    for rank, text in answers.of("corrupt"):
        raise PayloadCorrupt(
            f"rank {rank} refused a message: {text}. Nothing was applied on any rank"
        )


def _refuse_different_places(answers: Answers, what: str) -> None:
    first = answers[0]
    for rank, said in enumerate(answers):
        if said["engine"] != first["engine"]:
            raise Mismatch(
                f"{what}: rank 0 steps {first['engine']}, rank {rank} {said['engine']}, counted "
                "as they were made over these ranks. All ranks must make engines and optimizers, "
                "and step them, in the same order"
            )
    for rank, said in enumerate(answers):
        if said["phase"] != first["phase"] and COMPARING in (said["phase"], first["phase"]):
            raise wrong_call_site(what, rank)
        if (said["step"], said["phase"]) != (first["step"], first["phase"]):
            raise Mismatch(
                f"{what}: rank 0 is at step {first['step']} ({first['phase']}), rank {rank} at "
                f"step {said['step']} ({said['phase']}). All ranks must call step() equally often, "
                "leave local updates at the same step, and go all or none through an attached DDP "
                "model"
            )


MAX_DROPS_IN_A_ROW = 10
_log = logging.getLogger("thinwire")
_ADDED = ", added to those of other ranks,"


class Verdict(Enum):
    """Common decision of all ranks about a step."""

    APPLY = "apply"
    """The update is made."""
    DROP = "drop"
    """A gradient is not finite on some rank."""
    OVERFLOW = "overflow"
    """A loss scaler found such a gradient on some rank."""
    END = "end"
    """No rank has a batch left."""


def verdict_of(answers: Answers) -> Verdict:
    """Return the decision that follows from the reports.

    The keys are `batches` (this rank has a batch), `overflow` (a loss scaler found an overflow),
    `non_finite` and `sum_non_finite` (the first parameter whose gradient is not finite: on this
    rank alone, or in the sum over several ranks).

    >>> verdict_of(Answers([{"non_finite": "weight"}, {}], (), 0))
    <Verdict.DROP: 'drop'>
    """
    batches = [batch for _, batch in answers.of("batches")]
    if batches and not any(batches):
        return Verdict.END
    if any(overflow for _, overflow in answers.of("overflow")):
        return Verdict.OVERFLOW
    found = any(True for key in ("non_finite", "sum_non_finite") for _ in answers.of(key))
    return Verdict.DROP if found else Verdict.APPLY


class Drops:
    """Counts dropped steps, warns, and raises after too many in a row."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.given_up: str | None = None
        """Reason for which this rank cannot continue with steps of its own, or None."""

    def applied(self) -> None:
        """Record that a step was not dropped."""
        self.in_a_row, self.given_up = 0, None

    def overflowed(self) -> None:
        """Count a step dropped by a loss scaler, which gives up by its own rules."""
        self.total += 1

    def dropped(self, step: int, answers: Answers) -> None:
        """Count a step that all ranks drop, and warn.

        Raises:
            NonFinite: The tenth in a row, on every rank.
        """
        culprits = [(*each, "") for each in answers.of("non_finite")]
        culprits += [(*each, _ADDED) for each in answers.of("sum_non_finite")]
        rank, name, added = culprits[0]
        self.total += 1
        text = (
            f"step {step} was dropped on every rank: the gradient of parameter {name} on rank "
            f"{rank}{added} is not finite"
        )
        too_many = self._counted(text)
        if too_many is not None:
            raise NonFinite(too_many)
        _warn(text)

    def dropped_here(self, step: int, name: str) -> None:
        """Count a step that this rank alone drops because of the gradient of `name`, and warn.

        The tenth in a row sets `given_up`, which the other ranks receive.
        """
        self.total += 1
        text = (
            f"local step {step} was dropped on this rank: the gradient of parameter {name} is not "
            "finite"
        )
        self.given_up = self._counted(text)
        _warn(text)

    def _counted(self, text: str) -> str | None:
        """Count one more step in a row. Return the error's text if there are too many."""
        self.in_a_row += 1
        if self.in_a_row < MAX_DROPS_IN_A_ROW:
            return None
        return (
            f"{text}; this was dropped step {self.in_a_row} in a row. Lower the learning rate, "
            "clip gradients, or look at the data of that rank"
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)
    _log.warning(text)
