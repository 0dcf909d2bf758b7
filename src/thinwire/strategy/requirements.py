"""Checks of `prepare` that each rank makes by itself, before anything is changed."""

from types import NoneType
from typing import get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire._names import named_parameters, require_shapes
from thinwire._wording import warn_user
from thinwire.comm import require_mesh
from thinwire.compress import tag_of
from thinwire.core.gradients import Clip
from thinwire.core.several import all_of
from thinwire.errors import StrategyError
from thinwire.members.members import Member
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import StageSplit, holds_one_stage


def warn_of_optimizer(strategy: Fields, optimizer: torch.optim.Optimizer) -> None:
    """Warn of an optimizer that the compression of gradients does not suit."""
    names = [type(part).__name__ for part in all_of(optimizer)]
    config = strategy.gradient_compression
    if config is not None and (remark := config.remark(names)) is not None:
        warn_user(remark)


def require_mesh_works(strategy: Fields, mesh: DeviceMesh) -> None:
    """Refuse fields that do not go with sharded models."""
    require_mesh(mesh)
    method = strategy.gradient_compression
    problems = []
    if strategy.pipeline is not None:
        problems.append("pipeline: pipeline and mesh= both divide the model: remove one of them")
    if method is not None and not method.elementwise:
        problems.append(
            f"{tag_of(method)}: a rank sees some rows of a matrix only: use dgc, or local updates "
            "with compression=LowRank(), which compress shard by shard"
        )
    problems += [
        "node_size: each rank of a site exchanges its own shards: omit node_size"
        for config in (method, strategy.local)
        if config is not None and config.node_size not in (None, 1)
    ]
    if problems:
        raise StrategyError(f"mesh= does not work with {'; '.join(problems)}")


def require_members_work(strategy: Fields, member: Member) -> None:
    """Refuse fields that do not go with ranks that join and leave."""
    if strategy.local is None:
        raise StrategyError(
            "members join and leave between two averagings, so members= needs localsgd or "
            "adaptive_localsgd. Exchanges in every step need static membership: start the ranks "
            "with torchrun"
        )
    if strategy.pipeline is not None:
        raise StrategyError("members= does not work with pipeline: remove one of them")
    if (method := strategy.gradient_compression) is not None:
        raise StrategyError(
            f"members= does not work with {tag_of(method)}: remove it, and give localsgd a "
            "compression such as tw.Sparse(0.97)"
        )
    if member.terms.keep_batch and strategy.gradient_merge and not strategy.gradient_merge.avg:
        raise StrategyError(
            "keep_batch=True changes how many gradients are merged, which must not scale the "
            "update: use GradientMerge(avg=True)"
        )


def check_kinds(model: nn.Module, optimizer: object, loss_fn: object, grad_clip: object) -> None:
    """Refuse arguments of other types."""
    check.instance("model", model, nn.Module)
    require_shapes(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model is wrapped in DistributedDataParallel, but the engine exchanges gradients "
            "itself: pass the model inside (ddp.module), or keep DDP and use "
            "optimizer.attach(ddp) of thinwire.optim.DGCMomentum"
        )
    check.instance("optimizer", optimizer, torch.optim.Optimizer)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable as loss_fn(outputs, targets), got {loss_fn!r}")
    check.instance("grad_clip", grad_clip, (*get_args(Clip), NoneType))


def require_split_works(
    split: StageSplit | None,
    optimizer: torch.optim.Optimizer,
    stages: list[nn.Module],
    names: dict[Parameter, str],
    **needs_whole: object,
) -> None:
    """Refuse to continue after an engine with a pipeline if this rank lacks current values."""
    if split is None:
        return
    for name, given in needs_whole.items():
        if given is not None:
            raise StrategyError(
                "this model was trained in stages and each rank has the current values of its "
                f"own stage only, but {name}= needs a whole model. Load a file made by `thinwire "
                "export` into a new model"
            )
    now = [{name for name, _ in named_parameters(stage)} for stage in stages]
    alike = len(now) == len(split) and all(new <= old for new, old in zip(now, split, strict=True))
    if not alike and holds_one_stage(split, optimizer, names):
        raise StrategyError(
            "an engine with a pipeline left the optimizer with the parameters of one stage, but "
            "the stages are different now: pass a new optimizer of model.parameters()"
        )


def require_averages(stages: list[nn.Module]) -> None:
    """Refuse stages in which local updates have nothing to average."""
    for number, stage in enumerate(stages, 1):
        if not any(p.requires_grad and p.numel() for p in stage.parameters()):
            raise StrategyError(
                f"stage {number} of {len(stages)} has no non-empty parameter with "
                "requires_grad=True, so localsgd has nothing to average there: move a split point"
            )
