"""Agreements: nobody moves before everybody has the same view of the step.

An agreement is one message a rank and a list of checks. Each check adds what it knows of this rank,
and judges what all ranks have said. All ranks judge the same answers, so all of them go on or all
raise the same error.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from thinwire.comm import Group, elsewhere
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
"""The phase in which ranks compare all that they must hold alike, before a checkpoint."""

Said = dict[str, Any]
"""What one rank says, by key, in values that JSON holds. A key without a value is left out."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One agreement."""

    group: Group
    step: int
    """Updates made before."""
    phase: str
    """Where in the step the rank is. Ranks in different phases have lost each other."""
    first: bool
    """Whether it is the first one of its update."""
    last: bool
    """Whether messages have arrived, so that the update follows."""

    @property
    def what(self) -> str:
        """The occasion, for errors."""
        return f"agreeing on step {self.step}"


class Answers(Sequence[Said]):
    """What all ranks have said, in rank order.

    Where ranks hold different parts of the model, and all is well, those of other parts are heard
    in short: only what all say alike, such as `step` and `phase`.
    """

    def __init__(self, said: Sequence[Said], parts: Sequence[int], rank: int) -> None:
        self._said, self._parts, self._rank = said, parts or [0] * len(said), rank
        self.unanimous = all(each is said[0] for each in said)
        """Whether all ranks have said the same."""

    def __getitem__(self, rank: Any) -> Any:
        return self._said[rank]

    def __len__(self) -> int:
        return len(self._said)

    def of(self, key: str) -> Iterator[tuple[int, Any]]:
        """Rank and value of those that said something under this key."""
        return ((rank, said[key]) for rank, said in enumerate(self._said) if key in said)

    def by_part(self) -> list[dict[int, Said]]:
        """The answers by rank of those that hold the same part, for each part."""
        found: dict[int, dict[int, Said]] = {}
        for rank, (part, said) in enumerate(zip(self._parts, self._said, strict=True)):
            found.setdefault(part, {})[rank] = said
        return list(found.values())

    def of_my_part(self) -> list[Said]:
        """Those of the ranks that hold the same part as this one."""
        if self.unanimous:
            return list(self._said)
        return next(list(part.values()) for part in self.by_part() if self._rank in part)

    def of_my_replica(self, key: str) -> list[Any]:
        """What the ranks say that hold the parts of this rank's model, in the order of the parts;
        replicas are consecutive ranks. Empty where nobody says anything.
        """
        width = len(set(self._parts))
        first = self._rank - self._rank % width
        return [said[key] for said in self._said[first : first + width] if key in said]

    def unlike(self, key: str, default: Any = None) -> Iterator[tuple[int, Any, int, Any]]:
        """Of ranks of one part that differ under this key: the first one and its value, the other
        one and its value.
        """
        for part in [] if self.unanimous else self.by_part():
            first = min(part)
            value = part[first].get(key, default)
            for rank, said in part.items():
                if said.get(key, default) != value:
                    yield first, value, rank, said.get(key, default)


class Check(Protocol):
    """One thing that ranks tell each other. It has no effect before `judge`."""

    def say(self, turn: Turn) -> Said:
        """What this rank says; the keys are this check's own. Empty where there is nothing."""

    def judge(self, turn: Turn, answers: Answers) -> None:
        """Raise the error that follows from the answers, or remember what all ranks now know."""


_PLACE = ("engine", "step", "phase")
_COMMON = (*_PLACE, "ready")
"""What ranks of all parts must say alike."""
_QUIET = {*_COMMON, "kinds", "rates", "settings", "digest", "sums", "likeness", "buffers"}
"""What ranks of another part need not hear."""
_FAILURES = {kind.__name__: kind for kind in (Diverged, Mismatch, NonFinite, PayloadCorrupt)}
"""The errors that are of the same kind on ranks which are told of them; others are
`ThinwireError`."""


@dataclass(frozen=True, slots=True)
class Among:
    """With whom an exchange agrees, and on what besides its own."""

    checks: Sequence[Check] = ()
    job: Group | None = None
    """All ranks, where they hold different stages; None for those that exchange."""
    names_of_stages: Sequence[Sequence[str]] = ()
    """The parameters of each stage."""


class Agreement:
    """The agreements of one training.

    Args:
        group: All ranks that must agree.
        checks: In the order in which they judge.
        engine: Which of the engines and optimizers over these ranks this is, in the order in which
            they were made.

    Communication: `Group.gather_parts`, 24 bytes a rank when all say the same; where they hold
    different parts of the model, when the ranks of each part do and nothing has happened.
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
        """Hear all ranks, and judge.

        Args:
            step: Updates made before.
            phase: See `Turn`.
            first: See `Turn`.
            last: See `Turn`.
            said: What the caller says besides; None is left out. Keys with a meaning here:
                `failure`, name and text of an error with which this rank cannot go on; `misuse`,
                what its user did; `corrupt`, why it refused a message.

        Raises:
            PayloadCorrupt: A rank refused a message.
            ThinwireError: A rank was misused, or has failed; of the same kind where it is one of an
                exchange.
            Mismatch: Ranks are at different steps, or in different engines.

        Besides what the checks raise.
        """
        turn = Turn(self.group, step, phase, first, last)
        told: Said = {"engine": self.engine, "step": step, "phase": phase}
        for check in self.checks:
            told |= check.say(turn)
        told |= {key: value for key, value in said.items() if value is not None}
        answers = self._heard(told, turn.what)
        if not (answers.unanimous and told.keys() <= _QUIET):
            _refuse_failures(answers)
            _refuse_misuse(answers)  # where a rank says why, its messages are refused for that
            _refuse_different_places(answers, turn.what)
            _refuse_corrupt(answers)
        for check in self.checks:
            check.judge(turn, answers)
        return answers

    def alike(self, content: bytes, what: str) -> bool:
        """Whether the ranks of each part say the same. Communication: 24 bytes a rank if so."""
        rows = self.group.gather_parts(content, b"", what=what)
        said = [{} if row is None else {"row": row} for row in rows]
        return not any(self._answers(said).unlike("row"))

    def _heard(self, told: Said, what: str) -> Answers:
        mine = _written(told)
        quiet = {key for key, value in told.items() if value} <= _QUIET
        common = _written(_common(told)) if quiet else mine
        return self._answers(
            _read(self.group.gather_parts(mine, common, what=what), mine, told, what)
        )

    def _answers(self, said: Sequence[Said]) -> Answers:
        return Answers(said, self.group.parts, self.group.place)


def _common(told: Said) -> Said:
    return {key: told[key] for key in _COMMON if key in told}


def _written(said: Said) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _read(rows: Sequence[bytes | None], mine: bytes, told: Said, what: str) -> list[Said]:
    found = []
    for rank, row in enumerate(rows):
        if row is None or row == mine:
            found.append(told if row else _common(told))
            continue
        try:
            said = json.loads(row)
        except ValueError as error:
            raise elsewhere(what, rank, row) from error
        if not isinstance(said, dict) or not said.keys() >= set(_PLACE):
            raise elsewhere(what, rank, said if isinstance(said, dict) else b"")
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
            raise elsewhere(what, rank)
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
    """What all ranks make of a step."""

    APPLY = "apply"
    """The update is made."""
    DROP = "drop"
    """A gradient is not finite somewhere."""
    OVERFLOW = "overflow"
    """A loss scaler found such a gradient somewhere."""
    END = "end"
    """No rank has a batch left."""


def verdict_of(answers: Answers) -> Verdict:
    """What follows from the keys `batches` (whether this rank has one), `overflow` (whether a loss
    scaler found one), `non_finite` and `sum_non_finite` (the first parameter whose gradient is not
    finite, of this rank alone or summed over several).
    """
    batches = [batch for _, batch in answers.of("batches")]
    if batches and not any(batches):
        return Verdict.END
    if any(overflow for _, overflow in answers.of("overflow")):
        return Verdict.OVERFLOW
    found = any(True for key in ("non_finite", "sum_non_finite") for _ in answers.of(key))
    return Verdict.DROP if found else Verdict.APPLY


class Drops:
    """Counts dropped steps, warns, and gives up in the end."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.given_up: str | None = None
        """Why this rank cannot go on with steps of its own."""

    def applied(self) -> None:
        """A step was not dropped."""
        self.in_a_row, self.given_up = 0, None

    def overflowed(self) -> None:
        """Count a step that a loss scaler drops, which adapts and gives up by its own rules."""
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
        """Count a step that this rank alone drops, for the gradient of parameter `name`, and warn.
        The tenth in a row is `given_up`, for the others to hear.
        """
        self.total += 1
        text = (
            f"local step {step} was dropped on this rank: the gradient of parameter {name} is not "
            "finite"
        )
        self.given_up = self._counted(text)
        _warn(text)

    def _counted(self, text: str) -> str | None:
        """One more in a row, and the text of the error where these are too many."""
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
