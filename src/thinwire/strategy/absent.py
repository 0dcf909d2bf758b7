"""Ranks that lack what others have: a gradient, which counts as zero, or a batch, without which
they
take part in what the others exchange.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.comm import Group, elsewhere
from thinwire.core.sharded import shard_of

__all__ = [
    "AbsentAsZero",
    "Joining",
]

_TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
_CODES = {dtype: code for code, dtype in enumerate(_TYPES, start=1)}
_ROW_SPARSE = 16
"""Added to the code of a row-sparse gradient: optimizers treat these in their own way, on all ranks
or on none."""


class AbsentAsZero:
    """Completes the gradients of an update by zeros, in type and layout of those that other ranks
    have.

    A parameter without gradient on all ranks stays without.

    Communication: 24 bytes a rank and update where all have the same, else a byte for every
    parameter besides.

    Args:
        params: What is trained, by name, in the same order on all ranks.
        group: The ranks that exchange; its own bytes are counted.
    """

    def __init__(self, params: Mapping[str, Parameter], group: Group) -> None:
        self._params, self._group = params, group

    @property
    def bytes_sent(self) -> int:
        """By this rank."""
        return self._group.bytes_sent

    @property
    def bytes_received(self) -> int:
        """By this rank."""
        return self._group.bytes_received

    @property
    def wait_s(self) -> float:
        """Of this rank."""
        return self._group.wait_s

    def completed(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New gradients by name; all ranks must call it.

        Raises:
            Mismatch: A rank is in another call of this library.
        """
        mine = bytes(_code(grads[name]) if name in grads else 0 for name in self._params)
        what = "comparing which parameters have a gradient"
        answers = self._group.gather_bytes(mine, what=what)
        for rank, answer in enumerate(answers):
            if len(answer) != len(mine) or any(code % _ROW_SPARSE > len(_TYPES) for code in answer):
                raise elsewhere(what, rank, answer)
        whole = dict(grads)
        for (name, param), codes in zip(
            self._params.items(), zip(*answers, strict=True), strict=True
        ):
            code = next(filter(None, codes), 0)
            if code and name not in grads:
                whole[name] = _zeros(shard_of(param), code)
        return whole


def _code(grad: Tensor) -> int:
    return _CODES[grad.dtype] + (_ROW_SPARSE if grad.is_sparse else 0)


def _zeros(param: Tensor, code: int) -> Tensor:
    dtype = _TYPES[code % _ROW_SPARSE - 1]
    if code < _ROW_SPARSE:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    rows = torch.zeros((1, 0), dtype=torch.int64, device=param.device)
    values = torch.zeros((0, *param.shape[1:]), dtype=dtype, device=param.device)
    return torch.sparse_coo_tensor(
        rows, values, param.shape, is_coalesced=True, check_invariants=False
    )


class Joining:
    """The votes inside `engine.join()`: which ranks still have batches.

    Communication: 24 bytes a rank and vote where all say the same. One comes before every
    microstep; under local updates before the first one after an averaging.
    """

    def __init__(self, group: Group, *, every: bool) -> None:
        self._group, self._every = group, every
        self.all_active = True
        """Whether all ranks had a batch at the last vote."""
        self.due = True
        """Whether the next microstep begins with a vote; after one, it does only where `every` was
        said."""

    def vote(self, *, active: bool) -> bool:
        """Whether any rank still has a batch; all ranks must call it.

        Raises:
            Mismatch: A rank is in another call of this library, such as a step outside `join`.
        """
        what = "asking which ranks still have batches"
        answers = self._group.gather_bytes(b"+" if active else b"-", what=what)
        for rank, answer in enumerate(answers):
            if answer not in (b"+", b"-"):
                raise elsewhere(what, rank, answer)
        self.all_active = b"-" not in answers
        self.due = self._every
        return b"+" in answers

    def idle(self, microstep: Callable[[], None]) -> None:
        """Take part by `microstep`, as often as the others, until no rank has a batch left."""
        while not self.due or self.vote(active=False):
            microstep()
