"""Makes an engine from a strategy, a model and an optimizer. All checks precede all changes."""

import contextlib
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from thinwire import _validate as check
from thinwire._names import named_buffers, named_parameters
from thinwire.amp import LossScaler
from thinwire.comm import next_identity, require_agreement, sites_of
from thinwire.comm.nodes import Grid, require_divisor
from thinwire.comm.replicate import make_models_equal_
from thinwire.comm.stats import Pace, planned_row
from thinwire.compress import locally_clipped
from thinwire.compress.protocol import Limit, report_coverage
from thinwire.compress.residuals import Dense
from thinwire.core.arithmetic import arithmetic
from thinwire.core.gradients import ClipByGlobalNorm
from thinwire.core.norms import norm_of
from thinwire.core.several import all_of, kinds_of
from thinwire.core.sharded import Shards, require_elementwise, require_shards, reshard_, shard_of
from thinwire.errors import StrategyError, ThinwireError
from thinwire.exchange.agreement import Check, Participants
from thinwire.exchange.digest import digest_of
from thinwire.exchange.gradients import gradients_of
from thinwire.exchange.overlap import Overlap
from thinwire.exchange.replica import Replica
from thinwire.exchange.synchronizer import Ranks
from thinwire.local.model import require_own_params, warn_of_misplaced, warn_of_others
from thinwire.local.updates import LocalUpdates, enter
from thinwire.members.members import member_of
from thinwire.optim import Lamb, Lars
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.folded import FoldedSGD
from thinwire.optim.muon import Muon
from thinwire.pipeline.runner import PipelineRunner
from thinwire.pipeline.split import split_model
from thinwire.step.forwarding import Autocast
from thinwire.step.recompute import matches, recompute
from thinwire.strategy.clipping import require_clip_of_one, require_one_clip, take_clip_
from thinwire.strategy.engine import Engine
from thinwire.strategy.engine_checks import MovingBuffers
from thinwire.strategy.facts import checkpoint_facts, compared_settings, model_facts
from thinwire.strategy.fields import Fields
from thinwire.strategy.ownership import (
    OwnershipGuard,
    convert_,
    gather_stages_,
    holds_one_stage,
    params_of,
    record_stage_split,
    require_trained,
    require_unowned,
    stage_split_of,
)
from thinwire.strategy.parts import Parts, Setup
from thinwire.strategy.replace import select_optimizers
from thinwire.strategy.requirements import (
    check_kinds,
    require_averages,
    require_members_work,
    require_mesh_works,
    require_split_works,
    warn_of_optimizer,
)
from thinwire.strategy.saving import mark_states
from thinwire.strategy.updates import EveryStep, LocalStep, Steps
from thinwire.wire.message import WIRE_VERSION

_log = logging.getLogger("thinwire")


def prepare(setup: Setup) -> Engine:
    """See `DistributedStrategy.prepare`."""
    strategy, model, mesh = setup.strategy, setup.model, setup.mesh
    setup.member = member = member_of(setup.members)
    if member is not None:
        require_members_work(strategy, member)
        member.require_mesh(mesh)
    if mesh is not None:
        require_mesh_works(strategy, mesh)
        require_elementwise(setup.optimizer)
    check.one_of("verify", setup.verify, ("after", "before"))
    check.boolean("find_unused_parameters", setup.find_unused_parameters)
    setup.planned = planned_row(setup.plan)
    check_kinds(model, setup.optimizer, setup.loss_fn, setup.grad_clip)
    warn_of_misplaced(model, setup.optimizer)
    reshard_(model)
    require_shards(dict(named_parameters(model)), None if mesh is None else mesh["shard"])
    setup.digest_every = check.integer("digest_every", setup.digest_every, at_least=0)
    local = mesh is not None or strategy.local is not None
    setup.ranks = Ranks(
        timeout=setup.timeout, member=member, streams=setup.streams, between_sites=local
    )
    with setup.ranks.deadline():
        return _prepared(setup)


def _prepared(setup: Setup) -> Engine:
    begin_s = time.perf_counter()
    model, group = setup.model, setup.group
    _form_groups_(setup)
    parts = _agreed_parts(setup)
    with ExitStack() as undo:
        undo.push(parts.undo)
        setup.ranks.compile(partial(_compile_loops, setup, parts))
        split = stage_split_of(model)
        if split is None:
            # the model of rank 0, or of the first site
            params = {f"parameter {name}": shard_of(p) for name, p in named_parameters(model)}
            buffers = {f"buffer {name}": b for name, b in named_buffers(model)}
            make_models_equal_(params, buffers, setup.sites or group)
        else:
            gather_stages_(model, split, group)
            record_stage_split(model, [model])
        engine = Engine(parts, _assembled(setup, parts, undo.enter_context(ExitStack())))
        undo.pop_all()
    kind, on = kinds_of(setup.optimizer), ", ".join(setup.strategy.on) or "no field"
    took_s = time.perf_counter() - begin_s
    _log.info("the engine is ready after %.1f s: %s, %s, %d ranks", took_s, on, kind, group.size)
    if group.rank == 0:
        warn_of_optimizer(setup.strategy, setup.optimizer)
    return engine


def _form_groups_(setup: Setup) -> None:
    """Compare strategies, and make the groups of ranks. Changes `setup`."""
    strategy, group, member = setup.strategy, setup.group, setup.member
    facts = {
        "wire version": WIRE_VERSION,
        "strategy": compared_settings(strategy),
        "dp_degree": strategy.expected_replicas,
        "digest_every": setup.digest_every,
        "verify": setup.verify,
        **setup.ranks.facts,
        **_rounding_facts(strategy, setup.model, setup.optimizer),
    }
    if member is not None:
        member.require_same_setup("strategy", facts)
    setup.ranks.compare(facts, "comparing strategies")
    setup.replicas = group.size
    if strategy.pipeline is not None:
        setup.grid = Grid(strategy.pipeline.stages, setup.timeout)
        setup.replicas = setup.grid.replicas
    if setup.mesh is not None:
        own = None if member else sites_of(setup.mesh, setup.timeout, setup.streams)
        setup.sites = own or group
        setup.replicas = setup.sites.replica_count
    if strategy.expected_replicas not in (None, setup.replicas):
        raise StrategyError(
            f"the fleet description has dp_degree={strategy.expected_replicas}, but the "
            f"{group.size} ranks make {setup.replicas} replicas: start that number of replicas, "
            "or omit dp_degree to use all ranks"
        )


def _compile_loops(setup: Setup, parts: Parts) -> None:
    """Compile what this training calls, without the loops of local updates."""
    for single in all_of(setup.optimizer):
        if isinstance(single, CommonOptimizer):
            single.compile_loops()
    of_gradients = parts.compression if parts.local is None else None
    if of_gradients and (loops := of_gradients.loops([*Shards(parts.params).values()])):
        loops()


def _agreed_parts(setup: Setup) -> Parts:
    """Return the parts that need no change of the model, or raise on all ranks at once."""
    model, optimizer = setup.model, setup.optimizer
    alike = setup.strategy.local is None and setup.sites is None
    facts = model_facts(model, optimizer, digest=alike)
    names = {p: name for name, p in named_parameters(model)}
    split = stage_split_of(model)
    of_stage = {}
    if holds_one_stage(split, optimizer, names):  # equal only among replicas of this stage
        of_stage["state of the optimizer"] = facts.pop("state of the optimizer")
        of_stage["params"] = [group.pop("params") for group in facts["group"]]
    facts |= {
        "stages of the engine before": 1 if split is None else [sorted(stage) for stage in split],
        "parameters of one stage in the optimizer": bool(of_stage),
        "grad_clip of prepare": repr(setup.grad_clip),
        "find_unused_parameters of prepare": setup.find_unused_parameters,
    }
    try:
        parts = _planned(setup)
    except (TypeError, ValueError, RuntimeError) as problem:
        # a failed rank takes part in the agreement too: the others would wait for it otherwise
        with contextlib.suppress(ThinwireError):
            _agree(setup, {"problem": f"{type(problem).__name__}: {problem}", **facts}, of_stage)
        raise
    try:
        _agree(setup, {"problem": None, **facts}, of_stage)
    except BaseException:
        parts.undo.close()
        raise
    return parts


def _agree(setup: Setup, facts: dict[str, Any], of_stage: dict[str, Any]) -> None:
    require_agreement(setup.group, facts, action="preparing the engine")
    if of_stage:
        replicas = setup.replica_ranks()
        require_agreement(replicas, of_stage, action="comparing the replicas of a stage")


def _planned(setup: Setup) -> Parts:
    strategy, model, optimizer = setup.strategy, setup.model, setup.optimizer
    require_unowned(model, optimizer)
    names = {p: name for name, p in named_parameters(model)}
    require_own_params(model, optimizer)
    if strategy.recompute is not None:
        matches(model, strategy.recompute.checkpoints)
    if (exchanging := strategy.local or strategy.gradient_compression) is not None:
        require_divisor(exchanging.node_size, setup.replicas)
    stages = [model] if strategy.pipeline is None else split_model(model, strategy.pipeline)
    require_split_works(stage_split_of(model), optimizer, stages, names, setup)
    if strategy.local is not None and len(stages) > 1:
        require_averages(stages)
    here = setup.part if len(stages) > 1 else 0
    stage, own = stages[here], set(stages[here].parameters())
    trained = {p for p in params_of(optimizer) if p.requires_grad}
    of_stages = [{n: p for n, p in named_parameters(part) if p in trained} for part in stages]
    if strategy.pipeline is None:
        require_trained(of_stages[0])
    selected = select_optimizers(optimizer, strategy, names=names, keep=own.__contains__)
    with ExitStack() as undo:
        for one in selected:
            undo.callback(one.restore)
        sharded = setup.mesh is not None
        for one in selected:
            folding = one.compressor if one.folds else None
            require_one_clip(one.optimizer, setup.grad_clip, folding, sharded=sharded)
        in_parts = sharded or len(stages) > 1
        require_clip_of_one([one.optimizer for one in selected], parts=in_parts)
        for given, one in zip(all_of(optimizer), selected, strict=True):
            if one.optimizer is not given:
                undo.callback(convert_(given, one.optimizer, one.conversion))
        parts = _planned_for(setup, stage, of_stages[here])
        parts.names_of_stages = [list(named) for named in of_stages] if len(stages) > 1 else []
        parts.folds = selected[0].folds
        parts.undo = undo.pop_all()
        return parts


def _planned_for(setup: Setup, stage: nn.Module, params: dict[str, Parameter]) -> Parts:
    strategy, optimizer = setup.strategy, setup.optimizer
    config, local = strategy.local, None
    scaler = _scaler(setup)
    if config is None:
        warn_of_others(stage, optimizer)
    else:
        local = LocalUpdates(
            stage,
            optimizer,
            config,
            process_group=setup.replica_group,
            compression=strategy.gradient_compression,
            scaler=scaler,
            digest_every=setup.digest_every,
            timeout=setup.timeout,
            streams=setup.streams,
            members=setup.members,
            plan=setup.planned,
            mesh=setup.mesh,
        )
    merge = strategy.gradient_merge
    return Parts(
        model=stage,
        optimizer=optimizer,
        loss_fn=setup.loss_fn,
        params=params,
        group=setup.group,
        part=setup.part,
        compression=strategy.gradient_compression,
        local=local,
        member=setup.member,
        scaler=scaler,
        merge_steps=strategy._merge_steps,
        merge_avg=merge is None or merge.avg,
        find_unused=setup.find_unused_parameters and local is None,
    )


def _assembled(setup: Setup, parts: Parts, undo: ExitStack) -> Steps:
    """Make the other parts, and the steps. Changes the model from here on; `undo` undoes it."""
    strategy, model, optimizer = setup.strategy, setup.model, setup.optimizer
    parts.undo = undo
    for single in all_of(optimizer):
        undo.callback(OwnershipGuard(model, single).remove)
    if strategy.recompute is not None:
        undo.callback(recompute(model, strategy.recompute.checkpoints, stage=parts.model).remove)
    dtype = None if strategy.amp is None else getattr(torch, str(strategy.amp.dtype))
    if dtype is not None:
        device = next(model.parameters()).device.type
        parts.autocast = partial(torch.autocast, device, dtype=dtype)
        if strategy.pipeline is None:
            undo.callback(Autocast(model, dtype).remove)
    scaler, grid = parts.scaler, setup.grid
    if strategy.pipeline is not None:
        assert grid is not None, "made for the pipeline"
        record_stage_split(model, split_model(model, strategy.pipeline))
        scale = (lambda: 1.0) if scaler is None else (lambda: scaler.scale)
        parts.runner = PipelineRunner(
            parts.model, strategy.pipeline, grid, setup.loss_fn, dtype=dtype, scale=scale
        )
    if parts.local is not None:
        parts.averager = enter(parts.local, merge_steps=parts.merge_steps)
        undo.callback(parts.local.close)
    stages = None if grid is None or grid.stages == 1 else grid.peers
    parts.clip = take_clip_(optimizer, setup.grad_clip, undo, stages=stages, shards=setup.shards)
    peers = setup.member.group if setup.member else setup.replica_ranks()
    parts.buffers = MovingBuffers(parts.model, peers)
    if parts.local is None:
        steps: Steps = _every_step(setup, parts)
    else:
        parts.limit = _limit(parts.compression, Shards(parts.params), setup)
        parts.compression = None
        parts.replica = Replica(optimizer, None, parts.model, parts.params, averaged=True)
        steps = LocalStep(parts, parts.local)
    for single in all_of(optimizer):
        if isinstance(single, CommonOptimizer):
            single.call_params({p: name for name, p in named_parameters(model)})
    parts.facts = checkpoint_facts(strategy, model, optimizer)
    mark_states(parts)
    return steps


def _scaler(setup: Setup) -> LossScaler | None:
    """Return the loss scaler, for the ranks that decide on an overflow together."""
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


def _every_step(setup: Setup, parts: Parts) -> EveryStep:
    """Make the exchange of gradients and what goes with it."""
    sites, params, optimizer = setup.sites, Shards(parts.params), setup.optimizer
    compression, parts.compression = parts.compression, None
    if sites is not None:  # a compression sees single shards
        parts.limit = _limit(compression, params, setup)
    whole, clip = compression, parts.clip
    if compression is not None and parts.limit is not None:
        compression = replace(compression, local_grad_clip_norm=None)
    if compression is not None and parts.folds:
        own = optimizer.grad_clip if isinstance(optimizer, CommonOptimizer) else None
        method = compression
        parts.momentum = FoldedSGD(optimizer, parts.params, lambda _: method, clip.clip or own)
    if compression is not None and any(map(compression.compresses, params.values())):
        parts.compression = compression
    checks: list[Check] = [] if parts.runner is None else [parts.runner]
    job = None if setup.grid is None else setup.grid.job
    rides = setup.verify == "after" and setup.grid is None and sites is None
    rides &= parts.compression is None
    parts.gradients = gradients = gradients_of(
        setup.replica_ranks() if sites is None else sites,
        params,
        compression,
        momentum=parts.momentum,
        # a loss scale has checked the gradients, or was told not to
        check_finite=parts.scaler is None,
        sources=None if sites is None else sites.replicas,
        participants=Participants(
            [*checks, parts.batches, parts.buffers], job, parts.names_of_stages
        ),
        rides=rides,
    )
    momentum = parts.momentum
    if momentum is not None and momentum.begun:
        gradients.state_loaded()
    # where facts ride on the sums, a digest is compared one update after it was read
    every = setup.digest_every - (rides and setup.digest_every > 1)
    digest = digest_of(optimizer, dict(named_parameters(parts.model)), every)
    parts.replica = Replica(optimizer, digest, parts.model, parts.params)
    gradients.watch(parts.replica, f"engine {next_identity()}")
    if clip.stages is not None and isinstance(clip.clip, ClipByGlobalNorm):
        gradients.measure = lambda grads: norm_of(grads.values())
    if compression is not None and gradients.sources.rank == 0:
        report_coverage(compression, params.values())
    gradients.pace = Pace(setup.planned if setup.group.rank == 0 else None)
    # gradients of shards exist only after the model's own reduction
    whole_model = parts.runner is None and sites is None
    if whole_model and setup.replicas > 1 and not parts.find_unused:
        first_bytes, bucket_bytes = (whole or Dense()).buckets
        parts.overlap = Overlap(
            parts.params, gradients, bucket_bytes=bucket_bytes, first_bytes=first_bytes
        )
        parts.undo.callback(parts.overlap.remove)
    return EveryStep(parts, gradients)


def _limit(config: Any, params: Shards, setup: Setup) -> Limit | None:
    """Return the local clip before compression."""
    if config is None or config.local_grad_clip_norm is None:
        return None
    gather = None if setup.shards is None else setup.shards.gather_now
    return lambda step, grads: locally_clipped(
        grads, params, lambda _: config, step=step, sources=setup.replicas, gather=gather
    )


def _rounding_facts(
    strategy: Fields, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, str]:
    """Return the facts that determine the rounding of replicas, if all of them update alike."""
    if strategy.local is not None:  # it compares what its averagings need
        return {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    layerwise = bool(strategy.lamb or strategy.lars)
    layerwise |= any(isinstance(single, Lamb | Lars) for single in all_of(optimizer))
    products = any(isinstance(single, Muon) for single in all_of(optimizer))
    return arithmetic(device, kernels=layerwise, products=products)
