"""Whose a model and its optimizer are: one engine's, until it is closed.

Nobody else may call `step` meanwhile, and who changes gradients after an update is told that it has
no effect. An optimizer that the strategy replaces becomes one of another method and stays the same
object, for all that hold it. After a pipeline a rank has the current values of its stage only.
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

from thinwire._names import named_buffers, named_parameters
from thinwire.comm import Group
from thinwire.comm.replicate import make_models_equal_
from thinwire.core.several import all_of
from thinwire.core.sharded import shard_of
from thinwire.core.tensors import coalesced, values_of
from thinwire.errors import StrategyError

__all__ = [
    "Cut",
    "Hold",
    "LeftGradients",
    "ParameterPlaces",
    "became",
    "become_",
    "cut_of",
    "dependents",
    "gather_stages_",
    "holds_one_stage",
    "is_passing",
    "passing",
    "remember_cut",
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
    before: list[tuple[Hold, bool]] = []
    for each in all_of(optimizer):
        if (hold := _holds.get(each)) is not None:
            before.append((hold, hold.passes))
            hold.passes = True
    try:
        yield
    finally:
        for hold, passes in before:
            hold.passes = passes


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
    if any(each in _holds for each in all_of(optimizer)):
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


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where torch keeps the hooks of an optimizer."""


_KEPT = frozenset({"state", "param_groups", "defaults", *_HOOKS})
"""Objects that others may hold: their contents change, not they."""
_OF_THE_CLASS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What torch's constructors set for themselves; another method has its own."""

_asked: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]" = weakref.WeakKeyDictionary()


def dependents(optimizer: torch.optim.Optimizer) -> list[str]:
    """What stands in the way of another method in the same object, in words."""
    step = vars(optimizer).get("step")
    if step is None or hasattr(
        step, "_wrapped_by_lr_sched"
    ):  # a scheduler notes calls, which goes on
        return []
    return [
        "optimizer.step was replaced on the given object, and would be called no more: undo that"
    ]


def became(optimizer: torch.optim.Optimizer) -> Any:
    """What it was asked to become; None where it is what it was made as."""
    return _asked.get(optimizer)


def become_(
    optimizer: torch.optim.Optimizer, new: torch.optim.Optimizer, asked: Any
) -> Callable[[], None]:
    """Changes `optimizer`: it becomes what `new` is, in class and contents; `new` must not be used
    any more.

    Groups, state, hooks and the list of groups stay the same objects, so that schedulers and
    handles made before go on.

    Args:
        optimizer: Has as many groups as `new`.
        new: An optimizer of the other method, with what is taken over.
        asked: What `became` will say.

    Returns:
        What undoes it, as long as no update was made.
    """
    undo = _remembered(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    own = vars(optimizer)
    for key in _OF_THE_CLASS:
        own.pop(key, None)
    optimizer.__class__ = type(new)
    own.update({key: value for key, value in vars(new).items() if key not in _KEPT})
    for group, other, rate in zip(optimizer.param_groups, new.param_groups, rates, strict=True):
        _refill_(group, other)
        if isinstance(rate, Tensor):  # somebody may write to it
            group["lr"] = rate
    _refill_(optimizer.defaults, new.defaults)
    _refill_(optimizer.state, new.state)
    if "step" in own:  # a scheduler's, around the step of the class before
        _track_step_(optimizer)
    _asked[optimizer] = asked
    return undo


def _remembered(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    kind, attributes, before = type(optimizer), dict(vars(optimizer)), _asked.get(optimizer)
    groups = list(optimizer.param_groups)
    places: list[dict[Any, Any]] = [*groups, optimizer.defaults, optimizer.state]
    contents = [(place, dict(place)) for place in places]

    def undo() -> None:
        optimizer.__class__ = kind
        _refill_(vars(optimizer), attributes)
        optimizer.param_groups[:] = groups
        for place, content in contents:
            _refill_(place, content)
        if before is None:
            _asked.pop(optimizer, None)
        else:
            _asked[optimizer] = before

    return undo


def _refill_(place: dict[Any, Any], content: Any) -> None:
    values = dict(content)
    place.clear()
    place.update(values)


def _track_step_(optimizer: torch.optim.Optimizer) -> None:
    """Mark calls of `step` for torch's schedulers, as they do themselves when they are made."""
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "its own attribute"
        vars(target)["_opt_called"] = True
        return step(target, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # by this torch knows its own
    vars(optimizer)["step"] = tracked


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


Cut = tuple[frozenset[str], ...]
"""By stage the names of its parameters and buffers in the model. In the layout of
`thinwire.comm.Grid` the first replica's stage s is on rank s."""

_cuts: weakref.WeakKeyDictionary[nn.Module, Cut] = weakref.WeakKeyDictionary()


def cut_of(model: nn.Module) -> Cut | None:
    """The stages in which a model was trained last; None where it was trained whole."""
    return _cuts.get(model)


def remember_cut(model: nn.Module, stages: list[nn.Module]) -> None:
    """Say that from now on ranks have the current values of one stage each; or, with one stage,
    of the whole model.
    """
    if len(stages) == 1:
        _cuts.pop(model, None)
        return
    _cuts[model] = tuple(
        frozenset(name for name, _ in [*named_parameters(stage), *named_buffers(stage)])
        for stage in stages
    )


def holds_one_stage(
    cut: Cut | None, optimizer: torch.optim.Optimizer, names: dict[Parameter, str]
) -> bool:
    """Whether an optimizer is one that a pipeline has left with the parameters of its stage."""
    held = {names.get(p, "") for group in optimizer.param_groups for p in group["params"]}
    return cut is not None and bool(held) and any(held <= stage for stage in cut)


def gather_stages_(model: nn.Module, cut: Cut, group: Group) -> None:
    """Give all ranks the values of each stage from the rank of the first replica that has it.

    Raises:
        StrategyError: There are fewer ranks than stages now.
    """
    if group.size < len(cut):
        raise StrategyError(
            f"this model was trained in {len(cut)} stages, each rank has the current values of its "
            f"own only, and there are {group.size} ranks now: load a checkpoint, or a file that "
            "`thinwire export` has made of it, into a new model"
        )
    params, buffers = dict(named_parameters(model)), dict(named_buffers(model))
    for rank, names in enumerate(cut):
        make_models_equal_(
            {f"parameter {name}": p.detach() for name, p in params.items() if name in names},
            {f"buffer {name}": b for name, b in buffers.items() if name in names},
            group,
            source=rank,
        )
