"""Runs a stage on micro-batches in the order of a schedule, and packs values between stages."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Work

from thinwire.comm.nodes import Grid
from thinwire.core.checksum import bit_sums
from thinwire.core.tensors import called, require_loss
from thinwire.core.tree import leaves, mapped
from thinwire.pipeline.split import Pipeline

_PLAIN = (type(None), bool, int, float, str)
_SAMPLE = 256


def pack(value: Any) -> tuple[Any, list[Tensor]]:
    """Split a value into a layout that JSON can hold, without shapes, and its tensors, for
    `unpack`.
    """
    tensors: list[Tensor] = []

    def layout(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return {"tensor": len(tensors) - 1}
        if type(part) in {tuple, list, torch.Size}:
            return {"list" if type(part) is list else "tuple": [layout(entry) for entry in part]}
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return {"dict": {key: layout(entry) for key, entry in part.items()}}
        if type(part) in _PLAIN:
            return {"plain": part}
        raise TypeError(
            f"the output of a stage has a part of type {type(part).__name__}, which cannot be sent "
            "between stages: let the module return a tensor, or a tuple, list or dict (with string "
            "keys) of tensors and plain values"
        )

    return layout(value), tensors


def unpack(layout: Any, tensors: list[Tensor]) -> Any:
    """Return the value that `pack` split, with other tensors in place of its own."""
    ((kind, content),) = layout.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: unpack(entry, tensors) for key, entry in content.items()}
    entries = [unpack(entry, tensors) for entry in content]
    return entries if kind == "list" else tuple(entries)


def describe(value: Any) -> Any:
    """Return shapes and types for JSON, equal if one schedule can run both values."""
    if isinstance(value, Tensor):
        return [str(value.dtype), *value.shape]
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [describe(entry) for entry in value]
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def content(value: Any) -> str:
    """Return a digest of both ends of every tensor, which distinguishes mini-batches."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in leaves(value):
        flat = tensor.detach().reshape(-1)
        for end in (flat[:_SAMPLE], flat[-_SAMPLE:]):
            digest.update(end.resolve_conj().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def micro_batches(inputs: Any, targets: Any, count: int) -> list[tuple[Any, Any]]:
    """Cut a mini-batch along the first dimension of its tensors."""
    sizes = sorted({tensor.shape[0] for tensor in leaves(inputs) if tensor.ndim})
    if len(sizes) != 1:
        missing = "without a tensor that has a first dimension"
        found = f"of first dimensions {sizes}" if sizes else missing
        raise ValueError(
            "inputs must be tensors with the same first dimension (the batch size), got inputs "
            f"{found}"
        )
    (batch,) = sizes
    if batch == 0 or batch % count:
        raise ValueError(
            f"a mini-batch of {batch} cannot be cut into micro_batches={count} equal parts: make "
            "the batch size a multiple of it and drop a smaller last batch (drop_last=True), or "
            "change micro_batches"
        )
    for tensor in leaves(targets):
        if tensor.ndim and tensor.shape[0] % batch:
            raise ValueError(
                f"targets have a first dimension of {tensor.shape[0]}, which is not a multiple of "
                f"the {batch} of inputs"
            )
    return [(_part(inputs, i, count), _part(targets, i, count)) for i in range(count)]


def _part(value: Any, index: int, count: int) -> Any:
    return mapped(lambda t: t.tensor_split(count)[index] if t.ndim else t, value)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Layout of the tensors between two stages for one micro-batch, without their values."""

    layout: Any
    """Layout from `pack`."""
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]
    """Dtype and shape of each tensor, and True if its gradient comes back."""

    @classmethod
    def of(cls, value: Any) -> "tuple[Parcel, list[Tensor]]":
        """Return the parcel for a value, and the tensors in it."""
        layout, tensors = pack(value)
        return cls(
            layout, tuple((str(t.dtype)[6:], tuple(t.shape), t.requires_grad) for t in tensors)
        ), tensors

    def blanks(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return zeros like the tensors; they need a gradient if these do."""
        return tuple(
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device, requires_grad=trains)
            for dtype, shape, trains in self.tensors
        )

    def nbytes(self, *, back: bool = False) -> int:
        """Return the bytes of the values, or of the gradients that come back."""
        blanks = self.blanks(torch.device("meta"))
        return sum(t.nbytes for t in blanks if t.requires_grad or not back)


class StageWorker(nn.Module):
    """Runs the micro-batches of a stage in order."""

    # an error does not stop the schedule, since other ranks wait for its messages: it is kept in
    # `error`, and the stage sends zeros from then on

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
        self.device = device
        self._dtype = dtype
        self.begin()

    def begin(
        self,
        parts: Sequence[tuple[Any, Any]] = (),
        source: Parcel | None = None,
        result: Parcel | None = None,
        factor: float = 1.0,
    ) -> None:
        """Prepare for a step: (inputs, targets) of the micro-batches, the parcels before and after
        this stage, and the factor of the loss before the backward pass.
        """
        self._parts = parts
        self.source = source
        self.result = result
        self._factor = factor
        self.losses: list[Tensor] = []
        self.error: Exception | None = None
        self._next = 0

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the next micro-batch. Return tensors for the next stage, or the scaled loss."""
        index = self._next
        self._next += 1
        outputs: list[Tensor | tuple[Tensor, ...]] = []
        self.guarded(lambda: outputs.append(self._run(index, received)))
        if outputs:
            return outputs[0]
        if self.result is None:
            return torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        return self.result.blanks(self.device)

    def guarded(self, call: Callable[[], object]) -> None:
        """Make a call unless an error came before. Keep its error."""
        if self.error is None:
            try:
                call()
            except Exception as error:  # raised on all ranks at the end of the step
                self.error = error

    def _run(self, index: int, received: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        inputs, targets = self._parts[index]
        assert self.loss_fn is not None, "the runner checks it"
        if self.result is None:
            with self._precision():
                loss: Any = self.loss_fn(self.output(inputs, received), targets)
            if isinstance(loss, Tensor) and not loss.is_floating_point():
                raise TypeError(f"loss_fn must return a floating-point loss, got {loss.dtype}")
            require_loss(loss, trains=torch.is_grad_enabled())
            mean: Tensor = loss.reshape(())
            self.losses.append(mean.detach())
            return mean * self._factor
        parcel, tensors = Parcel.of(self.output(inputs, received))
        if parcel != self.result:
            raise ValueError(
                "the output of a stage must have the same layout and plain values for all "
                f"micro-batches: micro-batch {index} gave {parcel}, but the rehearsal gave "
                f"{self.result}"
            )
        return tuple(tensor.contiguous() for tensor in tensors)

    def output(self, inputs: Any, received: Sequence[Tensor]) -> Any:
        """Return the output of the stage, from inputs on the first stage, else from `received`."""
        with self._precision():
            # copies: a first module that works in place would change the user's mini-batch, of
            # which all micro-batches are views, or tensors that torch still needs
            if self.source is None:
                return called(self.stage, mapped(Tensor.clone, inputs))
            tensors = [tensor.clone() if tensor.requires_grad else tensor for tensor in received]
            return self.stage(unpack(self.source.layout, tensors))

    def _precision(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)


class Schedule:
    """Runs one mini-batch through the stage of this rank."""

    # GPipe makes all forward passes first; 1F1B alternates as soon as the last stage has returned a
    # gradient, and keeps fewer activations

    def __init__(self, worker: StageWorker, config: Pipeline, grid: Grid, backward: bool) -> None:
        meta = torch.device("meta")
        self._worker = worker
        self._grid = grid
        self._backward = backward
        self._inputs = worker.source.blanks(meta) if worker.source else ()
        outputs = worker.result.blanks(meta) if worker.result else ()
        self._gradients = tuple(blank for blank in outputs if blank.requires_grad)
        count = ahead = config.micro_batches
        if config.schedule == "1f1b":
            ahead = min(count, config.stages - grid.stage)
        self._passes: list[tuple[int, bool]] = []
        """Micro-batch, and True for its forward pass."""
        for index in range(count + ahead - 1):
            if index < count:
                self._passes.append((index, True))
            if backward and index + 1 >= ahead:
                self._passes.append((index + 1 - ahead, False))
        self._kept: dict[int, tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        """Inputs and outputs of the micro-batches whose backward pass is still to come."""
        self._bits: defaultdict[tuple[int, bool], list[Tensor]] = defaultdict(list)
        """Sum of the bits of each tensor, by the other stage, and True if it was sent."""

    def run(self) -> None:
        """Make all passes."""
        before = self._grid.stage - 1
        after = self._grid.stage + 1
        leaving: list[Tensor] = []
        in_flight: list[Work] = []
        to = after
        for index, forward in self._passes:
            blanks, end = (self._inputs, before) if forward else (self._gradients, after)
            arriving = [torch.empty_like(blank, device=self._worker.device) for blank in blanks]
            in_flight += self._grid.transfer(leaving, to, arriving, end)
            self._bits[to, True] += bit_sums(leaving)
            self._bits[end, False] += bit_sums(arriving)
            if forward:
                leaving = self._forward(index, arriving)
                to = after
            else:
                leaving = self._back(index, arriving)
                to = before
        self._bits[to, True] += bit_sums(leaving)
        for work in [*in_flight, *self._grid.transfer(leaving, to)]:
            work.wait()

    def bits(self) -> list[int]:
        """Return sums of bits: sent to and received from the previous stage, and the next one."""
        ends = self._grid.stage - 1, self._grid.stage + 1
        return [int(sum(self._bits[end, sent])) for end in ends for sent in (True, False)]

    def _forward(self, index: int, received: list[Tensor]) -> list[Tensor]:
        """Return tensors for the next stage."""
        for tensor, blank in zip(received, self._inputs, strict=True):
            tensor.requires_grad_(blank.requires_grad)
        outputs = self._worker(*received)
        if isinstance(outputs, Tensor):  # the loss
            outputs = (outputs,)
        if self._backward:
            self._kept[index] = received, outputs
        is_last = self._grid.stage == self._grid.stages - 1
        return [] if is_last else [output.detach() for output in outputs]

    def _back(self, index: int, gradients: list[Tensor]) -> list[Tensor]:
        """Return gradients for the previous stage: zeros for an unused tensor or after an error."""
        received, outputs = self._kept.pop(index)
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            self._worker.guarded(lambda: torch.autograd.backward(roots, gradients or None))
        return [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            for tensor in received
            if tensor.requires_grad
        ]
