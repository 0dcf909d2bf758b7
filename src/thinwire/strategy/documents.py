"""A strategy as plain values and as a YAML file, in both directions. Every error names the key by
its dotted path, and in a file its line.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from thinwire._files import replace_file
from thinwire._wording import closest_or_all, plain, shown
from thinwire.compress import COMPRESSIONS
from thinwire.core.loss_scale import DynamicLossScale, FixedLossScale
from thinwire.errors import StrategyError
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.step.config import AMP
from thinwire.strategy.fields import CONFIGS, Fields
from thinwire.strategy.yaml_reader import read_file

_TAGGED: dict[tuple[type, str], Mapping[str, type]] = {
    (AMP, "loss_scale"): {"fixed": FixedLossScale, "dynamic": DynamicLossScale},
    (LocalSGD, "compression"): COMPRESSIONS,
    (AdaptiveLocalSGD, "compression"): COMPRESSIONS,
    (Fields, "compression"): COMPRESSIONS,
}
"""Keys of a config whose value is one of several configs: a mapping of one key, the tag."""
_LEFT = {
    "fragment_order": "a fragment is always adjacent tensors",
    "mixing": "a result replaces the value that was measured; local steps since are kept",
    "clip_sources": "the norm of a rank's message is not limited",
}
"""Keys of configs that left in 0.4, and what holds without them."""

_ROOT = "strategy"
_MOST_UNKNOWN = 5
F = TypeVar("F", bound=Fields)


def to_dict(config: Any) -> dict[str, Any]:
    """Return plain values only, of a strategy or a config in it, without those that are None."""
    document: dict[str, Any] = {}
    for name, value, tag in _entries(config):
        if is_dataclass(value):
            document[name] = to_dict(value) if tag is None else {tag: to_dict(value)}
        elif value is not None:
            document[name] = list(value) if isinstance(value, tuple) else value
    return document


def _entries(config: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Return keys, values and tags; positional keys first."""
    kind = Fields if isinstance(config, Fields) else type(config)
    for field in sorted(fields(config), key=lambda field: bool(field.kw_only)):
        value = getattr(config, field.name)
        tags = _TAGGED.get((kind, field.name), {})
        tag = next((tag for tag, known in tags.items() if isinstance(value, known)), None)
        yield field.name, value, tag


def from_dict(
    kind: type[F], document: Mapping[str, Any], where: Callable[[str], str] = lambda _: ""
) -> F:
    """See `DistributedStrategy.from_dict`."""
    _require_keys(_ROOT, document, CONFIGS, where)
    configs = {
        name: _value(Fields, _ROOT, name, value, where)
        for name, value in document.items()
        if value is not None
    }
    try:
        return kind(**configs)
    except StrategyError as error:
        raise StrategyError(f"{where(_ROOT)}{error}") from None


def _config(path: str, kind: type, document: Any, where: Callable[[str], str]) -> Any:
    _require_keys(path, document, [field.name for field in fields(kind)], where)
    for field in fields(kind):
        if field.default is MISSING and field.name not in document:
            raise StrategyError(f"{where(path)}{path} lacks {field.name}, which has no default")
    values = {name: _value(kind, path, name, value, where) for name, value in document.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        # a config's message begins with the name of the argument
        word = re.match(r"\w+", str(error))
        key = f"{path}.{word[0]}" if word and word[0] in values else path
        raise type(error)(f"{where(key)}{path}.{error}") from None


def _value(kind: type, path: str, name: str, value: Any, where: Callable[[str], str]) -> Any:
    tags = _TAGGED.get((kind, name))
    path = f"{path}.{name}"
    if value is None or tags is None:
        return _config(path, CONFIGS[name], value, where) if kind is Fields else value
    if isinstance(value, Mapping) and "sparse" in tags and "sparsity" in value:
        raise StrategyError(
            f"{where(path)}{path} without the name of its method left thinwire in 0.4: write "
            "sparse: above its keys"
        )
    _require_keys(path, value, tags, where)
    if len(value) != 1:
        raise StrategyError(
            f"{where(path)}{path} must have one key of {' and '.join(tags)}, got "
            f"{shown(dict(value))}"
        )
    ((tag, config),) = value.items()
    return _config(f"{path}.{tag}", tags[tag], config, where)


def _require_keys(
    path: str, document: Any, known: Collection[str], where: Callable[[str], str]
) -> None:
    """Refuse all but a mapping of known keys."""
    if not isinstance(document, Mapping):
        advice = "write {} for the defaults"
        if isinstance(document, bool):
            advice += "; omit the key to turn it off; from_fleet reads descriptions with flags"
        raise TypeError(
            f"{where(path)}{path} must be a mapping, got {shown(document)} of type "
            f"{type(document).__name__}; {advice}"
        )
    problems = []
    for key, value in document.items():
        below = f"{path}.{key}"
        if key in _LEFT and key not in known:
            problem = f"{plain(below)} left thinwire in 0.4: remove it; {_LEFT[key]}"
        elif key == "average_state" and type(value) is int:
            problem = f"{plain(below)}={value}: numbers left in 0.4; write true or false"
        elif key not in known:
            problem = f"{plain(below)}={shown(value)} is unknown{closest_or_all(key, known)}"
        else:
            continue
        problems.append(where(below) + problem)
    if (more := len(problems) - _MOST_UNKNOWN) > 0:
        problems[_MOST_UNKNOWN:] = [f"{more} more are unknown"]
    if problems:
        raise StrategyError("; ".join(problems))


def load(kind: type[F], path: Path) -> F:
    """See `DistributedStrategy.load`."""
    document, lines = read_file(path)
    return from_dict(
        kind, document, lambda key: f"{path}:{lines[key]}: " if key in lines else f"{path}: "
    )


def save(strategy: Fields, path: Path) -> None:
    """See `DistributedStrategy.save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text_of(strategy).encode())


class _Dumper(yaml.SafeDumper):
    """Writes every string in double quotes, so that no reader takes it for another type."""


_Dumper.add_representer(
    str, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, style='"')
)


def text_of(strategy: Fields) -> str:
    """Return the text of the file: keys below their docstrings, fields that are off as comments."""
    about = attribute_lines(type(strategy))
    on = strategy.on
    lines = [
        "# A training strategy of thinwire. `thinwire explain FILE` says what a step will do.",
        "",
    ]
    for name, value, tag in _entries(strategy):
        if value is not None:
            lines += [*_comment(about.get(name, ""), 0), *_lines_of(name, value, tag, 0), ""]
    off = [name for name in CONFIGS if name not in on]
    lines += [] if on else ["{}", ""]
    lines += ["# Off:"] if off else []
    lines += [line for name in off for line in _comment(f"{name}: {about.get(name, '')}", 0)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _lines_of(name: str, value: Any, tag: str | None, depth: int) -> Iterator[str]:
    """Return the lines of one key, with those of its config below it."""
    indent = "  " * depth
    if not is_dataclass(value):
        yield f"{indent}# {name}: null" if value is None else f"{indent}{name}: {_inline(value)}"
        return
    if tag is not None:
        yield f"{indent}{name}:"
        name = tag
        depth += 1
    yield f"{'  ' * depth}{name}:{'' if to_dict(value) else ' {}'}"
    about = attribute_lines(type(value))
    for key, below, its_tag in _entries(value):
        yield from _comment(about.get(key, ""), depth + 1)
        yield from _lines_of(key, below, its_tag, depth + 1)


def _inline(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, depth: int) -> list[str]:
    mark = "  " * depth + "# "
    return textwrap.wrap(text, 100, initial_indent=mark, subsequent_indent=mark)


_SECTION = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(r"(?:See|As in) `(\w+)`")


def attribute_lines(config: type) -> dict[str, str]:
    """Return the text on each attribute in the docstring's section "Attributes", on one line."""
    section = _SECTION.search(inspect.getdoc(config) or "")
    found = {}
    for name, text in _ENTRY.findall(section[1] if section else ""):
        line = " ".join(text.split())
        if reference := _REFERENCE.match(line):
            line = attribute_lines(getattr(sys.modules[config.__module__], reference[1]))[name]
        found[name] = re.sub(r"`|\*\*", "", line)
    return found
