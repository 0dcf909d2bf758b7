"""The lines of docstrings that document a config's attributes, for files that explain
themselves.
"""

import inspect
import re
import sys

__all__ = ["attribute_lines"]

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
