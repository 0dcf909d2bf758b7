"""A strategy as text: its fields, a step in order, the pairs, advice, the effect on a model."""

import textwrap
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire._wording import listed
from thinwire.comm.nodes import job_ranks, node_size_of
from thinwire.compress import tag_of
from thinwire.compress.protocol import Compression
from thinwire.compress.residuals import Dense
from thinwire.core.gradients import Clip
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.layout.shares import contiguous
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig
from thinwire.local.model import require_own_params
from thinwire.pipeline.split import Pipeline, split_model
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
    division, local = _division(strategy.pipeline), strategy.local
    updates: _Updates = _EveryStep(strategy, division)
    if local is not None:
        updates = _BetweenAveragings(local, strategy, division)
    order = enumerate(_order(strategy, updates, division, grad_clip), start=1)
    sections = {
        "On": [f"{name}: {about.get(name, '')} {value}" for name, value in strategy.on.items()]
        or ["nothing: gradients are averaged over all ranks, as by DistributedDataParallel"],
        "A step, in order": [f"{number}. {text}" for number, text in order],
        "Together": [
            f"{' and '.join(rule.pair)}: {rule.meaning}" for rule in rules_between(strategy.on)
        ],
        "To know": list(_advice(strategy, updates, division)),
        "This model": (
            [] if model is None else list(_about_model(strategy, updates, model, optimizer))
        ),
        "This optimizer": (
            [] if optimizer is None else _about_optimizer(strategy, optimizer, model, grad_clip)
        ),
    }
    wrap = textwrap.TextWrapper(_COLUMNS, "  ", "     ", break_on_hyphens=False).fill
    return "\n\n".join("\n".join([t, *map(wrap, texts)]) for t, texts in sections.items() if texts)


class _Division(NamedTuple):
    """Texts on a model that each rank has whole; on stages if they are given."""

    ranks: str = "all ranks"
    passes: str = ""
    early: str = "; it begins in the backward pass"
    clipped: str = ""
    stages: int = 1
    advice: tuple[str, ...] = ()


def _division(pipeline: Pipeline | None) -> _Division:
    if pipeline is None:
        return _Division()
    count, stages = pipeline.micro_batches, pipeline.stages
    advice = (
        f"pipeline: the number of ranks must be a multiple of {stages}, every mini-batch of "
        f"{count}. The tensors between stages are the traffic: keep them small. Use train_step, "
        "not minimize"
    )
    passes = f", in {count} parts through {stages} stages"
    return _Division("the replicas of a stage", passes, "", " over all stages", stages, (advice,))


class _EveryStep:
    """Texts on updates that are exchanged."""

    subject, owner = "the gradient", "the mean gradient"
    overflow = "All ranks agree whether a gradient overflowed: if so, no update"
    after: Sequence[str] = ()
    """What follows an update."""
    pending: Sequence[str] = ()
    """What a flush applies."""
    fragments = 1

    def __init__(self, strategy: Fields, division: _Division) -> None:
        config, scale, drop = strategy.gradient_compression, _scale_of(strategy), ""
        used = config or Dense()
        self.way = partial(_way, config)
        """Returns how the gradient of a parameter is exchanged."""
        self.message = partial(used.message_text, used.settled_step)
        """Describes the message of compressed tensors."""
        if scale is None or (_is_unchecked(scale) and config is not None):
            drop = ". A gradient that is not finite, on any rank, drops the update on all"
        method = "dense" if config is None else f"by {tag_of(config)}"
        self.exchange = (
            f"Exchange: the gradient becomes the mean over {division.ranks}, {method}"
            f"{division.early}{drop}"
        )
        self.advice: list[str] = []
        if division.early:
            first, others = (nbytes / 2**20 for nbytes in used.buckets)
            size = f"{others:g} MiB" + (f" (the first of {first:g} MiB)" if first < others else "")
            self.advice.append(
                f"overlap: gradients are sent during the backward pass, in buckets of {size}, once "
                "all ranks used the same parameters in two successive updates. With one rank, "
                "row-sparse gradients or changing parameters, the exchange follows the backward "
                "pass"
            )
        if config is not None:
            self.advice += _about_compression(config, strategy, division.stages)


class _BetweenAveragings:
    """Texts on updates of each rank alone."""

    subject, owner = "the change", "this rank's own gradient"
    overflow = "An overflow drops the local step, which still counts"
    exchange = "No exchange of gradients: each rank updates on its own"
    pending = ("the last averaging",)

    def __init__(self, config: LocalConfig, strategy: Fields, division: _Division) -> None:
        self._config, self._of_gradients = config, strategy.gradient_compression
        self.fragments = config.fragments
        self.after = [f"Averaging over {division.ranks}, {_interval(config)}"]
        if isinstance(config, AdaptiveLocalSGD):
            self.after.append("New interval: shorter as the loss falls, longer as the rate falls")
        self.advice = ["local updates: ranks differ between two averagings; evaluate after flush()"]
        self.advice += _about_share(config)
        if strategy.dgc is not None and strategy.dgc.node_size not in (None, 1):
            self.advice.append(
                "dgc: node_size is for gradients; set node_size of the local updates"
            )

    def way(self, param: Parameter, row_sparse: Collection[Tensor]) -> str:
        """Return how the change of a parameter is exchanged."""
        if (changes := self._config.compression) is None:
            return _way(self._of_gradients, param)
        return "compressed" if changes.compresses(param) and param.numel() else "dense"

    def message(self, shapes: Sequence[torch.Size]) -> str:
        """See `_EveryStep`; empty if the length is that of a gradient's."""
        changes, step = self._config.compression, self._config.begin_step + 1
        return f"a message has {changes.sent_bytes(step, shapes):,} bytes" if changes else ""


_Updates = _EveryStep | _BetweenAveragings


def _way(config: Compression | None, param: Parameter, row_sparse: Collection[Tensor] = ()) -> str:
    if config is None:
        return "dense"
    if (why := config.why_dense(param)) is not None:
        return f"dense, {why}"
    return "dense, because its rows are sparse already" if param in row_sparse else "compressed"


def _scale_of(strategy: Fields) -> LossScale | None:
    return None if strategy.amp is None else strategy.amp.loss_scale


def _is_unchecked(scale: LossScale | None) -> bool:
    return isinstance(scale, FixedLossScale) and not scale.drop_overflow_update


def _order(
    strategy: Fields, updates: _Updates, division: _Division, grad_clip: Clip | None
) -> Iterator[str]:
    amp, merge, recompute = strategy.amp, strategy.gradient_merge, strategy.recompute
    scale = _scale_of(strategy)
    text = f"Forward pass of this rank's mini-batch{division.passes}"
    text += f", in {amp.dtype} where autocast allows it" if amp is not None else ""
    yield text + ("; recomputed modules keep only their inputs" if recompute is not None else "")
    text = "Backward pass of the loss" + (" times the loss scale" if scale is not None else "")
    yield text + ("; recomputed modules repeat their forward pass" if recompute else "")
    merges = strategy._merge_steps > 1
    if merge is not None and merges:
        divided = ", divided by the loss scale," if scale is not None else ""
        yield (
            f"Merge: the gradient{divided} is added to those before it. After {merge.k_steps} "
            f"microsteps their {'mean' if merge.avg else 'sum'} is used"
        )
    if scale is not None:
        divided = "" if merges else "; else gradients are divided by the scale"
        if _is_unchecked(scale):
            yield f"Gradients are not checked for overflow{divided.replace('else ', '')}"
        else:
            yield f"{updates.overflow}{divided}"
    yield updates.exchange
    clipping = "clipping"
    if grad_clip is not None:
        clipping += f" of {updates.owner}{division.clipped} by {grad_clip}"
    method = next((f.upper() for f in ("lars", "lamb") if f in strategy.on), "the given optimizer")
    yield f"Update: {clipping}, weight decay and regularizer, centralization, then {method}"
    yield from updates.after
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


def _advice(strategy: Fields, updates: _Updates, division: _Division) -> Iterator[str]:
    amp, merge = strategy.amp, strategy.gradient_merge
    if amp is not None and amp.dtype == "float16" and amp.loss_scale is None:
        yield (
            "amp: float16 without a loss scale: gradients below 6e-8 become 0 and large ones "
            "infinite, and amp checks for neither; set loss_scale=DynamicLossScale()"
        )
    if amp is not None and amp.dtype == "bfloat16" and amp.loss_scale is not None:
        yield "amp: bfloat16 has the range of float32; the loss scale is used, but gains little"
    if _is_unchecked(_scale_of(strategy)):
        yield (
            "amp: with drop_overflow_update=False an overflow reaches the parameters, unless "
            "a compression stops it"
        )
    yield from division.advice
    single = {"gradient_merge": merge, "localsgd": strategy.localsgd}
    for name, config in single.items():
        if config is not None and config.k_steps == 1:
            yield f"{name}: k_steps=1 saves no communication"
    yield from updates.advice
    pending = ["the leftovers of a merge"] if strategy._merge_steps > 1 else []
    if pending := [*pending, *updates.pending]:
        yield f"at the end call engine.flush(): it applies {' and '.join(pending)}"


def _about_compression(config: Compression, strategy: Fields, stages: int) -> Iterator[str]:
    """Return advice on a compression of gradients: its optimizer, its sources, its exchange."""
    tag = tag_of(config)
    if config.accumulates and strategy.lars is None and strategy.lamb is None:
        yield (
            f"{tag}: clipping, weight decay, momentum and Nesterov of an SGD come before the "
            "exchange; any other optimizer gets the sparse mean as its gradient"
        )
    ranks = job_ranks()[::stages]
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


def _about_model(
    strategy: Fields, updates: _Updates, model: nn.Module, optimizer: Optimizer | None
) -> Iterator[str]:
    named = dict(named_parameters(model))
    params = {name: p for name, p in named.items() if p.requires_grad}
    if optimizer is not None:
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        params = {name: p for name, p in params.items() if p in trained}
    if strategy.pipeline is not None:
        for number, stage in enumerate(split_model(model, strategy.pipeline), start=1):
            yield f"stage {number}: {_sized(dict(named_parameters(stage)))}"
    else:
        if optimizer is not None:
            require_trained(params)
        if params:
            contiguous([p.numel() for p in params.values()], updates.fragments)
    if strategy.recompute is not None:
        names = matches(model, strategy.recompute.checkpoints)
        yield f"recomputed: {_counted(names, 'module')}"
    row_sparse = {
        m.weight
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
    }
    ways: dict[str, dict[str, Parameter]] = {}
    for name, p in params.items():
        ways.setdefault(updates.way(p, row_sparse), {})[name] = p
    for text, members in sorted(ways.items()):
        yield f"{text}, {updates.subject} of {_sized(members)}"
    compressed = ways.get("compressed", {}).values()
    shapes = [(torch.view_as_real(p) if p.is_complex() else p).shape for p in compressed]
    if shapes and strategy.pipeline is None and (text := updates.message(shapes)):
        yield text
    if rest := [name for name in named if name not in params]:
        yield f"not trained: {_counted(rest, 'tensor')}"


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
        require_one_clip(one, grad_clip)
    return [note for one in selected for note in one.notes]


def _sized(params: dict[str, Parameter]) -> str:
    numbers = sum(p.numel() for p in params.values())
    return f"{numbers:,} numbers in {_counted(list(params), 'tensor')}"


def _counted(names: Sequence[str], word: str) -> str:
    return f"{len(names)} {word}{'' if len(names) == 1 else 's'}: {listed(names, _SHOWN)}"
