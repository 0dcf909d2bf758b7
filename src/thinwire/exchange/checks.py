"""Checks of an exchange: presence of gradients, equal settings, duplicate batches."""

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.ddp import living
from thinwire.core.tensors import coalesced, values_of
from thinwire.errors import Mismatch
from thinwire.exchange.agreement import Answers, Said, Turn

__all__ = ["GradientPattern", "Likeness", "Presence", "SameHyperparameters"]

_TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
_ABSENT = "0"
_DENSE = dict(zip(_TYPES, "abcdefg", strict=True))
_ROW_SPARSE = dict(zip(_TYPES, "ABCDEFG", strict=True))
"""Codes of row-sparse gradients. Optimizers treat these differently, so either all ranks have them
or none.
"""
_TYPE_OF = {letter: dtype for kinds in (_DENSE, _ROW_SPARSE) for dtype, letter in kinds.items()}


class Presence:
    """Check that ranks have gradients of the same parameters and types.

    A report has one letter per gradient, for its type.

    A parameter with a gradient on some ranks only is an error, unless a rank reports that its
    missing gradients count as zero.
    """

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
        self._told = ""
        """Common report of all ranks in the last step, if their reports were equal."""

    def restart(self, params: Mapping[str, Tensor]) -> None:
        """Start again with other parameters, or with another order."""
        self._params, self.pattern = params, GradientPattern()
        self._told = ""

    def reset(self) -> None:
        """Record that a step lacked the expected gradients on some rank."""
        self.pattern.reset()
        self.all_ready = False

    def begin(self, grads: Mapping[str, Tensor], *, complete: bool) -> None:
        """Start a step with these gradients.

        Args:
            grads: This rank's gradients by name.
            complete: Count a gradient that this rank lacks as zero.
        """
        self._grads, self._complete = grads, complete

    def say(self, turn: Turn) -> Said:
        """See `Check`."""
        if not turn.first:
            return {}
        said: Said = {"kinds": "".join(map(self._letter, self._params))}
        if turn.group.parts:
            said["ready"] = self.pattern.names is not None
        return {**said, "complete": True} if self._complete else said

    def judge(self, turn: Turn, answers: Answers) -> None:
        """See `Check`."""
        if not turn.first:
            return
        self.all_ready = all(said.get("ready", False) for said in answers)
        told = [said["kinds"] for said in answers.of_my_part()]
        # the usual step: nothing new since the last one
        if answers.unanimous and told[0] == self._told:
            self.pattern.observe(self._kinds)
            return
        self._told = told[0] if answers.unanimous else ""
        complete = self._complete or any(True for _ in answers.of("complete"))
        if not complete:
            for number, part in enumerate(answers.by_part()):
                names = self.names_of_parts[number] if self.names_of_parts else list(self._params)
                _refuse_partial(
                    turn, names, {rank: said.get("kinds", "") for rank, said in part.items()}
                )
        # per parameter one letter for each rank; a missing one gets the first type
        columns = [
            "".join(column).replace(_ABSENT, next((k for k in column if k != _ABSENT), _ABSENT))
            for column in zip(*told, strict=True)
        ]
        self._kinds = dict(zip(self._params, columns, strict=True))
        self.pattern.observe(self._kinds)

    def completed(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients, with zeros for those that only other ranks have.

        Type and layout of the zeros follow the other ranks.
        """
        whole = dict(grads)
        for name, kinds in self._kinds.items():
            if name not in grads and kinds[0] != _ABSENT:
                whole[name] = _zeros(self._params[name], kinds[0])
        return whole

    def zeros(self, name: str) -> Tensor:
        """Return zeros like the dense gradient that a parameter had in the last step."""
        return _zeros(self._params[name], self._kinds[name][0])

    def row_sparse(self, name: str) -> tuple[bool, bool]:
        """Return two flags: the gradient is row-sparse on some rank, and on every rank."""
        kinds = self._kinds[name]
        return any(map(str.isupper, kinds)), kinds.isupper()

    def _letter(self, name: str) -> str:
        grad = self._grads.get(name)
        if grad is None:
            return _ABSENT
        return (_ROW_SPARSE if grad.is_sparse else _DENSE)[grad.dtype]


def _refuse_partial(turn: Turn, names: Sequence[str], kinds: Mapping[int, str]) -> None:
    for index in range(max(map(len, kinds.values()))):
        name = names[index] if index < len(names) else f"number {index} of another stage"
        without = [rank for rank, each in kinds.items() if each[index : index + 1] == _ABSENT]
        if without and len(without) < len(kinds):
            having = [rank for rank in kinds if rank not in without]
            raise Mismatch(
                f"{turn.what}: parameter {name} has a gradient on ranks {having} but none on "
                f"ranks {without}. Every rank must use the same parameters in a step (give "
                "find_unused_parameters=True to prepare, or add 0 * parameter.sum() to the "
                "loss of the others)"
            )


def _zeros(param: Tensor, letter: str) -> Tensor:
    dtype = _TYPE_OF[letter]
    if letter.islower():
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    rows = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
    values = torch.zeros((0, *param.shape[1:]), dtype=dtype, device=param.device)
    return torch.sparse_coo_tensor(
        rows, values, param.shape, is_coalesced=True, check_invariants=False
    )


_FIRST_PATIENCE = 2


class GradientPattern:
    """Learns from agreed steps the tensors that have a dense gradient on every rank.

    The result is the same on all ranks. A rank that sends early must know the tensors in advance,
    and sends twice if they turn out to be others. Therefore early sending starts after two equal
    steps in a row. Each wrong prediction doubles that number.

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
        if kinds is not self._kinds:
            dense = (each == _ABSENT * len(each) or each.islower() for each in kinds.values())
            self._usable = all(dense) and all(len(set(each)) == 1 for each in kinds.values())
            self._equal *= self._usable and kinds == self._kinds
            self._kinds = kinds
        self._equal += self._usable
        if self._equal < self._patience:
            self.names = None
        elif self.names is None:
            self.names = frozenset(n for n, each in kinds.items() if each[0] != _ABSENT)

    def reset(self) -> None:
        """Record that a step lacked the expected gradients."""
        self.names, self._equal = None, 0
        self._patience *= 2


_ELSEWHERE = ("params", "param_names", "lr")
"""Keys compared at the start, or separately."""


class SameHyperparameters:
    """Compares the parameter groups of the optimizer over the ranks.

    Learning rates are compared in the last agreement of an update, all other settings in every one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[tuple[tuple[Any, ...], str]] = []

    def say(self, turn: Turn) -> Said:
        """See `Check`."""
        groups = self._optimizer.param_groups
        said: Said = {"settings": self._settings()}
        if turn.last:  # some methods have no learning rate
            said["rates"] = [float(group["lr"]) for group in groups if "lr" in group]
        return said

    def judge(self, turn: Turn, answers: Answers) -> None:
        """See `Check`."""
        for first, ours, rank, theirs in answers.unlike("rates"):
            raise Mismatch(
                f"{turn.what}: the learning rates of the parameter groups are {ours} on rank "
                f"{first} and {theirs} on rank {rank}. Give all ranks the same schedule, and "
                "change rates on all of them"
            )
        for first, ours, rank, theirs in answers.unlike("settings"):
            _refuse(turn, (first, ours), (rank, theirs))

    def _settings(self) -> list[str]:
        """Return a JSON object per group, from names to the `repr` of values.

        It is written again only if a value has changed.
        """
        texts = []
        for index, group in enumerate(self._optimizer.param_groups):
            values = tuple((key, value) for key, value in group.items() if key not in _ELSEWHERE)
            if index == len(self._known):
                self._known.append(((), ""))
            before, text = self._known[index]
            if not text or not _same(values, before):
                text = json.dumps({key: _text(value) for key, value in sorted(values)})
                self._known[index] = values, text
            texts.append(text)
        return texts


def _refuse(turn: Turn, ours: tuple[int, list[str]], theirs: tuple[int, list[str]]) -> None:
    (first, mine), (rank, other) = ours, theirs
    if len(mine) != len(other):
        raise Mismatch(
            f"{turn.what}: there are {len(mine)} parameter groups on rank {first} and {len(other)} "
            f"on rank {rank}. Add groups on all ranks alike"
        )
    for index, texts in enumerate(zip(mine, other, strict=True)):
        here, there = map(json.loads, texts)
        for key in dict.fromkeys([*here, *there]):
            values = [settings.get(key, "missing") for settings in (here, there)]
            if values[0] != values[1]:
                raise Mismatch(
                    f"{turn.what}: {key} of parameter group {index} is {values[0]} on rank {first} "
                    f"and {values[1]} on rank {rank}. Change hyper-parameters on all ranks alike"
                )


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return True if the values are equal and immutable. Mutable values are always read again."""
    plain = all(isinstance(value, int | float | str | tuple | None) for _, value in now)
    return plain and now == before


def _text(value: Any) -> str:
    """Return a text that is equal in two processes for equal values."""
    written = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", written)


_ENOUGH = 2
_SAMPLED = 64


class Likeness:
    """Duplicate-batch check: compares a digest of each rank's first gradients or changes.

    It warns where the digests are equal twice in a row. Ranks that differed once are not compared
    again. In a healthy run, that is the first exchange with a nonzero tensor.

    Communication: a few characters in an existing agreement, until ranks have differed.
    """

    def __init__(self, kind: Literal["gradients", "changes"]) -> None:
        self.averaged_before = False
        """True if a DistributedDataParallel model was found that also averages densely in every
        step.
        """
        self._kind = kind
        self._mine: str | None = None
        self._params: Iterable[Tensor] = ()
        self._equal_in_a_row = 0
        self._done = self._told_of_step = False

    def skip(self) -> None:
        """Stop comparing: the run that continues was compared before."""
        self._done = True

    def bring(self, tensors: Iterable[Tensor], params: Iterable[Tensor], ranks: int) -> None:
        """Take a digest of this rank's tensors for the next agreement.

        Tensors that are all zero are not compared.

        Args:
            tensors: Gradients or changes.
            params: Parameters of the model, to find a DDP model that has averaged before.
            ranks: Number of ranks that take part.
        """
        self._params = params
        self._mine = None if self._done or ranks == 1 else _digest(tensors)

    def say(self, turn: Turn) -> Said:
        """See `Check`."""
        return {} if self._mine is None else {"likeness": self._mine}

    def judge(self, turn: Turn, answers: Answers) -> None:
        """See `Check`.

        Warns:
            UserWarning: Once, with what to do.
        """
        mine, self._mine = self._mine, None
        digests = [said.get("likeness") for said in answers.of_my_part()]
        if mine is None or any(digest is None for digest in digests):
            return
        self._done = any(digest != mine for digest in digests)
        self._equal_in_a_row += 1
        if self._done or self._equal_in_a_row < _ENOUGH:
            return
        self._done = True
        self.averaged_before = _in_ddp(set(self._params))
        warnings.warn(_advice(self._kind, ddp=self.averaged_before), UserWarning, stacklevel=2)

    def step_exchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer made collective calls of its own in `step`.

        Warns:
            UserWarning: Once, with the remedy.
        """
        if self._told_of_step:
            return
        self._told_of_step, kind = True, type(optimizer).__name__
        warnings.warn(
            f"{kind}.step() makes collective calls of its own, after the engine's exchange: if it "
            "averages gradients, that saves nothing. stats() does not count what it sends. Give "
            "an optimizer of one process, such as thinwire.optim.Muon; if it only divides its work "
            "or its state over the ranks, nothing is wrong",
            UserWarning,
            stacklevel=2,
        )


def _digest(tensors: Iterable[Tensor]) -> str | None:
    """Return the digest of a sample, or None if all of it is zero."""
    samples = [_sample(tensor) for tensor in tensors]
    if not samples:
        return None
    together = torch.cat([sample.to(samples[0].device) for sample in samples])
    if not bool(together.any()):
        return None
    return hashlib.blake2b(together.cpu().numpy().tobytes(), digest_size=6).hexdigest()


def _advice(kind: str, *, ddp: bool) -> str:
    said = f"the {kind} of all ranks are equal to the last bit: "
    if not ddp:
        return (
            said + "all ranks seem to train on the same batches, or something averages gradients "
            "before. Give every rank its own data, such as by DistributedSampler; if equal data "
            "are meant, nothing is wrong"
        )
    said += (
        "DistributedDataParallel averages gradients in every backward pass, densely, so nothing is "
        "saved. "
    )
    if kind == "changes":
        return said + "Train by the model inside (ddp.module), made without the wrapper"
    return said + (
        "Call optimizer.attach(ddp) after the model was wrapped, where the optimizer has it, or "
        "train by the model without the wrapper. stats() counts what it sends from now on"
    )


def _in_ddp(params: set[Tensor]) -> bool:
    """Return True if any of them is a parameter of a living DDP model."""
    return any(p in params for ddp in living(DistributedDataParallel) for p in ddp.parameters())


def _sample(tensor: Tensor) -> Tensor:
    values = values_of(coalesced(tensor.detach())).reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    return values[:: max(1, values.numel() // _SAMPLED)].double()
