"""Mode, buffers and random numbers of a forward pass, kept so that it can be repeated."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Remembered"]

Buffers = dict[str, Tensor | None]
_Generators = tuple[Any, Any]
"""States of Python's and NumPy's, each a copy."""


class _Part(NamedTuple):
    """One module of the tree."""

    module: nn.Module
    training: bool
    buffers: Buffers
    """Copies."""


class Remembered:
    """Mode and buffers of a module, and the random numbers of Python and NumPy, as they are now;
    inside the context its forward finds them again. Those of torch are up to torch's checkpoint.

    There the module has copies instead of its buffers. The real ones, which the first pass has
    advanced, are not written to: a backward pass may need their memory, and they must not advance
    twice.

    Cost: a copy of the module's buffers for as long as a backward pass may need them.
    """

    def __init__(self, module: nn.Module) -> None:
        copies: dict[Tensor, Tensor] = {}
        self._parts = [
            _Part(part, part.training, _copied(part._buffers, copies)) for part in module.modules()
        ]
        self._module = module
        self._versions: list[tuple[str, Tensor, int]] = []
        self._real: list[tuple[bool, Buffers]] = []
        self._drawn = self._now = _generators()

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Enclose the pass that may be repeated."""
        yield
        params = self._module.named_parameters()
        self._versions = [(name, p, p._version) for name, p in params if not p.is_inference()]

    def __enter__(self) -> None:
        for name, param, version in self._versions:
            if param._version != version:
                raise RuntimeError(
                    f"{name} was changed between the forward pass and the backward pass, which "
                    "repeats the forward pass with the new value: call backward() before the "
                    "optimizer's step"
                )
        self._now = _generators()
        _set_generators(self._drawn)
        # a graph that is kept is walked again, and the forward pass repeated from the same values
        copies: dict[Tensor, Tensor] = {}
        self._real = [(part.module.training, part.module._buffers) for part in self._parts]
        for part in self._parts:
            part.module.training, part.module._buffers = (
                part.training,
                _copied(part.buffers, copies),
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for part, (training, buffers) in zip(self._parts, self._real, strict=True):
            part.module.training, part.module._buffers = training, buffers
        self._real = []
        _set_generators(self._now)


def _generators() -> _Generators:
    return random.getstate(), np.random.get_state()


def _set_generators(states: _Generators) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _copied(buffers: Buffers, copies: dict[Tensor, Tensor]) -> Buffers:
    """Copies that require gradients where the originals do; a tensor that is there twice
    stays one.
    """
    new: Buffers = {}
    with torch.no_grad():
        for name, buffer in buffers.items():
            if buffer is None:
                new[name] = None
                continue
            if buffer not in copies:
                copies[buffer] = buffer.clone().requires_grad_(buffer.requires_grad)
            new[name] = copies[buffer]
    return new
