"""Selects the optimizer that trains: the given one, or a replacement of the strategy."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import field_of
from thinwire.compress.protocol import Compression
from thinwire.core.several import all_of
from thinwire.errors import StrategyError
from thinwire.optim import Lamb, Lars
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.folded import why_no_local_clip
from thinwire.optim.layerwise import LAMB, LARS
from thinwire.optim.settings import OptimizerSettings, restrict_, settings_of
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import conversion_obstacles, converted_by, params_of
from thinwire.strategy.replacements import (
    ADAMS,
    SGDS,
    Replacement,
    as_lamb,
    as_lars,
    convert_optimizer,
    exclusion_predicate,
    refused_settings,
)

_SPEED = ("capturable", "fused")


@dataclass(frozen=True, slots=True)
class SelectedOptimizer:
    """Optimizer selected for a strategy, and its settings."""

    optimizer: torch.optim.Optimizer
    """The given object, or a new one that the given object has to become: see `convert_`."""
    compressor: Compression | None
    """Compressor of the gradients (under local updates: of the changes); None if nothing is
    compressed.
    """
    folds: bool
    """True if the compressor keeps the momentum of this SGD."""
    conversion: tuple[Any, ...]
    """Fields that replace an optimizer, and so caused a new one."""
    notes: tuple[str, ...]
    """Notes in words on settings that were taken over, and on those that were not."""
    restore: Callable[[], None]
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
    is_only: bool = True,
) -> SelectedOptimizer:
    """Return the optimizer that trains under a strategy.

    A compression that accumulates keeps the momentum of an SGD that is alone; everything else is
    compressed before the optimizer.
    """
    # state is taken over where it means the same: moments and steps of Adam for Lamb; state of SGD
    # is refused for Lars, whose velocity contains the rate
    prefix = f"the strategy does not work with the optimizer {type(optimizer).__name__}: "
    conversion = (lars, lamb)
    if converted_by(optimizer) == conversion:  # by an earlier engine, now closed
        lars, lamb = None, None
    folds = compression is not None and compression.accumulates
    folds = folds and is_only and not local and lars is None and type(optimizer) in SGDS
    problems = [
        *_mismatches(optimizer, lars, lamb),
        *(_unfolded(optimizer, compression) if folds and compression is not None else []),
    ]
    if problems:
        raise StrategyError(prefix + "; ".join(problems))
    if lars is None and lamb is None:
        new, notes = optimizer, [f"{type(optimizer).__name__} is used unchanged"]
    else:
        new, notes = _converted(optimizer, lars, lamb, names, keep, is_only=is_only, prefix=prefix)
    notes += _compression(new, compression, local=local, folds=folds)
    restore = ExitStack().close  # nothing
    if new is optimizer and keep is not None and not all(map(keep, params_of(optimizer))):
        restore = restrict_(optimizer, keep)
    return SelectedOptimizer(new, compression, folds, conversion, tuple(notes), restore)


def _converted(
    optimizer: torch.optim.Optimizer,
    lars: LARS | None,
    lamb: LAMB | None,
    names: Mapping[Parameter, str],
    keep: Callable[[Tensor], bool] | None,
    *,
    is_only: bool,
    prefix: str,
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Return the optimizer of LARS or LAMB, and notes on what it takes over."""
    settings = settings_of(optimizer)
    if lars is not None:
        replacement = as_lars(optimizer, settings, lars)
    else:
        assert lamb is not None, "or it stays"
        replacement = as_lamb(optimizer, settings, lamb)
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
    return new, list(_notes(optimizer, replacement, settings))


def _mismatches(
    optimizer: torch.optim.Optimizer, lars: LARS | None, lamb: LAMB | None
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
    if getattr(optimizer, "exchanges_gradients", False):
        yield (
            f"{kind} exchanges gradients itself, in a loop of your own: pass an SGD, and compress "
            "by a field of the strategy"
        )


def _unfolded(optimizer: torch.optim.Optimizer, compression: Compression) -> Iterator[str]:
    """Return settings of an SGD that cannot act before its gradients are accumulated."""
    field = field_of(compression)
    yield from refused_settings(field, optimizer.param_groups)
    yield from conversion_obstacles(optimizer)
    clip = optimizer.grad_clip if isinstance(optimizer, CommonOptimizer) else None
    if clip is not None and (why := why_no_local_clip(compression, clip)) is not None:
        yield f"the optimizer clips by {clip}, but {why}"


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except (TypeError, ValueError) as error:  # ValueError: written in another language, unknown
        return isinstance(error, TypeError)
    return False


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
    optimizer: torch.optim.Optimizer, compressor: Compression | None, *, local: bool, folds: bool
) -> Iterator[str]:
    if compressor is None:
        return
    field, kind = field_of(compressor), type(optimizer).__name__
    if folds:
        yield (
            f"{field} compresses gradients with the momentum, Nesterov and weight decay of {kind}, "
            "which keeps those of all tensors that are always dense"
        )
        return
    subject = "changes of the parameters" if local else "gradients"
    yield (
        f"{field} compresses {subject}, without momentum of its own; momentum, "
        f"clipping and decay are {kind}'s"
    )
