"""What several commands ask of their options."""

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "DEVICES",
    "require_device",
    "require_nothing_beside",
    "require_one_of",
    "require_task",
    "require_within",
    "require_workers",
]

DEVICES = ("auto", "cpu", "cuda")
_MOST_WORKERS = 64


def require_workers(workers: int) -> None:
    """Raise ValueError for a number of ranks that the command does not start."""
    require_within("workers", workers, 1, _MOST_WORKERS)


def require_device(device: str) -> None:
    """Raise ValueError for a device that is none."""
    require_one_of("device", device, DEVICES)


def require_task(task: str) -> None:
    """Raise ValueError where no file can be meant by a task."""
    file, _, name = task.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(
            f"task={task!r} is not FILE.py:NAME; name the file and the function that makes the task"
        )
    if not Path(file).is_file():
        raise ValueError(f"task={task!r}: there is no file {file}")


def require_nothing_beside(task: str, **options: object) -> None:
    """Refuse options that a task of the user's would ignore."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"--{name} is for the task that comes with the command, and task={task!r} has a "
                "model and data of its own: leave one of them out"
            )


def require_within(name: str, value: int, least: int, most: int) -> None:
    """Refuse a number of the command line that cannot be used."""
    if not least <= value <= most:
        raise ValueError(f"{name}={value} is out of range: {least} to {most} is allowed")


def require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError for a word that is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(allowed)}")
