"""Wording of values and of unknown words in messages; without torch."""

import re
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence

_SEPARATOR = re.compile(r"[-_.]")
_MOST_WORDS = 3
PASSED = ("thinwire.", "torch.", "contextlib", "functools")
_MOST_CHARACTERS = 120


def host_port(host: str, port: int) -> str:
    """Return an address as text, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long."""
    text = repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}... ({len(text):,} characters)"


def warn_user(text: str) -> None:
    """Warn at the line of the user's code that called the library, through torch's hooks too."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PASSED):
        frame = frame.f_back
        level += 1
    warnings.warn(text, UserWarning, level)


def plain(text: str) -> str:
    """Return the text, or its `repr` if it holds terminal control codes or invisible characters."""
    return text if text.isprintable() else repr(text)


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def near(word: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates that differ from `word` in few letters, nearest first; often none.

    >>> near("momentun", ["lr", "momentum"])
    ['momentum']

    A missing, extra, replaced or transposed letter counts one, up to a third of the letters.
    """
    found = []
    for index, candidate in enumerate(candidates):
        most = max(1, max(len(word), len(candidate)) // 3)
        if abs(len(candidate) - len(word)) <= most:
            distance = _distance(word.lower(), candidate.lower())
            if distance <= most:
                found.append((distance, -index, candidate))
                continue
        if word.lower() in _SEPARATOR.split(candidate.lower()):
            found.append((len(candidate), -index, candidate))
    return [candidate for _, _, candidate in sorted(found)][:_MOST_WORDS]


def closest(word: object, candidates: Iterable[object]) -> str:
    """Return a hint such as `; did you mean 'weight_decay'?`, or an empty string if nothing is
    near.

    >>> closest("weigth_decay", ["lr", "weight_decay"])
    "; did you mean 'weight_decay'?"
    """
    names = [name for name in candidates if isinstance(name, str)]
    matches = near(word, names) if isinstance(word, str) else []
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def closest_or_all(word: object, known: Collection[str]) -> str:
    """Return the hint of `closest`, or a list of all known words if nothing is near."""
    return closest(word, known) or f"; known are {', '.join(known)}"


def _distance(a: str, b: str) -> int:
    """Return the restricted Damerau-Levenshtein distance between two words."""
    two_before = [0] * (len(b) + 1)
    before = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            best = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                best = min(best, two_before[j - 2] + 1)
            row.append(best)
        two_before, before = before, row
    return before[-1]
