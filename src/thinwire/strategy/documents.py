"""A strategy as plain values, and back; every error names the key by its dotted path."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from thinwire import _validate as check
from thinwire._wording import plain, shown
from thinwire.compress import CHANGE_COMPRESSIONS
from thinwire.compress.sparse_change import Sparse
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale
from thinwire.errors import StrategyError
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.step.config import AMP
from thinwire.strategy.fields import CONFIGS, Fields

__all__ = ["TAGGED", "F", "from_dict", "kind_of", "ordered_fields", "to_dict"]

TAGGED: dict[tuple[type, str], Mapping[str, type]] = {
    (AMP, "loss_scale"): {"fixed": FixedLossScale, "dynamic": DynamicLossScale},
    (LocalSGD, "compression"): CHANGE_COMPRESSIONS,
    (AdaptiveLocalSGD, "compression"): CHANGE_COMPRESSIONS,
}
"""Keys of a config whose value is one of several configs: a mapping of one key, the tag."""
_UNTAGGED: dict[tuple[type, str], type] = {
    (LocalSGD, "compression"): Sparse,
    (AdaptiveLocalSGD, "compression"): Sparse,
}
"""Of these the config that is written without its tag: what was the only one once."""

_ROOT = "strategy"
_MOST_UNKNOWN = 5
F = TypeVar("F", bound=Fields)


def to_dict(strategy: Fields) -> dict[str, Any]:
    """Plain values only: dict, list, str, int, float, bool.

    What is None is left out, at every level.
    """
    return {name: _plain(config) for name, config in strategy.on.items()}


def from_dict(
    kind: type[F], document: Mapping[str, Any], where: Callable[[str], str] = lambda _: ""
) -> F:
    """The strategy that `to_dict` described.

    Args:
        kind: Of strategy.
        document: A mapping from fields to mappings of their config's keys.
        where: What an error puts before the dotted path of a key, such as "plan.yaml:3: ".

    Raises:
        StrategyError: Unknown keys (the first five of them), a missing key, or a conflict.
        TypeError, ValueError: A wrong value.
    """
    _require_mapping(_ROOT, document, where)
    unknown = list(
        _unknown_keys(_ROOT, document, {name: _keys(kind) for name, kind in CONFIGS.items()})
    )
    if unknown:
        told = [where(path) + problem for path, problem in unknown[:_MOST_UNKNOWN]]
        more = len(unknown) - len(told)
        raise StrategyError("; ".join([*told, *([f"{more} more are unknown"] if more else [])]))
    present = {name: value for name, value in document.items() if value is not None}
    configs = {
        name: _config(f"{_ROOT}.{name}", CONFIGS[name], value, where)
        for name, value in present.items()
    }
    try:
        return kind(**configs)
    except StrategyError as error:
        raise StrategyError(f"{where(_ROOT)}{error}") from None


def ordered_fields(config: Any) -> list[Field[Any]]:
    """The fields of a config, those first that may be given by position."""
    return sorted(fields(config), key=lambda field: bool(field.kw_only))


def _plain(config: Any) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in ordered_fields(config)}
    return {
        name: _plain_value(type(config), name, value)
        for name, value in values.items()
        if value is not None
    }


def _plain_value(kind: type, name: str, value: Any) -> Any:
    if (kind, name) in TAGGED:
        tag = next(tag for tag, tagged in TAGGED[kind, name].items() if isinstance(value, tagged))
        return _plain(value) if _is_untagged(kind, name, tag) else {tag: _plain(value)}
    return list(value) if isinstance(value, tuple) else value


def _is_untagged(kind: type, name: str, tag: str) -> bool:
    return _UNTAGGED.get((kind, name)) is TAGGED[kind, name][tag]


def kind_of(kind: type, name: str, document: Mapping[str, Any]) -> tuple[str, Any]:
    """The tag of a value of `TAGGED` in plain values, and what it says of that config.

    Raises:
        ValueError: It has another key beside the tag, or none.
    """
    tags = TAGGED[kind, name]
    if (kind, name) in _UNTAGGED and not document.keys() & tags.keys():
        return next(tag for tag in tags if _is_untagged(kind, name, tag)), document
    if len(document) != 1:
        raise ValueError(f"must have one key of {' and '.join(tags)}, got {shown(dict(document))}")
    return next(iter(document.items()))


def _config(path: str, kind: type, document: Any, where: Callable[[str], str]) -> Any:
    _require_mapping(path, document, where)
    missing = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.name not in document
    ]
    if missing:
        raise StrategyError(
            f"{where(path)}{path} lacks {' and '.join(missing)}, which no default can replace"
        )
    values = {
        name: _value(f"{path}.{name}", kind, name, value, where) for name, value in document.items()
    }
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        word = re.match(
            r"\w+", str(error)
        )  # a config's message begins with the name of the argument
        key = f"{path}.{word[0]}" if word and word[0] in values else path
        raise type(error)(f"{where(key)}{path}.{error}") from None


def _value(path: str, kind: type, name: str, value: Any, where: Callable[[str], str]) -> Any:
    if value is None or (kind, name) not in TAGGED:
        return value
    _require_mapping(path, value, where)
    try:
        tag, document = kind_of(kind, name, value)
    except ValueError as error:
        raise StrategyError(f"{where(path)}{path} {error}") from None
    below = path if document is value else f"{path}.{tag}"
    return _config(below, TAGGED[kind, name][tag], document, where)


def _require_mapping(path: str, value: object, where: Callable[[str], str]) -> None:
    if isinstance(value, Mapping):
        return
    advice = "{} stands for the defaults"
    if isinstance(value, bool):
        advice += "; for off leave the key out; a description with flags is read by from_fleet"
    raise TypeError(
        f"{where(path)}{path} must be a mapping, got {shown(value)} of type "
        f"{type(value).__name__}; "
        f"{advice}"
    )


def _unknown_keys(
    path: str, document: Any, known: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Path and problem of every unknown key at and below `path`; `known` is a tree of keys."""
    if not isinstance(document, Mapping):
        return
    for key, value in document.items():
        below = f"{path}.{key}"
        if key not in known:
            hint = check.closest_or_all(key, known)
            yield below, f"{plain(below)}={shown(value)} is unknown{hint}"
        elif known[key]:  # a mapping instead of a plain value is the config's to refuse
            yield from _unknown_keys(below, value, known[key])


def _keys(kind: type) -> dict[str, dict[str, Any]]:
    """The keys of a config as a tree, those without keys below them as empty mappings."""
    return {field.name: _keys_below(kind, field.name) for field in fields(kind)}


def _keys_below(kind: type, name: str) -> dict[str, Any]:
    below = {tag: _keys(tagged) for tag, tagged in TAGGED.get((kind, name), {}).items()}
    untagged = _UNTAGGED.get((kind, name))
    return below if untagged is None else {**_keys(untagged), **below}
