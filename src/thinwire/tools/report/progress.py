"""Progress display: a bar on a terminal, a line every ten seconds elsewhere, or nothing."""

import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Self

_SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Progress of a comparison, strategy by strategy; this one shows nothing."""

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Self]:
        """Show the strategy that begins now, and its end."""
        yield self

    def note(self, text: str) -> None:
        """Show the activity before the first step."""

    def update(self, progress: float, step: int, loss: float) -> None:
        """Show `progress` in [0, 1]."""


class _Lines(Display):
    """Print a line every ten seconds, for logs and pipes."""

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Self]:
        self._name = name
        begin_s = time.monotonic()
        self._last_s = begin_s
        yield self
        self.note(f"done in {time.monotonic() - begin_s:.0f} s")

    def note(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def update(self, progress: float, step: int, loss: float) -> None:
        if time.monotonic() - self._last_s >= _SECONDS_BETWEEN_LINES:
            self._last_s = time.monotonic()
            self.note(f"{progress:.0%}, step {step}, loss {loss:.3f}")


class _Rich(Display):
    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Self]:
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.description:<12}", markup=False),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TimeRemainingColumn(elapsed_when_finished=True),
            rich.TextColumn("{task.fields[note]}", markup=False),
        )
        with rich.Progress(*columns, console=Console(stderr=True)) as shown:
            task = shown.add_task(name, total=1.0, note="starting the workers")
            self._show = partial(shown.update, task)
            yield self
            self._show(completed=1.0)

    def note(self, text: str) -> None:
        self._show(note=text)

    def update(self, progress: float, step: int, loss: float) -> None:
        self._show(completed=progress, note=f"step {step}, loss {loss:.3f}")


def display_for(*, quiet: bool) -> Display:
    """Return the display that fits standard error."""
    return Display() if quiet else _Rich() if sys.stderr.isatty() else _Lines()
