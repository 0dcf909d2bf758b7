"""Reads a Paddle fleet description as a strategy. Every attribute is mapped, refused or noted.

`names` lists the treatment of each attribute. `maps` converts the configs of each feature.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from thinwire import _validate as check
from thinwire._wording import plain
from thinwire.errors import StrategyError
from thinwire.strategy.documents import F
from thinwire.strategy.fleet.maps import MAPS, Findings, mapped
from thinwire.strategy.fleet.names import CONFIGS, NOTED, REFUSED

_UNREAD = ("sharding_configs", "tensor_parallel_configs")
_WITH_FLAG = (*MAPS, "a_sync", "sharding", "tensor_parallel")
_KNOWN = (*MAPS, *CONFIGS, *_UNREAD, *REFUSED, *NOTED, "a_sync", "mode")


def from_fleet(kind: type[F], description: Mapping[str, Any]) -> F:
    """See `DistributedStrategy.from_fleet`."""
    given = _mapping("description", description)
    findings = Findings()
    _judge_names(given, findings)
    configs = _read_configs(given, findings)
    _judge_modes(given, configs, findings)
    features = _features(given, configs, findings)
    try:
        strategy = kind(**features)
    except StrategyError as error:
        findings.problems.append(str(error))
    problems = "; ".join([*findings.wrong_types, *findings.problems])
    if problems:
        raise (TypeError if findings.wrong_types else StrategyError)(
            f"fleet description: {problems}"
        )
    # a claim about the ranks, not a setting: only `prepare` can check it; it is not in `to_dict`
    replicas = configs["hybrid_configs"].get("dp_degree", -1)
    if replicas != -1:
        object.__setattr__(strategy, "expected_replicas", replicas)
    if findings.notes:
        warnings.warn("from_fleet: " + "; ".join(findings.notes), UserWarning, stacklevel=3)
    return strategy


def _mapping(name: str, value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{name} must be a mapping, got {value!r} of type {type(value).__name__}")


def _unknown(prefix: str, given: Mapping[Any, Any], known: Collection[str]) -> list[str]:
    return [
        f"{plain(f'{prefix}{key}')}={value!r} is unknown{check.closest_or_all(key, sorted(known))}"
        for key, value in given.items()
        if key not in known
    ]


def _on(name: str, given: Mapping[str, Any], findings: Findings) -> bool:
    """Return True if a flag is given and True. Add a finding if it is no flag."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        findings.wrong_types.append(
            f"{name} must be True or False, got {value!r} of type {type(value).__name__}"
        )
    return value is True


def _judge_names(given: Mapping[str, Any], findings: Findings) -> None:
    findings.problems += _unknown("", given, _KNOWN)
    for name, reason in REFUSED.items():
        if _on(name, given, findings):
            findings.problems.append(f"{name}={given[name]!r} cannot be carried over: {reason}")
    by_reason: dict[str, list[str]] = {}
    for name, reason in NOTED.items():
        if name in given:
            by_reason.setdefault(reason, []).append(name)
    findings.notes += [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _read_configs(given: Mapping[str, Any], findings: Findings) -> dict[str, dict[str, Any]]:
    """Read the known keys of all configs; those of features that are off are not judged."""
    configs: dict[str, dict[str, Any]] = {}
    for name, known in CONFIGS.items():
        keys: dict[str, Any] = {}
        try:
            keys = _mapping(name, given.get(name) if given.get(name) is not None else {})
        except TypeError as error:
            findings.wrong_types.append(str(error))
        findings.problems += _unknown(f"{name}.", keys, known)
        configs[name] = keys = {key: value for key, value in keys.items() if key in known}
        if name == "hybrid_configs":
            _drop_wrong_degrees(keys, findings)
        feature = name.removesuffix("_configs")
        if feature not in _WITH_FLAG or given.get(feature) is True:
            _judge_keys(name, keys, findings)
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


def _judge_keys(name: str, keys: Mapping[str, Any], findings: Findings) -> None:
    for key, value in keys.items():
        default, refused, noted = CONFIGS[name][key]
        if value is None or value == default or (default == () and not value):
            continue
        if refused:
            findings.problems.append(f"{name}.{key}={value!r} cannot be carried over: {refused}")
        if noted:
            findings.notes.append(f"{name}.{key}={value!r}: {noted}")


def _judge_modes(
    given: Mapping[str, Any], configs: Mapping[str, dict[str, Any]], findings: Findings
) -> None:
    if _on("a_sync", given, findings) and configs["a_sync_configs"].get("k_steps") != -1:
        findings.problems.append(
            "a_sync=True cannot be carried over: parameter servers are not supported; use "
            "localsgd instead"
        )
    mode = given.get("mode", "COLLECTIVE")
    if isinstance(mode, bool) or mode not in (1, "COLLECTIVE", "collective", None):
        findings.problems.append(
            f"mode={mode!r} cannot be carried over: only COLLECTIVE training is supported"
        )


def _features(
    given: Mapping[str, Any], configs: Mapping[str, dict[str, Any]], findings: Findings
) -> dict[str, Any]:
    whole = {
        name: {key: known.default for key, known in keys.items()} for name, keys in CONFIGS.items()
    }
    pp_degree = (whole["hybrid_configs"] | configs["hybrid_configs"])["pp_degree"]
    whole["pipeline_configs"]["pp_degree"] = pp_degree
    features = {
        name: mapped(name, configs[f"{name}_configs"], whole[f"{name}_configs"], findings)
        for name in MAPS
        if _on(name, given, findings)
    }
    if "pipeline" not in features and pp_degree != 1:
        findings.problems.append(
            f"hybrid_configs.pp_degree={pp_degree!r} cannot be carried over without pipeline=True"
        )
    return features
