"""The event log of a rank: one JSON object per line in a file of its own, which the command reads
while it grows.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

__all__ = ["EventLog", "EventReader", "Events", "release"]

_GO = "go"
_SECONDS_BETWEEN_EVENTS = 0.2
_POLL_S = 0.02


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def release(folder: Path) -> None:
    """Let the ranks whose logs are in `folder` go on from `EventLog.wait_for_release`."""
    (folder / _GO).touch()


class Events(Protocol):
    """Where a rank tells what happens."""

    def write(self, event: str, **fields: Any) -> None:
        """Tell of one event at once."""

    def write_sometimes(self, event: str, **fields: Any) -> None:
        """Tell of one of many events, or leave it out."""

    def wait_for_release(self) -> None:
        """Return when training may begin."""


@final
class EventLog:
    """The writing end, in a worker that the command has started."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.file = _file_of(folder, rank).open("a", encoding="utf-8", buffering=1)
        self.last_s = 0.0

    def write(self, event: str, **fields: Any) -> None:
        """Append one line at once."""
        self.file.write(json.dumps({"event": event, "unix_s": time.time(), **fields}) + "\n")

    def write_sometimes(self, event: str, **fields: Any) -> None:
        """Append a line unless the last such one is younger than a fifth of a second."""
        if time.monotonic() - self.last_s >= _SECONDS_BETWEEN_EVENTS:
            self.last_s = time.monotonic()
            self.write(event, **fields)

    def wait_for_release(self) -> None:
        """Return when the command has called `release`."""
        while not (self.folder / _GO).exists():
            time.sleep(_POLL_S)


@dataclass
class EventReader:
    """The reading end, in the command."""

    folder: Path
    rank: int
    offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the whole lines that have been appended since the last call."""
        path = _file_of(self.folder, self.rank)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self.offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
