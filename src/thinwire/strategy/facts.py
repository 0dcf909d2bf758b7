"""Values that must be equal on all ranks, or between a checkpoint and the engine that loads it."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire._names import named_buffers, named_parameters, plain_names
from thinwire.compress import COMPRESSIONS
from thinwire.core.several import all_of, kinds_of
from thinwire.exchange.provenance import checksum_of
from thinwire.local.model import quantized_weights, shape_text
from thinwire.optim.common import CommonOptimizer
from thinwire.strategy.documents import from_dict, to_dict
from thinwire.strategy.fields import Fields

_FREE = (
    # of a loss scale the presence is compared, of a merge its gradients
    "amp.dtype amp.loss_scale amp.loss_scale.* gradient_merge gradient_merge.* "
    "recompute recompute.* pipeline.micro_batches pipeline.schedule lars.* lamb.* "
    "*localsgd.k_steps *localsgd.init_k_steps *localsgd.max_k_steps *localsgd.begin_step "
    "*localsgd.outer_lr *localsgd.outer_nesterov *localsgd.node_size"
)


def _free() -> Iterator[str]:
    """Yield settings on which no state depends, by dotted name. Every new setting is compared
    until it is listed here, or by its compression.
    """
    yield from _FREE.split()
    for tag, kind in COMPRESSIONS.items():
        names = [f"{tag}.{key}" for key in kind.free]
        if len(kind.kinds) == 1:  # these can load each other's state
            names += [tag, *(entry.name for entry in fields(kind))]
        for where in ("", "compression.", "*localsgd.compression."):
            yield from (where + name for name in names)


_IN_GROUPS = {
    "lars.lars_coeff": "trust_coefficient",
    "lars.lars_weight_decay": "weight_decay",
    "lars.epsilon": "eps",
    "lamb.lamb_weight_decay": "weight_decay",
}
"""Settings that an optimizer keeps in its groups. A loaded state would restore their old values."""
_NOTHING = "nothing"


class Change(NamedTuple):
    """One changed setting of a strategy."""

    name: str
    before: Any
    now: Any

    @property
    def is_free(self) -> bool:
        """True if no state depends on the setting."""
        if self.name.endswith(".outer_momentum"):
            return 0 not in (self.before, self.now)  # the buffer exists in both cases
        if self.name == "amp":  # of its settings only the loss scale has state
            values = [value for value in (self.before, self.now) if isinstance(value, Mapping)]
            return not any("loss_scale" in value for value in values)
        return any(fnmatchcase(self.name, pattern) for pattern in _free())


def compared_settings(strategy: Fields) -> dict[str, Any]:
    """Return the strategy in plain values, without settings that change no bit."""
    settings = to_dict(strategy)
    for config in settings.values():
        config.pop("state_device", None)
    return settings


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ between two strategies in plain values."""
    before = compared_settings(from_dict(Fields, before))  # a missing setting had its default
    return list(_differences("", before, now))


def mismatches(
    before: Mapping[str, Any], now: Mapping[str, Any], changes: list[Change]
) -> list[str]:
    """Return the differences that stop a checkpoint's state from fitting, in words."""
    found = [
        _difference_text(f"strategy.{c.name}", c.before, c.now) for c in changes if not c.is_free
    ]
    if before.get("optimizer") != now["optimizer"]:
        found.append(_difference_text("optimizer", before.get("optimizer"), now["optimizer"]))
    theirs = set(before.get("parameters", ()))
    ours = set(now["parameters"])
    if theirs != ours:
        gone = sorted(theirs - ours)
        new = sorted(ours - theirs)
        subject = f"parameters ({len(gone)} and {len(new)} of them differ)"
        names = [", ".join(some[:3]) or _NOTHING for some in (gone, new)]
        found.append(_difference_text(subject, *names))
    return found


def settings_in_groups(changes: list[Change]) -> set[str]:
    """Return the keys of the optimizer's groups that keep their values when a state is loaded."""
    return {_IN_GROUPS[change.name] for change in changes if change.name in _IN_GROUPS}


def _difference_text(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before} when it was saved and is {now} in this engine"


def _differences(path: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            where = f"{path}.{key}" if path else str(key)
            yield from _differences(where, before.get(key, _NOTHING), now.get(key, _NOTHING))
    elif before != now:
        yield Change(path, before, now)


def checkpoint_facts(
    strategy: Fields, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the facts that a checkpoint records of its engine."""
    params = named_parameters(model)
    names = {id(tensor): name for name, tensor in [*params, *named_buffers(model)]}
    values = model.state_dict(keep_vars=True)
    return {
        "strategy": compared_settings(strategy),
        "optimizer": kinds_of(optimizer),
        "parameters": [f"{name} {shape_text(p)}" for name, p in params],
        "quantized weights": quantized_weights(model),
        # keys with their parameters and buffers; other keys with None
        "state_dict": {
            key: names.get(id(value))
            for key, value in zip(plain_names(values), values.values(), strict=True)
        },
    }


def model_facts(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, digest: bool
) -> dict[str, Any]:
    """Return the facts to compare beside the strategy; `digest`: also the optimizer's state."""
    names = {p: name for name, p in named_parameters(model)}
    # ranks that continue from different moments would diverge silently; beside a residual they
    # differ by design
    state = optimizer.state_dict()["state"] if digest else {}
    moments = {key: entries for key, entries in state.items() if "residual" not in entries}
    return {
        "parameter": [
            f"{name} {shape_text(p)} requires_grad={p.requires_grad}" for p, name in names.items()
        ],
        "buffer": [f"{name} {shape_text(b)}" for name, b in named_buffers(model)],
        "quantized weights": quantized_weights(model),
        "optimizer": kinds_of(optimizer),
        "group": [
            {k: repr(v) for k, v in group.items() if k not in ("params", "param_names")}
            | {"params": [names.get(p, "not in the model") for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "setting": [
            single.shared_settings() if isinstance(single, CommonOptimizer) else None
            for single in all_of(optimizer)
        ],
        "state of the optimizer": checksum_of(moments) if digest else None,
    }
