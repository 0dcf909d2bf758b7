"""Describes one step of a strategy, in order, with its values."""

from collections.abc import Iterator, Sequence

from thinwire.compress import compression_of, field_of
from thinwire.core.gradients import Clip
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig
from thinwire.strategy.explain.texts import TEXTS, local_clip, plural
from thinwire.strategy.fields import Fields


def step_order(strategy: Fields, grad_clip: Clip | None = None) -> list[str]:
    """Return one text per stage of a step, in the order of execution."""
    return [
        _forward(strategy),
        _backward(strategy),
        *_merge(strategy),
        *_overflow(strategy),
        _exchange(strategy),
        _update(strategy, grad_clip),
        *_averaging(strategy),
        *_next_scale(strategy),
    ]


def _forward(strategy: Fields) -> str:
    clauses = ["Forward pass of this rank's mini-batch"]
    if (pipeline := strategy.pipeline) is not None:
        cut = (
            f"which begin at {', '.join(pipeline.split_points)}"
            if pipeline.split_points
            else "balanced by parameters"
        )
        if pipeline.stages == 1:
            cut = "the whole model"
        clauses = [
            f"Forward pass of a mini-batch in {pipeline.micro_batches} equal parts through "
            f"{pipeline.stages} {plural('stage', pipeline.stages)} on as many consecutive ranks "
            f"({cut}), in the order of {pipeline.schedule}"
        ]
    if strategy.amp is not None:
        clauses.append(
            f"in {strategy.amp.dtype} where autocast allows it; parameters stay as they are"
        )
    if strategy.recompute is not None:
        clauses.append(
            f"modules that match {', '.join(strategy.recompute.checkpoints)} keep only their inputs"
        )
    return "; ".join(clauses)


def _backward(strategy: Fields) -> str:
    scale = None if strategy.amp is None else strategy.amp.loss_scale
    clauses = ["Backward pass of the loss"]
    if isinstance(scale, FixedLossScale):
        clauses[0] += f" times {_number(scale.loss_scale)}, the fixed loss scale"
    if isinstance(scale, DynamicLossScale):
        clauses[0] += f" times the loss scale, {_number(scale.init_loss_scale)} at the start"
    if strategy.recompute is not None:
        clauses.append("the modules that matched repeat their forward pass")
    return "; ".join(clauses)


def _merge(strategy: Fields) -> Iterator[str]:
    merge = strategy.gradient_merge
    if merge is not None and merge.k_steps > 1:
        scaled = strategy.amp is not None and strategy.amp.loss_scale is not None
        total = "mean" if merge.avg else "sum"
        yield (
            f"Merge: the gradient{', divided by the loss scale,' if scaled else ''} is added to "
            f"those before it. After {merge.k_steps} microsteps their {total} is used; the first "
            f"{merge.k_steps - 1} end here, without exchange and update"
        )


def _overflow(strategy: Fields) -> Iterator[str]:
    scale = None if strategy.amp is None else strategy.amp.loss_scale
    if scale is None:
        return
    merged = strategy.gradient_merge is not None  # the merge has divided them already
    if _unchecked(scale):
        divided = "" if merged else "Gradients are divided by the loss scale; "
        unseen = "gradients are not checked for overflow (drop_overflow_update)"
        yield f"{divided}{unseen if divided else unseen.capitalize()}"
    elif strategy.local is not None:
        owner = "of this replica" if strategy.pipeline is not None else "on this rank"
        divided = "" if merged else "; else gradients are divided by the scale"
        yield f"An overflow {owner} drops the local step, which still counts{divided}"
    else:
        divided = "" if merged else "; else gradients are divided by the scale"
        yield f"All ranks agree whether any gradient overflowed: if so, nothing is updated{divided}"


def _exchange(strategy: Fields) -> str:
    peers = "the replicas of a stage" if strategy.pipeline is not None else "all ranks"
    compression = strategy.compression
    if strategy.local is not None:
        limit = local_clip(compression, "rank")
        return f"No exchange of gradients: each rank updates on its own{limit}"
    drop = (
        ". A gradient that is not finite, on any rank, drops the update on all"
        if _checked(strategy)
        else ""
    )
    early = (
        ". It begins in the backward pass, bucket by bucket" if strategy.pipeline is None else ""
    )
    if compression is None:
        return f"Exchange: the gradient becomes the mean over {peers}, dense{early}{drop}"
    return (
        f"Exchange between {peers}, by {field_of(compression)}: "
        f"{TEXTS[type(compression)].gradient(compression)}{early}{drop}"
    )


def _update(strategy: Fields, grad_clip: Clip | None) -> str:
    clipping = "clipping"
    if grad_clip is not None:
        owner = "this rank's own gradient" if strategy.local is not None else "the mean gradient"
        everywhere = " over all stages" if strategy.pipeline is not None else ""
        clipping = f"clipping of {owner}{everywhere} by {grad_clip}"
    text = (
        f"Update at this step's rate: {clipping}, weight decay and regularizer, centralization, "
        "then "
    )
    if (lars := strategy.lars) is not None:
        added = f", epsilon {lars.epsilon:g}" if lars.epsilon else ""
        text += f"LARS instead of the given SGD: trust coefficient {lars.lars_coeff:g}, "
        text += f"weight decay {lars.lars_weight_decay:g}{added}"
        return text + _excluded(lars.exclude_from_weight_decay)
    if (lamb := strategy.lamb) is not None:
        return (
            text
            + f"LAMB instead of the given Adam: weight decay {lamb.lamb_weight_decay:g}"
            + _excluded(lamb.exclude_from_weight_decay)
        )
    return text + "the optimizer's own formula"


def _averaging(strategy: Fields) -> Iterator[str]:
    config = strategy.local
    if config is None:
        return
    adaptive = isinstance(config, AdaptiveLocalSGD)
    k_steps = config.init_k_steps if isinstance(config, AdaptiveLocalSGD) else config.k_steps
    peers = "the replicas of each stage" if strategy.pipeline is not None else "all ranks"
    n = config.begin_step
    begin = ("", "after step 1, then ", f"after each of the steps 1 to {n}, then ")[min(n, 2)]
    period = max(1, k_steps // config.fragments)  # from one fragment to the next
    part = "one part " if config.fragments > 1 else ""
    often = f"{begin}{part}after every {_ordinal(period)} step"
    if period == 1 and not adaptive:
        often = f"{part}after every step"
    if config.by_time:
        often += f" or {config.round_seconds:g} s after the last averaging, whichever comes first"
    state = " and optimizer state" if config.average_state else ""
    yield f"Averaging of parameters{state} over {peers}, {often}{_change(strategy, config)}"
    if isinstance(config, AdaptiveLocalSGD):
        yield (
            f"New interval, 1 to {config.max_k_steps} steps: {config.init_k_steps} at the start, "
            "shorter as the loss falls, longer as the rate falls"
        )


def _change(strategy: Fields, config: LocalConfig) -> str:
    text = "; each rank's change counts by its steps or tokens" if config.by_time else ""
    if (config.outer_lr, config.outer_momentum) != (1.0, 0.0):
        nesterov = ", Nesterov" if config.outer_nesterov else ""
        text += f"; the mean change goes through an outer SGD, rate {config.outer_lr:g}, "
        text += f"momentum {config.outer_momentum:g}{nesterov}"
    if (changes := compression_of(config.compression, strategy.compression)) is not None:
        text += f"; {TEXTS[type(changes)].change(changes)}"
    if config.node_size not in (None, 1):
        text += f"; the {config.node_size} ranks of a node average densely first and count as one"
    if config.fragments > 1:
        text += f"; {config.fragments} parts of the model take turns"
    if config.delay:
        text += f"; the result takes effect {config.delay} {plural('step', config.delay)} later"
    return text


def _next_scale(strategy: Fields) -> Iterator[str]:
    scale = None if strategy.amp is None else strategy.amp.loss_scale
    if isinstance(scale, DynamicLossScale):
        yield (
            f"New loss scale: divided by {scale.scale_factor:g} after an overflow, but not below "
            f"1, times {scale.scale_factor:g} after {scale.scale_window} good updates in a row"
        )


def _checked(strategy: Fields) -> bool:
    """Return True if the exchange checks gradients for values that are not finite."""
    scale = None if strategy.amp is None else strategy.amp.loss_scale
    return scale is None or (strategy.compression is not None and _unchecked(scale))


def _unchecked(scale: LossScale) -> bool:
    return isinstance(scale, FixedLossScale) and not scale.drop_overflow_update


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and value < 1e15 else f"{value:g}"


def _excluded(patterns: Sequence[str]) -> str:
    return f", without decay: {', '.join(patterns)}" if patterns else ""


def _ordinal(count: int) -> str:
    if count == 1:
        return "single"
    ending = (
        "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    )
    return f"{count}{ending}"
