"""The checked arguments of the command."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Self

from thinwire.lab.network.link import Link
from thinwire.lab.run.config import Recipe
from thinwire.lab.run.size import ModelSize, parse_size
from thinwire.lab.strategies import choose

__all__ = ["Settings"]

_MOST_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One comparison.

    Attributes:
        workers: Ranks, 1 to 64.
        link: What each of them may send and receive.
        strategies: By name or from files, each name once.
        steps: Updates per strategy; None where `seconds` is given.
        seconds: Budget of training time per strategy; None where `steps` is given.
        size: Of the model, as it was typed.
        model: Its size in numbers.
        text: Folder with text; None is Python's own standard library.
        out: Folder for the report.
        batch: Sequences per worker and step.
        seed: Of parameters and data order.
        lr: Peak learning rate for all strategies instead of each one's own.
        tune: Whether the loss is that of the validation part instead of the held-out one.
        evaluations: How often the loss is taken, at most.
    """

    workers: int
    link: Link
    strategies: tuple[Recipe, ...]
    steps: int | None
    seconds: float | None
    size: str
    model: ModelSize
    text: Path | None
    out: Path
    batch: int
    seed: int
    lr: float | None
    tune: bool
    evaluations: int = 16

    @classmethod
    def check(
        cls,
        *,
        workers: int,
        link: str,
        latency: str,
        strategies: Sequence[str],
        steps: int | None,
        seconds: float | None,
        size: str,
        text: Path | None,
        out: Path,
        batch: int,
        seed: int,
        lr: float | None,
        tune: bool,
    ) -> Self:
        """Settings from what was typed.

        Raises:
            ValueError: The first argument that cannot be used, with what came and what is allowed.
        """
        _within("workers", workers, 1, _MOST_WORKERS)
        _within("batch", batch, 1, 4096)
        _within("seed", seed, 0, 2**31)
        if steps is not None and seconds is not None:
            raise ValueError(
                "steps and seconds exclude each other: give the number of updates, or the time for "
                "each"
            )
        if steps is None and seconds is None:
            steps = 200
        if steps is not None:
            _within("steps", steps, 1, 10_000_000)
        if seconds is not None and not (isfinite(seconds) and seconds >= 1):
            raise ValueError(
                f"seconds={seconds:g} is not allowed: at least 1 second for each strategy"
            )
        if lr is not None and not (isfinite(lr) and lr > 0):
            raise ValueError(f"lr={lr:g} is not allowed: a positive number")
        blocked = next(
            (path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None
        )
        if blocked is not None:
            raise ValueError(
                f"out={str(out)!r} cannot be a folder, since {blocked} is a file; name another one"
            )
        if text is not None and not text.is_dir():
            raise ValueError(f"text={str(text)!r} is not a folder; name a folder with text files")
        return cls(
            workers=workers,
            link=Link.parse(link, latency),
            strategies=choose(strategies),
            steps=steps,
            seconds=seconds,
            size=size,
            model=parse_size(size),
            text=text,
            out=out,
            batch=batch,
            seed=seed,
            lr=lr,
            tune=tune,
        )

    @property
    def command(self) -> str:
        """The command line that makes the same comparison, but for the folder of the report."""
        words = ["thinwire", "compare", "--workers", str(self.workers)]
        words += ["--link", "loopback" if not self.link.emulated else self.link.rate_text]
        words += ["--latency", f"{self.link.latency_s * 1e3:g}ms"] if self.link.latency_s else []
        words += ["--strategies", *(recipe.file or recipe.name for recipe in self.strategies)]
        words += (
            ["--steps", str(self.steps)]
            if self.seconds is None
            else ["--seconds", f"{self.seconds:g}"]
        )
        words += ["--size", self.size, "--batch", str(self.batch), "--seed", str(self.seed)]
        words += ["--text", str(self.text)] if self.text is not None else []
        words += ["--lr", f"{self.lr:g}"] if self.lr is not None else []
        words += ["--tune"] if self.tune else []
        return shlex.join(words)


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value} is out of range: {least} to {most} is allowed")
