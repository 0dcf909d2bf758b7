"""Tensors of local updates, and the optimizer inside a framework's wrapper."""

import hashlib
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thinwire import _validate as check
from thinwire._names import (
    is_quantized,
    named_buffers,
    named_parameters,
    plain_name,
    require_shapes,
)
from thinwire._wording import warn_user
from thinwire.comm import Group
from thinwire.comm.replicate import make_models_equal_, overwrite_
from thinwire.core.checksum import checksum, flat_bytes
from thinwire.core.several import SeveralOptimizers, all_of, combined, kinds_of, params_in
from thinwire.core.sharded import Shards, require_elementwise, require_shards, reshard_, shard_of
from thinwire.core.tensors import living
from thinwire.core.tree import leaves
from thinwire.exchange.agreement import Answers, Report, Vote


class LocalModel:
    """A model and its optimizer as they were at construction."""

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
        """Trainable parameters by name."""
        self.params: Mapping[str, Tensor] = Shards(self.trained)
        """Tensors to average: the trainable parameters, or this rank's shard of each."""
        self.frozen = {n: p for n, p in named_parameters(model) if n not in self.trained}
        """All other parameters."""
        self._seen: dict[str, Tensor | None] = {}
        """Last common value of each buffer; None for one that a load found changed."""
        self._loaded: Mapping[str, float] = {}
        """Flags of `unchanged_buffers` in the last loaded state."""
        self._searched: list[weakref.ref[Tensor]] = []
        """Tensors of the optimizers when `weight_copies` has searched them."""
        self._copies: dict[str, Tensor] = {}
        self._layout = dict(_layout(model))
        self._ids = {name: id(p) for name, p in named_parameters(model)}
        if not self.params:
            raise ValueError(
                "model has no trainable parameter with elements (requires_grad=True), so there is "
                "nothing to average"
            )
        require_own_params(model, optimizer)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers that train the model."""
        return all_of(self.optimizer)

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(iter(self.params.values())).device

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on all ranks."""
        return {
            "optimizer": kinds_of(self.optimizer),
            "layout": [f"{n}: {t}" for n, t in _layout(self.model, every=True)],
            "quantized weights": quantized_weights(self.model),
        }

    def difference(self) -> str | None:
        """Describe a change of the model since construction; None if there is none."""
        if self._sharded:
            reshard_(self.model)
        now = dict(_layout(self.model))
        for name in [*self._layout, *now]:
            before, after = self._layout.get(name, "not there"), now.get(name, "not there")
            if before != after:
                return (
                    f"the model was changed after local_sgd was set up: {name} was {before} and is "
                    f"{after}. Change a model (and run one forward pass if it is lazy) before "
                    "local_sgd or prepare; to change it now, leave the block or close the engine, "
                    "and start again on all ranks"
                )
        for name, param in named_parameters(self.model):
            if self._ids[name] != id(param):
                return (
                    f"the model was changed after local_sgd was set up: parameter {name} is "
                    "another object, which the optimizer does not train. Change a model before "
                    "creating the optimizer"
                )
        return None

    def buffers(self) -> dict[str, Tensor]:
        """Return the current floating-point buffers by name, which are averaged."""
        named = named_buffers(self.model)
        return {f"buffer {n}": b for n, b in named if b.is_floating_point() and b.numel()}

    def other_buffers(self) -> dict[str, Tensor]:
        """Return all other buffers by name: integers, booleans and complex numbers."""
        named = named_buffers(self.model)
        return {f"buffer {n}": b for n, b in named if not b.is_floating_point()}

    def parameters(self) -> dict[str, Tensor]:
        """Return `params` by the names under which they are averaged as they are."""
        return {f"parameter {name}": param for name, param in self.params.items()}

    def changed_buffers(self) -> dict[str, bool]:
        """Return the buffers that differ from their last common value; True if that is known."""
        now = self.buffers()
        return {name: name in self._seen for name in changed_since(self._seen, now)}

    def made_common(self, names: Iterable[str] | None = None) -> None:
        """Record that all ranks hold these buffers, or all buffers, with equal values."""
        now = self.buffers()
        self._seen.update(
            {name: now[name].clone() for name in (now if names is None else names) if name in now}
        )

    def forget_common(self) -> None:
        """Forget which buffers all ranks hold with equal values."""
        self._seen.clear()

    def unchanged_buffers(self) -> dict[str, float]:
        """Return 1 for a buffer at its last common value, 0 for a changed one, NaN if unknown."""
        changed = self.changed_buffers()
        known = {name: 0.0 if known else math.nan for name, known in changed.items()}
        return {name: known.get(name, 1.0) for name in self.buffers()}

    def load_unchanged(self, saved: Mapping[str, float]) -> None:
        """Load the flags of `unchanged_buffers`, for the current buffers."""
        self._loaded = saved
        self.buffers_restored()

    def buffers_restored(self) -> None:
        """Record that buffers were written since `load_unchanged`, with their saved values."""
        self.made_common(name for name, share in self._loaded.items() if share == 1)
        for name, share in self._loaded.items():
            if math.isnan(share):
                self._seen.pop(name, None)
            elif share < 1:
                self._seen[name] = None

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the optimizer's tensors of a parameter's shape, by parameter and key."""
        return {
            f"state {name} {key}": shard_of(value)
            for name in names
            for key, value in sorted(self.optimizer.state.get(self.trained[name], {}).items())
            if isinstance(value, Tensor)
            and key != "step"
            and value.shape == self.trained[name].shape
            and (value.is_floating_point() or value.is_complex())
        }

    def weight_copies(self) -> dict[str, Tensor]:
        """Return the optimizer's own copy of each parameter, such as a float32 master."""
        # a search waits for a GPU at every candidate: one is enough while no tensor is replaced
        here = list(leaves(list(map(vars, self.optimizers)), depth=6))
        known = len(here) == len(self._searched)
        known &= all(ref() is tensor for ref, tensor in zip(self._searched, here, strict=False))
        if known and self._all_equal(self._copies):
            return self._copies
        self._searched = [weakref.ref(tensor) for tensor in here]
        names: dict[Tensor, str] = {p: name for name, p in self.trained.items()}
        found: dict[str, Tensor] = {}
        for opt in self.optimizers:
            own = [p for group in opt.param_groups for p in group["params"] if p in names]
            states = [opt.state[p] for p in own if p in opt.state]
            keys = dict.fromkeys(key for state in states for key in state)
            values = [[state.get(key) for state in states] for key in keys]
            values += [v for key, v in vars(opt).items() if key not in ("state", "param_groups")]
            for value in values:
                pairs = _copied([p for p in own if names[p] not in found], value)
                # momentum of a parameter that stays zero equals it too
                if any(bool(p.any()) for p, _ in pairs):
                    found |= {names[p]: copy for p, copy in pairs}
                elif pairs:
                    self._searched = []
        self._copies = found
        return found

    def _all_equal(self, copies: Mapping[str, Tensor]) -> bool:
        """Return True if these hold the parameters' values, before rounding; one host read."""
        pairs = [(copy, self.params[name].detach()) for name, copy in copies.items()]
        flags = [(copy.to(ours) == ours).all() for copy, ours in pairs]
        return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())

    def copy_from_first(self, group: Group) -> None:
        """Copy parameters and buffers of rank 0, or the first site, to ranks where they differ."""
        params = {f"parameter {name}": shard_of(p) for name, p in named_parameters(self.model)}
        copies = self.weight_copies()
        make_models_equal_(params, self.buffers() | self.other_buffers(), group)
        for name, copy in copies.items():
            if not _is_copy(copy, self.params[name].detach()):
                copy.copy_(self.params[name].detach())
        self._searched = []  # an optimizer may fill what it has in its first step
        self.made_common()


def _is_copy(theirs: Tensor, ours: Tensor) -> bool:
    """Return True if another tensor holds a parameter's values, before rounding."""
    if theirs.shape != ours.shape or theirs.data_ptr() == ours.data_ptr():
        return False
    # most others differ in the first row
    rows = (slice(1), slice(None)) if ours.dim() else ((),)
    real = theirs.is_floating_point() or theirs.is_complex()
    return real and all(torch.equal(theirs[row].to(ours), ours[row]) for row in rows)


def _copied(params: Iterable[Tensor], value: Any) -> list[tuple[Tensor, Tensor]]:
    """Return parameters with their copies, a tensor each or flat; [] if a tensor holds others."""
    left = list(params)
    pairs = list[tuple[Tensor, Tensor]]()
    for tensor in leaves(value, depth=4):  # attributes may hold themselves
        theirs = shard_of(tensor).detach()
        at = 0
        while left and at < theirs.numel():
            ours = shard_of(left[0]).detach()
            end = at + ours.numel()
            flat = theirs.dim() == 1 and end <= theirs.numel()
            part = theirs[at:end].view_as(ours) if flat else theirs
            if _is_copy(part, ours):
                pairs.append((left[0], part))
                at = end
            elif at:
                break
            del left[0]
        if not at or (at < theirs.numel() and theirs[at:].any()):
            return []
    return pairs


def _check_kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    check.instance("model", model, nn.Module)
    require_shapes(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model is wrapped in DistributedDataParallel, which averages gradients in every step: "
            "pass the inner model (ddp.module), built without the wrapper, to local_sgd"
        )
    check.instance("optimizer", optimizer, torch.optim.Optimizer)
    for opt in all_of(optimizer):
        if getattr(opt, "exchanges_gradients", False):
            raise TypeError(
                f"optimizer is {type(opt).__name__}, which exchanges gradients in every step: use "
                "a local one such as thinwire.optim.SGD, and compression=Sparse(...) to send less"
            )


def _layout(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, str]]:
    for name, p in named_parameters(model):
        kind = "trainable" if p.requires_grad else "frozen"
        yield f"parameter {name}", f"{shape_text(p)}, {kind}"
    for name, b in named_buffers(model):
        if every or b.is_floating_point():
            yield f"buffer {name}", shape_text(b)


def require_own_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer of other parameters than the model's."""
    known = set(map(id, model.parameters()))
    foreign = [p for p in params_in(optimizer.param_groups) if id(p) not in known]
    if foreign:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameters that are not in model, the first of shape "
            f"{tuple(foreign[0].shape)}: give the optimizer parameters of this model only, or the "
            "whole model"
        )


def warn_of_others(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, own_state: bool = False
) -> None:
    """Warn of parameters in no group, and of an optimizer that derives them from its state."""
    own = set(map(id, params_in(optimizer.param_groups)))
    left = [n for n, p in named_parameters(model) if p.requires_grad and id(p) not in own]
    if left:
        warn_user(
            f"{len(left)} parameters require a gradient and are in no group of "
            f"{kinds_of(optimizer)}: {', '.join(left[:3])}. If another optimizer trains them, "
            "ranks diverge. Pass all optimizers of the model in a list, and call "
            "requires_grad_(False) on the remaining parameters"
        )
    for opt in all_of(optimizer) if own_state else ():
        if all(callable(getattr(opt, name, None)) for name in ("train", "eval")):
            warn_user(
                f"{type(opt).__name__}.eval() seems to compute the model's parameters from "
                "optimizer state, which differs between ranks: pass average_state=True to LocalSGD "
                "or AdaptiveLocalSGD"
            )


def warn_of_misplaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn of matrices that Muon trains and that train better with AdamW."""
    for opt in all_of(optimizer):
        find = getattr(opt, "misplaced", None)  # of Muon of this library
        if find is not None and (names := find(model)):
            warn_user(
                f"{type(opt).__name__} trains {', '.join(names)}: embeddings, what is tied to "
                "them, and the output layer train better with AdamW. Pass "
                "thinwire.optim.muon_groups(model) to it, or groups with muon=False"
            )


def warn_of_averages(model: nn.Module, averagings: int) -> None:
    """Warn of an `AveragedModel` that was updated more often than ranks were equal. Slow."""
    shapes = [p.shape for p in model.parameters()]
    for averaged in living(AveragedModel):
        updates = int(averaged.n_averaged)
        if updates > averagings and [p.shape for p in averaged.module.parameters()] == shapes:
            warn_user(
                f"an AveragedModel was updated {updates} times but ranks averaged {averagings} "
                "times, so it averages this rank's own parameters. Update it only where "
                "sync.synced is true, or average it over the ranks before use; "
                "engine.save(directory, extra=...) saves one per rank"
            )


@torch.no_grad()
def changed_since(before: Mapping[str, Tensor | None], now: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose values have changed."""
    # values are compared: batch norm writes its statistics without raising their version
    flags = [differs(tensor, before.get(name)) for name, tensor in now.items()]
    if not flags:
        return []
    flags_on_host = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [name for name, flag in zip(now, flags_on_host, strict=True) if flag]


def differs(now: Tensor, before: Tensor | None) -> Tensor:
    """Return a flag, on the device of `now`, that is True unless both hold the same values."""
    kind = attrgetter("shape", "dtype", "device")
    if before is None or kind(before) != kind(now):
        return torch.ones((), dtype=torch.bool, device=now.device)
    # NumPy compares bits in a seventh of the time
    if now.is_cpu and np.array_equal(flat_bytes(now), flat_bytes(before)):
        return torch.zeros((), dtype=torch.bool, device="cpu")
    # a value that stays NaN has not changed
    return ((now != before) & ~(now.isnan() & before.isnan())).any()


def quantized_weights(model: nn.Module) -> dict[str, str]:
    """Return a digest of the quantized weights of modules, with scales and settings.

    They are neither sent nor saved: every rank loads the base model.
    """
    return {
        plain_name(name): f"{checksum(list(_quantized(module))):016x}"
        for name, module in model.named_modules()
        if any(not p.requires_grad and _has_scales(p) for p in module.parameters(recurse=False))
    }


def _has_scales(param: Tensor) -> bool:
    return is_quantized(param) or not (param.is_floating_point() or param.is_complex())


def _quantized(module: nn.Module) -> Iterator[Tensor]:
    """Yield all that a module saves, but for what `named_parameters` and `named_buffers` have."""
    known = {id(t) for _, t in [*named_parameters(module), *named_buffers(module)]}
    for value in module.state_dict(keep_vars=True).values():
        if isinstance(value, Tensor) and id(value) not in known:
            yield from _inner(value)


def _inner(tensor: Any) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, settings = tensor.__tensor_flatten__()
    yield torch.frombuffer(bytearray(repr(settings).encode()), dtype=torch.uint8)
    for name in names:
        yield from _inner(getattr(tensor, name))


def shape_text(tensor: Tensor) -> str:
    """Return type and shape of a tensor, for comparisons over ranks."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class OtherBuffers:
    """Check that ranks hold the same `other_buffers`, but for counters of one element."""

    def __init__(self, tensors: LocalModel) -> None:
        self._tensors = tensors
        self._warned = False
        self._changed: dict[str, Tensor] = {}
        self._common = {name: buffer.clone() for name, buffer in self._compared().items()}
        self._constant = set(self._common)

    def take_(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite them with the values of a donor, which the other ranks hold too."""
        for name, buffer in self._tensors.other_buffers().items():
            value = given.get(name, buffer)
            if value.shape == buffer.shape:  # a cache may have grown
                overwrite_(buffer, value)
        self._common = {name: buffer.clone() for name, buffer in self._compared().items()}

    def variable(self) -> dict[str, Tensor]:
        """Return those that have changed since the start, or may have."""
        every = self._tensors.other_buffers()
        return {name: buffer for name, buffer in every.items() if name not in self._constant}

    def _compared(self) -> dict[str, Tensor]:
        return {n: b for n, b in self._tensors.other_buffers().items() if b.numel() > 1}

    def report(self, vote: Vote) -> Report:
        """Implement `Check.report`."""
        if vote.last or self._warned:
            return {}
        now = self._compared()
        self._changed = {name: now[name].clone() for name in changed_since(self._common, now)}
        self._constant -= self._changed.keys()
        digests = {}
        for name, buffer in self._changed.items():
            content = flat_bytes(buffer).cpu().numpy().data
            digests[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
        return {"other_buffers": digests} if digests else {}

    def judge(self, vote: Vote, answers: Answers) -> None:
        """Implement `Check.judge`."""
        found = () if self._warned else answers.differences("other_buffers", {})
        for first, ours, rank, theirs in found:
            name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            self._warned = True
            self._constant.clear()
            warn_user(
                f"{name} differs between rank {first} and rank {rank} at step {vote.step}. Only "
                "floating-point buffers are averaged: change the others alike on all ranks"
            )
            return
        self._common.update(self._changed)


_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__
"""Code of torch's wrapper of `step`, which runs the hooks."""


def calls_of_step(optimizer: object) -> int:
    """Return the number of nested calls of this optimizer's `step`."""
    # two under super().step(): torch wraps the step of every class, and each wrapper runs hooks
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    return sum(f.f_code is _HOOKED_STEP and f.f_locals.get("self") is optimizer for f in frames)


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RuntimeError` if a `GradScaler` calls `step` that may skip it on one rank only."""
    # safe: an optimizer that takes its scale and flag; FSDP's scaler agrees over its ranks
    if all(getattr(opt, "_step_supports_amp_scaling", False) for opt in all_of(optimizer)):
        return
    step = torch.amp.GradScaler.step.__code__
    scalers = (f.f_locals["self"] for f, _ in walk_stack(sys._getframe()) if f.f_code is step)
    if any(s.is_enabled() and not hasattr(s, "process_group") for s in scalers):
        raise RuntimeError(SCALER)


SCALER = (
    "a GradScaler calls step(): gradients may still be scaled, and it skips step() on a rank with "
    "an overflow while the others wait. Use amp=AMP(...) of a strategy, or train in bfloat16 "
    "without a scaler"
)


def given_optimizer(given: object, model: object) -> torch.optim.Optimizer:
    """Return the optimizer that the user passed, without wrappers; a sequence as one."""
    if isinstance(given, SeveralOptimizers):
        return given
    bare: object = bare_optimizer(given)
    if isinstance(given, Sequence):
        bare = [bare_optimizer(opt) for opt in given]
    names = dict(named_parameters(model)) if isinstance(model, nn.Module) else {}
    found: torch.optim.Optimizer = combined(bare, {p: name for name, p in names.items()})
    return found


_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose wrappers pass every step on to `.optimizer`; other wrappers may do more."""


def bare_optimizer(optimizer: object) -> object:
    """Return the optimizer inside a known wrapper, else the object; raise if it takes no hooks."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            break
        optimizer = inside
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}, which does not support step hooks, as a "
            "wrapper that does not call torch.optim.Optimizer.__init__: pass the optimizer that "
            "it wraps"
        )
    return optimizer
