"""Selects the optimizer that trains: the given one, or a replacement of the strategy."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from thinwire.compress import field_of
from thinwire.compress.dgc import DGC
from thinwire.compress.protocol import Compression
from thinwire.core.several import all_of
from thinwire.errors import StrategyError
from thinwire.optim import Lamb, Lars
from thinwire.optim.config import LAMB, LARS
from thinwire.optim.dgc_momentum import DGCMomentum
from thinwire.optim.settings import OptimizerSettings, restrict_, settings_of
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import conversion_obstacles, converted_by
from thinwire.strategy.replacements import (
    ADAMS,
    SGDS,
    Replacement,
    as_dgc_momentum,
    as_lamb,
    as_lars,
    convert_optimizer,
    exclusion_predicate,
)

_SPEED = ("capturable", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedOptimizer:
    """Optimizer selected for a strategy, and its settings."""

    optimizer: torch.optim.Optimizer
    """The given object, or a new one that the given object has to become: see `convert_`."""
    compressor: Compression | None
    """Compressor of the gradients (under local updates: of the changes) before this optimizer sees
    them. None if nothing is compressed, or if the optimizer compresses by itself.
    """
    conversion: tuple[Any, ...]
    """Fields that replace an optimizer, and so caused a new one."""
    notes: tuple[str, ...]
    """Notes in words on settings that were taken over, and on those that were not."""
    restore: Callable[[], None] = lambda: None
    """Restores the parameters of other stages to the given optimizer, if `prepare` fails."""


def select_optimizers(
    optimizer: torch.optim.Optimizer, strategy: Fields, **rest: Any
) -> list[SelectedOptimizer]:
    """Call `select_optimizer` for every optimizer; LARS and LAMB replace those that they can."""
    every, lars, lamb = all_of(optimizer), strategy.lars, strategy.lamb
    rest |= {"compression": strategy.compression, "local": strategy.local is not None}
    if len(every) == 1:
        return [select_optimizer(optimizer, lars=lars, lamb=lamb, **rest)]
    found: list[SelectedOptimizer] = []
    fits = {
        "lars": [single for single in every if type(single) in (*SGDS, Lars)] or every,
        "lamb": [single for single in every if type(single) in (*ADAMS, Lamb)] or every,
    }
    try:
        for single in every:
            own: dict[str, Any] = {
                "lars": lars if single in fits["lars"] else None,
                "lamb": lamb if single in fits["lamb"] else None,
            }
            found.append(select_optimizer(single, **own, **rest, is_only=False))
    except BaseException:
        for selected in found:
            selected.restore()
        raise
    return found


def select_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    compression: Compression | None = None,
    lars: LARS | None = None,
    lamb: LAMB | None = None,
    local: bool = False,
    names: Mapping[Parameter, str],
    keep: Callable[[Tensor], bool] | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    is_only: bool = True,
) -> SelectedOptimizer:
    """Return the optimizer that trains under a strategy."""
    # state is taken over where it means the same: momentum of SGD for DGCMomentum, moments and
    # steps of Adam for Lamb; state of SGD is refused for Lars, whose velocity contains the rate
    prefix = f"the strategy does not work with the optimizer {type(optimizer).__name__}: "
    dgc = compression if isinstance(compression, DGC) and is_only else None
    conversion = (dgc, lars, lamb)
    if converted_by(optimizer) == conversion:  # by an earlier engine, now closed
        lars, lamb = None, None
        if isinstance(optimizer, DGCMomentum):
            compression = dgc = None
    problems = [
        *_mismatches(optimizer, compression, lars, lamb, local=local, keep=keep, is_only=is_only),
        *_foreign_parameters(optimizer, names),
    ]
    if problems:
        raise StrategyError(prefix + "; ".join(problems))
    stays = dgc is None or local or type(optimizer) not in SGDS
    if lars is None and lamb is None and stays:
        return _unchanged(optimizer, compression, keep, conversion, local=local)
    settings = settings_of(optimizer)
    if lars is not None:
        replacement = as_lars(optimizer, settings, lars)
    elif lamb is not None:
        replacement = as_lamb(optimizer, settings, lamb)
    else:
        assert dgc is not None, "or it stays"
        replacement = as_dgc_momentum(optimizer, settings, dgc, process_group, mesh)
    # a pattern may match parameters of another optimizer
    known: dict[Tensor, str] = {p: name for p, name in names.items() if not is_only}
    known |= {p: name or names[p] for group in settings.groups for name, p in group["params"]}
    problems = [
        *replacement.problems,
        *_unnamed_parameters(settings, replacement, known),
        *_lost_state(optimizer, replacement),
        *conversion_obstacles(optimizer),
    ]
    if problems:
        raise StrategyError(prefix + "; ".join(problems))
    try:
        new = convert_optimizer(
            replacement, settings, optimizer.state, known, keep or (lambda _: True)
        )
    except (TypeError, ValueError) as error:
        raise StrategyError(f"{prefix}{error}") from error
    compressor = None if isinstance(new, DGCMomentum) else compression
    notes = [*_notes(optimizer, replacement, settings), *_compression(new, compressor, local=local)]
    return SelectedOptimizer(
        optimizer=new, compressor=compressor, conversion=conversion, notes=tuple(notes)
    )


def _mismatches(
    optimizer: torch.optim.Optimizer,
    compression: Compression | None,
    lars: LARS | None,
    lamb: LAMB | None,
    *,
    local: bool,
    keep: Callable[[Tensor], bool] | None,
    is_only: bool,
) -> Iterator[str]:
    """Return the kinds of optimizers that do not go with the fields of a strategy."""
    kind = type(optimizer).__name__
    if lars is not None and lamb is not None:
        yield "lars and lamb both replace the optimizer: remove one"
    if lars is not None and type(optimizer) not in SGDS:
        yield (
            f"lars replaces an SGD (of torch or thinwire.optim), but this is {kind}: pass an SGD "
            "or remove lars"
        )
    if lamb is not None and type(optimizer) not in ADAMS:
        yield (
            f"lamb replaces an Adam, AdamW or LazyAdam, but this is {kind}: pass one of them or "
            "remove lamb"
        )
    if _needs_closure(optimizer):
        yield (
            f"{kind}.step requires a closure, but the engine computes and exchanges gradients "
            "once per step: pass an optimizer whose step() needs no closure"
        )
    if not isinstance(optimizer, DGCMomentum):
        return
    if isinstance(compression, DGC):
        converted = converted_by(optimizer)
        source = f" (an engine made it {kind} with other settings)" if converted else ""
        yield (
            "dgc is configured twice: keep it in the strategy and pass a plain SGD, or remove "
            f"dgc from the strategy{source}"
        )
    elif compression is not None:
        yield (
            f"{kind} compresses gradients itself: pass an SGD, or remove {field_of(compression)}"
        )
    if not is_only:
        yield (
            f"{kind} exchanges the gradients of its own parameters only, but is one of several "
            "optimizers: pass an SGD and dgc=DGC(...)"
        )
    if local:
        yield (
            f"{kind} exchanges gradients in every step, but local updates exchange none: pass an "
            "SGD"
        )
    if keep is not None and not _all_kept(optimizer, keep):
        yield (
            f"{kind} does not know which ranks share a stage of the pipeline: pass an SGD and "
            "dgc=DGC(...)"
        )


def _all_kept(optimizer: torch.optim.Optimizer, keep: Callable[[Tensor], bool]) -> bool:
    return all(keep(p) for group in optimizer.param_groups for p in group["params"])


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # written in another language: unknown
        return False
    return False


def _foreign_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]
) -> Iterator[str]:
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        yield (
            f"{len(foreign)} of its parameters are not in the model, the first of shape "
            f"{tuple(foreign[0].shape)}: give it parameters of the model only"
        )


def _unnamed_parameters(
    settings: OptimizerSettings, replacement: Replacement, names: Mapping[Tensor, str]
) -> Iterator[str]:
    if replacement.patterns and any(
        name is None for group in settings.groups for name, _ in group["params"]
    ):
        yield (
            f"exclude_from_weight_decay={replacement.patterns} are patterns over names, but the "
            "parameters have no names: pass model.named_parameters() to the optimizer instead of "
            "model.parameters()"
        )
        return
    try:
        exclusion_predicate(settings, replacement.patterns, names)
    except ValueError as error:
        yield str(error)


def _unchanged(
    optimizer: torch.optim.Optimizer,
    compressor: Compression | None,
    keep: Callable[[Tensor], bool] | None,
    conversion: tuple[Any, ...],
    *,
    local: bool,
) -> SelectedOptimizer:
    kind = type(optimizer).__name__
    notes = [f"{kind} is used unchanged"]
    if isinstance(optimizer, DGCMomentum):
        notes.append("it exchanges gradients itself")
    notes += _compression(optimizer, compressor, local=local)
    return SelectedOptimizer(
        optimizer=optimizer,
        compressor=compressor,
        conversion=conversion,
        notes=tuple(notes),
        restore=(lambda: None)
        if keep is None or _all_kept(optimizer, keep)
        else restrict_(optimizer, keep),
    )


def _lost_state(optimizer: torch.optim.Optimizer, replacement: Replacement) -> Iterator[str]:
    kept = [entries.items() for entries in optimizer.state.values()]
    keys = {key for items in kept for key, value in items if value is not None}
    lost = sorted(keys - set(replacement.state))
    if lost:
        yield (
            f"it has made updates, and its state {', '.join(lost)} has another meaning in "
            f"{replacement.kind.__name__}: pass a new optimizer, or call optimizer.state.clear()"
        )


def _notes(
    optimizer: torch.optim.Optimizer, replacement: Replacement, settings: OptimizerSettings
) -> Iterator[str]:
    kind, before = replacement.kind.__name__, type(optimizer).__name__
    yield f"{before} becomes {kind}"
    rates = [group.get("lr", settings.lr) for group in settings.groups]
    yield "learning rate " + ", ".join(dict.fromkeys(map(str, rates)))
    yield from (
        f"{key} {replacement.arguments[key]}"
        for key in ("momentum", "nesterov", "betas")
        if key in replacement.arguments
    )
    yield from replacement.notes
    yield (
        f"clipping {settings.grad_clip}, regularizer {settings.regularizer}, "
        f"{len(settings.groups)} groups"
    )
    if settings.position:
        yield f"schedules continue at update {settings.position}"
    if optimizer.state:
        yield f"{kind} takes over the state of {len(optimizer.state)} parameters"
    unused = [key for key in _SPEED if key in replacement.unused]
    if speed := [key for key in unused if any(group.get(key) for group in settings.groups)]:
        yield f"{kind} has no {' and '.join(speed)}, which affect speed only"


def _compression(
    optimizer: torch.optim.Optimizer, compressor: Compression | None, *, local: bool
) -> Iterator[str]:
    if compressor is not None:
        subject = "changes of the parameters" if local else "gradients"
        kind = type(optimizer).__name__
        yield (
            f"{field_of(compressor)} compresses {subject}, without momentum of its own; momentum, "
            f"clipping and decay are {kind}'s"
        )
