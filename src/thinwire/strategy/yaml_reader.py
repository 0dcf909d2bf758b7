"""Reads YAML strictly: plain values, with the line of each of them.

The scalars are those of YAML 1.2's core schema in decimal: `1e-3` is a number, `on` and `off` are
words. A duplicate key, an alias and a key without a value are errors, because their meaning in YAML
is easily mistaken.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from thinwire._files import read_regular
from thinwire._wording import shown
from thinwire.errors import StrategyError

_ROOT = "strategy"
_MOST_BYTES = 1 << 18
_TAG = "tag:yaml.org,2002:"
_STR = f"{_TAG}str"


class _Loader(yaml.SafeLoader):
    # (PyYAML's own way to drop the rules of YAML 1.1)
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            # the type stubs lack it
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not supported: write the value out", mark
            )
        return super().compose_node(parent, index)


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def read_file(path: Path) -> tuple[Any, dict[str, int]]:
    """Read a strategy."""
    try:
        content = read_regular(path, _MOST_BYTES)
    except ValueError as error:
        raise StrategyError(f"{path}: this is not a {_ROOT}: {error}") from None
    try:
        return _read(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise StrategyError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8"
        ) from None
    except StrategyError as error:
        raise StrategyError(f"{path}:{error}") from None


def _read(text: str) -> tuple[Any, dict[str, int]]:
    """Return the result of `read_file` from the text. Errors begin with the line and a colon."""
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise StrategyError("1: the file is empty; write {} for a strategy without fields")
        return _value(loader, node, _ROOT, lines), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise StrategyError(f"{line}: this is not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise StrategyError(
            f"{line}: this is not YAML: character U+{error.character:04X} is not allowed"
        ) from None
    except RecursionError:
        raise StrategyError("1: this is not a strategy: it is nested too deeply") from None


def _value(loader: _Loader, node: yaml.Node, path: str, lines: dict[str, int]) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    # the tag that the value has by itself
    natural = loader.resolve(type(node), node.value, (True, False))  # type: ignore[no-untyped-call]
    if node.tag not in (natural, _STR):
        raise StrategyError(f"{line}: {path} has the tag {shown(node.tag)}: write plain values")
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag != _STR or not str(key).isprintable():
                raise StrategyError(f"{line}: a key of {path} must be a word, got {shown(key)}")
            below = f"{path}.{key}"
            if key in values:
                raise StrategyError(
                    f"{line}: {below} is given twice; the first time on line {lines[below]}"
                )
            lines[below] = line
            values[key] = _value(loader, value_node, below, lines)
        return values
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, f"{path}[{i}]", lines) for i, item in enumerate(node.value)]
    if node.value == "" and node.tag == f"{_TAG}null":
        raise StrategyError(
            f"{line}: {path} has no value; write {{}} for the defaults, or omit the key to turn "
            "it off"
        )
    try:
        return loader.construct_object(node)
    except ValueError as error:  # an integer with thousands of digits
        raise StrategyError(f"{line}: {path}: {error}") from None
