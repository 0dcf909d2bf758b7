"""A strategy as a YAML file: read with the line of every error, written with every key
explained.
"""

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from thinwire._files import replace_file
from thinwire.strategy.documents import TAGGED, F, from_dict, kind_of, ordered_fields, to_dict
from thinwire.strategy.fields import CONFIGS, Fields
from thinwire.strategy.yaml_reader import read_file

__all__ = [
    "attribute_lines",
    "load",
    "save",
    "text_of",
]

_SECTION = re.compile(r"^Attributes:\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(r"(?:See|As in) `(\w+)`")


def attribute_lines(config: type) -> dict[str, str]:
    """What the docstring's section "Attributes" says of each attribute, on one line, without marks.

    An entry that begins "See `Other`" or "As in `Other`" stands for the entry of that class in the
    same module. Empty where docstrings are stripped (`python -OO`).
    """
    section = _SECTION.search(inspect.getdoc(config) or "")
    entries = {
        name: " ".join(text.split()) for name, text in _ENTRY.findall(section[1] if section else "")
    }
    return {
        name: re.sub(r"`|\*\*", "", _followed(config, name, text)) for name, text in entries.items()
    }


def _followed(config: type, name: str, text: str) -> str:
    reference = _REFERENCE.match(text)
    if not reference:
        return text
    other: type = getattr(sys.modules[config.__module__], reference[1])
    return attribute_lines(other)[name]


_COLUMNS = 100


class _Dumper(yaml.SafeDumper):
    """Writes every string in double quotes, so that no reader can take it for anything else."""


_Dumper.add_representer(
    str, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, style='"')
)


def load(kind: type[F], path: Path) -> F:
    """Read a file with a strategy of this kind.

    Raises:
        StrategyError, TypeError, ValueError: As `DistributedStrategy.load`, beginning with file and
            line.
        OSError: The file cannot be read.
    """
    document, lines = read_file(path, "strategy")
    return from_dict(
        kind, document, lambda key: f"{path}:{lines[key]}: " if key in lines else f"{path}: "
    )


def save(strategy: Fields, path: Path) -> None:
    """Write a file aside and put it in its place as a whole; parents are made.

    Raises:
        OSError: It cannot be written; what was there before is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text_of(strategy).encode())


def text_of(strategy: Fields) -> str:
    """The file: every key with the line of its docstring above it; what is off, as a comment."""
    document = to_dict(strategy)
    about = attribute_lines(type(strategy))
    lines = [
        "# A training strategy of thinwire. `thinwire explain FILE` says what a step will do.",
        "",
    ]
    for name, config in CONFIGS.items():
        if name in document:
            lines += [
                *_comment(about.get(name, ""), 0),
                f"{name}:{'' if document[name] else ' {}'}",
            ]
            lines += [*_entries(config, document[name], 1), ""]
    off = [name for name in CONFIGS if name not in document]
    lines += [] if document else ["{}", ""]
    lines += ["# Off:"] if off else []
    lines += [line for name in off for line in _comment(f"{name}: {about.get(name, '')}", 0)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _entries(config: type, document: dict[str, Any], depth: int) -> Iterator[str]:
    """The lines of one config's mapping."""
    about, indent = attribute_lines(config), "  " * depth
    for name in [field.name for field in ordered_fields(config)]:
        yield from _comment(about.get(name, ""), depth)
        if name not in document:
            yield f"{indent}# {name}: null"
        elif (config, name) in TAGGED:
            tag, nested = kind_of(config, name, document[name])
            tagged = nested is not document[name]
            yield f"{indent}{name}:"
            yield from [f"{indent}  {tag}:"] if tagged else []
            yield from _entries(TAGGED[config, name][tag], nested, depth + 1 + tagged)
        else:
            yield f"{indent}{name}: {_inline(document[name])}"


def _inline(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, depth: int) -> list[str]:
    mark = "  " * depth + "# "
    return textwrap.wrap(text, _COLUMNS, initial_indent=mark, subsequent_indent=mark)
