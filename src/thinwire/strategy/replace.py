"""Selects the optimizer that trains: the given one, or a replacement of the strategy."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from thinwire.compress import tag_of
from thinwire.compress.protocol import Compression
from thinwire.core.several import all_of, params_in
from thinwire.core.tensors import state_dtype
from thinwire.errors import StrategyError
from thinwire.optim import SGD, Adam, AdamW, Lamb, Lars, LazyAdam
from thinwire.optim.common import CommonOptimizer, CommonSettings, common_settings
from thinwire.optim.folded import why_no_local_clip
from thinwire.optim.groups import Exclusion, ParamRecord, excluded_flags, require_matches
from thinwire.optim.layerwise import LAMB, LARS
from thinwire.optim.rates import parse_rate
from thinwire.schedules import Schedule
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import conversion_obstacles, converted_by, params_of

_SGDS = (torch.optim.SGD, SGD)
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, Adam, AdamW, LazyAdam)
_SPEED = ("capturable", "fused")
_COMMON_KEYS = "lr grad_centralization regularizer maximize foreach initial_lr name"
"""Keys of a group that every class has."""


@dataclass(frozen=True, slots=True)
class SelectedOptimizer:
    """Optimizer selected for a strategy, and its settings."""

    optimizer: torch.optim.Optimizer
    """The given object, or a new one that the given object has to become: see `convert_`."""
    folding: Compression | None
    """The compression that keeps the momentum of this SGD, if one does."""
    conversion: tuple[Any, ...]
    """Fields that replace an optimizer, and so caused a new one."""
    notes: tuple[str, ...]
    """Notes in words on settings that were taken over, and on those that were not."""
    restore: Callable[[], None]
    """Restores the parameters of other stages to the given optimizer, if `prepare` fails."""


class _Settings(NamedTuple):
    """Settings and parameters of an optimizer, in a form from which another one can be built."""

    common: CommonSettings
    """What our optimizers know beside their groups; of torch's, the rate and the parameters."""
    groups: list[dict[str, Any]]
    """All keys of each group. `params` are (name or None, parameter) pairs. `lr` is present only if
    it differs from the constructor's: a number or the group's schedule.
    """


@dataclass(slots=True)
class _Replacement:
    """Conversion of an optimizer to another method."""

    method: str
    """Field of the strategy that asks for it."""
    kind: type[Any]
    """The new class, a `CommonOptimizer`."""
    keys: dict[str, Callable[[Any], Any]]
    """Keys of a group with the same meaning in the new class, each with a converter of its
    value.
    """
    unused: Sequence[str]
    """Keys without meaning in the new class."""
    state: Sequence[str]
    """Keys of a parameter's state with the same meaning in the new class."""
    patterns: tuple[str, ...]
    """Patterns of names without decay, beside those that the optimizer excludes."""
    arguments: dict[str, Any]
    """Arguments of the constructor, beside those that all optimizers have in common."""
    notes: list[str] = field(default_factory=list)
    """Notes on settings that are taken over, and on those that are not."""


def select_optimizers(
    optimizer: torch.optim.Optimizer, strategy: Fields, **rest: Any
) -> list[SelectedOptimizer]:
    """Call `select_optimizer` for every optimizer; LARS and LAMB replace those that they can."""
    every = all_of(optimizer)
    rest |= {"compression": strategy.gradient_compression, "local": strategy.local is not None}
    for_lars = [single for single in every if type(single) in (*_SGDS, Lars)] or every
    for_lamb = [single for single in every if type(single) in (*_ADAMS, Lamb)] or every
    found: list[SelectedOptimizer] = []
    with ExitStack() as undo:
        for single in every:
            lars = strategy.lars if single in for_lars else None
            lamb = strategy.lamb if single in for_lamb else None
            alone = len(every) == 1
            found.append(select_optimizer(single, lars=lars, lamb=lamb, is_only=alone, **rest))
            undo.callback(found[-1].restore)
        undo.pop_all()
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
        lars = None
        lamb = None
    alone = is_only and not local and lars is None and type(optimizer) in _SGDS
    folding = compression if compression and compression.accumulates and alone else None
    problems = [*_mismatches(optimizer, lars, lamb), *_unfolded(optimizer, folding)]
    if problems:
        raise StrategyError(prefix + "; ".join(problems))
    new = optimizer
    notes = [f"{type(optimizer).__name__} is used unchanged"]
    if (config := lars or lamb) is not None:
        every = keep or (lambda _: True)
        new, notes = _converted(optimizer, config, names, every, is_only=is_only, prefix=prefix)
    if compression is not None:
        method = tag_of(compression)
        kind = type(new).__name__
        subject = "changes of the parameters" if local else "gradients"
        notes.append(
            f"{method} compresses {subject}, without momentum of its own; momentum, "
            f"clipping and decay are {kind}'s"
            if folding is None
            else f"{method} compresses gradients with the momentum, Nesterov and weight decay of "
            f"{kind}, which keeps those of all tensors that are always dense"
        )
    restore = ExitStack().close  # nothing
    if new is optimizer and keep is not None and not all(map(keep, params_of(optimizer))):
        restore = _restrict_(optimizer, keep)
    return SelectedOptimizer(new, folding, conversion, tuple(notes), restore)


def _converted(
    optimizer: torch.optim.Optimizer,
    config: LARS | LAMB,
    names: Mapping[Parameter, str],
    keep: Callable[[Tensor], bool],
    *,
    is_only: bool,
    prefix: str,
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Return the optimizer of LARS or LAMB, and notes on what it takes over."""
    settings = _settings_of(optimizer)
    replacement = _replacement_of(optimizer, config)
    # a pattern may match parameters of another optimizer
    known: dict[Tensor, str] = {p: name for p, name in names.items() if not is_only}
    known |= {p: name or names[p] for group in settings.groups for name, p in group["params"]}
    exclude: Exclusion = None
    problems = [
        *_refused_settings(replacement.method, settings.groups),
        *_decide_decay_(replacement, optimizer, settings),
    ]
    unnamed = any(name is None for group in settings.groups for name, _ in group["params"])
    if replacement.patterns and unnamed:
        problems.append(
            f"exclude_from_weight_decay={replacement.patterns} are patterns over names, but the "
            "parameters have no names: pass model.named_parameters() to the optimizer instead of "
            "model.parameters()"
        )
    else:
        try:
            exclude = _exclusion(settings, replacement.patterns, known)
        except ValueError as error:
            problems.append(str(error))
    problems += [*_lost_state(optimizer, replacement), *conversion_obstacles(optimizer)]
    if problems:
        raise StrategyError(prefix + "; ".join(problems))
    try:
        new = _made(replacement, settings, optimizer.state, known, keep, exclude)
    except (TypeError, ValueError) as error:
        raise StrategyError(f"{prefix}{error}") from error.__cause__
    return new, list(_notes(optimizer, replacement, settings))


def _replacement_of(optimizer: torch.optim.Optimizer, config: LARS | LAMB) -> _Replacement:
    patterns = config.exclude_from_weight_decay
    if isinstance(config, LARS):
        keys: dict[str, Any] = {"momentum": float, "nesterov": bool, "weight_decay": float}
        unused = "dampening differentiable fused"
        own = {"trust_coefficient": config.lars_coeff, "weight_decay": config.lars_weight_decay}
        own["eps"] = config.epsilon
        made = _Replacement("lars", Lars, keys, unused.split(), (), patterns, own)
    else:
        keys = {"betas": lambda betas: tuple(map(float, betas)), "weight_decay": float}
        unused = "eps amsgrad capturable differentiable fused decoupled_weight_decay"
        state = ("step", "exp_avg", "exp_avg_sq")
        own = {"weight_decay": config.lamb_weight_decay}
        made = _Replacement("lamb", Lamb, keys, unused.split(), state, patterns, own)
    taken = {key: kind(optimizer.defaults[key]) for key, kind in {**keys, "maximize": bool}.items()}
    made.arguments = taken | own
    return made


@dataclass(eq=False)
class _FixedExclusion:
    """A predicate that repeats earlier decisions, and applies the rules to later parameters."""

    answers: dict[Tensor, bool]
    rules: tuple[Exclusion, ...]

    def __call__(self, name: str, param: Tensor) -> bool:
        if param in self.answers:
            return self.answers[param]
        return any(excluded_flags(rule, [(name, param)])[0] for rule in self.rules)


def _exclusion(
    settings: _Settings, patterns: tuple[str, ...], names: Mapping[Tensor, str]
) -> Exclusion:
    """Return the predicate for parameters without decay: those that the optimizer excludes, and
    those whose name matches. Decided for all stages of a pipeline; refuses an idle pattern.
    """
    require_matches(patterns, names.values())
    before = settings.common.exclude
    records = settings.common.records
    if not patterns and not before:
        return None
    flags = excluded_flags(patterns, [(names[param], param) for param in records])
    pairs = zip(records.items(), flags, strict=True)
    answers = {param: record.excluded or flag for (param, record), flag in pairs}
    return _FixedExclusion(answers, tuple(rule for rule in (before, patterns) if rule))


def _made(
    replacement: _Replacement,
    settings: _Settings,
    state: Mapping[Tensor, Mapping[str, Any]],
    names: Mapping[Tensor, str],
    keep: Callable[[Tensor], bool],
    exclude: Exclusion,
) -> CommonOptimizer:
    """Return the optimizer of the other method, at the same update, with the state of the
    same meaning.
    """
    groups: list[dict[str, Any]] = []
    for group in settings.groups:
        kept = [param for _, param in group["params"] if keep(param)]
        values = {
            key: replacement.keys[key](group[key]) for key in replacement.keys if key in group
        }
        common = {key: group[key] for key in _COMMON_KEYS.split() if key in group}
        groups.append(
            {"params": kept, "param_names": [names[param] for param in kept], **common, **values}
        )
    shared = settings.common
    groups.append({"order_params": [param for param in shared.order if keep(param)]})
    new: CommonOptimizer = replacement.kind(
        groups,
        lr=shared.lr,
        grad_clip=shared.grad_clip,
        regularizer=shared.regularizer,
        exclude_from_weight_decay=exclude,
        **replacement.arguments,
    )
    known = {*_COMMON_KEYS.split(), "params", *replacement.keys, *replacement.unused}
    for made, before in zip(new.param_groups, settings.groups, strict=True):
        # the user's own keys, which no optimizer reads
        made.update({k: v for k, v in before.items() if k not in known and k not in made})
    saved = new.state_dict()
    everything = params_of(new)
    saved["position"] = shared.position
    saved["state"] = {
        i: entries
        for i, param in enumerate(everything)
        if (entries := _entries(param, state.get(param, {}), replacement.state))
    }
    new.load_state_dict(saved)
    return new


def _entries(param: Tensor, entries: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the state of one parameter in the types of thinwire's optimizers."""
    new: dict[str, Any] = {}
    for key in keys:
        value = entries.get(key)
        if key == "step" and value is not None:
            new[key] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
        elif isinstance(value, Tensor):
            dense = value if value.layout is torch.strided else value.to_dense()
            new[key] = dense.to(dense.dtype if dense.is_complex() else state_dtype(param))
    return new


def _mismatches(
    optimizer: torch.optim.Optimizer, lars: LARS | None, lamb: LAMB | None
) -> Iterator[str]:
    """Return the kinds of optimizers that do not go with the fields of a strategy."""
    kind = type(optimizer).__name__
    if lars is not None and lamb is not None:
        yield "lars and lamb both replace the optimizer: remove one"
    if lars is not None and type(optimizer) not in _SGDS:
        yield (
            f"lars replaces an SGD (of torch or thinwire.optim), but this is {kind}: pass an SGD "
            "or remove lars"
        )
    if lamb is not None and type(optimizer) not in _ADAMS:
        yield (
            f"lamb replaces an Adam, AdamW or LazyAdam, but this is {kind}: pass one of them or "
            "remove lamb"
        )
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        yield (
            f"{kind}.step requires a closure, but the engine computes and exchanges gradients "
            "once per step: pass an optimizer whose step() needs no closure"
        )
    except ValueError:  # written in another language: unknown
        pass
    if getattr(optimizer, "exchanges_gradients", False):
        yield (
            f"{kind} exchanges gradients itself, in a loop of your own: pass an SGD, and compress "
            "by a field of the strategy"
        )


def _unfolded(optimizer: torch.optim.Optimizer, compression: Compression | None) -> Iterator[str]:
    """Yield settings of an SGD that cannot act before its gradients are accumulated."""
    if compression is None:
        return
    yield from _refused_settings(tag_of(compression), optimizer.param_groups)
    yield from conversion_obstacles(optimizer)
    clip = optimizer.grad_clip if isinstance(optimizer, CommonOptimizer) else None
    if clip is not None and (why := why_no_local_clip(compression, clip)) is not None:
        yield f"the optimizer clips by {clip}, but {why}"


def _refused_settings(field: str, groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what no method of a strategy has, such as a step that records a graph."""
    if any(group.get("amsgrad") for group in groups):
        yield f"{field} has no amsgrad, but the optimizer uses it: set amsgrad=False"
    dampening = [group["dampening"] for group in groups if group.get("dampening")]
    if dampening:
        yield f"{field} has no dampening, but the optimizer has {dampening[0]}: set dampening=0"
    if any(group.get("differentiable") for group in groups):
        yield (
            f"{field} is not differentiable, but the optimizer has differentiable=True: set "
            "differentiable=False"
        )


def _decide_decay_(
    replacement: _Replacement, optimizer: torch.optim.Optimizer, settings: _Settings
) -> list[str]:
    """Set the decay so that nothing decays twice and each choice is kept; return obstacles."""
    decay = replacement.arguments["weight_decay"]
    method = replacement.method
    own = float(optimizer.defaults["weight_decay"])
    decays = [float(group["weight_decay"]) for group in settings.groups]
    if set(decays) != {own}:
        of_groups = ", ".join(map(str, decays))
        replacement.notes.append(f"each group keeps its weight_decay: {of_groups}")
        return []
    del replacement.keys["weight_decay"]
    replacement.notes.append(f"weight_decay is {method}'s {decay}")
    usual = float(inspect.signature(type(optimizer)).parameters["weight_decay"].default)
    if own in (0.0, usual, decay):
        return []
    return [
        f"the optimizer's weight_decay={own} and {method}_weight_decay={decay} both apply to "
        f"the same parameters: set {method}_weight_decay={own} and omit it in the optimizer"
    ]


def _lost_state(optimizer: torch.optim.Optimizer, replacement: _Replacement) -> Iterator[str]:
    kept = [entries.items() for entries in optimizer.state.values()]
    keys = {key for items in kept for key, value in items if value is not None}
    lost = sorted(keys.difference(replacement.state))
    if lost:
        yield (
            f"it has made updates, and its state {', '.join(lost)} has another meaning in "
            f"{replacement.kind.__name__}: pass a new optimizer, or call optimizer.state.clear()"
        )


def _notes(
    optimizer: torch.optim.Optimizer, replacement: _Replacement, settings: _Settings
) -> Iterator[str]:
    kind = replacement.kind.__name__
    yield f"{type(optimizer).__name__} becomes {kind}"
    common = settings.common
    rates = [group.get("lr", common.lr) for group in settings.groups]
    yield "learning rate " + ", ".join(dict.fromkeys(map(str, rates)))
    yield from (
        f"{key} {replacement.arguments[key]}"
        for key in ("momentum", "nesterov", "betas")
        if key in replacement.arguments
    )
    yield from replacement.notes
    if replacement.kind is Lamb:
        yield f"eps is LAMB's own 1e-06, not the optimizer's {optimizer.defaults['eps']:g}"
    yield (
        f"clipping {common.grad_clip}, regularizer {common.regularizer}, "
        f"{len(settings.groups)} groups"
    )
    if common.position:
        yield f"schedules continue at update {common.position}"
    if optimizer.state:
        yield f"{kind} takes over the state of {len(optimizer.state)} parameters"
    unused = [key for key in _SPEED if key in replacement.unused]
    if speed := [key for key in unused if any(group.get(key) for group in settings.groups)]:
        yield f"{kind} has no {' and '.join(speed)}, which affect speed only"


def _settings_of(optimizer: torch.optim.Optimizer) -> _Settings:
    """Return the settings of `optimizer`, ours or torch's, for the constructor of another one.

    Raises:
        TypeError, ValueError: A learning rate that our optimizers do not accept.
    """
    groups = optimizer.param_groups
    rates: list[float | Schedule]
    if isinstance(optimizer, CommonOptimizer):
        common = common_settings(optimizer)
        scheduled = zip(groups, common.schedules, strict=True)
        rates = [group["lr"] if schedule is None else schedule for group, schedule in scheduled]
        followed = [rate for rate, own in zip(rates, common.own_lr, strict=True) if not own]
        if followed and not isinstance(common.lr, Schedule):
            common = replace(common, lr=parse_rate("lr", followed[0]))
        own_lr = [own or rate != common.lr for rate, own in zip(rates, common.own_lr, strict=True)]
    else:
        rates = [parse_rate("lr of a parameter group", group["lr"]) for group in groups]
        default = parse_rate("lr", optimizer.defaults["lr"])
        lr = default if default in rates else rates[0]
        params = params_in(groups)
        records = {p: ParamRecord(i, 0, None, False) for i, p in enumerate(params)}
        common = CommonSettings(lr, None, None, None, None, order=params, records=records)
        own_lr = [rate != lr for rate in rates]
    spelled_out = []
    for group, rate, own in zip(groups, rates, own_lr, strict=True):
        names = group.get("param_names", [None] * len(group["params"]))
        other = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr")}
        pairs = list(zip(names, group["params"], strict=True))
        spelled_out.append({"params": pairs, **({"lr": rate} if own else {}), **other})
    return _Settings(common, spelled_out)


def _restrict_(
    optimizer: torch.optim.Optimizer, keep: Callable[[Tensor], bool]
) -> Callable[[], None]:
    """Drop from `optimizer` all parameters for which `keep` is false, and their state. Return a
    function that undoes it, as long as the optimizer has not been used.

    Groups keep their index, empty ones too, so that a learning-rate scheduler finds them.
    """
    undo = ExitStack()
    if isinstance(optimizer, CommonOptimizer):
        common = common_settings(optimizer)
        undo.callback(setattr, common, "records", common.records)
        undo.callback(setattr, common, "order", common.order)
        kept = [(param, record) for param, record in common.records.items() if keep(param)]
        common.records = {p: replace(record, index=i) for i, (p, record) in enumerate(kept)}
        common.order = [param for param in common.order if keep(param)]
    for group in optimizer.param_groups:
        named = ("params", "param_names")
        before: dict[str, Any] = {key: group[key] for key in named if key in group}
        undo.callback(group.update, before)
        kept_here = [keep(param) for param in before["params"]]
        group.update({key: [*compress(values, kept_here)] for key, values in before.items()})
    dropped = {
        param: optimizer.state.pop(param) for param in list(optimizer.state) if not keep(param)
    }
    undo.callback(optimizer.state.update, dropped)
    return undo.close
