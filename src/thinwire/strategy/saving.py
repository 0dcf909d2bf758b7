"""The state of an engine as one tree of plain values and tensors, and back; on disk and off it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.checkpoint import Loaded, random_state, set_random_state
from thinwire.checkpoint import load as load_checkpoint
from thinwire.checkpoint import save as save_checkpoint
from thinwire.checkpoint.combine import Rule
from thinwire.errors import CheckpointError

if TYPE_CHECKING:
    from thinwire.strategy.engine import Parts

__all__ = ["load", "read", "save", "saved"]

_OTHER_RANKS: dict[str, Rule] = {
    "loss_scale/scale": "min",
    "merge/overflowed": "max",
    "merge/sums/*": "mean_zero",
    "exchange/*residuals/*": "mean_zero",
    "exchange/errors/*": "mean_zero",
    "optimizer/state/*/residual": "mean_zero",
    "optimizer/state/*/step": "first",
    "optimizer/state/*/momentum_buffer": "mean_zero",
}
"""On another number of ranks, what is not simply the mean of those that have it: sums (absent ranks gave 0), counts."""


def saved(parts: "Parts", counters: Mapping[str, int]) -> dict[str, Any]:
    """Everything that a later step depends on, copied where the engine would go on to change it."""
    return {
        "counters": dict(counters),
        "parameters": _copied(_parameters(parts)),
        "buffers": _copied(dict(parts.model.named_buffers())),
        "optimizer": _copied(parts.optimizer.state_dict()),
        "exchange": _copied(parts.exchange.state_dict()),
        "loss_scale": None if parts.scaler is None else parts.scaler.state_dict(),
        "merge": None if parts.merge is None else _copied(parts.merge.state_dict()),
        "random": random_state(),
    }


@torch.no_grad()
def load(state: Mapping[str, Any], parts: "Parts") -> dict[str, int]:
    """Put everything back and return the counters; what can be checked is checked before anything changes."""
    check.instance("state", state, Mapping, advice="pass what engine.state_dict() returned")
    wanted = {"counters", "parameters", "buffers", "optimizer", "exchange", "loss_scale", "merge", "random"}
    if state.keys() != wanted:
        raise ValueError(
            f"state is not one of an engine: missing {sorted(wanted - state.keys())}, "
            f"unknown {sorted(state.keys() - wanted)}"
        )
    kinds = ("step", "dropped_steps", "bytes_sent")
    counters = {key: check.integer(key, state["counters"].get(key), at_least=0) for key in kinds}
    _require_same("loss_scale", state["loss_scale"], parts.scaler)
    _require_same("merge", state["merge"], parts.merge)
    parameters, buffers = _parameters(parts), dict(parts.model.named_buffers())
    for kind, places in (("parameters", parameters), ("buffers", buffers)):
        check.same_shapes(kind, state[kind], places, advice="Load a state of the same model")
    for places, values in ((parameters, state["parameters"]), (buffers, state["buffers"])):
        for name, place in places.items():
            place.copy_(values[name])
    parts.optimizer.load_state_dict(state["optimizer"])
    parts.exchange.load_state_dict(state["exchange"])
    if parts.scaler is not None:
        parts.scaler.load_state_dict(state["loss_scale"])
    if parts.merge is not None:
        parts.merge.load_state_dict(state["merge"])
    parts.buffers.forget()
    set_random_state(state["random"])
    return counters


def save(directory: str | Path, state: Mapping[str, Any], parts: "Parts", step: int) -> Path:
    """Write a checkpoint; see `Engine.save`."""
    return save_checkpoint(directory, state, step=step, group=parts.group, facts=parts.facts, part=parts.stage)


def read(directory: str | Path, parts: "Parts") -> Loaded:
    """The newest whole checkpoint, if it is one of the same strategy."""
    loaded = load_checkpoint(directory, group=parts.group, part=parts.stage, rules=_OTHER_RANKS)
    for key, here in parts.facts.items():
        there = loaded.facts.get(key)
        if there != here:
            raise CheckpointError(
                f"{loaded.path} does not fit: {key} was {there} when it was written and is {here} in this engine. "
                f"Prepare the engine as it was then; model weights alone can be taken from engine.state_dict()"
            )
    return loaded


def _parameters(parts: "Parts") -> dict[str, Tensor]:
    return dict(parts.model.named_parameters())


def _copied(tree: Any) -> Any:
    """The same tree, its tensors detached and cloned."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree


def _require_same(kind: str, state: object, part: object) -> None:
    if (state is None) != (part is None):
        has, lacks = ("state", "the engine") if part is None else ("the engine", "state")
        raise ValueError(f"{has} has a {kind} and {lacks} has none: prepare the engine with the same strategy")
