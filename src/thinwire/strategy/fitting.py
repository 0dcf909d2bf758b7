"""Whether a checkpoint fits an engine: which settings may have changed since, because no state
depends on them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from thinwire.compress import CHANGE_COMPRESSIONS
from thinwire.compress.protocol import ErrorsOnly
from thinwire.strategy.documents import from_dict, to_dict
from thinwire.strategy.fields import Fields

__all__ = ["Change", "changes_of", "misfits", "settings_in_groups"]

_FREE = (
    "recompute",
    "recompute.*",
    "amp.dtype",
    "amp.loss_scale",  # the kind of scale; whether there is one is compared as well
    "amp.loss_scale.*",
    "pipeline.micro_batches",
    "pipeline.schedule",
    "gradient_merge",  # what it has merged is compared as well
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
        if issubclass(kind, ErrorsOnly)  # those go on from each other's state
        for key in (tag, f"{tag}.*", *(entry.name for entry in fields(kind)))
    ),
)
"""Settings on which no state depends, by dotted name; whatever is new is not among them before
somebody says so."""
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
"""Settings that an optimizer keeps in its groups, where a state that is loaded would bring the old
ones back."""
_NOTHING = "nothing"


class Change(NamedTuple):
    """One setting of the strategy that is another now."""

    name: str
    before: Any
    now: Any

    @property
    def is_free(self) -> bool:
        """Whether no state depends on it."""
        if self.name.endswith(".outer_momentum"):
            return 0 not in (self.before, self.now)  # the buffer is there either way
        if self.name == "amp":  # none of what it says but the loss scale has state
            return not any(
                "loss_scale" in value
                for value in (self.before, self.now)
                if isinstance(value, Mapping)
            )
        return any(fnmatchcase(self.name, pattern) for pattern in _FREE)


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The settings that differ between two strategies in plain values, of the present and of an
    earlier version.
    """
    # what was not there yet had its default; of another version, or by other hands, it is compared
    # as it is
    with contextlib.suppress(TypeError, ValueError):
        before = to_dict(from_dict(Fields, before))
    return list(_differences("", before, now))


def misfits(before: Mapping[str, Any], now: Mapping[str, Any], changes: list[Change]) -> list[str]:
    """What a checkpoint's state depends on and is another now, in words, from the facts of both."""
    found = [_told(f"strategy.{c.name}", c.before, c.now) for c in changes if not c.is_free]
    if before.get("optimizer") != now["optimizer"]:
        found.append(_told("optimizer", before.get("optimizer"), now["optimizer"]))
    theirs, ours = set(before.get("parameters", ())), set(now["parameters"])
    if theirs != ours:
        gone, new = (
            ", ".join(sorted(one)[:3]) or _NOTHING for one in (theirs - ours, ours - theirs)
        )
        found.append(
            _told(
                f"parameters ({len(theirs - ours)} and {len(ours - theirs)} of them differ)",
                gone,
                new,
            )
        )
    return found


def settings_in_groups(changes: list[Change]) -> set[str]:
    """The keys of the optimizer's groups that stay as they are here when a state is loaded."""
    return {_IN_GROUPS[change.name] for change in changes if change.name in _IN_GROUPS}


def _told(name: str, before: Any, now: Any) -> str:
    return f"{name} was {before} when it was written and is {now} in this engine"


def _differences(path: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            where = f"{path}.{key}" if path else str(key)
            yield from _differences(where, before.get(key, _NOTHING), now.get(key, _NOTHING))
    elif before != now:
        yield Change(path, before, now)
