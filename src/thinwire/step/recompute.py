"""Recompute: matched modules keep only their inputs and repeat their forward pass."""

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire._names import matches as matches_name
from thinwire._names import plain_name
from thinwire._wording import closest
from thinwire.step.forwarding import ForwardLayer

Buffers = dict[str, Tensor | None]
_Parts = list[tuple[nn.Module, bool, Buffers]]
"""Modules, the mode and the buffers of each."""
_Generators = tuple[Any, Any]
"""States of Python's and NumPy's generators, each a copy."""


class Remembered:
    """Snapshot of a module's mode and buffers, and of the random states of Python and NumPy. In the
    context the forward pass runs from it; torch's checkpoint handles torch's random state.
    """

    # in the context the module has copies instead of its buffers, which are not written to: the
    # first pass has advanced them already, and a backward pass may need their memory

    def __init__(self, module: nn.Module) -> None:
        copies: dict[Tensor, Tensor] = {}
        self._parts: _Parts = [
            (part, part.training, _copied(part._buffers, copies)) for part in module.modules()
        ]
        self._module = module
        self._versions: list[tuple[str, Tensor, int]] = []
        self._real: _Parts = []
        self._drawn = self._now = _generators()

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Enclose the first pass, which may be repeated."""
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
        # a graph that is kept is walked again; the forward pass must repeat from the same values
        copies: dict[Tensor, Tensor] = {}
        self._real = [(part, part.training, part._buffers) for part, *_ in self._parts]
        for part, training, buffers in self._parts:
            part.training = training
            part._buffers = _copied(buffers, copies)

    def __exit__(self, *_: object) -> None:
        for part, training, buffers in self._real:
            part.training = training
            part._buffers = buffers
        self._real = []
        _set_generators(self._now)


def _generators() -> _Generators:
    return random.getstate(), np.random.get_state()


def _set_generators(states: _Generators) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _copied(buffers: Buffers, copies: dict[Tensor, Tensor]) -> Buffers:
    """Return copies that need gradients if the originals do; one copy for each distinct tensor."""
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


# per thread: autograd repeats forward passes on its own threads
_here = threading.local()


class Recomputed:
    """Handle of `recompute`."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        """Names of the recomputed modules."""
        modules = dict.fromkeys(model.get_submodule(name) for name in names)
        self._layers = [_Recompute(module) for module in modules]

    def remove(self) -> None:
        """Restore the modules' own forward. May be called twice."""
        for layer in self._layers:
            layer.remove()


def recompute(
    model: nn.Module, checkpoints: Iterable[str], *, stage: nn.Module | None = None
) -> Recomputed:
    """Make matched modules keep only their inputs, and repeat their forward pass in the backward
    pass. Changes `model`: each match gets its own `forward`. Of a pipeline it is the `stage` here.

    On one device, gradients are bit-identical to those without recompute. The repeat uses the same
    random numbers, autocast, mode and buffers; buffers such as running statistics advance once.
    Other state that a forward changes, such as a counter attribute, changes twice. Under
    `torch.no_grad()` the forward pass is unchanged.

    Source: Chen et al., 2016, arXiv 1604.06174; torch.utils.checkpoint. Differs: buffers advance
    once.
    """
    names = matches(model, checkpoints)
    if stage is None:
        return Recomputed(model, names)
    present = {name for name, _ in stage.named_modules(remove_duplicate=False)}
    return Recomputed(stage, [name for name in names if name in present])


def matches(model: nn.Module, checkpoints: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the outermost modules that match, in the model's order."""
    # modules without a forward (`ModuleList`) do not count, since they are never called. Only the
    # pattern "" matches the model itself: repeating all of it at once saves nothing
    found: dict[str, None] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern in checkpoints:
        hits = [n for n in modules if (matches_name(n, pattern) if plain_name(n) else not pattern)]
        usable = [name for name in hits if _has_forward(modules[name])]
        if not usable:
            raise ValueError(_miss(pattern, hits, modules))
        found.update(dict.fromkeys(usable))
    return tuple(
        name
        for name in modules
        if name in found
        and not any(
            name != other and name.startswith(f"{other}." if other else "") for other in found
        )
    )


class _Recompute(ForwardLayer):
    """Runs the forward below it under torch's checkpoint."""

    def _around(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or getattr(_here, "inside", False):
            return self._inside(*args, **kwargs)
        # a compiled graph holds its buffers and repeats without writing to them
        if torch.compiler.is_compiling():
            return checkpoint(self._inside, *args, use_reentrant=False, **kwargs)
        memory = Remembered(self.module)
        # values of keyword arguments are passed positionally: torch saves them, checks them for
        # changes, and takes the device of the random numbers from them
        return checkpoint(
            self._once,
            tuple(kwargs),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: (memory.first_pass(), memory),
        )

    def _once(self, keys: tuple[str, ...], *values: Any) -> Any:
        count = len(values) - len(keys)
        before = getattr(_here, "inside", False)
        _here.inside = True  # of nested matches only the outer recomputes
        try:
            return self._inside(*values[:count], **dict(zip(keys, values[count:], strict=True)))
        finally:
            _here.inside = before


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _miss(pattern: str, hits: Sequence[str], modules: Iterable[str]) -> str:
    if hits:
        return (
            f"checkpoints: the pattern {pattern!r} matches only {', '.join(map(repr, hits))}, "
            f"which has no forward of its own; write {pattern + '.*'!r} for its submodules"
        )
    names = [name for name in modules if name]
    bare = pattern.replace("*", "").replace("?", "").strip(".")
    hint = closest(bare, names) or (f"; the names begin with {names[:5]}" if names else "")
    return f"checkpoints: the pattern {pattern!r} matches no module name{hint}"
