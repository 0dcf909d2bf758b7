"""Checked arguments of the command."""

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any, Self

from cyclopts import Parameter

from thinwire._launched import launched_rank
from thinwire.tools.app import Count, Names, Seconds
from thinwire.tools.compare.strategies import USUAL, choose
from thinwire.tools.network.netns import Link
from thinwire.tools.run.config import (
    DEVICES,
    MODELS,
    MOST_WORKERS,
    OPTIMIZERS,
    Recipe,
    Training,
    require_nothing_beside,
    require_one_of,
    require_sites,
    require_task,
    require_within,
    size_of,
)
from thinwire.tools.run.text import require_digits

_UNTYPED = ("out", "every", "quiet")
"""Arguments that are no part of a comparison."""


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """One comparison; its `seed` is the first one of several."""

    workers: int
    link: Link
    strategies: tuple[Recipe, ...]
    text: Path | None
    out: Path
    seeds: int
    tune: bool
    typed: list[str]
    every: bool
    quiet: bool
    joined_rank: int | None = None
    timeout: float | None = None

    @classmethod
    def check(
        cls,
        *,
        workers: Count | None = None,
        link: str | None = None,
        latency: str = "0ms",
        up: str | None = None,
        down: str | None = None,
        loss: str = "0%",
        congestion: str | None = None,
        strategies: Names | None = None,
        steps: Count | None = None,
        seconds: Seconds | None = None,
        model: str = "transformer",
        size: str | None = None,
        text: Path | None = None,
        out: Path | None = None,
        batch: Count | None = None,
        seed: Count = 0,
        seeds: Count = 1,
        lr: float | None = None,
        optimizer: str = "adamw",
        task: str | None = None,
        device: str = "auto",
        tune: bool = False,
        timeout: float | None = None,
        shard: Count = 1,
        every: Annotated[bool, Parameter(name="--all")] = False,
        quiet: bool = False,
    ) -> Self:
        """Return settings from the arguments; raise ValueError for the first invalid one."""
        if out is None:
            out = Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
        typed = _typed(cls.check.__kwdefaults__ or {}, {**locals()})
        launched = launched_rank(os.environ)
        if launched is not None:
            lines = any(one is not None for one in (link, up, down, congestion))
            lines |= latency not in ("0ms", "0") or loss != "0%"
            workers = _workers_of_launcher(workers, launched[1], lines)
            link = "loopback"
            up = None
            down = None
        workers = 2 if workers is None else workers
        if launched is None:
            require_within("workers", workers, 1, MOST_WORKERS)
        require_sites(workers, shard)
        given = {"text": text, "tune": tune, "size": size, "batch": batch}
        size, batch = "medium" if size is None else size, 8 if batch is None else batch
        require_within("batch", batch, 1, 4096)
        require_within("seed", seed, 0, 2**31)
        require_within("seeds", seeds, 1, 100)
        if steps is not None and seconds is not None:
            raise ValueError("steps and seconds exclude each other; give one of them")
        if steps is None and seconds is None:
            steps = 200
        if steps is not None:
            require_within("steps", steps, 1, 10_000_000)
        _require_a_second("seconds", seconds, " for each strategy")
        _require_a_second("timeout", timeout)
        if lr is not None and not 0 < lr < inf:
            raise ValueError(f"lr={lr:g} is out of range; it must be a positive number")
        require_one_of("optimizer", optimizer, tuple(OPTIMIZERS))
        require_one_of("device", device, DEVICES)
        require_one_of("model", model, tuple(MODELS))
        if model == "convolution":
            _require_no_data(task, text)
            require_digits()
        if task is not None:
            require_task(task)
            require_nothing_beside(task, **given)
        # Muon trains hidden matrices, which any model need not have
        usual = USUAL if model == "transformer" and task is None else USUAL[:-1]
        values = locals() | {
            "link": Link.parse(link, latency, up=up, down=down, loss=loss, congestion=congestion),
            "strategies": choose(usual if strategies is None else strategies),
            "model": size_of(model, size),
            "joined_rank": None if launched is None else launched[0],
        }
        return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})

    @property
    def sites(self) -> int:
        """Number of sites, which hold a model each: a worker, or the ranks that shard it."""
        return self.workers // self.shard

    @property
    def command(self) -> str:
        """Return the command line of this comparison, as typed, without the report folder."""
        launcher = [] if self.joined_rank is None else ["torchrun", "...", "-m"]
        return shlex.join([*launcher, "thinwire", "compare", *self.typed])


def _typed(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    words = []
    for name, default in defaults.items():
        value = given[name]
        if name not in _UNTYPED and value not in (None, False, default):
            values = value if isinstance(value, list | tuple) else [value]
            texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
            words += [f"--{name}", *(() if value is True else texts)]
    return words


def _workers_of_launcher(workers: int | None, ranks: int, lines: bool) -> int:
    if workers not in (None, ranks):
        raise ValueError(
            f"workers={workers}, but the launcher (such as torchrun) started {ranks} ranks; "
            "omit --workers"
        )
    if lines:
        raise ValueError(
            "under torchrun or another launcher, ranks train over the real network; omit "
            "--link, --up, --down, --latency, --loss and --congestion"
        )
    return ranks


def _require_a_second(name: str, seconds: float | None, suffix: str = "") -> None:
    if seconds is not None and not 1 <= seconds < inf:
        raise ValueError(
            f"{name}={seconds:g} is out of range; it must be at least 1 second{suffix}"
        )


def _require_no_data(task: str | None, text: Path | None) -> None:
    if task is None and text is None:
        return
    option = "--text" if task is None else "--task"
    raise ValueError(
        f"model='convolution' trains on scanned digits, but {option} brings other data; omit "
        "one of them"
    )
