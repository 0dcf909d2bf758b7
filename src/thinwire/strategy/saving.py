"""The state of an engine as one tree, and its restoration on any number of ranks."""

import logging
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._at_exit import fail_at_exit
from thinwire._names import named_buffers, named_parameters, non_persistent_buffers
from thinwire._wording import listed, warn_user
from thinwire.checkpoint import random_state, set_random_state
from thinwire.checkpoint.combine import Rule
from thinwire.comm import Group, rank_and_size_in
from thinwire.compress import kinds_of_state
from thinwire.core.several import all_of, kinds_of, params_in
from thinwire.core.sharded import is_sharded, reshard_, shard_of, sharded_like
from thinwire.core.tree import leaves, mapped
from thinwire.exchange.provenance import PROVENANCE, Provenance, checksum_of, without_provenance
from thinwire.optim.common import CommonOptimizer
from thinwire.optim.saving import in_order, remembered
from thinwire.strategy.facts import Change, changes_of, mismatches, settings_in_groups
from thinwire.strategy.updates import Steps
from thinwire.strategy.user_state import (
    Matched,
    matched_schedulers,
    plain,
    restore_modules_,
    restore_schedulers_,
    saved_modules,
    saved_schedulers,
    unmatched_modules,
)

_log = logging.getLogger("thinwire")

_OF_MODULES = "module_state"
"""Key of the extra state of modules, if there is any."""
_NON_PERSISTENT = "non_persistent_buffers"
"""Key of the names of buffers with persistent=False, if there are any."""
_FROZEN = "frozen"
"""Key of the digests of frozen parameters that were left out, if some were."""
_QUANTIZED = "quantized weights"
"""Key of the digests of quantized weights, which are always left out, and of those in the facts."""
_MAY_LACK = {_OF_MODULES, _NON_PERSISTENT, _FROZEN, _QUANTIZED}
OF_USER = ("extra", _OF_MODULES)
"""Keys of the user's state, whose contents thinwire does not interpret."""
OF_OTHER_RANKS: dict[str, Rule] = {
    "extra": "first",
    _OF_MODULES: "first",
    _NON_PERSISTENT: "first",
    _FROZEN: "first",
    _QUANTIZED: "first",
    "loss_scale/scale": "min",
    "merge/overflowed": "max",
    "merge/sums/*": "mean_zero",
    "optimizer/state/*/step": "first",
    "optimizer/state/*/momentum_buffer": "mean_zero",
    "optimizer/state/*": "whole",
}
"""Rules for another number of ranks, where the mean of the ranks that have a value is wrong: sums
(absent ranks gave 0) and counts.
"""


def rules_of_other_ranks() -> dict[str, Rule]:
    """Return `OF_OTHER_RANKS` with the rules for the state of compressions."""
    kept = {f"exchange/{kind}s/*": rule for kind, rule in kinds_of_state().items()}
    return {**kept, **OF_OTHER_RANKS}


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory."""
    return tensor.to("cpu", copy=True)


def saved_model(
    steps: Steps, *, frozen: bool, to_save: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return parameters and buffers, with tensors as `to_save` returns them."""
    names = sorted(non_persistent_buffers(steps.model))
    params = _parameters(steps)
    left = {} if frozen else {n: p for n, p in params.items() if n not in steps.params}
    quantized = steps.facts[_QUANTIZED]
    return {
        "parameters": _held({n: p for n, p in params.items() if n not in left}, to_save),
        "buffers": _held(dict(named_buffers(steps.model)), to_save),
        **({_NON_PERSISTENT: names} if names else {}),
        **({_FROZEN: _digests(left, steps.part)} if left else {}),
        **({_QUANTIZED: quantized} if quantized else {}),
    }


def saved(
    steps: Steps,
    extra: Any = None,
    *,
    frozen: bool = True,
    to_save: Callable[[Tensor], Tensor] = torch.clone,
) -> dict[str, Any]:
    """Return everything that a later step depends on, with tensors as `to_save` returns them."""
    # first, since an averaging in flight is settled below, and counted again after a load
    counters = steps.counters()
    # threads of the user may change it
    of_user = to_save if to_save is torch.clone else on_host
    _require_dense_state(steps)
    of_modules = _held(saved_modules(steps.model), of_user, sharded=True)
    optimizer = without_provenance(steps.optimizer.state_dict())
    exchange = steps.saved_exchange()
    kept = set(map(id, leaves(exchange)))  # tensors that the exchange saves
    state = {
        key: {kind: value for kind, value in entries.items() if id(value) not in kept}
        if isinstance(entries, Mapping)
        else entries
        for key, entries in optimizer["state"].items()
    }
    rest = {
        "optimizer": {**optimizer, "state": state},
        "exchange": exchange,
        "merge": steps.merge.state_dict(),
    }
    return {
        "counters": counters,
        **saved_model(steps, frozen=frozen, to_save=to_save),
        **_held(rest, to_save),
        "schedulers": _held(saved_schedulers(steps.optimizer, extra), of_user),
        "optimizer_names": _names(steps),
        "loss_scale": None if steps.scaler is None else steps.scaler.state_dict(),
        "random": random_state(),
        "extra": _held(plain(extra), of_user, sharded=True),
        **({_OF_MODULES: of_modules} if of_modules else {}),
    }


def state_dict(steps: Steps) -> dict[str, Any]:
    """Return the result of `saved` for `load`, with the facts that it fits and its rank."""
    state = saved(steps)
    provenance = Provenance(
        *rank_and_size_in(), state["counters"]["step"], checksum_of(_of_ranks(state))
    )
    return {**state, "facts": _held(steps.facts), PROVENANCE: provenance.packed()}


def mark_states(optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
    """Let the state of optimizers that differs by rank say whose it is; warn of another's."""
    own = Provenance(*rank_and_size_in(), 0, 0)

    def compare(_: object, state: Mapping[str, Any]) -> None:
        found = Provenance.read(state.get(PROVENANCE))
        problem = found and found.problem(own.rank, own.ranks, 0)
        if problem and checksum_of(state["state"]):
            warn_user(f"thinwire: {problem}")

    for single in all_of(optimizer):
        mark = single.register_state_dict_post_hook(lambda _, s: {**s, PROVENANCE: own.packed()})
        for handle in (mark, single.register_load_state_dict_pre_hook(compare)):
            undo.callback(handle.remove)


def load(state: Mapping[str, Any], steps: Steps) -> dict[str, Any]:
    """Restore everything or nothing, and return the state of the engine itself."""
    check.instance("state", state, Mapping, advice="pass what engine.state_dict() returned")
    if "facts" not in state:
        raise ValueError(
            "state is not from an engine: it lacks 'facts'. Pass the result of engine.state_dict()"
        )
    changes, problem = compared(state["facts"], steps)
    if problem:
        raise ValueError(
            f"state does not fit this engine: {problem}. Prepare the engine as it was when it saved"
        )
    rest = {key: value for key, value in state.items() if key not in ("facts", PROVENANCE)}
    provenance = Provenance.read(state.get(PROVENANCE))
    # an optimizer uses the tensors of the state in place, and a state may be loaded again
    own = {k: _held(v, sharded=True) if k == "optimizer" else v for k, v in rest.items()}
    restored = load_all(own, steps, changes, "the state", agreed=lambda problem, left: left)
    this = *rank_and_size_in(), checksum_of(_of_ranks(rest))
    if provenance is not None and (other := provenance.problem(*this)) is not None:
        warn_user(f"thinwire: {other}")
    return restored


def _of_ranks(state: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a state that differ between ranks."""
    return [state["optimizer"]["state"], state["exchange"], state["merge"]]


@torch.no_grad()
def load_all(
    state: Mapping[str, Any],
    steps: Steps,
    changes: list[Change],
    source: str,
    *,
    agreed: Callable[[Exception | None, frozenset[str]], frozenset[str]],
) -> dict[str, Any]:
    """Run `load` with the agreement of several ranks: `agreed` gets this rank's error or
    None, and the buffers that it must not load, before parameters change.
    """
    left: frozenset[str] = frozenset()
    of_modules = state.get(_OF_MODULES, {})
    with ExitStack() as undo:
        problem: Exception | None = None
        try:
            counters, left = _checked(state, steps)
            found = matched_schedulers(state["schedulers"], steps.optimizer)
            for optimizer in all_of(steps.optimizer):
                undo.callback(remembered(optimizer))
            _load_optimizer(state, steps, settings_in_groups(changes))
            restore_schedulers_(found.pairs, undo)
            restore_modules_(steps.model, of_modules, undo)
            for key, part in {"loss_scale": steps.scaler, "merge": steps.merge}.items():
                if part is not None:
                    undo.callback(part.load_state_dict, part.state_dict())
                    part.load_state_dict(state[key])
        except Exception as error:
            problem = error
        left = agreed(problem, left)
        if problem is not None:
            raise problem
        steps.load_exchange(
            _without(left, state["exchange"], dict(named_buffers(steps.model)))
        )  # it checks everything before it changes anything
        undo.pop_all()
    copy_values_(state, steps, left)
    steps.buffers_loaded(alike=not left)
    set_random_state(state["random"])
    if changes:
        texts = [f"{one.name} was {one.before} and is {one.now}" for one in changes]
        _log.warning("%s is loaded with changed settings: %s", source, ", ".join(texts))
    _warn_of_user_state(found, *unmatched_modules(steps.model, of_modules))
    return {**counters, "extra": state["extra"]}


def _checked(state: Mapping[str, Any], steps: Steps) -> tuple[dict[str, float], frozenset[str]]:
    """Return the counters and the buffers that are `_left`, if the state fits the engine."""
    wanted = {"counters", "parameters", "buffers", "optimizer", "optimizer_names", "schedulers"}
    wanted |= {"exchange", "loss_scale", "merge", "random", "extra"}
    if state.keys() - _MAY_LACK != wanted:
        raise ValueError(
            f"state is not from an engine: missing {sorted(wanted - state.keys())}, unknown "
            f"{sorted(state.keys() - wanted - _MAY_LACK)}"
        )
    counters = {key: state["counters"].get(key) for key in steps.counters()}
    for key, value in counters.items():
        check.real(key, value, at_least=0)
    if (state["loss_scale"] is None) != (steps.scaler is None):
        sides = ("state", "the engine")
        has, lacks = sides if steps.scaler is None else reversed(sides)
        raise ValueError(
            f"{has} has a loss_scale, but {lacks} has none: prepare the engine with the same "
            "strategy"
        )
    return counters, require_shapes(state, steps, "Load a state of the same model")


def require_shapes(state: Mapping[str, Any], steps: Steps, advice: str) -> frozenset[str]:
    """Raise unless names and shapes are equal. Return the buffers that are `_left`."""
    params = _parameters(steps)
    frozen = state.get(_FROZEN, {"part": steps.part, "digests": {}})
    for name, (shape, checksum) in frozen["digests"].items():
        if name not in params:
            raise ValueError(
                f"the state was saved without frozen parameters, but {name} is not in this model: "
                "prepare the model with the base weights of the training"
            )
        # of other shards only names are compared
        alike = frozen["part"] == steps.part and list(params[name].shape) == shape
        if alike and checksum_of(params[name]) != checksum:
            raise ValueError(
                f"the state was saved without frozen parameters (frozen=False), but {name} has "
                "different values now: first load the base weights of the training into the model"
            )
    theirs, ours = state.get(_QUANTIZED, {}), steps.facts[_QUANTIZED]
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise ValueError(
                f"the quantized weights of {name} are others than those of the training, and are "
                "not saved with it: load the same base model, quantized with the same settings"
            )
    here = {name: param for name, param in params.items() if name not in frozen["digests"]}
    check.same_shapes("parameters", state["parameters"], here, advice=advice)
    left = _left(state, steps)
    theirs, ours = (
        {name: buffer for name, buffer in buffers.items() if name not in left}
        for buffers in (state["buffers"], dict(named_buffers(steps.model)))
    )
    check.same_shapes("buffers", theirs, ours, advice=advice)
    return left


def _digests(params: Mapping[str, Tensor], part: int) -> dict[str, Any]:
    """Return digests of parameters that are left out, and the part of the model."""
    digests = {name: [list(p.shape), checksum_of(p)] for name, p in params.items()}
    return {"part": part, "digests": digests}


def _left(state: Mapping[str, Any], steps: Steps) -> frozenset[str]:
    """Return the buffers with persistent=False that one side lacks or has in another shape."""
    theirs = state["buffers"]
    ours = dict(named_buffers(steps.model))
    saved_only = set(state.get(_NON_PERSISTENT, ())) - ours.keys()
    return frozenset(
        name
        for name in non_persistent_buffers(steps.model) | saved_only
        if (name in theirs) != (name in ours)
        or (name in ours and theirs[name].shape != ours[name].shape)
    )


def _without(
    left: frozenset[str], exchange: Mapping[str, Any], here: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the state of local updates with the present values of buffers that are left."""
    fitted = dict(exchange)
    if not left:
        return fitted
    names = {f"buffer {name}": name for name in left}  # the names in local updates

    def rest(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in names}

    local = exchange.get("local")
    pending = exchange.get("pending")
    if isinstance(local, Mapping):
        own = {key: here[name] for key, name in names.items() if name in here}
        averaged = {key: b for key, b in own.items() if b.is_floating_point() and b.numel()}
        fitted["local"] = rest(local) | averaged
    if isinstance(pending, Mapping) and "extras" in pending:
        fitted["pending"] = {**pending, "extras": rest(pending["extras"])}
    return fitted


def copy_values_(state: Mapping[str, Any], steps: Steps, left: frozenset[str]) -> None:
    """Set parameters and buffers of the model to those of a state, except what is `left`."""
    for kind, tensors in (
        ("parameters", _parameters(steps)),
        ("buffers", dict(named_buffers(steps.model))),
    ):
        for name, tensor in tensors.items():
            if name in state[kind] and name not in left:
                tensor.copy_(state[kind][name])
    kept = sorted(left & {*state["buffers"], *dict(named_buffers(steps.model))})
    if kept:
        _log.warning(
            "%s: non-persistent buffers that are missing in the state or the model, or have "
            "another shape there: the model keeps its own values",
            listed(kept, 3),
        )


def _load_optimizer(state: Mapping[str, Any], steps: Steps, keep: Collection[str]) -> None:
    saved_groups = state["optimizer"]["param_groups"]
    groups = steps.optimizer.param_groups
    kept = [{key: group[key] for key in keep if key in group} for group in groups]
    ordered = in_order(saved_groups, state["optimizer_names"], _names(steps))
    owners = dict(zip(params_in(ordered), params_in(groups), strict=False))
    entries = {  # other keys are the optimizer's own
        key: _as_sharded(values, owners[key]) if key in owners else values
        for key, values in state["optimizer"]["state"].items()
    }
    steps.optimizer.load_state_dict(
        {**state["optimizer"], "state": entries, "param_groups": ordered}
    )
    params = _parameters(steps)
    same = all(value.dtype == params[name].dtype for name, value in state["parameters"].items())
    for optimizer in all_of(steps.optimizer):
        if not same or isinstance(optimizer, CommonOptimizer):  # these take their state unchanged
            continue
        for key, owner in owners.items():  # undo torch's cast to the parameter's type
            here = optimizer.state.get(owner, {})
            for name, value in entries.get(key, {}).items():
                now = here.get(name)
                if not isinstance(value, Tensor) or not isinstance(now, Tensor):
                    continue
                if now.dtype != value.dtype:
                    here[name] = value.to(now.device, copy=True)
    for group, values in zip(steps.optimizer.param_groups, kept, strict=True):
        group.update(values)


def _as_sharded(entries: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return the state of one parameter; tensors like its shard become sharded as it is."""
    shape = shard_of(param).shape
    return {
        key: sharded_like(value, param)
        if isinstance(value, Tensor) and value.dim() and value.shape == shape
        else value
        for key, value in entries.items()
    }


def _warn_of_user_state(found: Matched, missing: list[str], unsaved: list[str]) -> None:
    texts = [
        f"the state has a scheduler {kind}, but the optimizer of this engine has none, so its "
        "rates would start again. Make the scheduler before engine.load, or pass it in extra= "
        "when you save and load its state yourself"
        for kind in found.missing
    ]
    texts += [
        f"the optimizer of this engine has a scheduler {kind}, but the state has none: it "
        "continues from its present step. Step it to the right step if you do not want that"
        for kind in found.unsaved
    ]
    if missing:
        texts.append(
            f"the state has {', '.join(missing[:3])}, but the model has no such module with "
            "set_extra_state: it is ignored"
        )
    if unsaved:
        texts.append(
            f"the state lacks {', '.join(unsaved[:3])}: these modules keep their present extra "
            "state"
        )
    for text in texts:
        warn_user(text)


def compared(facts: Mapping[str, Any], steps: Steps) -> tuple[list[Change], str]:
    """Compare a state's facts with the engine's. Return changed settings, and obstacles as text."""
    changes = changes_of(facts.get("strategy", {}), steps.facts["strategy"])
    return changes, "; ".join(mismatches(facts, steps.facts, changes))


def _parameters(steps: Steps) -> dict[str, Tensor]:
    if any(map(is_sharded, steps.params.values())):
        reshard_(steps.model)
    return {name: shard_of(param) for name, param in named_parameters(steps.model)}


def _names(steps: Steps) -> list[list[str]] | None:
    """Return the names of the optimizer's parameters by group; None if one of them has none."""
    names: dict[Tensor, str] = {p: name for name, p in named_parameters(steps.model)}
    groups: Sequence[Any] = [group["params"] for group in steps.optimizer.param_groups]
    if any(p not in names for group in groups for p in group):
        return None
    return [[names[p] for p in group] for group in groups]


def _require_dense_state(steps: Steps) -> None:
    for name, param in steps.params.items():
        for key, value in steps.optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.layout != torch.strided:
                raise TypeError(
                    f"{key} of {name} is a {value.layout} tensor in {kinds_of(steps.optimizer)}, "
                    "because its gradients are row-sparse, but only dense state can be saved: "
                    "use tw.optim.LazyAdam, no momentum, or an embedding with sparse=False"
                )


def _held(
    tree: Any, to_save: Callable[[Tensor], Tensor] = torch.clone, *, sharded: bool = False
) -> Any:
    """Return the same tree with tensors, or this rank's part of them, as `to_save` returns them."""
    return mapped(lambda t: to_save((t if sharded else shard_of(t)).detach()), tree)


class BackgroundSave:
    """Writes one checkpoint at a time on a thread, over a process group of its own."""

    # Python waits for the thread when the script ends; executors end before

    def __init__(self) -> None:
        self._group: Group | None = None
        self._begun: tuple[threading.Thread, Future[Path]] | None = None

    def begin(self, savers: Group, write: Callable[[Group], Path]) -> None:
        """Call `write` on the thread with a group of the savers, which the first call makes."""
        # collectives of two threads on one group would mix
        group = self._group = self._group or savers.detached()
        written: Future[Path] = Future()

        def work() -> None:
            try:
                written.set_result(write(group))
            except BaseException as error:  # raised by `finish`
                written.set_exception(error)
                text = f"{traceback.format_exc()}\nthinwire: this checkpoint was not written"
                fail_at_exit(written, text)

        thread = threading.Thread(target=work, name="thinwire: a checkpoint")
        thread.start()
        self._begun = thread, written

    def finish(self) -> Path | None:
        """Wait for the save in progress and return its folder; None if there is none."""
        if self._begun is None:
            return None
        (thread, written), self._begun = self._begun, None
        thread.join()
        fail_at_exit(written, None)
        return written.result()

    def close(self) -> None:
        """Wait as `finish` does, and free the process group."""
        try:
            self.finish()
        finally:
            self._group = None
