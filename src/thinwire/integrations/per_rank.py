"""One state_dict for what differs from rank to rank, for frameworks that save only what rank 0 has."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm import Group
from thinwire.errors import ThinwireError

__all__ = ["PerRankState", "Stateful"]

_STATE, _ERROR = b"s", b"e"


class Stateful(Protocol):
    """Whatever has a state_dict of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from what `state_dict` gave."""


class PerRankState:
    """The states of all ranks in one state_dict, for checkpoints that rank 0 writes alone.

    Accelerate and Lightning save the optimizer of rank 0 and load it everywhere. The residuals and the momentum of
    `DGCMomentum`, and everything under local updates, differ from rank to rank: that checkpoint alone would put the
    pending update of one rank in the place of all others. Register this beside it.

    Args:
        stateful: A `DGCMomentum`, what `local_sgd` returned, or any optimizer under local updates.
        process_group: The ranks whose states differ; None for all of them. One process alone works too.

    **State**: `{"ranks": [state_dict of rank 0, of rank 1, ...]}`, on the CPU.
    **Communication** in `state_dict`, which all ranks must call: one all-gather of all states, so that each rank holds
    the states of all ranks for a moment. `load_state_dict` communicates nothing.
    **Failure**: where one rank has no state to give, all ranks raise `ThinwireError` with its reason.
    """

    def __init__(self, stateful: Stateful, process_group: dist.ProcessGroup | None = None) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, method, None)):
                raise TypeError(f"stateful must have {method}(), got {type(stateful).__name__}")
        self._stateful = stateful
        self._process_group = process_group
        self._group: Group | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of every rank; to be called by all of them.

        Raises:
            ThinwireError: A rank's state could not be read, or a rank is gone.
        """
        try:
            payload, cause = _STATE + _packed(self._stateful.state_dict()), None
        except Exception as error:  # the others are about to wait for this rank
            payload, cause = _ERROR + f"{type(error).__name__}: {error}".encode(), error
        answers = self._joined().gather_bytes(payload, what="collecting the states of all ranks")
        for rank, answer in enumerate(answers):
            if answer.startswith(_ERROR):
                raise ThinwireError(f"rank {rank} has no state to save: {answer[1:].decode()}") from cause
        return {"ranks": [_unpacked(answer[1:]) for answer in answers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's own state back; under another number of ranks, the mean of what was saved.

        The mean of the residuals is the update that was still pending, so nothing of it is lost, and the mean of the
        momentum is what its next part would have been.

        Raises:
            ValueError: It is no such state, or, under another number of ranks, the ranks differ in more than
                floating-point tensors.
        """
        saved = state_dict.get("ranks")
        if not isinstance(saved, Sequence) or not saved:
            raise ValueError(
                f"state_dict must hold the states of all ranks under 'ranks', got the keys {sorted(state_dict)}: "
                "load what PerRankState.state_dict() gave"
            )
        group = self._joined()
        own = saved[group.rank] if len(saved) == group.size else _mean(saved, f"{len(saved)} ranks")
        self._stateful.load_state_dict(own)

    def _joined(self) -> Group:
        if self._group is None:
            self._group = Group(self._process_group)
        return self._group


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def _mean(values: Sequence[Any], where: str) -> Any:
    """The common value, with floating-point tensors averaged; `where` is for the error."""
    first = values[0]
    if all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return {key: _mean([v[key] for v in values], f"{where}, {key}") for key in first}
    if all(isinstance(v, list | tuple) and len(v) == len(first) for v in values):
        return type(first)(_mean(entries, f"{where}[{i}]") for i, entries in enumerate(zip(*values, strict=True)))
    if all(isinstance(v, Tensor) and v.shape == first.shape for v in values):
        if first.is_floating_point():
            return torch.stack([v.double() for v in values]).mean(0).to(first.dtype)
        if all(torch.equal(v, first) for v in values):
            return first
    elif not any(isinstance(v, Tensor) for v in values) and all(v == first for v in values):
        return first
    raise ValueError(
        f"the states of {where} differ in more than floating-point tensors, so there is no mean of them: "
        "resume on as many ranks as saved them"
    )
