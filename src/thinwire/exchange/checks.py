"""Checks of an exchange: presence of gradients, equal settings, duplicate batches."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire._wording import warn_user
from thinwire.core.tensors import coalesced, living, sparse_rows, values_of
from thinwire.errors import Mismatch
from thinwire.exchange.agreement import Answers, Report, Vote

_REAL = torch.float16, torch.bfloat16, torch.float32, torch.float64
_TYPES = *_REAL, torch.complex32, torch.complex64, torch.complex128
_ABSENT = "0"
_DENSE = dict(zip(_TYPES, "abcdefg", strict=True))
_ROW_SPARSE = dict(zip(_TYPES, "ABCDEFG", strict=True))
"""Codes of row-sparse gradients. Optimizers treat these differently, so either all ranks have them
or none.
"""
_TYPE_OF = {letter: dtype for kinds in (_DENSE, _ROW_SPARSE) for dtype, letter in kinds.items()}


class Presence:
    """Check that ranks have gradients of the same parameters and types, a letter for each."""

    def __init__(self) -> None:
        self.pattern = GradientPattern()
        self.names_of_parts: Sequence[Sequence[str]] = []
        """The parameters of each stage. Empty if all ranks have the same."""
        self._params: Mapping[str, Tensor] = {}
        self._grads: Mapping[str, Tensor] = {}
        self._complete = False
        self._kinds: dict[str, str] = {}
        self.all_ready = False
        """True if the gradients of each part of the model were steady before the last step."""
        self._last_kinds = ""
        """Common report of all ranks in the last step, if their reports were equal."""

    def restart(self, params: Mapping[str, Tensor]) -> None:
        """Start again with other parameters, or with another order."""
        self._params = params
        self.pattern = GradientPattern()
        self._last_kinds = ""

    def reset(self) -> None:
        """Record that a step lacked the expected gradients on some rank."""
        self.pattern.reset()
        self.all_ready = False

    def begin(self, grads: Mapping[str, Tensor], *, complete: bool) -> None:
        """Start a step with this rank's gradients; `complete`: those that it lacks are zero."""
        self._grads = grads
        self._complete = complete

    def report(self, vote: Vote) -> Report:
        """See `Check`."""
        # the types are needed once per update, before message lengths are fixed
        if not vote.first:
            return {}
        report: Report = {"kinds": "".join(map(self._letter, self._params))}
        if vote.group.parts:
            report["ready"] = self.pattern.names is not None
        return {**report, "complete": True} if self._complete else report

    def judge(self, vote: Vote, answers: Answers) -> None:
        """See `Check`."""
        if not vote.first:
            return
        # a rank may send early only if every other rank does so too
        self.all_ready = all(report.get("ready", False) for report in answers)
        reported = [report["kinds"] for report in answers.of_my_part()]
        # the usual step: nothing new since the last one
        if answers.unanimous and reported[0] == self._last_kinds:
            self.pattern.observe(self._kinds)
            return
        self._last_kinds = reported[0] if answers.unanimous else ""
        # one rank that counts missing gradients as zero decides for all
        complete = self._complete or any(True for _ in answers.of("complete"))
        if not complete:
            # stages hold different parameters, so each is checked by itself
            for number, part in enumerate(answers.by_part()):
                names = self.names_of_parts[number] if self.names_of_parts else list(self._params)
                _refuse_partial(
                    vote, names, {rank: report.get("kinds", "") for rank, report in part.items()}
                )
        # per parameter one letter for each rank; a missing one gets the first type
        columns = [
            "".join(column).replace(_ABSENT, next((k for k in column if k != _ABSENT), _ABSENT))
            for column in zip(*reported, strict=True)
        ]
        self._kinds = dict(zip(self._params, columns, strict=True))
        self.pattern.observe(self._kinds)

    def completed(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients, with zeros of the same type for those that only others have."""
        whole = dict(grads)
        for name, kinds in self._kinds.items():
            if name not in grads and kinds[0] != _ABSENT:
                whole[name] = _zeros(self._params[name], kinds[0])
        return whole

    def zeros(self, name: str) -> Tensor:
        """Return zeros like the dense gradient that a parameter had in the last step."""
        return _zeros(self._params[name], self._kinds[name][0])

    def fits(self, name: str, grad: Tensor) -> bool:
        """Return True if a gradient is dense, and of the type that it had in the last step."""
        kinds = self._kinds.get(name, _ABSENT)
        return not grad.is_sparse and _DENSE[grad.dtype] == kinds[0]

    def row_sparse(self, name: str) -> tuple[bool, bool]:
        """Return two flags: the gradient is row-sparse on some rank, and on every rank."""
        kinds = self._kinds[name]
        return any(map(str.isupper, kinds)), kinds.isupper()

    def _letter(self, name: str) -> str:
        grad = self._grads.get(name)
        if grad is None:
            return _ABSENT
        return (_ROW_SPARSE if grad.is_sparse else _DENSE)[grad.dtype]


def _refuse_partial(vote: Vote, names: Sequence[str], kinds: Mapping[int, str]) -> None:
    for index in range(max(map(len, kinds.values()))):
        name = names[index] if index < len(names) else f"number {index} of another stage"
        without = [rank for rank, letters in kinds.items() if letters[index : index + 1] == _ABSENT]
        if without and len(without) < len(kinds):
            having = [rank for rank in kinds if rank not in without]
            raise Mismatch(
                f"{vote.purpose}: parameter {name} has a gradient on ranks {having} but none on "
                f"ranks {without}. Every rank must use the same parameters in a step (pass "
                "find_unused_parameters=True to prepare, or add 0 * parameter.sum() to the loss "
                "of the others)"
            )


def _zeros(param: Tensor, letter: str) -> Tensor:
    dtype = _TYPE_OF[letter]
    if letter.islower():
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    rows = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
    values = torch.zeros((0, *param.shape[1:]), dtype=dtype, device=param.device)
    return sparse_rows(rows, values, param.shape)


_FIRST_PATIENCE = 2


class GradientPattern:
    """Learns from agreed steps the tensors that have a dense gradient on every rank.

    >>> pattern = GradientPattern()
    >>> for _ in range(2):
    ...     pattern.observe({"weight": "aa"})
    >>> pattern.names
    frozenset({'weight'})
    """

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None
        """Tensors to send early, or None while that is not allowed."""
        self._patience = _FIRST_PATIENCE
        self._kinds: Mapping[str, str] = {}
        self._usable = False
        self._equal = 0

    def observe(self, kinds: Mapping[str, str]) -> None:
        """Record the agreed kinds of one step: one letter per rank for each tensor."""
        # the same object means that all reports were equal to those of the last step
        if kinds is not self._kinds:
            dense = (
                letters == _ABSENT * len(letters) or letters.islower() for letters in kinds.values()
            )
            self._usable = all(dense) and all(len(set(letters)) == 1 for letters in kinds.values())
            # a step that differs starts the count again
            self._equal *= self._usable and kinds == self._kinds
            self._kinds = kinds
        self._equal += self._usable
        if self._equal < self._patience:
            self.names = None
        elif self.names is None:
            self.names = frozenset(n for n, letters in kinds.items() if letters[0] != _ABSENT)

    def reset(self) -> None:
        """Record that a step lacked the expected gradients."""
        self.names = None
        self._equal = 0
        # a model whose gradients alternate would otherwise send twice in every second step
        self._patience *= 2


_ENOUGH = 2
_SAMPLED = 64


class DuplicateBatchCheck:
    """Warns where two ranks have equal first gradients or changes twice in a row."""

    def __init__(self, kind: Literal["gradients", "changes"]) -> None:
        self.averaged_before = False
        """True if a DistributedDataParallel model was found that averages in every step too."""
        self._kind = kind
        self._own: str | None = None
        self._params: Iterable[Tensor] = ()
        self._equal_in_a_row = 0
        self._done = self._warned_of_step = False

    def skip(self) -> None:
        """Stop comparing: the run that continues was compared before."""
        self._done = True

    def sample(self, tensors: Iterable[Tensor], params: Iterable[Tensor], ranks: int) -> None:
        """Take a digest of this rank's tensors; `params` show a DDP model that averaged before."""
        self._params = params
        self._own = None if self._done or ranks == 1 else _digest(tensors)

    def report(self, vote: Vote) -> Report:
        """See `Check`."""
        return {} if self._own is None else {"batch_id": self._own}

    def judge(self, vote: Vote, answers: Answers) -> None:
        """See `Check`; warns once."""
        # one digest is for one agreement only
        own = self._own
        self._own = None
        digests = {rank: report.get("batch_id") for rank, report in answers.ranks_of_my_part()}
        if own is None or None in digests.values():
            return
        counts = Counter(digests.values())
        alike = [rank for rank, digest in digests.items() if counts[digest] > 1]
        # healthy ranks differ at once, and are never compared again
        self._done = not alike
        self._equal_in_a_row += 1
        if self._done or self._equal_in_a_row < _ENOUGH:
            return
        self._done = True
        listed = f"ranks {', '.join(map(str, alike[:-1]))} and {alike[-1]}"
        ranks = "all ranks" if len(alike) == len(digests) else listed
        of_ddp = (p for ddp in living(DistributedDataParallel) for p in ddp.parameters())
        self.averaged_before = len(counts) == 1 and not set(self._params).isdisjoint(of_ddp)
        message = _advice(f"{self._kind} of {ranks}", self._kind, ddp=self.averaged_before)
        warn_user(message)

    def step_exchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of an optimizer that made collective calls of its own in `step`."""
        if self._warned_of_step:
            return
        self._warned_of_step = True
        kind = type(optimizer).__name__
        warn_user(
            f"{kind}.step() makes its own collective calls after the engine's exchange, and "
            "stats() does not count them. If it averages gradients, nothing is saved: use a "
            "single-process optimizer such as thinwire.optim.Muon. If it only shards its work or "
            "state over the ranks, ignore this"
        )


def _digest(tensors: Iterable[Tensor]) -> str | None:
    """Return the digest of a sample, or None if all of it is zero."""
    samples = [_sample(tensor) for tensor in tensors]
    if not samples:
        return None
    joined = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu().double()
    if not bool(joined.any()):
        return None
    return hashlib.blake2b(joined.numpy().tobytes(), digest_size=6).hexdigest()


def _advice(subject: str, kind: str, *, ddp: bool) -> str:
    advice = f"the {subject} are equal bit for bit: "
    if not ddp:
        return advice + (
            "they seem to train on the same batches, or something averages gradients "
            "earlier. Give every rank its own data, for example with thinwire.ShardedSampler; "
            "ignore this if equal data are intended"
        )
    advice += (
        "DistributedDataParallel averages gradients densely in every backward pass, so "
        "nothing is saved. "
    )
    if kind == "changes":
        return advice + "Train with the inner model (ddp.module), built without the wrapper"
    return advice + (
        "Call optimizer.attach(ddp) after wrapping the model if the optimizer has attach, or "
        "train without the wrapper. stats() counts DDP's bytes from now on"
    )


def _sample(tensor: Tensor) -> Tensor:
    values = values_of(coalesced(tensor.detach())).reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    return values[:: max(1, values.numel() // _SAMPLED)]
