"""Noticing that all ranks bring the same: somebody has averaged before, or all of them see the same
data.
"""

import hashlib
import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.ddp import living
from thinwire.core.tensors import coalesced, values_of
from thinwire.exchange.agreement import Answers, Said, Turn

__all__ = ["Likeness"]

_ENOUGH = 2
_SAMPLED = 64


class Likeness:
    """A check that compares a digest of what ranks bring in the first exchanges, and warns where
    it is equal twice in a row.

    Ranks that differ once are never compared again: in a healthy run that is the first exchange
    with anything in it.

    Communication: a few characters in an agreement that takes place anyway, until ranks have
    differed.
    """

    def __init__(self, kind: Literal["gradients", "changes"]) -> None:
        self.averaged_before = False
        """Whether a DistributedDataParallel model was found that averages densely in every step
        besides."""
        self._kind = kind
        self._mine: str | None = None
        self._params: Iterable[Tensor] = ()
        self._equal_in_a_row = 0
        self._done = self._told_of_step = False

    def skip(self) -> None:
        """Compare nothing any more: the run that goes on has been compared."""
        self._done = True

    def bring(self, tensors: Iterable[Tensor], params: Iterable[Tensor], ranks: int) -> None:
        """What this rank brings to the next agreement: nothing is compared where that is nothing
        but zeros.

        Args:
            tensors: Gradients or changes.
            params: Of the model, to find who has averaged before.
            ranks: How many bring such.
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
        """Whoever updates from what arrived has made collective calls of its own in `step`.

        Warns:
            UserWarning: Once, with what to do.
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
    """Of a sample; None of nothing but zeros."""
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
    """Whether any of them is a parameter of a living DDP model."""
    return any(p in params for ddp in living(DistributedDataParallel) for p in ddp.parameters())


def _sample(tensor: Tensor) -> Tensor:
    values = values_of(coalesced(tensor.detach())).reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    return values[:: max(1, values.numel() // _SAMPLED)].double()
