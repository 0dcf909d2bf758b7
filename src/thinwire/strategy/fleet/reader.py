"""A Paddle fleet description, read as a strategy: everything it says is mapped, refused or noted,
and nothing is lost.

`maps` says what becomes of each attribute, and how a feature's configs become ours.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from thinwire import _validate as check
from thinwire._wording import plain
from thinwire.errors import StrategyError
from thinwire.strategy.documents import F
from thinwire.strategy.fields import Fields
from thinwire.strategy.fleet.maps import (
    CONFIG_KEYS,
    MAPS,
    NOTED,
    NOTED_FLAGS,
    NOTED_KEYS,
    REFUSED,
    REFUSED_KEYS,
    Findings,
    mapped,
)

__all__ = ["from_fleet"]

_UNREAD = ("sharding_configs", "tensor_parallel_configs")
_WITH_FLAG = (*MAPS, "a_sync", "sharding", "tensor_parallel")
_KNOWN = (*MAPS, *CONFIG_KEYS, *_UNREAD, *REFUSED, *NOTED, "a_sync", "mode")


def from_fleet(kind: type[F], description: Mapping[str, Any]) -> F:
    """See `DistributedStrategy.from_fleet`.

    Args:
        kind: Of strategy.
        description: Attributes of fleet's DistributedStrategy by name; a mapping, or what has
            `keys` and items.
    """
    given = _mapping("description", description)
    findings = Findings()
    _find_unknown(given, findings)
    _find_refused_and_noted(given, findings)
    configs = _read_configs(given, findings)
    _check_a_sync(given, configs, findings)
    _check_mode(given, findings)
    features = _features(given, configs, findings)
    try:
        strategy = kind(**features)
    except StrategyError as error:
        findings.problems.append(str(error))
    _raise(findings)
    _expect_replicas(strategy, configs)
    if findings.notes:
        warnings.warn("from_fleet: " + "; ".join(findings.notes), UserWarning, stacklevel=3)
    return strategy


def _raise(findings: Findings) -> None:
    said = "; ".join([*findings.wrong_types, *findings.problems])
    if findings.wrong_types:
        raise TypeError(f"fleet description: {said}")
    if findings.problems:
        raise StrategyError(f"fleet description: {said}")


def _mapping(name: str, value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        return {key: value[key] for key in value.keys()}  # noqa: SIM118 (it may be no Mapping)
    raise TypeError(f"{name} must be a mapping, got {value!r} of type {type(value).__name__}")


def _find_unknown(given: Mapping[Any, Any], findings: Findings) -> None:
    for name in given:
        if name not in _KNOWN:
            hint = check.closest_or_all(name, sorted(_KNOWN))
            findings.problems.append(f"{plain(str(name))}={given[name]!r} is unknown{hint}")


def _find_refused_and_noted(given: Mapping[str, Any], findings: Findings) -> None:
    for name, (default, reason) in REFUSED.items():
        if name in given and _flag(name, given[name], findings) not in (default, None):
            findings.problems.append(f"{name}={given[name]!r} cannot be carried over: {reason}")
    by_reason = defaultdict(list)
    for name, reason in NOTED.items():
        if name in NOTED_FLAGS and name in given:
            _flag(name, given[name], findings)
        if name in given:
            by_reason[reason].append(name)
    findings.notes += [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _flag(name: str, value: Any, findings: Findings) -> bool | None:
    """The flag, or None after a finding said that it is none."""
    if isinstance(value, bool):
        return value
    findings.wrong_types.append(
        f"{name} must be True or False, got {value!r} of type {type(value).__name__}"
    )
    return None


def _read_configs(given: Mapping[str, Any], findings: Findings) -> dict[str, dict[str, Any]]:
    """The known keys of all configs; those of a feature that is off only to be checked for unknown
    ones.
    """
    configs: dict[str, dict[str, Any]] = {}
    for name, known in CONFIG_KEYS.items():
        try:
            keys = _mapping(name, given.get(name) if given.get(name) is not None else {})
        except TypeError as error:
            findings.wrong_types.append(str(error))
            keys = {}
        for key in [key for key in keys if key not in known]:
            hint = check.closest_or_all(key, sorted(known))
            told = plain(f"{name}.{key}")
            findings.problems.append(f"{told}={keys.pop(key)!r} is unknown{hint}")
        if name == "hybrid_configs":
            _drop_wrong_degrees(keys, findings)
        configs[name] = keys
        feature = name.removesuffix("_configs")
        if feature not in _WITH_FLAG or given.get(feature) is True:
            _find_refused_and_noted_keys(name, keys, findings)
    off = [
        f"{name}_configs"
        for name in _WITH_FLAG
        if f"{name}_configs" in given and given.get(name, False) is False
    ]
    if off:
        findings.notes.append(
            f"{', '.join(off)}: without effect, because the flag of the feature is off"
        )
    return configs


def _drop_wrong_degrees(hybrid: dict[str, Any], findings: Findings) -> None:
    for key, value in list(hybrid.items()):
        try:
            hybrid[key] = check.integer(f"hybrid_configs.{key}", value)
        except TypeError as error:
            findings.wrong_types.append(str(error))
            del hybrid[key]


def _find_refused_and_noted_keys(name: str, keys: Mapping[str, Any], findings: Findings) -> None:
    for key, value in keys.items():
        default = CONFIG_KEYS[name][key]
        if value is None or value == default or (default == () and not value):
            continue
        if (name, key) in REFUSED_KEYS:
            findings.problems.append(
                f"{name}.{key}={value!r} cannot be carried over: {REFUSED_KEYS[name, key]}"
            )
        if (name, key) in NOTED_KEYS:
            findings.notes.append(f"{name}.{key}={value!r}: {NOTED_KEYS[name, key]}")


def _features(
    given: Mapping[str, Any], configs: Mapping[str, dict[str, Any]], findings: Findings
) -> dict[str, Any]:
    hybrid = CONFIG_KEYS["hybrid_configs"] | configs["hybrid_configs"]
    features = {}
    for name in MAPS:
        if name in given and _flag(name, given[name], findings):
            keys = f"{name}_configs"
            features[name] = mapped(name, configs[keys], CONFIG_KEYS[keys], hybrid, findings)
    if "pipeline" not in features and hybrid["pp_degree"] != 1:
        findings.problems.append(
            f"hybrid_configs.pp_degree={hybrid['pp_degree']!r} cannot be carried over without "
            "pipeline=True"
        )
    return features


def _check_a_sync(
    given: Mapping[str, Any], configs: Mapping[str, dict[str, Any]], findings: Findings
) -> None:
    if "a_sync" not in given or not _flag("a_sync", given["a_sync"], findings):
        return
    if configs["a_sync_configs"].get("k_steps") != -1:
        findings.problems.append(
            "a_sync=True cannot be carried over: parameter servers are not offered; localsgd is "
            "the collective form"
        )


def _check_mode(given: Mapping[str, Any], findings: Findings) -> None:
    mode = given.get("mode", "COLLECTIVE")
    if isinstance(mode, bool) or mode not in (1, "COLLECTIVE", "collective", None):
        findings.problems.append(
            f"mode={mode!r} cannot be carried over: only COLLECTIVE training is offered"
        )


def _expect_replicas(strategy: Fields, configs: Mapping[str, dict[str, Any]]) -> None:
    """dp_degree is no setting but a claim about the ranks, which only `prepare` knows; it is not in
    `to_dict`.
    """
    degree = configs["hybrid_configs"].get("dp_degree", -1)
    if degree != -1:
        object.__setattr__(strategy, "expected_replicas", degree)
