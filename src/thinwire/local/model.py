"""The tensors that local updates concern: which there are, by name, and whether they are still the
same; and the optimizer inside what a training framework wraps around it.
"""

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from thinwire import _validate as check
from thinwire._names import named_buffers, named_parameters, require_shapes
from thinwire.comm import Group
from thinwire.comm.ddp import living
from thinwire.comm.replicate import copy_from_first_, make_models_equal_
from thinwire.core.several import SeveralOptimizers, all_of, kinds_of, together
from thinwire.core.sharded import Shards, require_elementwise, require_shards, reshard_, shard_of
from thinwire.errors import PayloadCorrupt

__all__ = [
    "SCALER",
    "LocalModel",
    "bare_optimizer",
    "calls_of_step",
    "changed_since",
    "given_optimizer",
    "looks",
    "refuse_scaler",
    "require_own_params",
    "warn_of_averages",
    "warn_of_others",
]


class LocalModel:
    """A model and its optimizer as they were at construction.

    Args:
        model: Whole, or sharded over the ranks of a site.
        optimizer: Of its parameters.
        shards: The mesh of one site's shards; None where the model is whole.

    Raises:
        TypeError: The model or the optimizer exchanges by itself, or is of another kind.
        ValueError: The model has nothing to train, or the optimizer trains something else.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, shards: DeviceMesh | None = None
    ) -> None:
        _check_kinds(model, optimizer)
        self._sharded = shards is not None
        if self._sharded:
            require_elementwise(optimizer)
            reshard_(model)
        require_shards(dict(named_parameters(model)), shards)
        self.model = model
        self.optimizer = optimizer
        self.trained = {n: p for n, p in named_parameters(model) if p.requires_grad and p.numel()}
        """The parameters that train, by name."""
        self.params: Mapping[str, Tensor] = Shards(self.trained)
        """What is averaged: those, or this rank's part of each."""
        self.frozen = Shards({n: p for n, p in named_parameters(model) if n not in self.trained})
        """All other parameters, or this rank's part of each."""
        self._seen: dict[str, Tensor | None] = {}
        """What all ranks had of each buffer last; None for one that a load found changed since."""
        self._loaded: Mapping[str, float] = {}
        """What the last load told of `unchanged_buffers`."""
        self._layout = dict(_layout(model))
        self._ids = {name: id(p) for name, p in named_parameters(model)}
        if not self.params:
            raise ValueError(
                "model needs a parameter that has elements and trains (requires_grad=True): there "
                "is nothing to average"
            )
        require_own_params(model, optimizer)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All that train the model."""
        return all_of(self.optimizer)

    @property
    def numel(self) -> int:
        """Trainable elements."""
        return sum(p.numel() for p in self.params.values())

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(iter(self.params.values())).device

    def facts(self) -> dict[str, Any]:
        """What all ranks must have in common."""
        return {
            "optimizer": kinds_of(self.optimizer),
            "layout": [f"{n}: {t}" for n, t in self._layout.items()],
        }

    def difference(self) -> str | None:
        """What has changed about the model since construction, in words; None if nothing has."""
        if self._sharded:
            reshard_(self.model)
        now = dict(_layout(self.model))
        for name in [*self._layout, *now]:
            before, after = self._layout.get(name, "not there"), now.get(name, "not there")
            if before != after:
                return (
                    f"the model was changed since local_sgd was set up: {name} was {before} and is "
                    f"{after}. Change a model, and run one forward pass where that gives tensors "
                    "their shape, before local_sgd or prepare; to change it now leave the block, "
                    "or close the engine, and begin anew, on all ranks"
                )
        for name, param in named_parameters(self.model):
            if self._ids[name] != id(param):
                return (
                    f"the model was changed since local_sgd was set up: parameter {name} is "
                    "another object, which the optimizer does not train. Change a model before the "
                    "optimizer is made"
                )
        return None

    def buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers by name, as they are now."""
        return {f"buffer {name}": b for name, b in named_buffers(self.model) if _averaged(b)}

    def changed_buffers(self) -> dict[str, bool]:
        """Those that are not as all ranks had them last; true where that is known."""
        now = self.buffers()
        return {name: name in self._seen for name in changed_since(self._seen, now)}

    def made_common(self, names: Iterable[str] | None = None) -> None:
        """All ranks hold these buffers alike, or all of them."""
        now = self.buffers()
        self._seen.update(
            {name: now[name].clone() for name in (now if names is None else names) if name in now}
        )

    def forget_common(self) -> None:
        """It is not known any more what all ranks hold alike."""
        self._seen.clear()

    def unchanged_buffers(self) -> dict[str, float]:
        """1 for a buffer that is as all ranks had it last, 0 for one that is not, and NaN where
        that is not known: the mean over ranks is 1 where no rank has changed it.
        """
        changed = self.changed_buffers()
        known = {name: 0.0 if known else math.nan for name, known in changed.items()}
        return {name: known.get(name, 1.0) for name in self.buffers()}

    def load_unchanged(self, saved: Mapping[str, float]) -> None:
        """Take what `unchanged_buffers` gave, for buffers as they are."""
        self._loaded = saved
        self.buffers_are_back()

    def buffers_are_back(self) -> None:
        """Buffers have been written since `load_unchanged`, as they were at the save."""
        self.made_common(name for name, share in self._loaded.items() if share == 1)
        for name, share in self._loaded.items():
            if math.isnan(share):
                self._seen.pop(name, None)
            elif share < 1:
                self._seen[name] = None

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The optimizer's floating-point tensors of a parameter's shape, by parameter and key; no
        step counters.
        """
        return {
            f"state {name} {key}": shard_of(value)
            for name in names
            for key, value in sorted(self.optimizer.state.get(self.trained[name], {}).items())
            if isinstance(value, Tensor)
            and key != "step"
            and value.shape == self.trained[name].shape
            and (value.is_floating_point() or value.is_complex())
        }

    def copy_from_first(self, group: Group) -> None:
        """Give parameters, frozen ones too, and floating-point buffers the values of rank 0, or of
        the first site, where they differ.

        Communication: that of `make_models_equal_`.
        """
        params = {f"parameter {name}": shard_of(p) for name, p in named_parameters(self.model)}
        make_models_equal_(params, self.buffers(), group)
        self.made_common()

    def settle_buffers(self, shards: Group) -> str | None:
        """Before an averaging: give the ranks of a site the buffers of its first one.

        Returns:
            Why they were refused here, for the others; None where all is well.

        Communication: one broadcast inside the site.
        """
        try:
            what = "copying the buffers of the first shard"
            copy_from_first_(self.buffers().values(), shards, what=what)
        except PayloadCorrupt as refusal:
            return str(refusal)
        return None


def _check_kinds(model: object, optimizer: object) -> None:
    check.instance("model", model, nn.Module)
    assert isinstance(model, nn.Module)
    require_shapes(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model is wrapped in DistributedDataParallel, which averages gradients in every step: "
            "give local_sgd the model itself (ddp.module), made without the wrapper"
        )
    check.instance("optimizer", optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for each in all_of(optimizer):
        if not getattr(each, "exchanges_gradients", False):
            continue
        raise TypeError(
            f"optimizer is {type(each).__name__}, which exchanges gradients in every step: "
            "use a local one such as thinwire.optim.SGD, and compression=Sparse(...) to send less"
        )


def _layout(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, p in named_parameters(model):
        yield f"parameter {name}", f"{looks(p)}, {'trainable' if p.requires_grad else 'frozen'}"
    for name, b in named_buffers(model):
        if b.is_floating_point():
            yield f"buffer {name}", looks(b)


def require_own_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of other parameters than the model's."""
    known = set(map(id, model.parameters()))
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameters that are not in model, the first of shape "
            f"{tuple(foreign[0].shape)}: give the optimizer parameters of this model only, or the "
            "whole model"
        )


def warn_of_others(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, own_state: bool = False
) -> None:
    """Warn of trainable parameters that are in no group, which another optimizer may train; and,
    where each rank has a state of its own, of one that makes parameters from it.
    """
    own = {id(p) for g in optimizer.param_groups for p in g["params"]}
    left = [n for n, p in named_parameters(model) if p.requires_grad and id(p) not in own]
    if left:
        _warn(
            f"{len(left)} parameters require a gradient and are in no group of "
            f"{kinds_of(optimizer)}: {', '.join(left[:3])}. Steps of an optimizer that was not "
            "given are not followed: where it trains these, ranks come to hold different values. "
            "Give all optimizers of the model in a list, and call requires_grad_(False) on the rest"
        )
    for each in all_of(optimizer) if own_state else ():
        if not all(callable(getattr(each, name, None)) for name in ("train", "eval")):
            continue
        _warn(
            f"{type(each).__name__}.eval() seems to make the model's parameters from the "
            "optimizer's state, of which each rank has its own, so that ranks come to hold "
            "different values: give average_state=True to LocalSGD or AdaptiveLocalSGD"
        )


def warn_of_averages(model: nn.Module, averagings: int) -> None:
    """Warn of an `AveragedModel` of this model that was updated more often than ranks were equal;
    takes a moment.
    """
    shapes = [p.shape for p in model.parameters()]
    for each in living(AveragedModel):
        updates = int(each.n_averaged)
        if updates > averagings and [p.shape for p in each.module.parameters()] == shapes:
            _warn(
                f"an AveragedModel was updated {updates} times, and ranks have averaged "
                f"{averagings} times: it is an average of this rank's own parameters. Update it "
                "where sync.synced is true, or average it over the ranks before it is used; "
                "engine.save(directory, extra=...) keeps that of each rank"
            )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=5)


def changed_since(before: Mapping[str, Tensor | None], now: Mapping[str, Tensor]) -> list[str]:
    """The names under which other values are now; by value, since batch norm writes its statistics
    without raising their version.
    """
    flags = [_differs(tensor, before.get(name)) for name, tensor in now.items()]
    if not flags:
        return []
    together = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [name for name, flag in zip(now, together, strict=True) if flag]


def _differs(now: Tensor, before: Tensor | None) -> Tensor:
    if (
        before is None
        or before.shape != now.shape
        or before.dtype != now.dtype
        or before.device != now.device
    ):
        return torch.ones((), dtype=torch.bool, device=now.device)
    # a NaN that stays is no change
    return ((now != before) & ~(now.isnan() & before.isnan())).any()


def looks(tensor: Tensor) -> str:
    """Type and shape of a tensor, for comparisons over ranks."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and buffer.numel() > 0


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__
"""Of torch's wrapper of `step`, which runs the hooks."""


def calls_of_step(optimizer: object) -> int:
    """How many calls of `step` of this optimizer are under way: two in the hooks of a step that
    another one has called, as `super().step()` does. Torch wraps the step of every class that has
    ever been constructed, and runs the hooks of the instance in each.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    return sum(f.f_code is _HOOKED_STEP and f.f_locals.get("self") is optimizer for f in frames)


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RuntimeError` where a `GradScaler` calls `step` that may leave it out on one rank.

    None does where the optimizer takes its scale and flag; and that of FSDP, which has a process
    group, agrees over its ranks.
    """
    if all(getattr(each, "_step_supports_amp_scaling", False) for each in all_of(optimizer)):
        return
    step = torch.amp.GradScaler.step.__code__
    scalers = (f.f_locals["self"] for f, _ in walk_stack(sys._getframe()) if f.f_code is step)
    if any(each.is_enabled() and not hasattr(each, "process_group") for each in scalers):
        raise RuntimeError(SCALER)


SCALER = (
    "a GradScaler calls step(): the gradients are still multiplied by its scale, or it leaves out "
    "step() on a rank whose gradients overflow, which the others would wait for. Let amp=AMP(...) "
    "of a strategy scale the loss, or train in bfloat16 without a scaler"
)


def given_optimizer(given: object, model: object) -> torch.optim.Optimizer:
    """The optimizer of a model as its user gave it: bare, and several of a sequence together.

    Raises:
        TypeError, ValueError: See `bare_optimizer` and `together`; all else that is none is left
            for others to refuse.
    """
    if isinstance(given, SeveralOptimizers):
        return given
    bare: object = bare_optimizer(given)
    if isinstance(given, Sequence):
        bare = [bare_optimizer(each) for each in given]
    names = dict(named_parameters(model)) if isinstance(model, nn.Module) else {}
    found: torch.optim.Optimizer = together(bare, {p: name for name, p in names.items()})
    return found


_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose wrappers pass every step on to `.optimizer`; wrappers of others may do more than
that."""


def bare_optimizer(optimizer: object) -> object:
    """What Accelerate (and with it the Trainer of transformers) or Lightning has wrapped; else the
    very object.

    Raises:
        TypeError: A wrapper of somebody else that is a torch.optim.Optimizer by name only and takes
            no hooks.
    """
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            break
        optimizer = inside
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}, which takes no step hooks, as a wrapper "
            "whose constructor does not call that of torch.optim.Optimizer: give the optimizer "
            "that it wraps"
        )
    return optimizer
