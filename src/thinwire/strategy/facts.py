"""Values that must be equal on all ranks before an engine is made, and between a checkpoint and the
engine that loads it. Settings on which no state depends are exempt.
"""

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire._names import named_buffers, named_parameters, plain_names
from thinwire.compress import CHANGE_COMPRESSIONS
from thinwire.compress.protocol import ErrorsOnly
from thinwire.core.several import all_of, kinds_of
from thinwire.local.model import shape_text
from thinwire.optim.common import CommonOptimizer
from thinwire.strategy.documents import from_dict, to_dict
from thinwire.strategy.fields import Fields
from thinwire.wire.message import WIRE_VERSION

__all__ = [
    "Change",
    "changes_of",
    "checkpoint_facts",
    "mismatches",
    "model_facts",
    "settings_in_groups",
    "strategy_facts",
]

_FREE = (
    "recompute",
    "recompute.*",
    "amp.dtype",
    "amp.loss_scale",  # the kind of scale; its presence is compared as well
    "amp.loss_scale.*",
    "pipeline.micro_batches",
    "pipeline.schedule",
    "gradient_merge",  # its merged gradients are compared as well
    "gradient_merge.*",
    *(
        f"dgc.{name}"
        for name in (
            "rampup_begin_step",
            "rampup_step",
            "sparsity",
            "local_grad_clip_norm",
            "value_bits",
            "node_size",
            "exchange",
        )
    ),
    "low_rank.begin_step",
    "lars.*",
    "lamb.*",
    *(
        f"{field}.{key}"
        for field in ("localsgd", "adaptive_localsgd")
        for key in (
            "k_steps",
            "init_k_steps",
            "max_k_steps",
            "begin_step",
            "outer_lr",
            "outer_nesterov",
            "mixing",
            "node_size",
        )
    ),
    *(
        f"{field}.compression.{key}"
        for field in ("localsgd", "adaptive_localsgd")
        for tag, kind in CHANGE_COMPRESSIONS.items()
        if issubclass(kind, ErrorsOnly)  # these can load each other's state
        for key in (tag, f"{tag}.*", *(entry.name for entry in fields(kind)))
    ),
)
"""Settings on which no state depends, by dotted name. Every new setting is compared until it is
listed here.
"""
_IN_GROUPS = {
    **{
        f"dgc.{name}": name
        for name in ("rampup_begin_step", "rampup_step", "sparsity", "local_grad_clip_norm")
    },
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
            return not any(
                "loss_scale" in value
                for value in (self.before, self.now)
                if isinstance(value, Mapping)
            )
        return any(fnmatchcase(self.name, pattern) for pattern in _FREE)


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ between two strategies in plain values, of this and of an
    earlier version.
    """
    # a missing setting had its default; one of another version, or written by hand, is compared
    # as it is
    with contextlib.suppress(TypeError, ValueError):
        before = to_dict(from_dict(Fields, before))
    return list(_differences("", before, now))


def mismatches(
    before: Mapping[str, Any], now: Mapping[str, Any], changes: list[Change]
) -> list[str]:
    """Return the differences that stop a checkpoint's state from fitting, in words, from the facts
    of both.
    """
    found = [
        _difference_text(f"strategy.{c.name}", c.before, c.now) for c in changes if not c.is_free
    ]
    if before.get("optimizer") != now["optimizer"]:
        found.append(_difference_text("optimizer", before.get("optimizer"), now["optimizer"]))
    theirs, ours = set(before.get("parameters", ())), set(now["parameters"])
    if theirs != ours:
        gone, new = (
            ", ".join(sorted(one)[:3]) or _NOTHING for one in (theirs - ours, ours - theirs)
        )
        found.append(
            _difference_text(
                f"parameters ({len(theirs - ours)} and {len(ours - theirs)} of them differ)",
                gone,
                new,
            )
        )
    return found


def settings_in_groups(changes: list[Change]) -> set[str]:
    """Return the keys of the optimizer's groups that keep their present values when a state is
    loaded.
    """
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


def strategy_facts(strategy: Fields) -> dict[str, Any]:
    """Return the facts that ranks must share before they make process groups."""
    return {
        "wire version": WIRE_VERSION,
        "strategy": to_dict(strategy),
        "dp_degree": strategy.expected_replicas,
    }


def checkpoint_facts(
    strategy: Fields, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the facts that a checkpoint records of its engine."""
    return {
        "strategy": to_dict(strategy),
        "optimizer": kinds_of(optimizer),
        "parameters": [f"{name} {shape_text(p)}" for name, p in named_parameters(model)],
        "state_dict": _names_by_key(model),
    }


def _names_by_key(model: nn.Module) -> dict[str, str | None]:
    """Map every key of the model's own `state_dict` to the parameter or buffer that it stands for.
    Tied weights map to the same one; other keys to None.
    """
    tensors = [*named_parameters(model), *named_buffers(model)]
    names = {id(tensor): name for name, tensor in tensors}
    values = model.state_dict(keep_vars=True)
    keys = plain_names(values)
    return {key: names.get(id(value)) for key, value in zip(keys, values.values(), strict=True)}


def model_facts(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, digest: bool
) -> dict[str, Any]:
    """Return the facts that ranks must share beside the strategy. `digest`: include the optimizer's
    state.
    """
    names = {p: name for name, p in named_parameters(model)}
    return {
        "parameter": [
            f"{name} {shape_text(p)} requires_grad={p.requires_grad}" for p, name in names.items()
        ],
        "buffer": [f"{name} {shape_text(b)}" for name, b in named_buffers(model)],
        "optimizer": kinds_of(optimizer),
        "group": [
            {
                key: repr(value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            | {"params": [names.get(p, "not in the model") for p in group["params"]]}
            for group in optimizer.param_groups
        ],
        "setting": [
            single.shared_settings() if isinstance(single, CommonOptimizer) else None
            for single in all_of(optimizer)
        ],
        # ranks that continue from different moments would diverge silently; moments of an optimizer
        # that exchanges differ by design
        "state of the optimizer": _state_digest(optimizer)
        if digest and not getattr(optimizer, "exchanges_gradients", False)
        else None,
    }


def _state_digest(optimizer: torch.optim.Optimizer) -> int:
    checksum = 0
    for piece in _bytes_of(optimizer.state_dict()["state"]):
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _bytes_of(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, Tensor):
        yield tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield repr(key).encode()
            yield from _bytes_of(value)
    else:
        yield repr(tree).encode()
