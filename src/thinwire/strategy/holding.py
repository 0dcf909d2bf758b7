"""Whose a model and its optimizer are: one engine's. Until it is closed nobody else may call
`step`, and who changes gradients after an update is told that it has no effect.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire.core.rows import coalesced, values_of
from thinwire.core.sharded import shard_of

__all__ = [
    "Hold",
    "LeftGradients",
    "ParameterPlaces",
    "is_passing",
    "passing",
    "require_free",
    "require_trained",
    "step_replaced_",
    "taken_off_",
]


class Hold:
    """Refuses every call of `step` but those inside `passing`, until it is removed.

    A second update from the same gradients would be made twice, or by each rank on its own.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.passes = False
        self._model = weakref.ref(model)
        self._handle = optimizer.register_step_pre_hook(self._refuse)
        self._optimizer = weakref.ref(optimizer)
        _holds[optimizer] = self

    def remove(self) -> None:
        """Let it go; may be called twice."""
        self._handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None and _holds.get(optimizer) is self:
            del _holds[optimizer]

    def concerns(self, model: nn.Module, params: set[int]) -> bool:
        """Whether it is of this model, or its optimizer trains one of the parameters with these
        ids.
        """
        optimizer = self._optimizer()
        theirs = set() if optimizer is None else _ids(optimizer)
        return self._model() is model or not params.isdisjoint(theirs)

    def _refuse(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self.passes:
            return
        taken_off_(optimizer)
        raise RuntimeError(
            "step() of an optimizer was called by hand while an engine trains by it: "
            "engine.train_step(inputs, targets) and engine.minimize(loss) make the whole update, "
            "the exchange included. Remove the call (and scaler.step(optimizer) of a GradScaler: "
            "use amp=AMP(...)), or let engine.follow_steps() take the calls of a loop that is not "
            "yours; engine.close() gives the optimizer back"
        )


_holds: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Hold]" = weakref.WeakKeyDictionary()


@contextmanager
def passing(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, `step` may be called: by the engine."""
    hold: Any = _holds.get(optimizer)
    if hold is None:
        yield
        return
    before, hold.passes = hold.passes, True
    try:
        yield
    finally:
        hold.passes = before


def is_passing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the engine itself is calling `step`."""
    hold = _holds.get(optimizer)
    return hold is not None and hold.passes


def step_replaced_(
    optimizer: torch.optim.Optimizer, update: Callable[[Any], Any]
) -> Callable[[], None]:
    """Changes `optimizer`: `step(closure)` of anybody but its engine is `update(closure)`.

    Returns:
        What undoes it; may be called twice.
    """
    own, before = vars(optimizer), optimizer.step
    undone = False

    @functools.wraps(before)  # with the mark of a scheduler, which looks for it
    def step(target: torch.optim.Optimizer, closure: Any = None) -> Any:
        return before(closure) if undone or is_passing(target) else update(closure)

    # a method, since a scheduler that is made from here on wraps the function inside
    replaced, method = own.get("step"), MethodType(step, optimizer)
    own["step"] = method

    def undo() -> None:
        nonlocal undone
        undone = True
        if own.get("step") is not method:
            return
        del own["step"]
        if replaced is not None:
            own["step"] = replaced

    return undo


def taken_off_(optimizer: torch.optim.Optimizer) -> bool:
    """Take off the marks of a `GradScaler`, which would not get to do so; whether there were
    some.
    """
    own = vars(optimizer)
    marks = [own.pop(name, None) for name in ("grad_scale", "found_inf")]
    return any(mark is not None for mark in marks)


def require_free(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `RuntimeError` where an engine that has not been closed trains by the optimizer, or the
    model or a parameter of it.
    """
    if optimizer in _holds:
        raise RuntimeError(
            "optimizer belongs to an engine already: call engine.close() on that one first, or "
            "make another optimizer"
        )
    params = _ids(optimizer)
    if any(hold.concerns(model, params) for hold in _holds.values()):
        raise RuntimeError(
            "an engine trains this model, or parameters of it, already; two would exchange and "
            "update the same parameters. Call engine.close() on that one first (training goes on "
            "from the parameters as they are), or prepare another model"
        )


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def require_trained(params: Mapping[str, Parameter]) -> None:
    """Refuse an optimizer that has nothing to train."""
    if not params:
        raise ValueError(
            "optimizer has no parameter with requires_grad=True: there is nothing to train"
        )


class ParameterPlaces:
    """Notices that a model has other parameters than those that are trained, such as after
    `load_state_dict(..., assign=True)`: nobody would train them.

    Args:
        model: The model, whose parameters are not sharded: those come and go.
        params: What is trained, by name.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Parameter]) -> None:
        self._model, self._params = model, params
        self._known = {id(p) for p in model.parameters()}
        self._owners: list[tuple[Mapping[str, Any], str, Any]] = []
        for module in model.modules():
            for own in (module._parameters, module._modules):
                self._owners += [(own, name, each) for name, each in own.items()]

    def replaced(self) -> str | None:
        """The first that is trained and gone, by name, if there are others that nobody trains."""
        # looked up where they stand, which takes microseconds: names are asked only after a change
        if all(own.get(name) is each for own, name, each in self._owners):
            return None
        now = list(self._model.parameters())
        here = {id(p) for p in now}
        gone = [name for name, p in self._params.items() if id(p) not in here]
        new = any(p.requires_grad and id(p) not in self._known for p in now)
        return gone[0] if gone and new else None


class LeftGradients:
    """Remembers what an update left in `p.grad`, and warns, once, where it is another at the next
    one.

    Clearing gradients is no such change, in place or not; nor is what the backward pass of another
    engine added, as that of a generator does to its critic.
    """

    _begun = 0
    """Backward passes of all engines of this process."""

    def __init__(self, params: Mapping[str, Parameter]) -> None:
        self._params = params
        self._last = 0
        self._seen: dict[str, tuple[int, int]] = {}
        self._warned = False

    def remember(self) -> None:
        """What is there now is what was left."""
        self._last = LeftGradients._begun
        if self._warned:
            return
        # an identity and no reference: what the user drops must be freed
        present = ((name, p.grad) for name, p in self._params.items() if p.grad is not None)
        self._seen = {name: (id(grad), grad._version) for name, grad in present}

    def look(self) -> None:
        """Before gradients are cleared for the next backward pass."""
        alone = LeftGradients._begun == self._last
        LeftGradients._begun += 1
        if self._warned or not alone:
            return
        for name, param in self._params.items():
            grad = param.grad
            if grad is None or self._seen.get(name, (None, 0)) == (id(grad), grad._version):
                continue
            if name in self._seen and bool(_entries(grad).any()):
                self._warned = True
                warnings.warn(
                    f"the gradient of {name} was changed after engine.minimize or train_step had "
                    "made the update from it, which has no effect: clip by prepare(..., "
                    "grad_clip=ClipByGlobalNorm(...)) instead of clip_grad_norm_, and give every "
                    "loss to the engine instead of calling its backward(); "
                    "gradient_merge=GradientMerge(k_steps) adds up several",
                    UserWarning,
                    stacklevel=4,
                )
                break
        self._seen = {}


def _entries(grad: Tensor) -> Tensor:
    return values_of(coalesced(shard_of(grad)))
