"""Ownership guard: a model and its optimizer belong to one engine until it is closed.

Until then only the engine may call `step`. An optimizer that the strategy replaces changes its
class but stays the same object, so that references to it stay valid. After a pipeline a rank has
the current values of its own stage only.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire._names import named_buffers, named_parameters
from thinwire.comm import Group
from thinwire.comm.replicate import make_models_equal_
from thinwire.core.several import all_of, params_in
from thinwire.errors import StrategyError
from thinwire.optim.saving import refill_, remembered


class OwnershipGuard:
    """Refuses every call of `step` outside `allow_step`, until it is removed."""

    # a direct `step` would apply the same gradients twice, or update one rank alone

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.allows_step = False
        self.model = weakref.ref(model)
        self._handle = optimizer.register_step_pre_hook(self._refuse)
        self._optimizer = weakref.ref(optimizer)
        _guards[optimizer] = self

    def remove(self) -> None:
        """Release the model and the optimizer. May be called twice."""
        self._handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None and _guards.get(optimizer) is self:
            del _guards[optimizer]

    def _refuse(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if self.allows_step:
            return
        remove_scaler_marks_(optimizer)
        raise RuntimeError(
            "optimizer.step() was called while an engine uses the optimizer: "
            "engine.train_step(inputs, targets) and engine.minimize(loss) make the whole update. "
            "Remove the call (instead of scaler.step(optimizer) use amp=AMP(...)), call "
            "engine.follow_steps() for a loop that you cannot change, or engine.close() to "
            "release the optimizer"
        )


_guards: "weakref.WeakKeyDictionary[torch.optim.Optimizer, OwnershipGuard]" = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def allow_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Allow calls of `step` in the block, for the engine."""
    before: list[tuple[OwnershipGuard, bool]] = []
    for single in all_of(optimizer):
        if (guard := _guards.get(single)) is not None:
            before.append((guard, guard.allows_step))
            guard.allows_step = True
    try:
        yield
    finally:
        for guard, allows_step in before:
            guard.allows_step = allows_step


def replace_step_(
    optimizer: torch.optim.Optimizer, update: Callable[[Any], Any]
) -> Callable[[], None]:
    """Replace `step(closure)` of `optimizer` by `update(closure)`, except for its engine."""
    own = vars(optimizer)
    before = optimizer.step
    undone = False

    @functools.wraps(before)  # keeps the mark that a scheduler looks for
    def step(target: torch.optim.Optimizer, closure: Any = None) -> Any:
        guard = _guards.get(target)
        by_engine = guard is not None and guard.allows_step
        return before(closure) if undone or by_engine else update(closure)

    # a method, since a scheduler that is made from here on wraps the function inside
    replaced = own.get("step")
    method = MethodType(step, optimizer)
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


def params_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield all parameters of an optimizer."""
    return (param for group in optimizer.param_groups for param in group["params"])


def remove_scaler_marks_(optimizer: torch.optim.Optimizer) -> bool:
    """Remove the marks of a `GradScaler` that is refused. Return True if there were any."""
    marks = [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")]
    return any(mark is not None for mark in marks)


def require_unowned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `RuntimeError` if an open engine has the optimizer, the model or a parameter of it."""
    if any(single in _guards for single in all_of(optimizer)):
        raise RuntimeError(
            "the optimizer already belongs to an engine: call engine.close() on that engine "
            "first, or make another optimizer"
        )
    params = _ids(optimizer)
    # an engine that is gone is given up when garbage is collected: in the midst of this, too
    for reference in _guards.keyrefs():
        other = reference()
        if other is None or (guard := _guards.get(other)) is None:
            continue
        if guard.model() is model or not params.isdisjoint(_ids(other)):
            raise RuntimeError(
                "another engine already trains this model, or some of its parameters: call "
                "engine.close() on that engine first (training continues from the current "
                "parameters), or prepare another model"
            )


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for p in params_of(optimizer) if p.requires_grad}


def require_trained(params: Mapping[str, Parameter]) -> None:
    """Raise if the optimizer has nothing to train."""
    if not params:
        raise ValueError(
            "the optimizer has no parameter with requires_grad=True, so there is nothing to train"
        )


_KEPT = ("state", "param_groups", "defaults")
"""Attributes whose objects others may hold, as they do the hooks: contents change, objects stay."""
_HOOKS = "_optimizer_"
"""Beginning of the attributes in which torch keeps the hooks of an optimizer."""
_OF_THE_CLASS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes that torch's constructors set; an optimizer of another method has its own."""
_CONVERSION = "_converted_by"
"""Attribute of a converted optimizer; torch does not copy or pickle it."""


def conversion_obstacles(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the obstacles to another method in the same object, in words."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # of a scheduler: it stays
        yield (
            "optimizer.step was replaced on this object, and the strategy would ignore the "
            "replacement: undo it"
        )


def converted_by(optimizer: torch.optim.Optimizer) -> Any:
    """Return the request that converted the optimizer; None if it has its original class."""
    return vars(optimizer).get(_CONVERSION)


def convert_(
    optimizer: torch.optim.Optimizer, new: torch.optim.Optimizer, conversion: Any
) -> Callable[[], None]:
    """Convert `optimizer` into `new`, in class and contents."""
    # `new` is not usable afterwards. Groups, state, hooks and the list of groups stay the same
    # objects, so that earlier schedulers and handles keep working
    undo = remembered(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    own = vars(optimizer)
    for key in _OF_THE_CLASS:
        own.pop(key, None)
    optimizer.__class__ = type(new)
    for key, value in vars(new).items():
        if key not in _KEPT and not key.startswith(_HOOKS):
            own[key] = value
    for group, other, rate in zip(optimizer.param_groups, new.param_groups, rates, strict=True):
        refill_(group, other)
        if isinstance(rate, Tensor):  # others may write to it
            group["lr"] = rate
    refill_(optimizer.defaults, new.defaults)
    refill_(optimizer.state, new.state)
    if "step" in own:  # a scheduler's, around the old class's step
        _track_step_(optimizer)
    own[_CONVERSION] = conversion
    return undo


def _track_step_(optimizer: torch.optim.Optimizer) -> None:
    """Mark calls of `step` for torch's schedulers, as their constructors do."""
    step = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "its own attribute"
        vars(target)["_opt_called"] = True
        return step(target, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's own mark
    vars(optimizer)["step"] = tracked


StageSplit = tuple[frozenset[str], ...]
"""Names of the parameters and buffers of each stage in the model. In the layout of
`thinwire.comm.Grid` the first replica's stage s is on rank s.
"""

_stage_splits: weakref.WeakKeyDictionary[nn.Module, StageSplit] = weakref.WeakKeyDictionary()


def stage_split_of(model: nn.Module) -> StageSplit | None:
    """Return the stages in which the model was last trained; None if it was trained whole."""
    return _stage_splits.get(model)


def record_stage_split(model: nn.Module, stages: list[nn.Module]) -> None:
    """Record that each rank has current values of one stage only, or of the whole model."""
    if len(stages) == 1:
        _stage_splits.pop(model, None)
        return
    _stage_splits[model] = tuple(
        frozenset(name for name, _ in [*named_parameters(stage), *named_buffers(stage)])
        for stage in stages
    )


def holds_one_stage(
    split: StageSplit | None, optimizer: torch.optim.Optimizer, names: dict[Parameter, str]
) -> bool:
    """Return True if a pipeline left the optimizer with the parameters of one stage."""
    held = {names.get(p, "") for p in params_in(optimizer.param_groups)}
    return split is not None and bool(held) and any(held <= stage for stage in split)


def gather_stages_(model: nn.Module, split: StageSplit, group: Group) -> None:
    """Send the values of each stage to all ranks, from the rank of the first replica that has
    them.
    """
    if group.size < len(split):
        raise StrategyError(
            f"this model was trained in {len(split)} stages and each rank has the current values "
            f"of its own stage only, but there are {group.size} ranks now. Load a checkpoint, or a "
            "file made by `thinwire export`, into a new model"
        )
    params = dict(named_parameters(model))
    buffers = dict(named_buffers(model))
    for rank, names in enumerate(split):
        make_models_equal_(
            {f"parameter {name}": p.detach() for name, p in params.items() if name in names},
            {f"buffer {name}": b for name, b in buffers.items() if name in names},
            group,
            source=rank,
        )
