"""Why the workers failed, in a few lines: from what they wrote down themselves and from torchrun's
logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["explain", "log_tail"]

_MOST_LINES, _LONGEST_LINE = 5, 300
# torchrun's own summary; SIGTERM is what it sends to the others when one has failed
_DEATH = re.compile(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*-\d+[^\n]*\((SIG(?!TERM)\w+)\)")


def explain(errors: Sequence[Mapping[str, Any]], work: Path) -> str:
    """The cause, and not its consequences on the other ranks, as far as that can be told.

    Args:
        errors: The `error` events of all ranks, each with its `rank`.
        work: Folder with the agents' logs.
    """
    spoke = {
        str(error["rank"]) for error in errors
    }  # whoever dies after an error of its own died of that
    deaths = [
        f"worker {rank} was killed by {signal}"
        for rank, signal in _DEATH.findall(_logs(work))
        if rank not in spoke
    ]
    if deaths:
        return "; ".join(deaths)
    if errors:
        first = min(errors, key=lambda error: float(error["unix_s"]))
        lines = str(first["message"]).strip().splitlines() or [""]
        short = [line[:_LONGEST_LINE] for line in lines[:_MOST_LINES]]
        return "\n  ".join(
            [f"worker {first['rank']} failed: {first['kind']}: {short[0]}", *short[1:]]
        )
    return f"a worker ended without a result\n{log_tail(work)}".rstrip()


def log_tail(work: Path) -> str:
    """The last lines of the agents' logs that speak of an error."""
    found = [
        line.strip()[:_LONGEST_LINE]
        for line in _logs(work).splitlines()
        if re.search(r"Error|error:", line)
    ]
    return "\n".join(f"  {line}" for line in found[-_MOST_LINES:])


def _logs(work: Path) -> str:
    return "\n".join(
        log.read_text(encoding="utf-8", errors="replace") for log in sorted(work.glob("agent*.log"))
    )
