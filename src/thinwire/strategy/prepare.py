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

from thinwire import _validate as check
from thinwire._names import named_buffers, named_parameters
from thinwire.amp import LossScaler
from thinwire.comm import next_identity, require_agreement, sites_of
from thinwire.comm.nodes import require_divisor
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
from thinwire.exchange.agreement import Participants
from thinwire.exchange.digest import digest_of
from thinwire.exchange.gradients import gradients_of
from thinwire.exchange.overlap import Overlap
from thinwire.exchange.replica import Replica
from thinwire.exchange.synchronizer import Ranks
from thinwire.local.config import LocalConfig
from thinwire.local.model import require_own_params, warn_of_misplaced, warn_of_others
from thinwire.local.updates import LocalUpdates, enter
from thinwire.members.members import member_of
from thinwire.optim import Lamb, Lars
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.folded import FoldedSGD
from thinwire.optim.muon import Muon
from thinwire.step.recompute import matches, recompute
from thinwire.strategy.clipping import require_clip_of_one, require_one_clip, take_clip_
from thinwire.strategy.engine import Engine
from thinwire.strategy.engine_checks import Batches, Joining, MovingBuffers
from thinwire.strategy.facts import checkpoint_facts, compared_settings, model_facts
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
from thinwire.strategy.stages import NEEDS_THE_LOSS, Setup, Stages, Whole
from thinwire.strategy.updates import EveryStep, LocalStep, Steps
from thinwire.wire.message import WIRE_VERSION

_log = logging.getLogger("thinwire")


def prepare(setup: Setup) -> Engine:
    """See `DistributedStrategy.prepare`."""
    strategy = setup.strategy
    model = setup.model
    mesh = setup.mesh
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
    setup.ranks = Ranks(
        timeout=setup.timeout,
        member=member,
        streams=setup.streams,
        between_sites=mesh is not None or strategy.local is not None,
    )
    with setup.ranks.deadline():
        return _prepared(setup)


def _prepared(setup: Setup) -> Engine:
    begin_s = time.perf_counter()
    model = setup.model
    group = setup.group
    _form_groups_(setup)
    with ExitStack() as undo:
        undo.push(_agreed(setup))
        setup.ranks.compile(partial(_compile_loops, setup))
        split = stage_split_of(model)
        if split is None:
            # the model of rank 0, or of the first site
            params = {f"parameter {name}": shard_of(p) for name, p in named_parameters(model)}
            buffers = {f"buffer {name}": b for name, b in named_buffers(model)}
            make_models_equal_(params, buffers, setup.sites or group)
        else:
            gather_stages_(model, split, group)
            record_stage_split(model, [model])
        steps = _assembled(setup, undo.enter_context(ExitStack()))
        engine = Engine(steps, setup.division)
        undo.pop_all()
    kind = kinds_of(setup.optimizer)
    on = ", ".join(setup.strategy.on) or "no field"
    took_s = time.perf_counter() - begin_s
    _log.info("the engine is ready after %.1f s: %s, %s, %d ranks", took_s, on, kind, group.size)
    if group.rank == 0:
        warn_of_optimizer(setup.strategy, setup.optimizer)
    return engine


def _form_groups_(setup: Setup) -> None:
    """Compare strategies, and make the groups of ranks. Changes `setup`."""
    strategy = setup.strategy
    group = setup.group
    member = setup.member
    facts = {
        "wire version": WIRE_VERSION,
        "strategy": compared_settings(strategy),
        "dp_degree": strategy.expected_replicas,
        "digest_every": setup.digest_every,
        "verify": setup.verify,
        **setup.ranks.facts,
    }
    if strategy.local is None:  # else local updates compare what their averagings need
        optimizers = all_of(setup.optimizer)
        device = next((p.device for p in setup.model.parameters()), torch.device("cpu"))
        layerwise = bool(strategy.lamb or strategy.lars)
        layerwise |= any(isinstance(single, Lamb | Lars) for single in optimizers)
        products = any(isinstance(single, Muon) for single in optimizers)
        facts |= arithmetic(device, kernels=layerwise, products=products)
    if member is not None:
        member.require_same_setup("strategy", facts)
    setup.ranks.compare(facts, "comparing strategies")
    if setup.mesh is not None:
        own = None if member else sites_of(setup.mesh, setup.timeout, setup.streams)
        setup.sites = own or group
    if strategy.pipeline is None:
        setup.division = Whole(setup.sites or group, setup.mesh)
    else:
        setup.division = Stages(strategy.pipeline, setup.timeout)
    replicas = setup.division.replicas
    if strategy.expected_replicas not in (None, replicas):
        raise StrategyError(
            f"the fleet description has dp_degree={strategy.expected_replicas}, but the "
            f"{group.size} ranks make {replicas} replicas: start that number of replicas, "
            "or omit dp_degree to use all ranks"
        )


def _compile_loops(setup: Setup) -> None:
    """Compile what this training calls, without the loops of local updates."""
    for single in all_of(setup.optimizer):
        if isinstance(single, CommonOptimizer):
            single.compile_loops()
    config = setup.strategy.gradient_compression
    if setup.local is None and config is not None:
        loops = config.loops([*Shards(setup.params).values()])
        if loops is not None:
            loops()


def _agreed(setup: Setup) -> ExitStack:
    """Run `_planned` on all ranks, or raise on all at once."""
    model = setup.model
    optimizer = setup.optimizer
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
        undo = _planned(setup)
    except (TypeError, ValueError, RuntimeError) as problem:
        # a failed rank takes part in the agreement too: the others would wait for it otherwise
        with contextlib.suppress(ThinwireError):
            _agree(setup, {"problem": f"{type(problem).__name__}: {problem}", **facts}, of_stage)
        raise
    try:
        _agree(setup, {"problem": None, **facts}, of_stage)
    except BaseException:
        undo.close()
        raise
    return undo


def _agree(setup: Setup, facts: dict[str, Any], of_stage: dict[str, Any]) -> None:
    require_agreement(setup.group, facts, action="preparing the engine")
    if of_stage:
        replicas = setup.replica_ranks()
        require_agreement(replicas, of_stage, action="comparing the replicas of a stage")


def _planned(setup: Setup) -> ExitStack:
    """Make what needs no change of the model; changes `setup`. Return what undoes the rest."""
    strategy = setup.strategy
    model = setup.model
    optimizer = setup.optimizer
    require_unowned(model, optimizer)
    names = {p: name for name, p in named_parameters(model)}
    require_own_params(model, optimizer)
    if strategy.recompute is not None:
        matches(model, strategy.recompute.checkpoints)
    if (exchanging := strategy.local or strategy.gradient_compression) is not None:
        require_divisor(exchanging.node_size, setup.division.replicas)
    stages = setup.division.cut(model)
    require_split_works(
        stage_split_of(model), optimizer, stages, names, mesh=setup.mesh, members=setup.members
    )
    here = setup.division.stage
    setup.stage = stage = stages[here]
    own = set(stage.parameters())
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
            require_one_clip(one, setup.grad_clip, sharded=sharded)
        require_clip_of_one(selected, parts=sharded or setup.division.peers is not None)
        for given, one in zip(all_of(optimizer), selected, strict=True):
            if one.optimizer is not given:
                undo.callback(convert_(given, one.optimizer, one.conversion))
        setup.params = of_stages[here]
        setup.folds = selected[0].folding is not None
        if len(stages) > 1:
            setup.names_of_stages = [list(named) for named in of_stages]
        if strategy.local is None:
            warn_of_others(stage, optimizer)
            if strategy._loss_scale is not None:
                setup.scaler = LossScaler(strategy._loss_scale)
        else:
            _plan_local(setup, strategy.local, stages)
        return undo.pop_all()


def _plan_local(setup: Setup, config: LocalConfig, stages: list[nn.Module]) -> None:
    """Make the local updates, without entering them. Changes `setup`."""
    if len(stages) > 1:
        require_averages(stages)
    scale = setup.strategy._loss_scale
    group = setup.division.overflow_group
    if scale is not None:
        setup.scaler = LossScaler(scale, group, local=group is None)
    setup.local = LocalUpdates(
        setup.stage,
        setup.optimizer,
        config,
        process_group=setup.division.replica_group,
        compression=setup.strategy.gradient_compression,
        scaler=setup.scaler,
        digest_every=setup.digest_every,
        timeout=setup.timeout,
        streams=setup.streams,
        members=setup.members,
        plan=setup.planned,
        mesh=setup.mesh,
    )


def _assembled(setup: Setup, undo: ExitStack) -> Steps:
    """Make the other parts, and the steps. Changes the model from here on; `undo` undoes it."""
    strategy = setup.strategy
    model = setup.model
    optimizer = setup.optimizer
    for single in all_of(optimizer):
        undo.callback(OwnershipGuard(model, single).remove)
    if strategy.recompute is not None:
        undo.callback(recompute(model, strategy.recompute.checkpoints, stage=setup.stage).remove)
    setup.division.open(setup, undo)
    local = setup.local
    steps = _every_step(setup, undo) if local is None else _local(setup, local, undo)
    for single in all_of(optimizer):
        if isinstance(single, CommonOptimizer):
            single.call_params({p: name for name, p in named_parameters(model)})
    return steps


def _common(setup: Setup, undo: ExitStack) -> dict[str, Any]:
    """Return the parts that both ways to update have."""
    strategy = setup.strategy
    merge = strategy.gradient_merge
    division = setup.division
    refusals = dict(division.refusals)
    if setup.scaler is not None:
        why = f"under the loss scale of amp, {NEEDS_THE_LOSS}"
        refusals |= dict.fromkeys(("apply_gradients", "follow_steps"), why)
    return {
        "model": setup.stage,
        "optimizer": setup.optimizer,
        "params": setup.params,
        "group": setup.group,
        "part": division.stage if division.shards is None else division.shards.rank,
        "is_whole": division.is_whole,
        "member": setup.member,
        "scaler": setup.scaler,
        "merge_steps": strategy._merge_steps,
        "merge_avg": merge is None or merge.avg,
        "undo": undo,
        "clip": take_clip_(
            setup.optimizer, setup.grad_clip, undo, stages=division.peers, shards=division.shards
        ),
        "facts": checkpoint_facts(strategy, setup.model, setup.optimizer),
        "refusals": refusals,
        "bytes_between_stages": lambda: division.bytes_sent,
    }


def _local(setup: Setup, local: LocalUpdates, undo: ExitStack) -> LocalStep:
    """Enter the local updates."""
    averager = enter(local, merge_steps=setup.strategy._merge_steps)
    undo.callback(local.close)
    mark_states(setup.optimizer, undo)
    return LocalStep(
        **_common(setup, undo),
        limit=_limit(setup),
        replica=Replica(setup.optimizer, None, setup.stage, setup.params, averaged=True),
        exchange=averager,
        joining=Joining(setup.group),
        local=local,
    )


def _every_step(setup: Setup, undo: ExitStack) -> EveryStep:
    """Make the exchange of gradients and what goes with it."""
    common = _common(setup, undo)
    sites = setup.sites
    params = Shards(setup.params)
    optimizer = setup.optimizer
    clip = common["clip"]
    division = setup.division
    given = setup.strategy.gradient_compression
    method = given or Dense()
    limit = None if sites is None else _limit(setup)  # a compression sees single shards
    if limit is not None:
        method = replace(method, local_grad_clip_norm=None)
    momentum = None
    if setup.folds:
        own = optimizer.grad_clip if isinstance(optimizer, CommonOptimizer) else None
        mark_states(optimizer, undo)
        momentum = FoldedSGD(optimizer, setup.params, lambda _: method, clip.clip or own)
    used = method if any(map(method.compresses, params.values())) else Dense()
    batches = Batches()
    buffers = MovingBuffers(setup.stage, setup.replica_ranks())
    rides = setup.verify == "after" and division.is_whole and isinstance(used, Dense)
    gradients = gradients_of(
        setup.replica_ranks() if sites is None else sites,
        params,
        given and method,
        momentum=momentum,
        # a loss scale has checked the gradients, or was told not to
        check_finite=setup.scaler is None,
        sources=None if sites is None else sites.replicas,
        participants=Participants(
            [*division.checks, batches, buffers], division.job, setup.names_of_stages
        ),
        rides=rides,
    )
    if momentum is not None and momentum.begun:
        gradients.state_loaded()
    # where facts ride on the sums, a digest is compared one update after it was read
    every = setup.digest_every - (rides and setup.digest_every > 1)
    digest = digest_of(optimizer, dict(named_parameters(setup.stage)), every)
    replica = Replica(optimizer, digest, setup.stage, setup.params)
    gradients.watch(replica, f"engine {next_identity()}")
    if clip.stages is not None and isinstance(clip.clip, ClipByGlobalNorm):
        gradients.measure = lambda grads: norm_of(grads.values())
    if given is not None and gradients.sources.rank == 0:
        report_coverage(given, params.values())
    gradients.pace = Pace(setup.planned if setup.group.rank == 0 else None)
    overlap = None
    # gradients of shards exist only after the model's own reduction
    if division.is_whole and division.replicas > 1 and not setup.find_unused_parameters:
        first_bytes, bucket_bytes = method.buckets
        overlap = Overlap(
            setup.params, gradients, bucket_bytes=bucket_bytes, first_bytes=first_bytes
        )
        undo.callback(overlap.remove)
    return EveryStep(
        **common,
        limit=limit,
        replica=replica,
        exchange=gradients,
        joining=batches,
        voters=[buffers.group],
        compression=used,
        settled_step=used.settled_step,
        momentum=momentum,
        buffers=buffers,
        find_unused=setup.find_unused_parameters,
        overlap=overlap,
    )


def _limit(setup: Setup) -> Limit | None:
    """Return the local clip before compression."""
    config: Any = setup.strategy.gradient_compression
    if config is None or config.local_grad_clip_norm is None:
        return None
    params = Shards(setup.params)
    shards = setup.division.shards
    sources = setup.division.replicas
    gather = None if shards is None else shards.gather_now
    return lambda step, grads: locally_clipped(
        grads, params, lambda _: config, step=step, sources=sources, gather=gather
    )
