"""One comparison from text to report."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.lab.launch import WorkerError, run_workers
from thinwire.lab.machine import describe_machine
from thinwire.lab.netns import Network, network, why_unavailable
from thinwire.lab.progress import Display
from thinwire.lab.results import summarise
from thinwire.lab.settings import Settings
from thinwire.lab.shape import ModelShape
from thinwire.lab.text import Corpus, read_folder, read_standard_library

__all__ = ["compare"]

_MOMENTUM = 0.9
_FEWEST_EVALUATIONS, _HELD_OUT_SEQUENCES = 8, 64
_LONGEST_RAMP_STEPS, _RAMP_STEPS_BY_CLOCK = 100, 60
_SHORTEST_TIMEOUT_S = 60.0


def compare(settings: Settings, display: Display) -> dict[str, Any]:
    """Trains every strategy in turn over the same link and returns what was measured.

    Args:
        settings: What to compare.
        display: Told about the progress.

    Returns:
        The content of `results.json`; the keys are described in `thinwire.lab.results`.

    Raises:
        ValueError: The text or the size cannot be used.
        WorkerError: A worker of the first strategy failed. Later ones end the comparison and are named under `failed`,
            so that what was measured before them is kept. Nothing is left running in any case.
    """
    shape = settings.shape
    corpus = read_folder(settings.text) if settings.text else read_standard_library()
    reason = why_unavailable() if settings.link.emulated else None
    started_s = time.time()
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] | None = None
    with _work_folder(settings.out) as work, _place(settings, reason) as place:
        common = {**_common(settings, shape, place), **_write_corpus(corpus, work, tune=settings.tune)}
        for recipe in settings.strategies:
            name = recipe.name
            own = {"strategy": name, "trainer": recipe.trainer, "options": dict(recipe.options)}
            config = {**common, **own, "lr": settings.lr or recipe.lr}
            try:
                runs.append(_run(name, config, settings, place, work / name, display))
            except WorkerError as error:
                if not runs:
                    raise WorkerError(f"{name}: {error}") from error
                failed = {"strategy": name, "error": str(error)}
                break
    return summarise(
        runs,
        settings=settings,
        shape=shape,
        corpus=corpus,
        machine=describe_machine(),
        emulated=place is not None,
        reason=reason,
        failed=failed,
        started_s=started_s,
        common={key: common[key] for key in ("momentum", "ramp_steps", "timeout_s", "context", "held_out_sequences")},
    )


def _run(
    name: str, config: Mapping[str, Any], settings: Settings, place: Network | None, work: Path, display: Display
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with display.strategy(name) as bar, contextlib.closing(run_workers(config, settings.workers, place, work)) as news:
        for event in news:
            if event["event"] == "result":
                result = {key: value for key, value in event.items() if key not in ("event", "unix_s")}
            else:
                bar.update(event["progress"], event["step"], event["loss"])
        bar.done()
    return result


@contextlib.contextmanager
def _place(settings: Settings, reason: str | None) -> Iterator[Network | None]:
    if not settings.link.emulated or reason is not None:
        yield None
    else:
        with network(settings.workers, settings.link) as place:
            yield place


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """A folder for the workers inside `out`, which belongs to this comparison until it ends."""
    work = out / ".work"
    with _claimed(out):
        shutil.rmtree(work, ignore_errors=True)  # of an earlier run that was killed
        try:
            work.mkdir()
        except OSError as error:
            raise _not_writable(out, error) from error
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Keep other comparisons out of a folder; the kernel lets go of it however this process ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise _not_writable(out, error) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"out={str(out)!r} is in use by another comparison: wait for it, or name another") from error
    else:
        yield
    finally:
        os.close(folder)


def _not_writable(out: Path, error: OSError) -> ValueError:
    return ValueError(f"out={str(out)!r} cannot be written: {error.strerror}; name another folder")


def _write_corpus(corpus: Corpus, work: Path, *, tune: bool) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, content in (("train", corpus.train), ("held_out", corpus.validation if tune else corpus.held_out)):
        path = work / f"{name}.bin"
        path.write_bytes(content)
        config |= {f"{name}_file": str(path.resolve()), f"{name}_bytes": len(content)}
    return config


def _evaluations(settings: Settings) -> int:
    if settings.seconds is None:
        return min(settings.evaluations, settings.steps or 1)
    return min(settings.evaluations, max(_FEWEST_EVALUATIONS, int(settings.seconds / 2)))


def _common(settings: Settings, shape: ModelShape, place: Network | None) -> dict[str, Any]:
    dense_bytes = 4 * 12 * shape.layers * shape.width**2
    steps = settings.steps
    return {
        "interface": place.interface if place else None,
        "width": shape.width,
        "layers": shape.layers,
        "context": shape.context,
        "batch": settings.batch,
        "seed": settings.seed,
        "momentum": _MOMENTUM,
        "steps": steps,
        "seconds": settings.seconds,
        "ramp_steps": _RAMP_STEPS_BY_CLOCK if steps is None else max(1, min(_LONGEST_RAMP_STEPS, steps // 4)),
        "evaluations": _evaluations(settings),
        "held_out_sequences": _HELD_OUT_SEQUENCES,
        # gloo waits this long for each message; a dense exchange over a slow link is not to be mistaken for a hang
        "timeout_s": _SHORTEST_TIMEOUT_S + 10 * settings.link.seconds(2 * dense_bytes) + 20 * settings.link.latency_s,
    }
