"""A finding: how bad it is, what was found, and what to do."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

__all__ = ["Finding", "Level", "as_text", "document", "note", "ok", "status_of", "wrong"]

Level = Literal["ok", "note", "wrong"]
_LEVEL_WIDTH, _CHECK_WIDTH, _LEAST_WIDTH = 7, 13, 60


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes:
        level: "wrong" keeps ranks from training, "note" may surprise.
        check: What was looked at, in one word.
        found: What was found, with the values.
        advice: What to do; empty where nothing is to be done.
    """

    level: Level
    check: str
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """A finding that is as it should be."""
    return Finding("ok", check, found)


def note(check: str, found: str, advice: str) -> Finding:
    """A finding with which ranks train all the same."""
    return Finding("note", check, found, advice)


def wrong(check: str, found: str, advice: str) -> Finding:
    """A finding that has to be mended."""
    return Finding("wrong", check, found, advice)


def status_of(findings: Iterable[Finding]) -> int:
    """The exit status: 1 where something is wrong, else 0."""
    return int(any(finding.level == "wrong" for finding in findings))


def as_text(findings: Iterable[Finding], *, quiet: bool, width: int = 100) -> str:
    """Lines for the terminal.

    Args:
        findings: In the order in which they are shown.
        quiet: Only what is wrong.
        width: Of a line, in characters; at least 60.
    """
    shown = [finding for finding in findings if not quiet or finding.level == "wrong"]
    return "\n".join(_lines(finding, max(width, _LEAST_WIDTH)) for finding in shown)


def document(title: str, findings: Iterable[Finding], seconds: float) -> dict[str, Any]:
    """The findings as data, for JSON."""
    rows = list(findings)
    return {
        "title": title,
        "status": status_of(rows),
        "seconds": round(seconds, 2),
        "findings": [asdict(finding) for finding in rows],
    }


def _lines(finding: Finding, width: int) -> str:
    head = f"{finding.level:<{_LEVEL_WIDTH}}{finding.check:<{_CHECK_WIDTH}}"
    blank = " " * len(head)
    # names, ports and commands stay in one piece
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    parts = wrap(finding.found, initial_indent=head, subsequent_indent=blank)
    if finding.advice:
        advice = f"-> {finding.advice}"
        further = f"{blank}   "
        parts += wrap(advice, initial_indent=blank, subsequent_indent=further)
    return "\n".join(parts)
