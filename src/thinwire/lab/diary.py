"""What a rank tells the command while it works: one JSON object per line, appended to a file of its
own.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, final

__all__ = ["GO", "Diary"]

GO = "go"
"""Name of the file, beside the diaries, by which the command says that the clock may start."""

_SECONDS_BETWEEN_EVENTS = 0.2


@final
class Diary:
    """Appends one JSON object per line to this rank's file, which the command reads while
    it grows.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.last_s = 0.0

    def write(self, event: str, **fields: Any) -> None:
        """Writes one line at once."""
        self.file.write(json.dumps({"event": event, "unix_s": time.time(), **fields}) + "\n")

    def write_sometimes(self, event: str, **fields: Any) -> None:
        """Writes unless the last such line is younger than a fifth of a second."""
        if time.monotonic() - self.last_s >= _SECONDS_BETWEEN_EVENTS:
            self.last_s = time.monotonic()
            self.write(event, **fields)
