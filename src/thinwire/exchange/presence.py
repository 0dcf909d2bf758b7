"""Which parameters have a gradient: compared over the ranks, completed by zeros where that is asked
for, and learned, so that later steps can send before they agree.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.errors import Mismatch
from thinwire.exchange.agreement import Answers, Said, Turn

__all__ = ["GradientPattern", "Presence"]

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
"""Optimizers treat these in their own way, on all ranks or on none."""
_TYPE_OF = {letter: dtype for kinds in (_DENSE, _ROW_SPARSE) for dtype, letter in kinds.items()}


class Presence:
    """A check of which parameters have a gradient, with a letter for each that tells its type.

    A parameter that has a gradient on some ranks only is refused, unless a rank says that what it
    lacks counts as zero.
    """

    def __init__(self) -> None:
        self.pattern = GradientPattern()
        self.names_of_parts: Sequence[Sequence[str]] = []
        """The parameters of each stage; empty where all ranks have the same."""
        self._params: Mapping[str, Tensor] = {}
        self._grads: Mapping[str, Tensor] = {}
        self._complete = False
        self._kinds: dict[str, str] = {}
        self.all_ready = False
        """Whether the gradients of each part of the model were steady before the last step."""
        self._told = ""
        """What all ranks have said in the last step, if they said the same."""

    def restart(self, params: Mapping[str, Tensor]) -> None:
        """Other parameters, or another order, from now on."""
        self._params, self.pattern = params, GradientPattern()
        self._told = ""

    def reset(self) -> None:
        """A step did not have the gradients that were expected, on some rank."""
        self.pattern.reset()
        self.all_ready = False

    def begin(self, grads: Mapping[str, Tensor], *, complete: bool) -> None:
        """A step begins with these gradients; `complete`: what this rank lacks counts as zero."""
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
        columns = [
            "".join(column).replace(_ABSENT, next((k for k in column if k != _ABSENT), _ABSENT))
            for column in zip(*told, strict=True)
        ]
        self._kinds = dict(zip(self._params, columns, strict=True))
        self.pattern.observe(self._kinds)

    def completed(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients, with zeros for those that only other ranks have, in type and layout of
        theirs.
        """
        whole = dict(grads)
        for name, kinds in self._kinds.items():
            if name not in grads and kinds[0] != _ABSENT:
                whole[name] = _zeros(self._params[name], kinds[0])
        return whole

    def zeros(self, name: str) -> Tensor:
        """In the place of the dense gradient that a parameter had in the last step."""
        return _zeros(self._params[name], self._kinds[name][0])

    def row_sparse(self, name: str) -> tuple[bool, bool]:
        """Whether the gradient is row-sparse on some rank, and on every one."""
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
    """Learns from agreed steps which tensors have a dense gradient on every rank; alike on all
    ranks.

    A rank that sends early has to know the tensors beforehand, and pays twice where they turn out
    to be others. So it takes two equal steps in a row to begin with, and twice as many after every
    disappointment.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None
        """The tensors to send early; None where nothing may be."""
        self._patience = _FIRST_PATIENCE
        self._kinds: Mapping[str, str] = {}
        self._usable = False
        self._equal = 0

    def observe(self, kinds: Mapping[str, str]) -> None:
        """Look at what the ranks have agreed on in one step: per tensor one letter for every
        rank.
        """
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
        """A step did not have the gradients that were expected."""
        self.names, self._equal = None, 0
        self._patience *= 2
