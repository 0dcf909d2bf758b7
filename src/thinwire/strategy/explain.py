"""A strategy as text: its fields, a step in order, the pairs, advice, the effect on a model."""

import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire import _validate as check
from thinwire._names import named_parameters
from thinwire._wording import listed
from thinwire.comm import node_size_of, rank_and_size_in
from thinwire.compress import tag_of
from thinwire.compress.protocol import Compression
from thinwire.compress.residuals import Dense
from thinwire.core.gradients import Clip
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from thinwire.layout.shares import contiguous
from thinwire.local.config import AdaptiveLocalSGD, LocalConfig
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
    model: nn.Module | None,
    optimizer: Optimizer | None,
    grad_clip: Clip | None,
) -> str:
    """Return the text of `DistributedStrategy.explain`, at most 100 columns wide."""
    check.instance("model", model, (nn.Module, NoneType))
    check.instance("optimizer", optimizer, (Optimizer, NoneType))
    about = attribute_lines(type(strategy))
    texts = _Texts(strategy)
    order = enumerate(_order(strategy, texts, grad_clip), start=1)
    sections = {
        "On": [f"{name}: {about.get(name, '')} {value}" for name, value in strategy.on.items()]
        or ["nothing: gradients are averaged over all ranks, as by DistributedDataParallel"],
        "A step, in order": [f"{number}. {text}" for number, text in order],
        "Together": [
            f"{' and '.join(rule.pair)}: {rule.meaning}" for rule in rules_between(strategy.on)
        ],
        "To know": list(_advice(strategy, texts)),
        "This model": (
            [] if model is None else list(_about_model(strategy, texts, model, optimizer))
        ),
        "This optimizer": (
            [] if optimizer is None else _about_optimizer(strategy, optimizer, model, grad_clip)
        ),
    }
    wrap = textwrap.TextWrapper(_COLUMNS, "  ", "     ", break_on_hyphens=False).fill
    return "\n\n".join("\n".join([t, *map(wrap, texts)]) for t, texts in sections.items() if texts)


class _Texts:
    """Texts that differ between modes; first of whole models whose updates are exchanged."""

    ranks = "all ranks"
    passes = clipped = ""
    early = "; it begins in the backward pass"
    stages = fragments = 1
    subject = "the gradient"
    owner = "the mean gradient"
    overflow = "All ranks agree whether a gradient overflowed: if so, no update"
    after: Sequence[str] = ()
    """What follows an update."""
    pending: Sequence[str] = ()
    """What a flush applies."""
    row_sparse = True
    """True if row-sparse gradients travel as they are."""
    changes: Compression | None = None
    message: Callable[[Sequence[torch.Size]], str] | None = None
    """Describes the message of what is compressed."""

    def __init__(self, strategy: Fields) -> None:
        self.of_gradients = strategy.gradient_compression
        self.advice: list[str] = []
        if (pipeline := strategy.pipeline) is not None:
            self.stages = pipeline.stages
            self.ranks = "the replicas of a stage"
            self.passes = f", in {pipeline.micro_batches} parts through {pipeline.stages} stages"
            self.early = ""
            self.clipped = " over all stages"
        if strategy.local is None:
            self._of_exchange(strategy)
        else:
            self._of_averaging(strategy.local, strategy)

    def _of_exchange(self, strategy: Fields) -> None:
        config = self.of_gradients
        scale = strategy._loss_scale
        drop = ""
        if scale is None or (_is_unchecked(scale) and config is not None):
            drop = ". A gradient that is not finite, on any rank, drops the update on all"
        method = "dense" if config is None else f"by {tag_of(config)}"
        self.exchange = (
            f"Exchange: the gradient becomes the mean over {self.ranks}, {method}{self.early}{drop}"
        )
        if self.early:
            first, others = (nbytes / 2**20 for nbytes in (config or Dense()).buckets)
            size = f"{others:g} MiB" + (f" (the first of {first:g} MiB)" if first < others else "")
            self.advice.append(
                f"overlap: gradients are sent during the backward pass, in buckets of {size}, once "
                "all ranks used the same parameters in two successive updates. With one rank, "
                "row-sparse gradients or changing parameters, the exchange follows the backward "
                "pass"
            )
        if config is not None:
            self.advice += _about_compression(config, strategy, self.stages)
            self.message = partial(config.message_text, config.settled_step)

    def _of_averaging(self, config: LocalConfig, strategy: Fields) -> None:
        self.subject = "the change"
        self.owner = "this rank's own gradient"
        self.overflow = "An overflow drops the local step, which still counts"
        self.exchange = "No exchange of gradients: each rank updates on its own"
        self.pending = ["the last averaging"]
        self.fragments = config.fragments
        self.row_sparse = False
        self.changes = changes = config.compression
        if changes is not None:
            first = partial(changes.sent_bytes, config.begin_step + 1)
            self.message = lambda shapes: f"a message has {first(shapes):,} bytes"
        self.after = [f"Averaging over {self.ranks}, {_interval(config)}"]
        if isinstance(config, AdaptiveLocalSGD):
            self.after.append("New interval: shorter as the loss falls, longer as the rate falls")
        self.advice = ["local updates: ranks differ between two averagings; evaluate after flush()"]
        self.advice += _about_share(config)
        if strategy.dgc is not None and strategy.dgc.node_size not in (None, 1):
            self.advice.append(
                "dgc: node_size is for gradients; set node_size of the local updates"
            )

    def way(self, p: Parameter, row_sparse: Collection[Tensor]) -> str:
        """Return how what is exchanged of a parameter travels."""
        if self.changes is not None:
            return "compressed" if self.changes.compresses(p) and p.numel() else "dense"
        if self.of_gradients is None:
            return "dense"
        if (why := self.of_gradients.why_dense(p)) is not None:
            return f"dense, {why}"
        return "dense, because its rows are sparse already" if p in row_sparse else "compressed"


def _is_unchecked(scale: LossScale | None) -> bool:
    return isinstance(scale, FixedLossScale) and not scale.drop_overflow_update


def _order(strategy: Fields, texts: _Texts, grad_clip: Clip | None) -> Iterator[str]:
    amp = strategy.amp
    merge = strategy.gradient_merge
    recompute = strategy.recompute
    scale = strategy._loss_scale
    text = f"Forward pass of this rank's mini-batch{texts.passes}"
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
            yield f"{texts.overflow}{divided}"
    yield texts.exchange
    clipping = "clipping"
    if grad_clip is not None:
        clipping += f" of {texts.owner}{texts.clipped} by {grad_clip}"
    method = next((f.upper() for f in ("lars", "lamb") if f in strategy.on), "the given optimizer")
    yield f"Update: {clipping}, weight decay and regularizer, centralization, then {method}"
    yield from texts.after
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


def _advice(strategy: Fields, texts: _Texts) -> Iterator[str]:
    amp = strategy.amp
    merge = strategy.gradient_merge
    if amp is not None and amp.dtype == "float16" and amp.loss_scale is None:
        yield (
            "amp: float16 without a loss scale: gradients below 6e-8 become 0 and large ones "
            "infinite, and amp checks for neither; set loss_scale=DynamicLossScale()"
        )
    if amp is not None and amp.dtype == "bfloat16" and amp.loss_scale is not None:
        yield "amp: bfloat16 has the range of float32; the loss scale is used, but gains little"
    if _is_unchecked(strategy._loss_scale):
        yield (
            "amp: with drop_overflow_update=False an overflow reaches the parameters, unless "
            "a compression stops it"
        )
    if (pipeline := strategy.pipeline) is not None:
        yield (
            f"pipeline: the number of ranks must be a multiple of {pipeline.stages}, every "
            f"mini-batch of {pipeline.micro_batches}. The tensors between stages are the traffic: "
            "keep them small. Use train_step, not minimize"
        )
    single = {"gradient_merge": merge, "localsgd": strategy.localsgd}
    for name, config in single.items():
        if config is not None and config.k_steps == 1:
            yield f"{name}: k_steps=1 saves no communication"
    yield from texts.advice
    pending = ["the leftovers of a merge"] if strategy._merge_steps > 1 else []
    if pending := [*pending, *texts.pending]:
        yield f"at the end call engine.flush(): it applies {' and '.join(pending)}"


def _about_compression(config: Compression, strategy: Fields, stages: int) -> Iterator[str]:
    """Return advice on a compression of gradients: its optimizer, its sources, its exchange."""
    tag = tag_of(config)
    if config.accumulates and strategy.lars is None and strategy.lamb is None:
        yield (
            f"{tag}: clipping, weight decay, momentum and Nesterov of an SGD come before the "
            "exchange; any other optimizer gets the sparse mean as its gradient"
        )
    ranks = range(0, rank_and_size_in()[1], stages)
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
    strategy: Fields, texts: _Texts, model: nn.Module, optimizer: Optimizer | None
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
            contiguous([p.numel() for p in params.values()], texts.fragments)
    if strategy.recompute is not None:
        names = matches(model, strategy.recompute.checkpoints)
        yield f"recomputed: {_counted(names, 'module')}"
    row_sparse = {
        m.weight
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and texts.row_sparse
    }
    ways: dict[str, dict[str, Parameter]] = {}
    for name, p in params.items():
        ways.setdefault(texts.way(p, row_sparse), {})[name] = p
    for text, members in sorted(ways.items()):
        yield f"{text}, {texts.subject} of {_sized(members)}"
    compressed = ways.get("compressed", {}).values()
    shapes = [(torch.view_as_real(p) if p.is_complex() else p).shape for p in compressed]
    if shapes and texts.message is not None and strategy.pipeline is None:
        yield texts.message(shapes)
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
