"""The progress of the strategies for the user: a bar on a terminal, a line now and then elsewhere,
or nothing.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Bar", "Display", "Plain", "Rich", "Silent", "display_for"]

_SECONDS_BETWEEN_LINES = 10.0


class Bar(Protocol):
    """Progress of one strategy."""

    def note(self, text: str) -> None:
        """Show what goes on before the first step."""

    def update(self, progress: float, step: int, loss: float) -> None:
        """Show that `progress` in [0, 1] of the run is over."""

    def done(self) -> None:
        """Show that the run is over."""


class Display(Protocol):
    """Progress of a comparison."""

    def strategy(self, name: str) -> contextlib.AbstractContextManager[Bar]:
        """A bar for the strategy that begins now."""


@final
class Silent:
    """No display."""

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Bar]:
        yield self

    def note(self, text: str) -> None:
        """See `Bar`."""

    def update(self, progress: float, step: int, loss: float) -> None:
        """See `Bar`."""

    def done(self) -> None:
        """See `Bar`."""


@final
class Plain:
    """A line every ten seconds, for logs and pipes."""

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Bar]:
        self.name, self.begin_s, self.last_s = name, time.monotonic(), time.monotonic()
        yield self

    def note(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def update(self, progress: float, step: int, loss: float) -> None:
        if time.monotonic() - self.last_s >= _SECONDS_BETWEEN_LINES:
            self.last_s = time.monotonic()
            print(
                f"{self.name}: {progress:.0%}, step {step}, loss {loss:.3f}",
                file=sys.stderr,
                flush=True,
            )

    def done(self) -> None:
        print(
            f"{self.name}: done in {time.monotonic() - self.begin_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )


@final
class Rich:
    """A bar per strategy on the terminal."""

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Bar]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description:<12}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(name, total=1.0, note="starting the workers")
            yield _RichBar(progress, task)


@final
class _RichBar:
    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self.progress, self.task = progress, task

    def note(self, text: str) -> None:
        self.progress.update(self.task, note=text)

    def update(self, progress: float, step: int, loss: float) -> None:
        self.progress.update(self.task, completed=progress, note=f"step {step}, loss {loss:.3f}")

    def done(self) -> None:
        self.progress.update(self.task, completed=1.0)


def display_for(*, quiet: bool) -> Display:
    """The display that suits where standard error goes."""
    if quiet:
        return Silent()
    return Rich() if sys.stderr.isatty() else Plain()
