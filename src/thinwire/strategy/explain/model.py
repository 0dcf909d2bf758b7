"""Describes the effect of a strategy on a given model and optimizer. Nothing is changed."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire._names import named_parameters
from thinwire._wording import listed
from thinwire.compress.figures import sent_bytes, why_dense
from thinwire.compress.protocol import Compression
from thinwire.core.gradients import Clip
from thinwire.core.several import all_of
from thinwire.local.config import fragments_of
from thinwire.pipeline.split import split_model
from thinwire.step.recompute import matches
from thinwire.strategy.clipping import require_one_clip
from thinwire.strategy.explain.texts import TEXTS, plural
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import require_trained
from thinwire.strategy.replace import select_optimizers

_SHOWN = 6


def about_model(strategy: Fields, model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Describe the stages, the recomputed modules, and which tensors are dense, and why."""
    params = {name: p for name, p in named_parameters(model) if p.requires_grad}
    if optimizer is not None:
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        params = {name: p for name, p in params.items() if p in trained}
    if optimizer is not None and strategy.pipeline is None:
        require_trained(params)
    if strategy.local is not None and strategy.pipeline is None and params:
        fragments_of(params, strategy.local)
    resting = [name for name, _ in named_parameters(model) if name not in params]
    return [
        *_stages(strategy, model),
        *_recomputed(strategy, model),
        *_exchanged(strategy, model, params),
        *([f"not trained: {_tensors(resting)}"] if resting else []),
    ]


def about_optimizer(
    strategy: Fields,
    optimizer: Optimizer,
    model: nn.Module | None,
    grad_clip: Clip | None = None,
) -> list[str]:
    """Describe the optimizer that will train, and the settings it takes over."""
    local = strategy.local is not None
    names = (
        _names_in(optimizer) if model is None else {p: name for name, p in named_parameters(model)}
    )
    selected = select_optimizers(
        optimizer,
        compression=strategy.compression,
        lars=strategy.lars,
        lamb=strategy.lamb,
        local=local,
        names=names,
    )
    for single, one in zip(all_of(optimizer), selected, strict=True):
        require_one_clip(single, grad_clip)
        require_one_clip(one.optimizer, grad_clip, one.compressor if one.folds else None)
    return [note for one in selected for note in one.notes]


def _names_in(optimizer: Optimizer) -> dict[Parameter, str]:
    names: dict[Parameter, str] = {}
    for group in optimizer.param_groups:
        known = group.get("param_names", [])
        for i, p in enumerate(group["params"]):
            names[p] = known[i] if i < len(known) else f"parameter {len(names)}"
    return names


def _stages(strategy: Fields, model: nn.Module) -> Iterator[str]:
    if strategy.pipeline is None:
        return
    for number, stage in enumerate(split_model(model, strategy.pipeline), start=1):
        yield f"stage {number}: {_sized(dict(named_parameters(stage)))}"


def _recomputed(strategy: Fields, model: nn.Module) -> Iterator[str]:
    if strategy.recompute is not None:
        names = matches(model, strategy.recompute.checkpoints)
        yield f"recomputed: {len(names)} {plural('module', len(names))}: {listed(names, _SHOWN)}"


def _exchanged(
    strategy: Fields, model: nn.Module, params: Mapping[str, Parameter]
) -> Iterator[str]:
    local = strategy.local
    subject = "the change of" if local is not None else "the gradient of"
    if local is not None and local.compression is not None:
        compressed = {
            name: p for name, p in params.items() if local.compression.compresses(p) and p.numel()
        }
        shapes = [
            (torch.view_as_real(p) if p.is_complex() else p).shape for p in compressed.values()
        ]
        nbytes = sent_bytes(local.compression, local.begin_step + 1, shapes) if shapes else 0
        yield (f"compressed, {subject} {_sized(compressed)}; the message has {nbytes:,} bytes")
        if rest := {name: p for name, p in params.items() if name not in compressed}:
            yield f"dense, {subject} {_sized(rest)}"
        return
    if (compression := strategy.compression) is None:
        yield f"dense, {subject} {_sized(params)}"
        return
    row_sparse = set() if local is not None else _row_sparse(model)
    groups: dict[str, dict[str, Parameter]] = {}
    for name, p in params.items():
        groups.setdefault(_way(p, compression, row_sparse), {})[name] = p
    for way, members in sorted(groups.items()):
        yield f"{way}, {subject} {_sized(members)}"
    if local is None and strategy.pipeline is None and "compressed" in groups:
        params = groups["compressed"]
        yield TEXTS[type(compression)].message(compression, list(params.values()))


def _way(param: Parameter, compression: Compression, row_sparse: Collection[Tensor]) -> str:
    if (why := why_dense(compression, param)) is not None:
        return f"dense, {why}"
    return "dense, because its rows are sparse already" if param in row_sparse else "compressed"


def _row_sparse(model: nn.Module) -> set[Tensor]:
    return {
        m.weight
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
    }


def _sized(params: Mapping[str, Parameter]) -> str:
    numbers = sum(p.numel() for p in params.values())
    return f"{numbers:,} numbers in {_tensors(list(params))}"


def _tensors(names: list[str]) -> str:
    return f"{len(names)} {plural('tensor', len(names))}: {listed(names, _SHOWN)}"
