"""What ranks tell each other around an exchange: nobody moves before everybody has the same view of
the step.
"""

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.comm import Group, elsewhere
from thinwire.compress.protocol import Flags
from thinwire.errors import Diverged, Mismatch, NonFinite, PayloadCorrupt, ThinwireError

__all__ = [
    "ABSENT",
    "COMPARING",
    "DENSE",
    "MAX_DROPS_IN_A_ROW",
    "ROW_SPARSE",
    "Drops",
    "GradientPattern",
    "Report",
    "Settings",
    "agree_on_step",
    "read_flags",
]

if TYPE_CHECKING:
    from thinwire.exchange.digest import RollingDigest


ABSENT, DENSE, ROW_SPARSE = "0", "1", "2"
COMPARING = "comparing everything"
"""The phase in which ranks compare all that they must hold alike, before a checkpoint."""
MAX_DROPS_IN_A_ROW = 10
_log = logging.getLogger("thinwire")


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's view of a step."""

    step: int
    phase: str
    """Where in the step the rank is; ranks in different phases have lost each other."""
    engine: str = ""
    """Which of the engines and optimizers over these ranks this is, in the order in which they were
    made."""
    kinds: str = ""
    """Per parameter: ABSENT, DENSE or ROW_SPARSE gradient."""
    non_finite: int | None = None
    """The first parameter whose gradient is not finite."""
    sum_non_finite: int | None = None
    """The first parameter whose sum over several ranks is not finite, though this rank's own
    gradient is."""
    overflow: bool | None = None
    """Whether a loss scaler on this rank found an overflow; None without one."""
    corrupt: str | None = None
    """Why a message that this rank received was refused."""
    unusable: str | None = None
    """Why messages that this rank sent early do not stand for its gradients."""
    misuse: str | None = None
    """What the user of this rank did that cannot be gone on with."""
    loss: float | None = None
    """This rank's mean loss of the step, where an interval follows it."""
    rate: float | None = None
    """This rank's learning rate of the step, likewise."""
    rates: list[float] = field(default_factory=list)
    """This rank's learning rate of each parameter group, where all ranks update alike."""
    settings: list[str] = field(default_factory=list)
    """The other hyper-parameters of each parameter group, likewise, as JSON."""
    digest: str | None = None
    """Of what all ranks must hold alike before this step; see `RollingDigest`."""
    sums: int = 0
    """Of the dense sums that have arrived, which are the same on all ranks unless a message was
    damaged."""
    likeness: str | None = None
    """Of a sample of what this rank brings, in the first steps; see `Likeness`."""
    scale: float | None = None
    """This rank's loss scale, where each rank has its own."""
    state: list[str] = field(default_factory=list)
    """Optimizer state that this rank can give to an averaging of parameters."""
    members: dict[str, Any] = field(default_factory=dict)
    """Who comes and who goes, where members do; see `thinwire.members`."""
    work: Sequence[int | None] | None = None
    """Steps and tokens of this rank since the last averaging, where ranks may make unequal ones."""
    weight: float | None = None
    """By which this rank's change was multiplied, likewise."""
    written: str | None = None
    """Digest of the parameters that somebody else wrote since all ranks were equal; None where
    nobody did."""
    failure: tuple[str, str] | None = None
    """Name and text of the error with which this rank cannot go on: of an exchange of fewer ranks,
    this one among them, or of its own steps."""


_FIELDS = tuple(each.name for each in fields(Report))
_SELDOM = {"work", "weight", "written", "failure"}
"""Only told where there are any."""
_FAILURES = {kind.__name__: kind for kind in (Diverged, Mismatch, NonFinite, PayloadCorrupt)}
"""The errors that are of the same kind on ranks which are told of them; others are
`ThinwireError`."""


def agree_on_step(
    group: Group, report: Report, names: Sequence[str], digest: "RollingDigest | None" = None
) -> list[Report]:
    """Every rank's report, after the checks that all of them must pass.

    Args:
        group: The ranks.
        report: This rank's view.
        names: The parameters in the order of `Report.kinds`.
        digest: What `Report.digest` is from; finds what differs.

    Returns:
        The reports in rank order.

    Raises:
        PayloadCorrupt: A rank refused a message.
        ThinwireError: A rank was misused; or an exchange of fewer ranks has failed, then the error
            is of the same kind as theirs, where it is one of an exchange.
        Diverged: Ranks do not hold the same.
        Mismatch: Ranks are at different steps or in different engines, would update at different
            rates or with different hyper-parameters, or a parameter has a gradient on some of them
            only.

    Communication: `Group.gather_bytes`, 24 bytes a rank when all say the same. Where sites hold
    sharded models, 25 bytes a rank inside the site before.
    """
    what = f"agreeing on step {report.step}"
    shards = group.shards
    if shards is not None and group.stays:
        report = _of_site(report, shards, what)
    told = {name: getattr(report, name) for name in _FIELDS}
    told = {name: value for name, value in told.items() if name not in _SELDOM or value is not None}
    mine = json.dumps(told, separators=(",", ":")).encode()
    answers = group.gather_bytes(mine, what=what)
    if all(answer == mine for answer in answers):
        reports = [report] * len(answers)
    else:
        reports = [_parse(answer, rank, what) for rank, answer in enumerate(answers)]
    if shards is not None and not group.stays:
        reports = _by_sites(reports, shards.size)
    _refuse_failure(reports)
    # where a rank says why, its messages are refused for that
    _refuse_misuse(reports)
    _refuse_different_places(reports, what)
    _refuse_different_writes(reports, what)
    _refuse_corrupt(reports)
    _refuse_different_rates(reports, what)
    _refuse_different_settings(reports, what)
    _refuse_divergence(group, reports, digest)
    _refuse_partial_gradients(reports, names, what)
    return reports


def _of_site(report: Report, shards: Group, what: str) -> Report:
    """The report with digests of what all shards of this site hold: the same at all sites, as
    those of single shards are not.
    """
    return _together(report, shards.gather_now(_digests(report), what))


def _by_sites(reports: Sequence[Report], shards: int) -> list[Report]:
    """Likewise, of the reports of all ranks of all sites."""
    found = []
    for at in range(0, len(reports), shards):
        site = reports[at : at + shards]
        answers = [_digests(report) for report in site]
        found += [_together(report, answers) for report in site]
    return found


def _digests(report: Report) -> bytes:
    """Of what shards do not have alike."""
    mine = report.digest, report.sums, report.likeness
    digests = [hashlib.blake2b(repr(each).encode(), digest_size=8).digest() for each in mine]
    # a shard may be empty, or have nothing but zeros, and then it has no likeness of its own
    return b"".join([*digests, b"\0" if report.likeness is None else b"\1"])


def _together(report: Report, answers: Sequence[bytes]) -> Report:
    together = [
        hashlib.blake2b(b"".join(answer[at : at + 8] for answer in answers), digest_size=8)
        for at in (0, 8, 16)
    ]
    digest, sums, likeness = (each.hexdigest() for each in together)
    return replace(
        report,
        digest=None if report.digest is None else digest,
        sums=int(sums, 16),
        likeness=likeness if any(answer[24] for answer in answers) else None,
    )


def _parse(answer: bytes, rank: int, what: str) -> Report:
    try:
        return Report(**json.loads(answer))
    except (TypeError, ValueError):
        raise elsewhere(what, rank, answer) from None


def _refuse_failure(reports: Sequence[Report]) -> None:
    for report in reports:
        if report.failure is not None:
            kind, text = report.failure
            raise _FAILURES.get(kind, ThinwireError)(text)


def _refuse_misuse(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        if report.misuse is not None:
            raise ThinwireError(f"rank {rank}: {report.misuse}. Nothing was applied on any rank")


def _refuse_corrupt(reports: Sequence[Report]) -> None:
    for rank, report in enumerate(reports):
        if report.corrupt is not None:
            raise PayloadCorrupt(
                f"rank {rank} refused a message: {report.corrupt}. Nothing was applied on any rank"
            )


def _refuse_different_places(reports: Sequence[Report], what: str) -> None:
    for rank, report in enumerate(reports):
        if report.engine != reports[0].engine:
            raise Mismatch(
                f"{what}: rank 0 steps {reports[0].engine}, rank {rank} {report.engine}, counted "
                "as they were made over these ranks. All ranks must make engines and optimizers, "
                "and step them, in the same order"
            )
    first = (reports[0].step, reports[0].phase)
    for rank, report in enumerate(reports):
        if report.phase != first[1] and COMPARING in (report.phase, first[1]):
            raise elsewhere(what, rank)
        if (report.step, report.phase) != first:
            raise Mismatch(
                f"{what}: rank 0 is at step {first[0]} ({first[1]}), rank {rank} at step "
                f"{report.step} ({report.phase}). All ranks must call step() equally often, leave "
                "local updates at the same step, and go all or none through an attached DDP model"
            )


def _refuse_different_writes(reports: Sequence[Report], what: str) -> None:
    first = reports[0].written
    for rank, report in enumerate(reports):
        if report.written != first:
            who = f"ranks 0 and {rank}" if first and report.written else "some ranks"
            raise Mismatch(
                f"{what}: {who} have parameters that were written between the last averaging, or "
                "the start, and the step after it, which the others have not, or not with these "
                "values. Load weights, or change them, on all ranks alike, and let one optimizer "
                "train all parameters"
            )


def _refuse_different_rates(reports: Sequence[Report], what: str) -> None:
    first = reports[0].rates
    for rank, report in enumerate(reports):
        if report.rates != first:
            raise Mismatch(
                f"{what}: the learning rates of the parameter groups are {first} on rank 0 and "
                f"{report.rates} on rank {rank}. Give all ranks the same schedule, and change "
                "rates on all of them"
            )


def _refuse_different_settings(reports: Sequence[Report], what: str) -> None:
    first = reports[0].settings
    for rank, report in enumerate(reports):
        if report.settings == first:
            continue
        if len(report.settings) != len(first):
            counts = (
                f"{len(first)} parameter groups on rank 0 and {len(report.settings)} on rank {rank}"
            )
            raise Mismatch(f"{what}: there are {counts}. Add groups on all ranks alike")
        for index, texts in enumerate(zip(first, report.settings, strict=True)):
            ours, theirs = map(json.loads, texts)
            for key in dict.fromkeys([*ours, *theirs]):
                values = [settings.get(key, "missing") for settings in (ours, theirs)]
                if values[0] != values[1]:
                    raise Mismatch(
                        f"{what}: {key} of parameter group {index} is {values[0]} on rank 0 and "
                        f"{values[1]} on rank {rank}. Change hyper-parameters on all ranks alike"
                    )


def _refuse_divergence(
    group: Group, reports: Sequence[Report], digest: "RollingDigest | None"
) -> None:
    for rank, report in enumerate(reports):
        if report.sums != reports[0].sums:
            raise PayloadCorrupt(
                f"agreeing on step {report.step}: the sums of dense tensors that arrived on rank 0 "
                f"and rank {rank} differ: a message was damaged on its way. Nothing was applied on "
                "any rank"
            )
    if digest is None or reports[0].digest is None:
        return
    if any(report.digest != reports[0].digest for report in reports):
        digest.explain(group, reports[0].step)
    digest.agreed(reports[0].step)


def _refuse_partial_gradients(reports: Sequence[Report], names: Sequence[str], what: str) -> None:
    for index, name in enumerate(names):
        kinds = [report.kinds[index : index + 1] for report in reports]
        without = [rank for rank, kind in enumerate(kinds) if kind == ABSENT]
        if without and len(without) < len(reports):
            having = [rank for rank in range(len(reports)) if rank not in without]
            raise Mismatch(
                f"{what}: parameter {name} has a gradient on ranks {having} but none on ranks "
                f"{without}. Every rank must use the same parameters in a step (give "
                "find_unused_parameters=True to prepare, or add 0 * parameter.sum() to the loss of "
                "the others)"
            )


class Drops:
    """Counts the steps that were dropped because of gradients that are not finite; warns, and gives
    up in the end.
    """

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.culprit: tuple[int, int, str] | None = None
        """Of the last dropped step the rank and the parameter whose gradient was not finite, and
        what was done to it, in words; None where a loss scaler dropped it."""
        self.given_up: str | None = None
        """Why this rank cannot go on with steps of its own."""

    def needed(
        self,
        reports: Sequence[Report],
        names: Sequence[str],
        *,
        last: bool = True,
        told: bool = True,
    ) -> bool:
        """Whether this step is dropped, which is counted and, without a loss scaler, warned of.

        Args:
            reports: Of all ranks.
            names: Of the parameters.
            last: Whether no other vote on this step follows that may drop it.
            told: Whether to warn, and to give up in the end; else that is for the caller, who hears
                of more ranks.

        Raises:
            NonFinite: The tenth dropped step in a row without a loss scaler, on every rank.
        """
        culprits = [
            (rank, r.non_finite, "") for rank, r in enumerate(reports) if r.non_finite is not None
        ]
        culprits += [
            (rank, r.sum_non_finite, ", added to those of other ranks,")
            for rank, r in enumerate(reports)
            if r.sum_non_finite is not None
        ]
        if not culprits and not any(report.overflow for report in reports):
            self.in_a_row = 0 if last else self.in_a_row
            return False
        self.total += 1
        self.culprit = culprits[0] if culprits else None
        if not told:
            return True
        if any(report.overflow is not None for report in reports):
            return True  # the loss scaler adapts, warns and gives up by its own rules
        rank, index, added = culprits[0]
        text = (
            f"step {reports[0].step} was dropped on every rank: the gradient of parameter "
            f"{names[index]} on rank {rank}{added} is not finite"
        )
        too_many = self._counted(text)
        if too_many is not None:
            raise NonFinite(too_many)
        _warn(text)
        return True

    def needed_here(self, step: int, culprit: str | None) -> bool:
        """Likewise, of a step that this rank makes by itself; `culprit` is the first parameter
        whose gradient is not finite. The tenth in a row is `given_up`, for the others to hear.
        """
        if culprit is None:
            self.in_a_row, self.given_up = 0, None
            return False
        self.total += 1
        text = (
            f"local step {step} was dropped on this rank: the gradient of parameter {culprit} is "
            "not finite"
        )
        self.given_up = self._counted(text)
        _warn(text)
        return True

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


def read_flags(
    several: Sequence[Flags], numbers: Sequence[Tensor] = ()
) -> tuple[list[str | None], list[list[int]]]:
    """Per set of flags the first name that is not as it should be, and what the integer tensors
    hold.

    Args:
        several: Sets of flags.
        numbers: int64, shape (m,) each.

    Returns:
        The names, None where all is well, and the numbers. One copy to the host per device, for
        everything together.
    """
    waiting = [
        (i, name, flag)
        for i, flags in enumerate(several)
        for name, flag in flags.items()
        if isinstance(flag, Tensor)
    ]
    values = _read([*(flag.long().view(1) for *_, flag in waiting), *numbers])
    known = [dict(flags) for flags in several]
    for (i, name, _), value in zip(waiting, values, strict=False):
        known[i][name] = bool(value[0])
    bad = [next((name for name, flag in flags.items() if not flag), None) for flags in known]
    return bad, values[len(waiting) :]


def _read(pieces: Sequence[Tensor]) -> list[list[int]]:
    """The numbers in each of the tensors, which are joined per device before they are copied."""
    devices = dict.fromkeys(piece.device for piece in pieces)
    hosts = {
        device: torch.cat([p for p in pieces if p.device == device]).tolist() for device in devices
    }
    return [[hosts[piece.device].pop(0) for _ in range(piece.numel())] for piece in pieces]


_ELSEWHERE = ("params", "param_names", "lr")
"""Compared at the start, or on its own."""


class Settings:
    """Texts of all groups, written anew only where a value has changed."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Any, ...], str]] = []

    def of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Per group a JSON object from names to values as Python writes them."""
        texts = []
        for index, group in enumerate(optimizer.param_groups):
            values = tuple((key, value) for key, value in group.items() if key not in _ELSEWHERE)
            if index == len(self._known):
                self._known.append(((), ""))
            before, text = self._known[index]
            if not text or not _same(values, before):
                text = json.dumps({key: _text(value) for key, value in sorted(values)})
                self._known[index] = values, text
            texts.append(text)
        return texts


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether these are plain values, and equal; one that can change inside is looked at again."""
    plain = all(isinstance(value, int | float | str | tuple | None) for _, value in now)
    return plain and now == before


def _text(value: Any) -> str:
    """What two processes write alike."""
    written = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", written)


_FIRST_PATIENCE = 2


class GradientPattern:
    """Learns from agreed steps which tensors have a dense gradient on every rank; alike on all
    ranks.

    A rank that sends early has to know the tensors beforehand, and pays twice where they turn out
    to be others. So it takes two equal steps in a row to begin with, and twice as many after every
    disappointment.
    """

    def __init__(self) -> None:
        self.keys: frozenset[int] | None = None
        """The tensors to send early; None where nothing may be."""
        self._patience = _FIRST_PATIENCE
        self._kinds = ""
        self._equal = 0

    def observe(self, kinds: Sequence[str]) -> None:
        """Look at what the ranks have agreed on in one step: per rank one letter for every
        tensor.
        """
        first = kinds[0]
        usable = all(each == first for each in kinds) and ROW_SPARSE not in first
        self._equal = self._equal + 1 if usable and first == self._kinds else int(usable)
        self._kinds = first
        if self._equal < self._patience:
            self.keys = None
        elif self.keys is None:
            self.keys = frozenset(key for key, kind in enumerate(first) if kind == DENSE)

    def reset(self) -> None:
        """A step did not have the gradients that were expected."""
        self.keys, self._equal = None, 0
        self._patience *= 2
