"""The sequence of one gradient exchange: propose, agree, send, verify, vote. Only then may anybody change anything."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.comm import Group
from thinwire.errors import PayloadCorrupt, ThinwireError
from thinwire.sync.agreement import ABSENT, DENSE, ROW_SPARSE, Drops, Report, agree_on_step
from thinwire.sync.round import Round, SparseGradient

__all__ = ["GradientExchange", "Proposer", "all_finite", "not_finite"]

_Key = TypeVar("_Key", int, str)

Proposer = Callable[[int, Tensor], SparseGradient | None]
"""From a tensor's key and gradient to what it would send; None where the tensor is exchanged densely."""


class GradientExchange:
    """Brings every rank the mean of all ranks' gradients, sparse or dense, or drops the step on all of them.

    Two ways of use: `exchange` alone, or `launch_bucket` during the backward pass and `exchange` after it.

    `check_dense=False` lets dense gradients through that are not finite; compressed ones never.

    Communication: per step one small agreement before and one after the messages; with buckets launched early only the
    one after. See `Round` for the messages.
    Failure: an error leaves nothing applied on this rank; `drops` counts dropped steps.
    """

    def __init__(
        self, group: Group, names: Sequence[str], *, value_bits: int, propose: Proposer, check_dense: bool = True
    ) -> None:
        self.group = group
        self.drops = Drops()
        self.names = list(names)
        self._value_bits = value_bits
        self._propose = propose
        self._check_dense = check_dense
        self._flying: Round | None = None
        self._non_finite: int | None = None

    @property
    def in_flight(self) -> bool:
        """Whether buckets have been launched and not yet been taken by `exchange`."""
        return self._flying is not None

    def launch_bucket(self, step: int, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """Send this rank's part of one bucket, without waiting.

        Raises:
            ThinwireError: One of the tensors has been launched since the last `exchange`.
        """
        if self._flying is None:
            self._flying = Round(self.group, step=step, value_bits=self._value_bits)
        twice = self._flying.keys & grads.keys()
        if twice:
            raise ThinwireError(
                f"the gradient of {self.names[min(twice)]} was exchanged already and step() not called since: "
                "run the backward passes of an accumulated gradient, but the last, under ddp.no_sync()"
            )
        sparse, dense, bad = self._split(grads)
        self._non_finite = bad if self._non_finite is None else self._non_finite
        self._flying.launch(bucket, sparse, dense)

    def discard(self) -> None:
        """Wait for what was launched and forget it."""
        flying, self._flying, self._non_finite = self._flying, None, None
        if flying is not None:
            flying.finish()

    def exchange(
        self, step: int, grads: Mapping[int, Tensor], *, overflow: bool | None = None, misuse: str | None = None
    ) -> Round | None:
        """The checked exchange of this step, or None where all ranks drop it.

        Args:
            step: Completed updates, from 0.
            grads: This rank's gradients by key; only names what is there if the buckets were launched before.
            overflow: Whether a loss scaler found an overflow on this rank; None without a scaler.
            misuse: What makes this rank unable to go on, for the error that all ranks raise.

        Raises:
            PayloadCorrupt: A rank refused a message.
            ThinwireError: A rank was misused.
            Mismatch: Ranks are at different places, or have gradients for different parameters.
            NonFinite: Too many dropped steps in a row.
            PeerLost, PeerStalled: A rank died or does not answer.
        """
        flying, bad = self._flying, self._non_finite
        self._flying, self._non_finite = None, None
        if flying is not None:
            misuse = misuse or self._stray(flying, grads)
            return self._settle(flying, Report(step, "attached", non_finite=bad, overflow=overflow, misuse=misuse))
        sparse, dense, bad = self._split(grads)
        report = Report(step, "proposed", self._kinds(grads), bad, overflow, misuse=misuse)
        reports = agree_on_step(self.group, report, self.names)
        if self.drops.needed(reports, self.names):
            return None
        row_sparse = {key for key in grads if any(r.kinds[key] == ROW_SPARSE for r in reports)}
        for key in row_sparse & sparse.keys():
            del sparse[key]
            dense[key] = grads[key]
        fresh = Round(self.group, step=step, value_bits=self._value_bits, row_sparse=row_sparse)
        fresh.launch(0, sparse, {key: dense[key] for key in sorted(dense)})
        return self._settle(fresh, Report(step, "exchanged"))

    def _settle(self, one_round: Round, report: Report) -> Round | None:
        corrupt = None
        try:
            one_round.finish()
        except PayloadCorrupt as refusal:
            corrupt = str(refusal)
        reports = agree_on_step(self.group, replace(report, corrupt=corrupt), self.names)
        return None if self.drops.needed(reports, self.names) else one_round

    def _split(self, grads: Mapping[int, Tensor]) -> tuple[dict[int, SparseGradient], dict[int, Tensor], int | None]:
        sparse: dict[int, SparseGradient] = {}
        dense: dict[int, Tensor] = {}
        for key, grad in grads.items():
            proposed = None if grad.is_sparse else self._propose(key, grad)
            if proposed is None:
                dense[key] = grad.to_dense() if grad.is_sparse else grad
            else:
                sparse[key] = proposed
        bad = [key for key, item in sparse.items() if not item.proposal.finite]
        if self._check_dense:
            bad += not_finite(dense)
        return sparse, dense, min(bad, default=None)

    def _kinds(self, grads: Mapping[int, Tensor]) -> str:
        kinds = [ABSENT] * len(self.names)
        for key, grad in grads.items():
            kinds[key] = ROW_SPARSE if grad.is_sparse else DENSE
        return "".join(kinds)

    def _stray(self, flying: Round, grads: Mapping[int, Tensor]) -> str | None:
        for key in grads:
            if key not in flying.keys:
                return (
                    f"parameter {self.names[key]} has a gradient that did not come from the attached model's backward: "
                    "call step() after every synchronising backward pass of that model, and use no other"
                )
        return None


def all_finite(tensor: Tensor) -> bool:
    """One cheap pass: a sum is finite only if all terms are; a finite tensor whose sum overflows is looked at again."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def not_finite(tensors: Mapping[_Key, Tensor]) -> list[_Key]:
    """The keys of dense tensors that are not `all_finite`; one host synchronization where all of them are."""
    flags = [tensor.sum().isfinite() for tensor in tensors.values()]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return []
    return [key for key, tensor in tensors.items() if not all_finite(tensor)]
