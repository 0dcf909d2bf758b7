"""Save and load the state of local updates as plain values and tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.exchange.provenance import checksum_of
from thinwire.local.averager import Averager
from thinwire.local.model import LocalModel

_ADVICE = "Load a state of the same model and the same config"


def saved(averager: Averager, *, copy: bool = True) -> dict[str, Any]:
    """Return all state on which a later step depends, or a copy; refuse within a timed round."""
    if averager.work is not None and averager.work.steps:
        raise RuntimeError(
            f"{averager.work.steps} steps were made since the last averaging, and with "
            "round_seconds= ranks make unequal numbers of steps: save right after an averaging, "
            "where sync.synced is true"
        )
    averager.settle()
    held = copied if copy else dict
    pending, averaging, counters = averager.pending, averager.averaging, averager.counters
    between = counters.step > counters.last_full_sync
    return {
        **averager.when.state(),
        "observed": [float(loss) for loss in averager.interval.observed],
        "work": None if averager.work is None else averager.work.state(),
        "traffic": averager.counted(),
        "anchors": held(averaging.anchors),
        "outer_momentum": held(averaging.momentum),
        **{f"{kind}s": held(tensors) for kind, tensors in averaging.kept.items()},
        "sketches": averaging.sketches.clone(),
        "pending": None
        if pending is None
        else {
            "step": pending.measured.step,
            "weight": averager.weight,
            "measured": held(pending.measured.moved.params),
            "extras": held(pending.measured.extras),
        },
        "local": held(_local(averager.tensors)) if between else None,
        "unchanged_buffers": averager.tensors.unchanged_buffers(),
    }


def own_checksum(state: Mapping[str, Any]) -> int:
    """Return a checksum of the state that belongs to this rank alone; 0 if there is none."""
    errors = [error for error in (state.get("residuals") or {}).values() if bool(error.any())]
    measured = (state.get("pending") or {}).get("measured")
    return checksum_of([errors, measured, state.get("local")])


@torch.no_grad()
def load(state: Mapping[str, Any], averager: Averager) -> None:
    """Restore a saved state. Everything is checked before anything changes."""
    averaging, tensors = averager.averaging, averager.tensors
    targets = {"anchors": averaging.anchors, "outer_momentum": averaging.momentum}
    targets |= {f"{kind}s": tensors for kind, tensors in averaging.kept.items()}
    wanted = {*averager.when.state(), *targets, "traffic", "pending", "local", "sketches"}
    wanted |= {"observed", "work", "unchanged_buffers"}
    if wanted != state.keys():
        raise ValueError(
            f"state is not one of local_sgd: missing {sorted(wanted - state.keys())}, "
            f"unknown {sorted(state.keys() - wanted)}"
        )
    if state["local"] is not None:
        targets["local"] = _local(tensors)
    for kind, current in targets.items():
        check.same_shapes(kind, state[kind], current, advice=_ADVICE)
    check.instance("unchanged_buffers", state["unchanged_buffers"], Mapping, advice=_ADVICE)
    for name, share in state["unchanged_buffers"].items():
        check.instance(f"unchanged_buffers[{name!r}]", share, (int, float), advice=_ADVICE)
    pending = state["pending"]
    if pending is not None:
        known = {n: p for n, p in tensors.params.items() if n in pending["measured"]}
        check.same_shapes("pending", pending["measured"], known, advice=_ADVICE)
    for kind, current in targets.items():
        for name, tensor in current.items():
            tensor.copy_(state[kind][name])
    tensors.load_unchanged(state["unchanged_buffers"])
    averaging.state_loaded()
    averaging.sketches.copy_(state["sketches"])
    averager.when.load(state)
    if averager.counters.batch:
        averager.counters.members = averager.group.replica_count
    if averager.counters.last > averager.counters.step:  # no averaging was made yet
        averager.counters.last = averager.config.begin_step
    averager.interval.k_steps = averager.interval.allowed(state["k_steps"])
    averager.interval.observed = list(state["observed"])
    averager.reset_after_load(state["work"])
    averager.count_from(state["traffic"])
    if pending is not None:  # it is sent again when it is due
        params = tensors.params
        measured = {n: value.to(params[n].device) for n, value in pending["measured"].items()}
        extras = {key: value.to(tensors.device) for key, value in pending["extras"].items()}
        part = averaging.measure(pending["step"], measured, extras, keep=True)
        averager.resume(part, pending["weight"])


def _local(tensors: LocalModel) -> dict[str, Tensor]:
    return {**tensors.params, **tensors.buffers()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of all tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
