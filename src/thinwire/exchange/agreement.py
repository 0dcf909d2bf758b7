"""Agreements: no rank changes anything before all ranks have the same view of the step.

An agreement is one message per rank and a list of checks. Each check adds the facts it knows about
this rank and judges the answers of all ranks. All ranks judge the same answers, so either all of
them continue or all raise the same error.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

from thinwire._wording import warn_user
from thinwire.comm import Group, Pending, Regrouped, sealed, wrong_call_site
from thinwire.errors import Diverged, Mismatch, NonFinite, PayloadCorrupt, ThinwireError

COMPARING = "comparing everything"
"""Phase in which ranks compare all replicated state, before a checkpoint."""
FLUSHING = "flushing"
"""Phase in which ranks agree to finish what is pending."""
AVERAGED = "averaged"
"""Phase in which ranks agree to apply an averaging."""

Report = dict[str, Any]
"""Report of one rank by key, with values that JSON holds. A key without a value is left out."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One agreement."""

    group: Group
    step: int
    """Updates made before."""
    phase: str
    """Phase of the step. Ranks in different phases are out of step."""
    first: bool
    """True for the first agreement of an update."""
    last: bool
    """True if the update follows."""
    rides: bool = False
    """True if it is sent with the messages, so that it knows those of the update before."""

    @property
    def purpose(self) -> str:
        """The occasion, for error messages."""
        return f"agreeing on step {self.step}"


class Answers(Sequence[Report]):
    """Reports of all ranks, in rank order.

    >>> answers = Answers([{"step": 3}, {"step": 3, "failure": "x"}], (), 0)
    >>> answers.unanimous, list(answers.of("failure"))
    (False, [(1, 'x')])
    """

    def __init__(self, reports: Sequence[Report], parts: Sequence[int], rank: int) -> None:
        self._reports = reports
        self._parts = parts or [0] * len(reports)
        self._rank = rank
        self.unanimous = all(report is reports[0] for report in reports)
        """True if all ranks sent the same report."""

    def __getitem__(self, rank: Any) -> Any:
        return self._reports[rank]

    def __len__(self) -> int:
        return len(self._reports)

    def of(self, key: str) -> Iterator[tuple[int, Any]]:
        """Yield rank and value of each report that contains this key."""
        if self.unanimous and key not in self._reports[0]:
            return iter(())
        return ((rank, report[key]) for rank, report in enumerate(self._reports) if key in report)

    def by_part(self) -> list[dict[int, Report]]:
        """Return the reports by rank, one dict for each part of the model."""
        found: dict[int, dict[int, Report]] = {}
        for rank, (part, report) in enumerate(zip(self._parts, self._reports, strict=True)):
            found.setdefault(part, {})[rank] = report
        return list(found.values())

    def of_my_part(self) -> list[Report]:
        """Return the reports of the ranks that hold the same part as this one."""
        # equal reports are equal for every part: no need to group them
        if self.unanimous:
            return list(self._reports)
        return next(list(part.values()) for part in self.by_part() if self._rank in part)

    def ranks_of_my_part(self) -> Iterator[tuple[int, Report]]:
        """Yield rank and report of the ranks that hold the same part as this one."""
        part = self._parts[self._rank]
        of_all = enumerate(zip(self._parts, self._reports, strict=True))
        return ((rank, report) for rank, (own, report) in of_all if own == part)

    def of_my_replica(self, key: str) -> list[Any]:
        """Return the values of this replica's ranks, which are consecutive, by part; [] if none."""
        # a replica has one rank of every part
        width = len(set(self._parts))
        first = self._rank - self._rank % width
        return [report[key] for report in self._reports[first : first + width] if key in report]

    def differences(self, key: str, default: Any = None) -> Iterator[tuple[int, Any, int, Any]]:
        """Yield first rank of a part, its value, a rank that differs and its value, for one key."""
        # only ranks of one part hold the same tensors
        for part in [] if self.unanimous else self.by_part():
            first = min(part)
            value = part[first].get(key, default)
            for rank, report in part.items():
                if report.get(key, default) != value:
                    yield first, value, rank, report.get(key, default)


class Check(Protocol):
    """One fact that ranks report to each other. It has no effect before `judge`."""

    def report(self, vote: Vote) -> Report:
        """Return this rank's report, or nothing. The keys belong to this check alone."""

    def judge(self, vote: Vote, answers: Answers) -> None:
        """Raise the error that follows from the answers, or store the agreed facts."""


_POSITION = ("engine", "step", "phase")
_COMMON = (*_POSITION, "ready")
"""Keys that must be equal on the ranks of all parts."""
_QUIET = {*_COMMON, "kinds", "rates", "settings", "digest", "sums", "batch_id", "buffers"}
"""Keys that are not sent to ranks of other parts."""
_FAILURES = {kind.__name__: kind for kind in (Diverged, Mismatch, NonFinite, PayloadCorrupt)}
"""Errors that keep their type on other ranks; all others become `ThinwireError`."""


@dataclass(frozen=True, slots=True)
class Participants:
    """Additional participants and facts of an agreement."""

    checks: Sequence[Check] = ()
    job: Group | None = None
    """All ranks, where they hold different stages. None if only the exchanging ranks agree."""
    names_of_stages: Sequence[Sequence[str]] = ()
    """Names of the parameters of each stage."""


class Agreement:
    """The agreements of one training; checks judge in their order. See `Group.launch_bytes`."""

    def __init__(self, group: Group, checks: Sequence[Check] = ()) -> None:
        self.group = group
        self.checks = list(checks)
        self.engine = ""
        self._spoke: list[Check] = []
        """Checks that the present report is of."""

    def __call__(
        self, step: int, phase: str, *, first: bool = True, last: bool = False, **facts: Any
    ) -> Answers:
        """Gather the reports of all ranks and judge them; see `Vote`.

        `facts` of the caller are left out where they are None. Three keys stop all ranks:
        `failure`, type and text of this rank's error; `user_error`; `corrupt`, a refused message.
        """
        return self.launch(step, phase, first=first, last=last, **facts).wait()

    def launch(
        self, step: int, phase: str, *, first: bool = True, last: bool = False, **facts: Any
    ) -> Pending[Answers]:
        """Send this rank's report; `wait` judges. Wait for it before the next is launched."""
        vote = Vote(self.group, step, phase, first, last)
        own = self._reported(vote, facts)
        message = _written(own)
        # without an event, ranks of other parts need only the common keys
        quiet = {key for key, value in own.items() if value} <= _QUIET
        common = _written(_common(own)) if quiet else message
        ask = partial(self.group.launch_bytes, message, action=vote.purpose, common=common)
        rows = ask()

        def answers() -> Answers:
            nonlocal rows
            while True:
                reports = _read(rows.wait(), message, own, vote.purpose)
                if self.group.static_membership:
                    return self._judged(vote, own, reports)
                last = max(report["step"] for report in reports)
                phases = {report["phase"] for report in reports}
                behind = {report["phase"] for report in reports if report["step"] < last}
                # who ends first takes part in the averaging of the others, which ask again
                if behind == {FLUSHING} or phases == {FLUSHING, AVERAGED}:
                    if phase == FLUSHING and (step < last or AVERAGED in phases):
                        return self._answers(reports)
                else:
                    odd = _odd_ranks(reports)
                    if self.group.answer_index in odd or not self.group.leave_out(odd):
                        return self._judged(vote, own, reports)
                    if vote.last:  # with the messages of these ranks
                        raise Regrouped
                rows = ask()

        return Pending(answers)

    def riding(self, step: int, phase: str, *, near: bool, **facts: Any) -> "Riding":
        """Return this rank's report for a slot of a sum that all ranks launch; see `Riding`."""
        vote = Vote(self.group, step, phase, first=True, last=True, rides=True)
        return Riding(self, vote, self._reported(vote, facts), near=near)

    def _reported(self, vote: Vote, facts: Mapping[str, Any]) -> Report:
        own: Report = {"engine": self.engine, "step": vote.step, "phase": vote.phase}
        self._spoke = []
        # all checks share one message; each writes only its own keys
        for check in self.checks:
            if report := check.report(vote):
                own |= report
                self._spoke.append(check)
        return own | {key: value for key, value in facts.items() if value is not None}

    def _judged(self, vote: Vote, own: Report, reports: Sequence[Report]) -> Answers:
        answers = self._answers(reports)
        # most specific cause first; a unanimous report without an event needs no look
        quiet = answers.unanimous and own.keys() <= _QUIET
        if not quiet:
            _refuse_errors(answers)
            if vote.rides:  # a rank that refused a damaged mean is a step behind the others
                require_equal_sums(vote, answers)
            _refuse_different_steps(answers, vote.purpose)
            for rank, text in answers.of("corrupt"):
                nothing = "Nothing was applied on any rank"
                raise PayloadCorrupt(f"rank {rank} refused a message: {text}. {nothing}")
        # who reported nothing, as all others did, has nothing to judge
        for check in self._spoke if quiet else self.checks:
            check.judge(vote, answers)
        return answers

    def all_equal(self, content: bytes, purpose: str) -> bool:
        """Return True if the ranks of each part hold the same content."""
        rows = self.group.launch_bytes(content, action=purpose, common=b"").wait()
        reports = [{} if row is None else {"row": row} for row in rows]
        return not any(self._answers(reports).differences("row"))

    def _answers(self, reports: Sequence[Report]) -> Answers:
        return Answers(reports, self.group.parts, self.group.answer_index)


_OF_A_RANK = ("batches", "merged", "complete", "overflow")
"""Facts of each rank's own: ranks that differ in them need no second round."""


class Riding:
    """A report whose digest rides in a slot of a sum, in place of the first round of a vote.

    Where digests differ all ranks send their reports, as they do after an agreement's first round.
    """

    def __init__(self, agreement: Agreement, vote: Vote, own: Report, *, near: bool) -> None:
        self.near = near
        """True if all ranks said that they are near each other, once judged."""
        self._agreement = agreement
        self._vote = vote
        self._own = own
        shared = repr({key: value for key, value in own.items() if key not in _OF_A_RANK})
        digest = hashlib.blake2b(shared.encode(), digest_size=8).digest()
        self.slot = sealed(digest + bytes([_packed(own) | near << 7]))

    def judged(self, slots: Sequence[bytes]) -> Answers:
        """Return the answers from the slots of all ranks."""
        vote, own = self._vote, self._own
        # the last update of all ranks needs their numbers
        if own.get("batches", True) and all(slot == self.slot for slot in slots):
            return self._agreement._judged(vote, own, [own] * len(slots))
        rows = vote.group.unsealed(slots, vote.purpose)
        self.near = all(row[-1] & 128 for row in rows)
        bits = [row[-1] & 127 for row in rows]
        if len({row[:-1] for row in rows}) == 1 and any(b & 3 != 1 for b in bits):
            here = bits[vote.group.rank]
            reports = [own if b == here else _unpacked(own, b) for b in bits]
        else:
            message = _written(own)
            messages = vote.group.gather_bytes(message, action=vote.purpose)
            reports = _read(messages, message, own, vote.purpose)
        return self._agreement._judged(vote, own, reports)


def _packed(report: Report) -> int:
    """Return a rank's own facts in bits: each that may be missing has two."""
    bits = 0
    for index, key in enumerate(("batches", "complete", "overflow")):
        bits |= ((key in report) | bool(report.get(key)) << 1) << 2 * index
    return bits


def _unpacked(own: Report, bits: int) -> Report:
    """Return the report of a rank that differs from `own` in its own facts."""
    found = {key: value for key, value in own.items() if key not in _OF_A_RANK}
    for index, key in enumerate(("batches", "complete", "overflow")):
        if bits >> 2 * index & 1:
            found[key] = bool(bits >> 2 * index & 2)
    return found


def _common(report: Report) -> Report:
    return {key: report[key] for key in _COMMON if key in report}


def _written(report: Report) -> bytes:
    return json.dumps(report, separators=(",", ":")).encode()


def _read(rows: Sequence[bytes | None], message: bytes, own: Report, purpose: str) -> list[Report]:
    found = []
    for rank, row in enumerate(rows):
        if row is None or row == message:
            # None: a rank of another part, known by the common keys only
            found.append(own if row else _common(own))
            continue
        # a rank in another call may have sent anything, also no report at all
        try:
            report = json.loads(row)
        except ValueError as error:
            raise wrong_call_site(purpose, rank, row) from error.__context__
        if not isinstance(report, dict) or not report.keys() >= set(_POSITION):
            raise wrong_call_site(purpose, rank, report if isinstance(report, dict) else b"")
        found.append(report)
    return found


def require_equal_sums(vote: Vote, answers: Answers) -> None:
    """Raise `PayloadCorrupt` on all ranks if one of them received another sum."""
    for first, _, rank, _ in answers.differences("sums"):
        late = "It was applied: restart all ranks from the last checkpoint"
        raise PayloadCorrupt(
            f"{vote.purpose}: the sums of dense tensors that arrived on rank {first} and rank "
            f"{rank} differ: a message was damaged on its way. "
            f"{'Nothing was applied on any rank' if vote.last and not vote.rides else late}"
        )


def _refuse_errors(answers: Answers) -> None:
    # the text already names its rank, so all ranks raise the same one
    for _, (kind, text) in answers.of("failure"):
        raise _FAILURES.get(kind, ThinwireError)(text)
    # before `corrupt`: a user error is the cause of bad messages
    nothing = "Nothing was applied on any rank" if len(answers) > 1 else "Nothing else was applied"
    for rank, text in answers.of("user_error"):
        raise ThinwireError(f"rank {rank}: {text}. {nothing}")


def _odd_ranks(reports: Sequence[Report]) -> list[int]:
    """Return the ranks whose call differs from that of more than half; none if there is no such."""
    calls = [[report[key] for key in _POSITION] for report in reports]
    most = max(calls, key=calls.count)
    if 2 * calls.count(most) <= len(calls):
        return []
    return [rank for rank, call in enumerate(calls) if call != most]


def _refuse_different_steps(answers: Answers, purpose: str) -> None:
    first = answers[0]
    for rank, report in enumerate(answers):
        if report["engine"] != first["engine"]:
            raise Mismatch(
                f"{purpose}: rank 0 steps {first['engine']} and rank {rank} {report['engine']}, "
                "numbered in the order of creation over these ranks. All ranks must create engines "
                "and optimizers, and step them, in the same order"
            )
    for rank, report in enumerate(answers):
        # a rank that compares before a checkpoint is in another call, not at another step
        if report["phase"] != first["phase"] and COMPARING in (report["phase"], first["phase"]):
            raise wrong_call_site(purpose, rank)
        if (report["step"], report["phase"]) != (first["step"], first["phase"]):
            raise Mismatch(
                f"{purpose}: rank 0 is at step {first['step']} ({first['phase']}), rank {rank} at "
                f"step {report['step']} ({report['phase']}). All ranks must call step() equally "
                "often, leave local updates at the same step, and either all or none use an "
                "attached DDP model"
            )


MAX_DROPS_IN_A_ROW = 10
_ADDED = ", added to those of other ranks,"


class StepDecision(Enum):
    """Common decision of all ranks about a step."""

    APPLY = "apply"
    """The update is made."""
    DROP = "drop"
    """A gradient is not finite on some rank."""
    OVERFLOW = "overflow"
    """A loss scaler found such a gradient on some rank."""
    END = "end"
    """No rank has a batch left."""


def verdict_of(answers: Answers) -> StepDecision:
    """Return the decision that follows from the reports.

    >>> verdict_of(Answers([{"non_finite": "weight"}, {}], (), 0))
    <StepDecision.DROP: 'drop'>
    """
    # END first: a rank without a batch has no gradients to judge
    batches = [batch for _, batch in answers.of("batches")]
    if batches and not any(batches):
        return StepDecision.END
    # a scaler drops by its own rules, and its overflow also makes gradients infinite
    if any(overflow for _, overflow in answers.of("overflow")):
        return StepDecision.OVERFLOW
    found = any(True for key in ("non_finite", "sum_non_finite") for _ in answers.of(key))
    return StepDecision.DROP if found else StepDecision.APPLY


class Drops:
    """Counts dropped steps, warns, and raises after too many in a row."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.given_up: str | None = None
        """Reason for which this rank cannot continue with steps of its own, or None."""
        self._untold: Report = {}
        """This rank's part in a dropped step of which the ranks have not told each other."""

    def applied(self) -> None:
        """Record that a step was not dropped."""
        self.in_a_row = 0
        self.given_up = None

    def overflowed(self) -> None:
        """Count a step dropped by a loss scaler, which gives up by its own rules."""
        self.total += 1

    @property
    def last(self) -> bool:
        """True if the next drop is the one that ends the training."""
        return self.in_a_row + 1 >= MAX_DROPS_IN_A_ROW

    def dropped_untold(self, step: int, found: Mapping[str, str]) -> None:
        """Count a step that all ranks drop; they tell each other why in the next one."""
        self.total += 1
        self.in_a_row += 1
        self._untold = {"dropped": step, **{f"was_{key}": name for key, name in found.items()}}

    def report(self, vote: Vote) -> Report:
        """See `Check`."""
        return self._untold

    def judge(self, vote: Vote, answers: Answers) -> None:
        """See `Check`; warns of a step that was dropped before."""
        if self._untold:
            warn_user(_dropped_text(self._untold["dropped"], answers, "was_"))
            self._untold = {}

    def dropped(self, step: int, answers: Answers) -> None:
        """Count a step that all ranks drop, and warn; raise `NonFinite` at the tenth in a row."""
        self.total += 1
        text = _dropped_text(step, answers)
        too_many = self._counted(text)
        if too_many is not None:
            raise NonFinite(too_many)
        warn_user(text)

    def dropped_here(self, step: int, name: str) -> None:
        """Count a step that this rank alone drops; the tenth in a row sets `given_up`."""
        self.total += 1
        text = (
            f"local step {step} was dropped on this rank: the gradient of parameter {name} is not "
            "finite"
        )
        self.given_up = self._counted(text)
        warn_user(text)

    def _counted(self, text: str) -> str | None:
        """Count one more step in a row. Return the error's text if there are too many."""
        self.in_a_row += 1
        if self.in_a_row < MAX_DROPS_IN_A_ROW:
            return None
        return (
            f"{text}; this was dropped step {self.in_a_row} in a row. Lower the learning rate, "
            "clip gradients, or check the data of that rank"
        )


def _dropped_text(step: int, answers: Answers, when: str = "") -> str:
    culprits = [(*culprit, "") for culprit in answers.of(f"{when}non_finite")]
    culprits += [(*culprit, _ADDED) for culprit in answers.of(f"{when}sum_non_finite")]
    rank, name, added = culprits[0]
    return (
        f"step {step} was dropped on every rank: the gradient of parameter {name} on rank "
        f"{rank}{added} is not finite"
    )
