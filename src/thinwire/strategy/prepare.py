"""From a strategy, a model and an optimizer to an engine: every check comes before anything is
changed.
"""

import datetime
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from thinwire import _validate as check
from thinwire._names import named_buffers, named_parameters, require_shapes
from thinwire.amp import LossScaler
from thinwire.comm import (
    Group,
    Replicas,
    Sites,
    next_identity,
    one_deadline,
    require_agreement,
    require_mesh,
    seconds_of,
    time_limit_s,
    while_busy,
)
from thinwire.comm.grid import Grid
from thinwire.comm.nodes import require_divisor
from thinwire.comm.replicate import make_models_equal_
from thinwire.compress import COMPRESSIONS, field_of
from thinwire.compress.coverage import tell_coverage
from thinwire.compress.dgc import DGC, locally_clipped
from thinwire.compress.figures import loops_of
from thinwire.compress.protocol import Compression, Limit
from thinwire.core.arithmetic import CURES, arithmetic
from thinwire.core.clip import Clip, ClipByGlobalNorm, ClipByNorm, ClipByValue
from thinwire.core.sharded import Shards, require_elementwise, require_shards, reshard_, shard_of
from thinwire.core.stats import Planned, planned_row
from thinwire.errors import StrategyError, ThinwireError
from thinwire.exchange.agreement import Among, Check
from thinwire.exchange.digest import RollingDigest, optimizer_state
from thinwire.exchange.gradients import gradients_of
from thinwire.exchange.overlap import Overlap
from thinwire.kernels.needs import Need
from thinwire.kernels.warm import warm_up
from thinwire.layout.traffic import settled_step
from thinwire.local.model import bare_optimizer, require_own_params, warn_of_others
from thinwire.local.updates import LocalUpdates
from thinwire.members.members import Members
from thinwire.optim import EXCHANGING, Lamb, Lars
from thinwire.optim.base import ExchangingOptimizer
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.muon import Muon
from thinwire.pipeline.runner import PipelineRunner
from thinwire.pipeline.split import split_model
from thinwire.step.autocast import autocast_forward
from thinwire.step.merge import GradientSum
from thinwire.step.recompute import matches, recompute
from thinwire.strategy.clipping import Clipping, require_one_clip, take_clip_
from thinwire.strategy.engine import Engine
from thinwire.strategy.exchanges import Exchange, ExchangingStep, LocalSteps, MeanThenStep
from thinwire.strategy.explain.texts import TEXTS
from thinwire.strategy.fields import Fields
from thinwire.strategy.fitting import checkpoint_facts, model_facts, strategy_facts, versions
from thinwire.strategy.holding import (
    Cut,
    Hold,
    become_,
    cut_of,
    gather_stages_,
    holds_one_stage,
    remember_cut,
    require_free,
    require_trained,
)
from thinwire.strategy.joining import Batches
from thinwire.strategy.moving_buffers import MovingBuffers
from thinwire.strategy.parts import LossFunction, Parts
from thinwire.strategy.replace import adopt

__all__ = ["Setup", "prepare"]

_log = logging.getLogger("thinwire")


@dataclass(slots=True, kw_only=True)
class Setup:
    """What `prepare` was given, and where this rank stands among the stages and replicas."""

    strategy: Fields
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFunction | None
    grad_clip: Clip | None
    digest_every: int
    timeout: float | datetime.timedelta | None
    find_unused_parameters: bool
    plan: Any
    members: Members | None
    mesh: DeviceMesh | None
    planned: Planned | None = field(init=False)
    group: Group = field(init=False)
    """All ranks."""
    grid: Grid | None = None
    """None without a pipeline: one stage, and every rank is a replica."""
    sites: Sites | None = None
    """None where every rank has a whole model."""
    replicas: int = 0

    @property
    def part(self) -> int:
        """Which stage of the pipeline, or which shard, this rank holds."""
        if self.sites is not None:
            return self.sites.shard
        return 0 if self.grid is None else self.grid.stage

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that exchange with this one; None for all."""
        return None if self.grid is None else self.grid.replica_group


@dataclass(frozen=True, slots=True)
class _Undo:
    """A handle made of a function that may be called twice."""

    remove: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class _Plan:
    """What can be said before ranks agree; until then everything can be undone."""

    stage: nn.Module
    optimizer: torch.optim.Optimizer
    params: dict[str, Parameter]
    compressor: Compression | None
    scaler: LossScaler | None
    sync: LocalUpdates | None
    restore: Callable[[], None]
    """Undoes what making it did to the given optimizer, in class and contents."""
    names_of_stages: list[list[str]]
    """What trains in each stage of a pipeline; empty without one."""
    digest_every: int


def prepare(setup: Setup) -> Engine:
    """See `DistributedStrategy.prepare`."""
    strategy, model, members, mesh = setup.strategy, setup.model, setup.members, setup.mesh
    if members is not None:
        _require_members_work(strategy, members, setup.timeout)
        members.require_mesh(mesh)
    if mesh is not None:
        _require_mesh_works(strategy, mesh)
        require_elementwise(setup.optimizer)
    check.boolean("find_unused_parameters", setup.find_unused_parameters)
    setup.planned = planned_row(setup.plan)
    # of a wrong kind, it is refused next
    setup.optimizer = cast("torch.optim.Optimizer", bare_optimizer(setup.optimizer))
    _check_kinds(model, setup.optimizer, setup.loss_fn, setup.grad_clip)
    reshard_(model)
    require_shards(dict(named_parameters(model)), None if mesh is None else mesh["shard"])
    setup.digest_every = check.integer("digest_every", setup.digest_every, at_least=0)
    limit_s = time_limit_s(None, setup.timeout) if members is None else members.timeout_s
    with one_deadline(limit_s):
        setup.group = Group(None, setup.timeout) if members is None else members.job
        return _prepared(setup)


def _prepared(setup: Setup) -> Engine:
    begin_s = time.perf_counter()
    model, group = setup.model, setup.group
    _take_place_(setup)
    plan = _agreed_plan(setup)
    handles: list[Any] = []
    try:
        while_busy(group, "compiling loops", lambda: float(warm_up(_needs(plan)) > 0))
        cut = cut_of(model)
        if cut is None:
            _copy_from_first(model, group if setup.sites is None else setup.sites.job)
        else:
            gather_stages_(model, cut, group)
            remember_cut(model, [model])
        engine = _assembled(setup, plan, handles)
        kind, on = type(setup.optimizer).__name__, ", ".join(setup.strategy.on) or "no field"
        took_s = time.perf_counter() - begin_s
        _log.info(
            "the engine is ready after %.1f s: %s, %s, %d ranks", took_s, on, kind, group.size
        )
        return engine
    except BaseException:
        for handle in reversed(handles):
            handle.remove()
        plan.restore()
        raise


def _take_place_(setup: Setup) -> None:
    """Compare strategies, and make the groups of ranks; fills `setup`."""
    strategy, group, members = setup.strategy, setup.group, setup.members
    facts = {
        **strategy_facts(strategy),
        "digest_every": setup.digest_every,
        "timeout in seconds": group.timeout_s,
        **_arithmetic(strategy, setup.model, setup.optimizer),
    }
    if members is not None:
        members.begin("strategy", facts)
    require_agreement(group, facts, what="comparing strategies", cures=CURES, versions=versions())
    setup.replicas = group.size
    if strategy.pipeline is not None:
        setup.grid = Grid(strategy.pipeline.stages, setup.timeout)
        setup.replicas = setup.grid.replicas
    if setup.mesh is not None:
        setup.sites = Sites.of(setup.mesh, setup.timeout) if members is None else Sites(group)
        setup.replicas = setup.sites.replicas.size
    if strategy.expected_replicas not in (None, setup.replicas):
        raise StrategyError(
            f"the fleet description says dp_degree={strategy.expected_replicas}, and there are "
            f"{group.size} ranks, which make {setup.replicas} replicas: start as many ranks as it "
            "says, or leave dp_degree out to use all"
        )


def _copy_from_first(model: nn.Module, group: Group) -> None:
    """Give all replicas the model of rank 0, or of the first site."""
    params = {f"parameter {name}": shard_of(p) for name, p in named_parameters(model)}
    buffers = {f"buffer {name}": b for name, b in named_buffers(model)}
    make_models_equal_(params, buffers, group)


def _require_mesh_works(strategy: Fields, mesh: DeviceMesh) -> None:
    require_mesh(mesh)
    whole = {field: TEXTS[kind].no_shards for field, kind in COMPRESSIONS.items()}
    others = " or ".join(field for field, why in whole.items() if not why)
    reasons = {
        "pipeline": "its stages are another way to divide a model: leave one of them out",
        **{field: f"{why}; or use {others}" for field, why in whole.items() if why},
        "lars": "give thinwire.optim.Lars as the optimizer, whose norms are over all shards",
        "lamb": "give thinwire.optim.Lamb as the optimizer, whose norms are over all shards",
    }
    problems = [f"{name}: {reason}" for name, reason in reasons.items() if getattr(strategy, name)]
    problems += [
        "node_size: the ranks of a site hold its shards, and each of them exchanges its own: "
        "leave node_size out"
        for each in (strategy.compression, strategy.local)
        if getattr(each, "node_size", None) not in (None, 1)
    ]
    if problems:
        raise StrategyError(f"mesh= does not work with {'; '.join(problems)}")


def _require_members_work(
    strategy: Fields, members: object, timeout: float | datetime.timedelta | None
) -> None:
    check.instance("members", members, Members)
    if strategy.local is None:
        raise StrategyError(
            "members come and go between two averagings, so members= needs localsgd or "
            "adaptive_localsgd; every other field exchanges in each step, over ranks that stay: "
            "start those with torchrun"
        )
    if strategy.pipeline is not None:
        raise StrategyError("members= does not work with pipeline: leave it out")
    if strategy.compression is not None:
        raise StrategyError(
            f"members= does not work with {field_of(strategy.compression)}: leave it out, and give "
            "localsgd a compression such as tw.Sparse(0.97)"
        )
    if timeout is not None:
        raise ValueError(
            "timeout and members were both given: members exchange within the time-out that join "
            "was given; leave it out"
        )


def _needs(plan: _Plan) -> frozenset[Need]:
    """The compiled loops that this training calls; local updates see to theirs."""
    needs: frozenset[Need] = getattr(plan.optimizer, "needs", frozenset())
    if plan.sync is None and plan.compressor is not None:
        needs |= loops_of(plan.compressor, Shards(plan.params).values(), of_gradients=True)
    return needs


def _check_kinds(model: object, optimizer: object, loss_fn: object, grad_clip: object) -> None:
    check.instance("model", model, nn.Module)
    assert isinstance(model, nn.Module)
    require_shapes(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        kinds = " or ".join(f"thinwire.optim.{kind.__name__}" for kind in EXCHANGING)
        raise TypeError(
            "model is wrapped in DistributedDataParallel, and the engine exchanges by itself: give "
            "it the model inside (ddp.module), or keep DDP and use optimizer.attach(ddp) of "
            f"{kinds}"
        )
    check.instance("optimizer", optimizer, torch.optim.Optimizer)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable as loss_fn(outputs, targets), got {loss_fn!r}")
    if grad_clip is not None:
        check.instance("grad_clip", grad_clip, (ClipByGlobalNorm, ClipByNorm, ClipByValue))


def _agreed_plan(setup: Setup) -> _Plan:
    """The plan, or this rank's own error, or one that names the rank which has an error: on all
    ranks at once.
    """
    model, optimizer = setup.model, setup.optimizer
    alike = setup.strategy.local is None and setup.sites is None
    facts = model_facts(model, optimizer, digest=alike)
    names = {p: name for name, p in named_parameters(model)}
    cut = cut_of(model)
    of_stage = {}
    if holds_one_stage(cut, optimizer, names):  # equal over the replicas of this stage alone
        of_stage["state of the optimizer"] = facts.pop("state of the optimizer")
        of_stage["params"] = [group.pop("params") for group in facts["group"]]
    facts |= {
        "stages of the engine before": 1 if cut is None else [sorted(stage) for stage in cut],
        "parameters of one stage in the optimizer": bool(of_stage),
        "grad_clip of prepare": repr(setup.grad_clip),
        "find_unused_parameters of prepare": setup.find_unused_parameters,
    }
    problem: Exception | None = None
    plan = None
    try:
        plan = _planned(setup)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error
    reason = None if problem is None else f"{type(problem).__name__}: {problem}"
    try:
        require_agreement(setup.group, {"problem": reason, **facts}, what="preparing the engine")
        if of_stage:
            replicas = Group(setup.replica_group, setup.group.timeout_s)
            require_agreement(replicas, of_stage, what="comparing the replicas of a stage")
    except BaseException as error:
        if plan is not None:
            plan.restore()
        if problem is None or not isinstance(error, ThinwireError):
            raise
    if problem is not None:
        raise problem
    assert plan is not None
    return plan


def _planned(setup: Setup) -> _Plan:
    strategy, model, optimizer = setup.strategy, setup.model, setup.optimizer
    grad_clip = setup.grad_clip
    require_free(model, optimizer)
    names = {p: name for name, p in named_parameters(model)}
    require_one_clip(optimizer, grad_clip, names)
    require_own_params(model, optimizer)
    if strategy.recompute is not None:
        matches(model, strategy.recompute.checkpoints)
    if strategy.compression is not None and strategy.local is None:
        require_divisor(strategy.compression.node_size, setup.replicas)
    if strategy.local is not None:
        require_divisor(strategy.local.node_size, setup.replicas)
    stages = [model] if strategy.pipeline is None else split_model(model, strategy.pipeline)
    _require_cut_works(cut_of(model), optimizer, stages, names, setup)
    if strategy.local is not None and len(stages) > 1:
        _require_averages(stages)
    stage = stages[setup.part if len(stages) > 1 else 0]
    mine = set(stage.parameters())
    trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    of_stages = [[n for n, p in named_parameters(each) if p in trained] for each in stages]
    adopted = adopt(
        optimizer,
        compression=strategy.compression,
        lars=strategy.lars,
        lamb=strategy.lamb,
        local=strategy.local is not None,
        names=names,
        keep=mine.__contains__,
        process_group=setup.replica_group,
        mesh=setup.mesh,
    )
    restore = adopted.restore
    try:
        require_one_clip(adopted.optimizer, grad_clip, names, sharded=setup.mesh is not None)
        if adopted.optimizer is not optimizer:
            restore = become_(optimizer, adopted.optimizer, adopted.asked)
        of_stages = of_stages if len(stages) > 1 else []
        return _planned_for(setup, stage, adopted.compressor, restore, of_stages)
    except BaseException:
        restore()
        raise


def _planned_for(
    setup: Setup,
    stage: nn.Module,
    compressor: Compression | None,
    restore: Callable[[], None],
    names_of_stages: list[list[str]],
) -> _Plan:
    strategy, optimizer = setup.strategy, setup.optimizer
    local = strategy.local
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    params = {name: p for name, p in named_parameters(stage) if p.requires_grad and p in trained}
    if strategy.pipeline is None:
        require_trained(params)
    scaler, sync = _scaler(setup), None
    if local is None:
        warn_of_others(stage, optimizer)
    else:
        sync = LocalUpdates(
            stage,
            optimizer,
            local,
            process_group=setup.replica_group,
            compression=strategy.compression,
            scaler=scaler,
            members=setup.members,
            mesh=setup.mesh,
        )
        sync.digest_every, sync.timeout_s = setup.digest_every, seconds_of(setup.timeout)
        sync.planned = setup.planned
    return _Plan(
        stage=stage,
        optimizer=optimizer,
        params=params,
        compressor=compressor,
        scaler=scaler,
        sync=sync,
        restore=restore,
        names_of_stages=names_of_stages,
        digest_every=setup.digest_every,
    )


def _require_cut_works(
    cut: Cut | None,
    optimizer: torch.optim.Optimizer,
    stages: list[nn.Module],
    names: dict[Parameter, str],
    setup: Setup,
) -> None:
    """After an engine with a pipeline: refuse what cannot go on from what it has left."""
    if cut is None:
        return
    for name in ("mesh", "members"):
        if getattr(setup, name) is not None:
            raise StrategyError(
                f"this model was trained in stages, and each rank has the current values of its "
                f"own only: {name}= needs a model that was not; load a file that `thinwire export` "
                "has made of a checkpoint into a new one"
            )
    now = [{name for name, _ in named_parameters(stage)} for stage in stages]
    alike = len(now) == len(cut) and all(new <= old for new, old in zip(now, cut, strict=True))
    if not alike and holds_one_stage(cut, optimizer, names):
        raise StrategyError(
            "the optimizer holds the parameters of one stage, as an engine with a pipeline has "
            "left it, and the stages are others now: give a new one over model.parameters()"
        )


def _require_averages(stages: list[nn.Module]) -> None:
    for number, stage in enumerate(stages, 1):
        if not any(p.requires_grad and p.numel() for p in stage.parameters()):
            raise StrategyError(
                f"stage {number} of {len(stages)} has no parameter with requires_grad=True that "
                "has elements, and localsgd averages those of each stage: move a split point"
            )


def _assembled(setup: Setup, plan: _Plan, handles: list[Any]) -> Engine:
    """Put the parts together; from here on the model is changed, by `handles`."""
    strategy, model = setup.strategy, setup.model
    handles.append(Hold(model, plan.optimizer))
    if strategy.recompute is not None:
        handles.append(recompute(model, strategy.recompute.checkpoints, stage=plan.stage))
    dtype = None if strategy.amp is None else getattr(torch, strategy.amp.dtype)
    autocast = None
    if dtype is not None:
        device = next(model.parameters()).device.type
        autocast = partial(torch.autocast, device, dtype=dtype)
        if strategy.pipeline is None:
            handles.append(autocast_forward(model, dtype))
    scaler, runner = plan.scaler, None
    if strategy.pipeline is not None:
        assert setup.grid is not None, "made for the pipeline"
        remember_cut(model, split_model(model, strategy.pipeline))
        scale = (lambda: 1.0) if scaler is None else (lambda: scaler.scale)
        runner = PipelineRunner(
            plan.stage, strategy.pipeline, setup.grid, setup.loss_fn, dtype=dtype, scale=scale
        )
    merge = strategy.gradient_merge
    if plan.sync is not None:
        handles.append(_Undo(plan.sync.__enter__().close))
    grid, sites = setup.grid, setup.sites
    clip = take_clip_(
        plan.optimizer,
        setup.grad_clip,
        stages=None if grid is None or grid.stages == 1 else grid.peers,
        shards=None if sites is None else sites.shards,
    )
    handles.append(clip)
    # an optimizer that was given a group of its own agrees with those ranks alone
    peers = setup.replica_group
    partly = False
    if isinstance(plan.optimizer, ExchangingOptimizer):
        peers = plan.optimizer.process_group
        partly = peers is not None
    batches, buffers = Batches(), MovingBuffers(plan.stage, _peers(peers, setup))
    job = None if grid is None else grid.job
    checks: list[Check] = [batches, buffers] if runner is None else [runner, batches, buffers]
    among = Among(checks, job, plan.names_of_stages)
    exchange = _exchange(strategy, plan, setup, clip, among)
    overlap = None
    alone = runner is not None or setup.replicas == 1 or partly or setup.find_unused_parameters
    # the gradients of shards are there only once the model's own reduction is over
    alone = alone or setup.sites is not None
    if not alone and isinstance(exchange, ExchangingStep | MeanThenStep):
        overlap = Overlap(
            plan.params,
            exchange,
            bucket_bytes=exchange.bucket_bytes,
            first_bytes=exchange.first_bytes,
        )
        handles.append(overlap)
    parts = Parts(
        model=plan.stage,
        optimizer=plan.optimizer,
        loss_fn=setup.loss_fn,
        params=plan.params,
        group=setup.group,
        exchange=exchange,
        overlap=overlap,
        batches=batches,
        find_unused=setup.find_unused_parameters and plan.sync is None,
        buffers=buffers,
        scaler=scaler,
        merge=None if merge is None or merge.k_steps == 1 else GradientSum(),
        merge_steps=1 if merge is None else merge.k_steps,
        merge_avg=merge is None or merge.avg,
        runner=runner,
        part=setup.part,
        autocast=autocast,
        handles=handles,
        planned=setup.planned,
        settled_step=settled_step(strategy.compression),
        facts=checkpoint_facts(strategy, model, plan.optimizer),
    )
    if isinstance(plan.optimizer, CommonOptimizer):
        plan.optimizer.call_params({p: name for name, p in named_parameters(model)})
    return Engine(parts)


def _peers(process_group: dist.ProcessGroup | None, setup: Setup) -> Group:
    """The ranks that exchange with this one."""
    return Group(process_group) if setup.members is None else setup.members.group


def _scaler(setup: Setup) -> LossScaler | None:
    """Who decides about an overflow: all ranks; under local updates the ranks of one replica of the
    pipeline, or of one site.
    """
    amp = setup.strategy.amp
    if amp is None or amp.loss_scale is None:
        return None
    if setup.strategy.local is None:
        return LossScaler(amp.loss_scale)
    if setup.mesh is not None:
        return LossScaler(amp.loss_scale, setup.mesh.get_group("shard"))
    if setup.grid is None:
        return LossScaler(amp.loss_scale, local=True)
    return LossScaler(amp.loss_scale, setup.grid.stage_group)


def _exchange(
    strategy: Fields, plan: _Plan, place: Setup, clip: Clipping, among: Among
) -> Exchange:
    """Which of the three ways this engine shares its updates."""
    if plan.sync is not None:
        limit = _limit(strategy, plan, place)
        # a loss scale has looked at the gradients; clipping waits for other stages and shards
        finite = plan.scaler is None and place.grid is None and place.sites is None
        return LocalSteps(plan.optimizer, plan.params, plan.sync, clip, limit, checks=finite)
    identity = f"engine {next_identity()}"
    if isinstance(plan.optimizer, ExchangingOptimizer):
        names: dict[torch.Tensor, str] = {p: name for name, p in plan.params.items()}
        plan.optimizer.serve(identity, plan.digest_every, names, among)
        return ExchangingStep(plan.optimizer, plan.params)
    sites = place.sites
    compression = plan.compressor
    limit = None
    if sites is not None and compression is not None:  # a compressor sees single shards
        limit = _limit(strategy, plan, place)
        if isinstance(compression, DGC):
            compression = replace(compression, local_grad_clip_norm=None)
    params = Shards(plan.params)
    gradients = gradients_of(
        Group(place.replica_group) if sites is None else sites.job,
        params,
        compression,
        # a loss scale has looked at the gradients, or was told not to
        check_finite=plan.scaler is None,
        sources=None if sites is None else Replicas(sites),
        among=among,
    )
    gradients.watch(_digest(plan), identity)
    if compression is not None and gradients.sources.rank == 0:
        tell_coverage(compression, params.values())
    return MeanThenStep(plan.optimizer, plan.params, gradients, clip, compression, limit)


def _limit(strategy: Fields, plan: _Plan, place: Setup) -> Limit | None:
    """The local clip that comes before what is compressed."""
    if strategy.dgc is None or strategy.dgc.local_grad_clip_norm is None:
        return None
    gather = None if place.sites is None else place.sites.shards.gather_now
    params, config = Shards(plan.params), strategy.dgc

    def limit(step: int, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sources = place.replicas
        return locally_clipped(
            grads, params, lambda _: config, step=step, sources=sources, gather=gather
        )

    return limit


def _digest(plan: _Plan) -> RollingDigest | None:
    """Of the replicas of this rank's stage and of its optimizer; None where nothing is to be
    compared.
    """
    if not plan.digest_every:
        return None
    params = {f"parameter {name}": p for name, p in named_parameters(plan.stage)}
    names: dict[torch.Tensor, str] = {p: name for name, p in plan.params.items()}
    return RollingDigest(
        lambda: Shards(params),
        lambda: optimizer_state(plan.optimizer, names),
        every=plan.digest_every,
    )


def _arithmetic(
    strategy: Fields, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, str]:
    """What decides how replicas round, where all of them update alike."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    layerwise = bool(strategy.lamb or strategy.lars) or isinstance(optimizer, Lamb | Lars)
    alike = strategy.local is None
    products = isinstance(optimizer, Muon)
    return arithmetic(device, kernels=layerwise and alike, products=products and alike)
