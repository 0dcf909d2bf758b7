"""A strategy as text: its fields, a step in order, the pairs, advice, the effect on a model."""

import textwrap
from collections.abc import Iterator, Sequence
from types import NoneType

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire._wording import listed
from thinwire.comm import node_size_of, rank_and_size_in
from thinwire.compress import tag_of
from thinwire.compress.residuals import Dense
from thinwire.core.gradients import Clip
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig, fragments_of
from thinwire.local.model import require_own_params
from thinwire.pipeline.split import split_model
from thinwire.step.recompute import matches
from thinwire.strategy.clipping import require_one_clip
from thinwire.strategy.documents import attribute_lines
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import require_trained
from thinwire.strategy.replace import select_optimizers
from thinwire.strategy.rules import rules_between

_COLUMNS = 100
_SHOWN = 6
_NEARLY_ALL = 0.8
"""Share of a change above which advice is left out."""


def explanation(
    strategy: Fields,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    grad_clip: Clip | None = None,
) -> str:
    """Return the text of `DistributedStrategy.explain`, at most 100 columns wide."""
    check.instance("model", model, (nn.Module, NoneType))
    check.instance("optimizer", optimizer, (Optimizer, NoneType))
    about = attribute_lines(type(strategy))
    order = enumerate(_order(strategy, grad_clip), start=1)
    sections = {
        "On": [f"{name}: {about.get(name, '')} {value}" for name, value in strategy.on.items()]
        or ["nothing: gradients are averaged over all ranks, as by DistributedDataParallel"],
        "A step, in order": [f"{number}. {text}" for number, text in order],
        "Together": [
            f"{' and '.join(rule.pair)}: {rule.meaning}" for rule in rules_between(strategy.on)
        ],
        "To know": list(_advice(strategy)),
        "This model": [] if model is None else list(_about_model(strategy, model, optimizer)),
        "This optimizer": (
            [] if optimizer is None else _about_optimizer(strategy, optimizer, model, grad_clip)
        ),
    }
    wrap = textwrap.TextWrapper(_COLUMNS, "  ", "     ", break_on_hyphens=False).fill
    return "\n\n".join("\n".join([t, *map(wrap, texts)]) for t, texts in sections.items() if texts)


def _order(strategy: Fields, grad_clip: Clip | None) -> Iterator[str]:
    amp, merge, local = strategy.amp, strategy.gradient_merge, strategy.local
    pipeline, recompute = strategy.pipeline, strategy.recompute
    scale = None if amp is None else amp.loss_scale
    unchecked = isinstance(scale, FixedLossScale) and not scale.drop_overflow_update
    merges = merge is not None and merge.k_steps > 1
    ranks = "all ranks" if pipeline is None else "the replicas of a stage"

    text = "Forward pass of this rank's mini-batch"
    if pipeline is not None:
        text += f", in {pipeline.micro_batches} parts through {pipeline.stages} stages"
    text += f", in {amp.dtype} where autocast allows it" if amp is not None else ""
    yield text + ("; recomputed modules keep only their inputs" if recompute is not None else "")
    text = "Backward pass of the loss" + (" times the loss scale" if scale is not None else "")
    yield text + ("; recomputed modules repeat their forward pass" if recompute else "")
    if merge is not None and merges:
        divided = ", divided by the loss scale," if scale is not None else ""
        yield (
            f"Merge: the gradient{divided} is added to those before it. After {merge.k_steps} "
            f"microsteps their {'mean' if merge.avg else 'sum'} is used"
        )
    if scale is not None:
        divided = "" if merges else "; else gradients are divided by the scale"
        if unchecked:
            yield f"Gradients are not checked for overflow{divided.replace('else ', '')}"
        elif local is not None:
            yield f"An overflow drops the local step, which still counts{divided}"
        else:
            yield f"All ranks agree whether a gradient overflowed: if so, no update{divided}"
    if local is not None:
        yield "No exchange of gradients: each rank updates on its own"
    else:
        method = (
            f"by {tag_of(strategy.gradient_compression)}"
            if strategy.gradient_compression
            else "dense"
        )
        early = "; it begins in the backward pass" if pipeline is None else ""
        drop = ""
        if scale is None or (unchecked and strategy.gradient_compression is not None):
            drop = ". A gradient that is not finite, on any rank, drops the update on all"
        yield f"Exchange: the gradient becomes the mean over {ranks}, {method}{early}{drop}"
    clipping = "clipping"
    if grad_clip is not None:
        owner = "this rank's own gradient" if local is not None else "the mean gradient"
        clipping += (
            f" of {owner}{' over all stages' if pipeline is not None else ''} by {grad_clip}"
        )
    method = next((f.upper() for f in ("lars", "lamb") if f in strategy.on), "the given optimizer")
    yield f"Update: {clipping}, weight decay and regularizer, centralization, then {method}"
    yield from _after(local, scale, ranks)


def _after(local: LocalConfig | None, scale: LossScale | None, ranks: str) -> Iterator[str]:
    if local is not None:
        yield f"Averaging over {ranks}, {_interval(local)}"
    if isinstance(local, AdaptiveLocalSGD):
        yield "New interval: shorter as the loss falls, longer as the rate falls"
    if isinstance(scale, DynamicLossScale):
        yield "New loss scale: smaller after an overflow, larger after many updates without one"


def _interval(config: LocalConfig) -> str:
    k_steps = config.init_k_steps if isinstance(config, AdaptiveLocalSGD) else config.k_steps
    first = f"after each of the first {config.begin_step} steps, then " if config.begin_step else ""
    part = f"one of {config.fragments} parts " if config.fragments > 1 else ""
    text = f"{first}{part}every {max(1, k_steps // config.fragments)} steps"
    if config.by_time:
        text += f" or {config.round_seconds:g} s; a rank's change counts by its steps or tokens"
    return text + (f"; it takes effect {config.delay} steps later" if config.delay else "")


def _advice(strategy: Fields) -> Iterator[str]:
    amp, pipeline, local = strategy.amp, strategy.pipeline, strategy.local
    merge = strategy.gradient_merge
    if amp is not None and amp.dtype == "float16" and amp.loss_scale is None:
        yield (
            "amp: float16 without a loss scale: gradients below 6e-8 become 0 and large ones "
            "infinite, and amp checks for neither; set loss_scale=DynamicLossScale()"
        )
    if amp is not None and amp.dtype == "bfloat16" and amp.loss_scale is not None:
        yield "amp: bfloat16 has the range of float32; the loss scale is used, but gains little"
    scale = None if amp is None else amp.loss_scale
    if isinstance(scale, FixedLossScale) and not scale.drop_overflow_update:
        yield (
            "amp: with drop_overflow_update=False an overflow reaches the parameters, unless "
            "a compression stops it"
        )
    if pipeline is not None:
        yield (
            f"pipeline: the number of ranks must be a multiple of {pipeline.stages}, every "
            f"mini-batch of {pipeline.micro_batches}. The tensors between stages are the traffic: "
            "keep them small. Use train_step, not minimize"
        )
    single = {"gradient_merge": merge, "localsgd": strategy.localsgd}
    for name, config in single.items():
        if config is not None and config.k_steps == 1:
            yield f"{name}: k_steps=1 saves no communication"
    if local is None and pipeline is None:
        method = strategy.gradient_compression or Dense()
        first, others = (nbytes / 2**20 for nbytes in method.buckets)
        size = f"{others:g} MiB" + (f" (the first of {first:g} MiB)" if first < others else "")
        yield (
            f"overlap: gradients are sent during the backward pass, in buckets of {size}, once "
            "all ranks used the same parameters in two successive updates. With one rank, "
            "row-sparse gradients or changing parameters, the exchange follows the backward pass"
        )
    if local is None:
        yield from _about_compression(strategy)
    else:
        yield "local updates: ranks differ between two averagings; evaluate after flush()"
        yield from _about_share(local)
    if local and strategy.dgc and strategy.dgc.node_size not in (None, 1):
        yield "dgc: node_size is for gradients; set node_size of the local updates"
    pending = ["the leftovers of a merge"] if merge is not None and merge.k_steps > 1 else []
    if pending := pending + (["the last averaging"] if local is not None else []):
        yield f"at the end call engine.flush(): it applies {' and '.join(pending)}"


def _about_compression(strategy: Fields) -> Iterator[str]:
    """Return advice on a compression of gradients: its optimizer, its sources, its exchange."""
    config = strategy.gradient_compression
    if config is None:
        return
    tag = tag_of(config)
    if config.accumulates and strategy.lars is None and strategy.lamb is None:
        yield (
            f"{tag}: clipping, weight decay, momentum and Nesterov of an SGD come before the "
            "exchange; any other optimizer gets the sparse mean as its gradient"
        )
    ranks = range(0, rank_and_size_in()[1], strategy.pipeline.stages if strategy.pipeline else 1)
    sources = (
        f"{tag}: node_size={config.node_size}: that many consecutive ranks average densely and "
        "count as one source; None takes torchrun's LOCAL_WORLD_SIZE where it fills two machines "
        "or more"
    )
    if len(ranks) > 1:
        try:
            width, why = node_size_of(ranks, config.node_size)
            sources += f". Here there are {len(ranks) // width} sources of {width}: {why}"
        except ValueError as error:
            sources += f". But {error}"
    yield sources
    if "exchange" in config.__dataclass_fields__:
        exchange = {
            "gather": "every source gets the messages of all others",
            "split": "every source adds up a share of the numbers and passes on the largest sums",
            "auto": "gather for few sources, split from about 9 on, if that halves the bytes",
        }
        yield f"{tag}: exchange={config.exchange!r}: {exchange[config.exchange]}"


def _about_share(config: LocalConfig) -> Iterator[str]:
    """Return advice on the applied share of a change, and on the outer rate for it."""
    share = 1.0 if config.compression is None else config.compression.steady_share
    if share is None:
        yield (
            "local updates: the applied share of a change depends on the ranks' messages: check "
            "stats()['applied_share'], and adjust outer_lr if it is far from 1"
        )
    elif share < _NEARLY_ALL and (config.outer_momentum or share * config.outer_lr < 1):
        more = f"{float(f'{1 / share:.3g}'):g}"
        # with outer momentum steps are longer on purpose: the share of a run is no evidence
        remedy = (
            f"{more} times the outer_lr of dense changes compensates for it"
            if config.outer_momentum
            else f"outer_lr={more} compensates for it: divide outer_lr by the "
            "stats()['applied_share'] of a run"
        )
        yield (
            f"local updates: about {100 * share:.2g} % or more of a recurring change is applied, "
            f"since the residual decays. At most {remedy}; at decay=1 all of it is applied"
        )


def _about_model(strategy: Fields, model: nn.Module, optimizer: Optimizer | None) -> Iterator[str]:
    named = dict(named_parameters(model))
    params = {name: p for name, p in named.items() if p.requires_grad}
    if optimizer is not None:
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        params = {name: p for name, p in params.items() if p in trained}
        if strategy.pipeline is None:
            require_trained(params)
    if strategy.local is not None and strategy.pipeline is None and params:
        fragments_of(params, strategy.local)
    if strategy.pipeline is not None:
        for number, stage in enumerate(split_model(model, strategy.pipeline), start=1):
            yield f"stage {number}: {_sized(dict(named_parameters(stage)))}"
    if strategy.recompute is not None:
        names = matches(model, strategy.recompute.checkpoints)
        yield f"recomputed: {_counted(names, 'module')}"
    yield from _exchanged(strategy, model, params)
    if rest := [name for name in named if name not in params]:
        yield f"not trained: {_counted(rest, 'tensor')}"


def _exchanged(strategy: Fields, model: nn.Module, params: dict[str, Parameter]) -> Iterator[str]:
    local = strategy.local
    changes = None if local is None else local.compression
    row_sparse = {
        m.weight
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and local is None
    }

    def way(p: Parameter) -> str:
        if changes is not None:
            return "compressed" if changes.compresses(p) and p.numel() else "dense"
        if strategy.gradient_compression is None:
            return "dense"
        if (why := strategy.gradient_compression.why_dense(p)) is not None:
            return f"dense, {why}"
        return "dense, because its rows are sparse already" if p in row_sparse else "compressed"

    ways: dict[str, dict[str, Parameter]] = {}
    for name, p in params.items():
        ways.setdefault(way(p), {})[name] = p
    subject = "the change" if local is not None else "the gradient"
    for text, members in sorted(ways.items()):
        yield f"{text}, {subject} of {_sized(members)}"
    compressed = list(ways.get("compressed", {}).values())
    config = changes if changes is not None else strategy.gradient_compression
    if config is None or not compressed or strategy.pipeline is not None:
        return
    shapes = [(torch.view_as_real(p) if p.is_complex() else p).shape for p in compressed]
    if changes is not None and local is not None:
        yield f"a message has {changes.sent_bytes(local.begin_step + 1, shapes):,} bytes"
    elif local is None:
        yield config.message_text(config.settled_step, shapes)


def _about_optimizer(
    strategy: Fields, optimizer: Optimizer, model: nn.Module | None, grad_clip: Clip | None
) -> list[str]:
    """Describe the optimizer that will train, and the settings it takes over."""
    if model is not None:
        require_own_params(model, optimizer)
        names = {p: name for name, p in named_parameters(model)}
    else:
        names = {}
        for group in optimizer.param_groups:
            known = group.get("param_names", [])
            for i, p in enumerate(group["params"]):
                names[p] = known[i] if i < len(known) else f"parameter {len(names)}"
    selected = select_optimizers(optimizer, strategy, names=names)
    for one in selected:
        require_one_clip(one.optimizer, grad_clip, one.compressor if one.folds else None)
    return [note for one in selected for note in one.notes]


def _sized(params: dict[str, Parameter]) -> str:
    numbers = sum(p.numel() for p in params.values())
    return f"{numbers:,} numbers in {_counted(list(params), 'tensor')}"


def _counted(names: Sequence[str], word: str) -> str:
    return f"{len(names)} {word}{'' if len(names) == 1 else 's'}: {listed(names, _SHOWN)}"
