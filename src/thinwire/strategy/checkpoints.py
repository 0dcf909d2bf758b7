"""The state of an engine on disk: every rank writes its part, any number of ranks loads it."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire._names import named_parameters
from thinwire.checkpoint import Loaded, on_all_ranks
from thinwire.checkpoint import load as load_checkpoint
from thinwire.checkpoint import save as save_checkpoint
from thinwire.checkpoint.loading import EXPORTED
from thinwire.checkpoint.manifest import ONLY
from thinwire.checkpoint.random_state import derived
from thinwire.checkpoint.shards import Sharding, words
from thinwire.comm import Group
from thinwire.compress import kinds_of_state
from thinwire.core.several import params_in
from thinwire.core.sharded import is_sharded
from thinwire.errors import CheckpointMismatch
from thinwire.strategy.saving import (
    OF_USER,
    compared,
    copy_values_,
    load_all,
    on_host,
    require_shapes,
    rules_of_other_ranks,
    saved,
    saved_model,
)
from thinwire.strategy.updates import Steps


def save(
    directory: str | Path,
    steps: Steps,
    extra: Any,
    keep: int | None,
    *,
    frozen: bool,
    copy: bool,
    only: str | None,
) -> Callable[[Group], Path]:
    """Return a function that writes a checkpoint of the current state; see `Engine.save`.

    Without `copy` parameters, buffers and state of the optimizer must not change until then.
    """
    content: Any
    to_save = on_host if copy else Tensor.detach
    facts = steps.facts
    try:
        if only is None:
            content = saved(steps, extra, frozen=frozen, to_save=to_save)
        else:
            facts = {**facts, ONLY: only}
            content = saved_model(steps, frozen=frozen, to_save=to_save)
    except Exception as error:  # reported to the others, which wait for this rank
        content = error
    step = steps.position()
    return lambda group: save_checkpoint(
        directory, content, group=group, step=step, part=steps.part, keep=keep, facts=facts
    )


def load(directory: str | Path, steps: Steps, step: int | None) -> tuple[Path, dict[str, Any]]:
    """Load the newest whole checkpoint, or that of a step; see `Engine.load`."""
    loaded = _found(directory, steps, step=step)
    if ONLY in loaded.facts:
        raise _mismatch(loaded, f"it was saved with only={loaded.facts[ONLY]!r}")
    changes, problem = compared(loaded.facts, steps)
    if problem:
        raise _mismatch(loaded, problem)
    if loaded.resharded:
        fitted = partial(_complete, loaded.state, steps)
        on_all_ranks(steps.savers, "cutting a checkpoint into other shards", fitted)

    if not steps.group.static_membership and steps.group.rank > 0:  # all ranks read one member's
        loaded.state["random"] = derived(loaded.state["random"], steps.group.rank)

    def agreed(problem: Exception | None, left: frozenset[str]) -> frozenset[str]:
        def act() -> list[str]:
            if problem is not None:
                raise _mismatch(loaded, str(problem)) from problem.__cause__
            return sorted(left)

        return frozenset().union(*on_all_ranks(steps.savers, "taking over a checkpoint", act))

    return loaded.path, load_all(loaded.state, steps, changes, str(loaded.path), agreed=agreed)


def _found(directory: str | Path, steps: Steps, **options: Any) -> Loaded:
    return load_checkpoint(
        directory,
        group=steps.savers,
        part=steps.part,
        rules=rules_of_other_ranks(),
        sharding=partial(_sharding, steps),
        **options,
    )


@torch.no_grad()
def load_parameters(directory: str | Path, steps: Steps) -> Path:
    """Load only the parameters and buffers; see `Engine.load_parameters`."""
    fit = "Load a checkpoint of the same model"
    if _in_stages(steps.facts):
        fit += f", cut into the same stages; else {EXPORTED}"
    loaded = _found(directory, steps, combined=True)

    def fits() -> list[str]:
        theirs, ours = (_shapes(facts) for facts in (loaded.facts, steps.facts))
        if loaded.resharded and theirs != ours:  # rows of shards may fit by chance
            name = next(n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n))
            raise CheckpointMismatch(
                f"{loaded.path}: parameter {name} has shape {theirs.get(name, 'none')} in the "
                f"checkpoint and {ours.get(name, 'none')} in this model. Load a checkpoint of the "
                "same model"
            )
        try:
            return sorted(require_shapes(loaded.state, steps, fit))
        except ValueError as error:
            raise CheckpointMismatch(f"{loaded.path}: {error}") from error.__cause__

    left = frozenset().union(*on_all_ranks(steps.savers, "taking over parameters", fits))
    copy_values_(loaded.state, steps, left)
    discard_pending(steps, alike=not left)
    return loaded.path


def discard_pending(steps: Steps, *, alike: bool = True) -> None:
    """Discard pending state. `alike`: True if ranks have the same buffers now."""
    steps.merge.clear()
    steps.start_anew(alike=alike)


def _shapes(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the full shapes of the parameters by name, from the facts of a checkpoint."""
    split = (entry.rsplit(" [", 1) for entry in facts.get("parameters", ()))
    return {named.rsplit(" ", 1)[0]: f"[{shape}" for named, shape in split}


def _mismatch(loaded: Loaded, problem: str) -> CheckpointMismatch:
    advice = EXPORTED if _in_stages(loaded.facts) else "engine.load_parameters(directory)"
    return CheckpointMismatch(
        f"{loaded.path} does not fit this engine: {problem}. Prepare the engine as it was when it "
        f"saved, or load only the parameters: {advice}"
    )


def _in_stages(facts: Mapping[str, Any]) -> bool:
    return (facts.get("strategy") or {}).get("pipeline") is not None


def _sharding(steps: Steps, facts: Mapping[str, Any]) -> Sharding | None:
    """Return the sharding of this engine's model; None if either side has pipeline stages."""
    if _in_stages(steps.facts) or _in_stages(facts):
        return None
    params = dict(named_parameters(steps.model))
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    first = next(iter(params.values()))
    shards = first.device_mesh.size() if is_sharded(first) else 1  # type: ignore[attr-defined]

    def owner(tree: Any, path: tuple[Any, ...]) -> str | None:
        if path[:2] == ("optimizer", "state"):
            name = _owners(tree).get(path[2])
            return name if name in shapes else None
        if path[0] in OF_USER:  # taken from rank 0
            return None
        return next((word for word in words(path) if word in shapes), None)

    return Sharding(
        shards=shards, shard=steps.part, shapes=shapes, owner=owner, of_ranks=("random",)
    )


def _owners(tree: Mapping[str, Any]) -> dict[Any, str]:
    """Return the parameters that the keys of an optimizer's saved state stand for."""
    names = tree["optimizer_names"]
    if names is None:
        return {}
    keys = params_in(tree["optimizer"]["param_groups"])
    return dict(zip(keys, chain(*names), strict=True))


def _complete(state: Mapping[str, Any], steps: Steps) -> None:
    """Initialize compression state that a new sharding needs: zeros, or as drawn on all ranks."""
    saved = state["exchange"]
    here = steps.saved_exchange()
    # state that all ranks hold alike is not pending
    alike = {f"{kind}s" for kind, rule in kinds_of_state().items() if rule == "first"}
    for kind, tensors in here.items():
        if not isinstance(tensors, dict) or not isinstance(saved.get(kind), dict):
            continue
        for name in [name for name in saved[kind] if name not in tensors]:
            lost = saved[kind][name]
            if not isinstance(lost, Tensor) or kind == "pending":
                continue
            if kind not in alike and lost.any():
                raise CheckpointMismatch(
                    f"{kind} of {name} belongs to shards that are now too small to be compressed, "
                    "so its pending values would be lost: lower min_numel (of LowRank, or its "
                    "rank), or load with the number of shards that saved it"
                )
            del saved[kind][name]
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                continue
            drawn = tensor.detach().cpu().clone()
            new = drawn if kind in alike else torch.zeros_like(drawn)
            saved[kind].setdefault(name, new)
