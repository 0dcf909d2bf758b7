"""The work of a stage on one micro-batch, as a module that torch's schedules can run."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.pipeline.structure import mapped, pack, unpack

__all__ = ["Parcel", "StageWorker"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Layout of what travels between two stages for one micro-batch, without its values."""

    layout: Any
    """Of `pack`."""
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]
    """Per tensor its dtype, shape, and whether a gradient travels back."""

    @classmethod
    def of(cls, value: Any, *, what: str) -> "tuple[Parcel, list[Tensor]]":
        """The parcel for a value, and the tensors in it."""
        layout, tensors = pack(value, what=what)
        return cls(
            layout, tuple((_short(t.dtype), tuple(t.shape), t.requires_grad) for t in tensors)
        ), tensors

    def looks_like(self, other: "Parcel | None") -> bool:
        """Whether both are the same; a NaN among plain values equals itself here."""
        if other is None or self.tensors != other.tensors:
            return False
        return self.layout == other.layout or json.dumps(self.layout) == json.dumps(other.layout)

    def blanks(self, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros that look like the tensors: leaves, which need a gradient where these do."""
        return tuple(
            torch.zeros(
                shape, dtype=getattr(torch, dtype), device=device, requires_grad=requires_grad
            )
            for dtype, shape, requires_grad in self.tensors
        )

    @property
    def bytes_forth(self) -> int:
        """Of the values."""
        return sum(t.numel() * t.element_size() for t in self.blanks(torch.device("meta")))

    @property
    def bytes_back(self) -> int:
        """Of the gradients."""
        return sum(
            t.numel() * t.element_size()
            for t in self.blanks(torch.device("meta"))
            if t.requires_grad
        )


class StageWorker(nn.Module):
    """A stage that runs the micro-batches in their order; on the last stage the result is the
    scaled loss.

    An error does not stop the schedule, on which the other ranks count: it is kept in `error`, and
    from then on zeros go out, so that all ranks come to the end of the step and can agree that it
    failed.
    """

    def __init__(
        self,
        stage: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.loss_fn = loss_fn
        self._device, self._dtype = device, dtype
        self.begin([], None, None, 1.0)

    def begin(
        self,
        parts: Sequence[tuple[Any, Any]],
        source: Parcel | None,
        result: Parcel | None,
        factor: float,
    ) -> None:
        """Get ready for a step.

        Args:
            parts: (inputs, targets) of the micro-batches.
            source: What comes from the stage before; None on the first stage.
            result: What goes to the stage after; None on the last.
            factor: Of the loss, before it is differentiated.
        """
        self._parts, self._source, self._result, self._factor = parts, source, result, factor
        self.losses: list[Tensor] = []
        self.error: Exception | None = None
        self._next = 0

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The next micro-batch: tensors for the next stage, or the loss times `factor`."""
        index = self._next
        self._next += 1
        if self.error is None:
            try:
                return self._run(index, received)
            except Exception as error:  # raised on all ranks at the end of the step
                self.error = error
        if self._result is None:
            return torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())
        return self._result.blanks(self._device)

    def guarded(self, call: Callable[[], object]) -> None:
        """Make a call unless an error came before, and keep its error."""
        if self.error is None:
            try:
                call()
            except Exception as error:  # raised on all ranks at the end of the step
                self.error = error

    def _run(self, index: int, received: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        inputs, targets = self._parts[index]
        assert self.loss_fn is not None, "the runner checks it"
        if self._result is None:
            with self._precision():
                loss = _as_loss(self.loss_fn(self.output(inputs, received), targets))
            self.losses.append(loss.detach())
            return loss * self._factor
        parcel, tensors = Parcel.of(self.output(inputs, received), what="the output of a stage")
        if not parcel.looks_like(self._result):
            raise ValueError(
                "the output of a stage must look the same for all micro-batches, plain values "
                f"included, since the next stage was told it before: got {parcel} for number "
                f"{index}, and {self._result} was told"
            )
        return tuple(tensor.contiguous() for tensor in tensors)

    def output(self, inputs: Any, received: Sequence[Tensor]) -> Any:
        """Output of the stage, for inputs of the model on the first stage, else for what was
        received.
        """
        with self._precision():
            # copies, since the stage may begin with a module that works in place, on the user's
            # mini-batch, of which all micro-batches are views, or on what torch still needs
            if self._source is None:
                return _called(self.stage, mapped(Tensor.clone, inputs))
            tensors = [tensor.clone() if tensor.requires_grad else tensor for tensor in received]
            return self.stage(unpack(self._source.layout, tensors))

    def _precision(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)


def _as_loss(loss: object) -> Tensor:
    """The value of a loss function as a tensor of shape (), or an error that says what it is
    instead.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor of one element, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn must return one element, got shape {tuple(loss.shape)}: take its mean"
        )
    if not loss.is_floating_point():
        raise TypeError(f"loss_fn must return a floating-point loss, got {loss.dtype}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that requires a gradient: there is nothing to train"
        )
    return loss.reshape(())


def _called(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
