"""Progress display: a bar on a terminal, a line every ten seconds elsewhere, or nothing."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0


class Bar:
    """Progress of one strategy; this one shows nothing."""

    def note(self, text: str) -> None:
        """Show the activity before the first step."""

    def update(self, progress: float, step: int, loss: float) -> None:
        """Show `progress` in [0, 1]."""

    def done(self) -> None:
        """Show the end of the run."""


class Display:
    """Progress of a comparison, by a bar for each strategy."""

    def __init__(self, bar: Callable[[str], Bar] = lambda _: Bar()) -> None:
        self._bar = bar

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Bar]:
        """Return a bar for the strategy that begins now."""
        yield self._bar(name)


class _Lines(Bar):
    """Print a line every ten seconds, for logs and pipes."""

    def __init__(self, name: str) -> None:
        self.name, self.begin_s, self.last_s = name, time.monotonic(), time.monotonic()

    def note(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def update(self, progress: float, step: int, loss: float) -> None:
        if time.monotonic() - self.last_s >= _SECONDS_BETWEEN_LINES:
            self.last_s = time.monotonic()
            self.note(f"{progress:.0%}, step {step}, loss {loss:.3f}")

    def done(self) -> None:
        self.note(f"done in {time.monotonic() - self.begin_s:.0f} s")


class _Rich(Display):
    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[Bar]:
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

            class OnTerminal(Bar):
                def note(self, text: str) -> None:
                    shown.update(task, note=text)

                def update(self, progress: float, step: int, loss: float) -> None:
                    shown.update(task, completed=progress, note=f"step {step}, loss {loss:.3f}")

                def done(self) -> None:
                    shown.update(task, completed=1.0)

            yield OnTerminal()


def display_for(*, quiet: bool) -> Display:
    """Return the display that fits standard error."""
    return Display() if quiet else _Rich() if sys.stderr.isatty() else Display(_Lines)
