"""Run one comparison, from the training text to the report."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thinwire.tools.compare.record import Failure, Results, Run, mean_of
from thinwire.tools.compare.results import Ledger
from thinwire.tools.compare.settings import Settings
from thinwire.tools.network.netns import Network, network, why_unavailable
from thinwire.tools.report.progress import Display
from thinwire.tools.run.config import Job, ModelSize, Recipe, RunConfig
from thinwire.tools.run.launch import News, WorkerError, joined, release, run_here, run_workers
from thinwire.tools.run.text import Corpus, read_digits, read_folder, read_standard_library

_FEWEST_EVALUATIONS, _HELD_OUT_SEQUENCES = 8, 64
_LONGEST_RAMP_STEPS, _RAMP_STEPS_BY_CLOCK = 100, 60
_SHORTEST_TIMEOUT_S = 60.0
_TASK_TIMEOUT_S = 600.0
"""Time-out for a user's task, whose size and evaluation time are unknown."""
_TRAINING = "thinwire.tools.run.training:TrainingRun"
_CHECK = "thinwire.tools.run.training:Check"
Keep = Callable[[Results], None]


def compare(settings: Settings, display: Display, keep: Keep = lambda _: None) -> Results:
    """Train every strategy in turn over the same link and return what was measured."""
    if settings.device == "cuda" and settings.joined_rank is None:  # else ranks agree on it later
        from thinwire.tools.run.task import require_gpu

        require_gpu()
    corpus = _read_corpus(settings)
    reason = why_unavailable() if settings.link.emulated else None
    started_s = time.time()
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(_work_folder(settings))
        if settings.joined_rank is not None:
            text = None if corpus is None else corpus.digest
            shared = {"the command": settings.command, "text": text}
            stack.enter_context(joined(shared, _timeout_s(settings)))
        emulated = None
        if settings.link.emulated and reason is None:
            emulated = stack.enter_context(network(settings.sites, settings.link))
        files = {} if corpus is None else _write_corpus(corpus, work, tune=settings.tune)
        configs = [_config(recipe, settings, emulated, files) for recipe in settings.strategies]
        ledger = Ledger(
            settings=settings,
            corpus=corpus,
            emulated=emulated is not None,
            reason=reason,
            started_s=started_s,
            common=_in_common(configs[0], settings),
        )
        _check(configs, settings, work / ".check", display)
        try:
            for config in configs:
                ledger.begin(config.recipe.name)
                try:
                    seeded = (replace(config, seed=config.seed + n) for n in range(settings.seeds))
                    runs = [_run(one, settings, emulated, work, display, ledger) for one in seeded]
                    ledger.runs.append(mean_of(runs))
                except WorkerError as error:
                    ledger.failures.append(Failure(config.recipe.name, str(error)))
                    if settings.joined_rank is not None:  # the ranks may not be in step any more
                        break
                if ledger.runs and ledger.missing:
                    keep(ledger.results())
        except (KeyboardInterrupt, SystemExit) as stop:
            if ledger.runs:
                by = "Ctrl-C" if isinstance(stop, KeyboardInterrupt) else "SIGTERM"
                keep(ledger.results(by=by))
            raise
    if not ledger.runs:
        raise WorkerError(
            "\n".join(f"{failure.strategy}: {failure.error}" for failure in ledger.failures)
        )
    return ledger.results()


def _read_corpus(settings: Settings) -> Corpus | None:
    """Return the training data of the built-in models; None for a user's task."""
    if settings.task is not None:
        return None
    if not isinstance(settings.model, ModelSize):
        return read_digits()
    return read_folder(settings.text) if settings.text else read_standard_library()


def _config(
    recipe: Recipe, settings: Settings, emulated: Network | None, files: Mapping[str, str]
) -> RunConfig:
    if settings.steps is None:
        ramp_steps = _RAMP_STEPS_BY_CLOCK
        most = max(_FEWEST_EVALUATIONS, int((settings.seconds or 0) / 2))
    else:
        ramp_steps = max(1, min(_LONGEST_RAMP_STEPS, settings.steps // 4))
        most = settings.steps
    return RunConfig(
        **settings.shared | {"evaluations": min(settings.evaluations, most)},
        recipe=recipe,
        ramp_steps=ramp_steps,
        train_file=files.get("train_file", ""),
        held_out_file=files.get("held_out_file", ""),
        held_out_sequences=_HELD_OUT_SEQUENCES,
        interface=emulated.interface if emulated else None,
    )


def _in_common(config: RunConfig, settings: Settings) -> dict[str, Any]:
    """Return the settings that all strategies share, for the report."""
    common = {"ramp_steps": config.ramp_steps, "timeout_s": _timeout_s(settings)}
    if isinstance(config.model, ModelSize) and config.task is None:
        common |= {"context": config.model.context, "held_out_sequences": config.held_out_sequences}
    return common


def _timeout_s(settings: Settings) -> float:
    """Return gloo's time-out per message; a dense exchange over a slow link must not reach it."""
    if settings.timeout is not None:
        return settings.timeout
    dense_bytes = 4 * settings.model.about_parameters
    return (
        (_SHORTEST_TIMEOUT_S if settings.task is None else _TASK_TIMEOUT_S)
        + 10 * settings.link.seconds(2 * dense_bytes)
        + 20 * settings.link.latency_s
    )


def _check(configs: Sequence[RunConfig], settings: Settings, work: Path, display: Display) -> None:
    """Rehearse strategy files and sharded runs; built-in strategies work on whole models."""
    unknown = {
        run.recipe.name: run for run in configs if run.recipe.file is not None or run.shard > 1
    }
    if not unknown:
        return
    runs = [asdict(run) for run in unknown.values()]
    refused: dict[str, str] = {}
    name = "the first strategy"
    try:
        with (
            display.strategy("checking") as bar,
            _started(_CHECK, {"runs": runs}, settings, None, work) as news,
        ):
            for event in news:
                if event["event"] == "checking":
                    name = event["strategy"]
                    bar.note(f"trying {name} on the model")
                elif event["event"] == "result":
                    refused = event["refused"]
    except WorkerError as error:
        raise WorkerError(f"{name}, tried before the training: {error}") from error
    if refused:
        raise ValueError(
            "; ".join(
                f"strategies={unknown[name].recipe.file or name!r} does not work with the model: "
                f"{why}"
                for name, why in refused.items()
            )
            + "; nothing has been trained"
        )


def _run(
    config: RunConfig,
    settings: Settings,
    emulated: Network | None,
    work: Path,
    display: Display,
    ledger: Ledger,
) -> Run:
    """Train one strategy from one seed; the link limits are lifted while it prepares."""
    name = config.recipe.name
    folder = work / config.recipe.name
    if settings.seeds > 1:
        folder = folder.with_name(f"{name}-{config.seed}")
        name += f", seed {config.seed}"
    result: dict[str, Any] = {}
    if emulated:
        emulated.lift()
    config = replace(config, launched_unix_s=time.time())
    with (
        display.strategy(name) as bar,
        _started(_TRAINING, asdict(config), settings, emulated, folder) as news,
    ):
        bar.note("preparing: processes, imports, kernels")
        for event in news:
            match event["event"]:
                case "prepared":
                    if emulated:
                        emulated.limit()
                    if settings.joined_rank is None:
                        release(folder)
                case "result":
                    result = {**event}
                    del result["event"], result["unix_s"]
                case _:
                    ledger.progress = event["progress"]
                    bar.update(event["progress"], event["step"], event["loss"])
    return Run.of(config.seed, result)


def _started(
    task: str,
    config: Mapping[str, Any],
    settings: Settings,
    emulated: Network | None,
    work: Path,
) -> "contextlib.closing[News]":
    """Start a job on our own workers, or on the ranks that torchrun has started."""
    job = Job(task=task, config=config, timeout_s=_timeout_s(settings))
    here = settings.joined_rank is not None
    return contextlib.closing(
        run_here(job) if here else run_workers(job, settings.workers, emulated, work)
    )


@contextlib.contextmanager
def _work_folder(settings: Settings) -> Iterator[Path]:
    """Yield a work folder inside `out`; `out` is locked until the comparison ends."""
    if settings.joined_rank:  # rank 0 alone has a report to write
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    out = settings.out
    work = out / ".work"
    made = not out.exists()
    try:
        with contextlib.ExitStack() as stack:
            try:
                out.mkdir(parents=True, exist_ok=True)
                lock = os.open(out, os.O_RDONLY)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
                shutil.rmtree(work, ignore_errors=True)  # of an earlier run that was killed
                work.mkdir()
            except OSError as error:
                problem = f"cannot be written: {error.strerror}; choose another folder"
                if isinstance(error, BlockingIOError):
                    problem = (
                        "is in use by another comparison; wait for it, or choose another folder"
                    )
                raise ValueError(f"out={str(out)!r} {problem}") from error
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            yield work
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # it is not empty
                out.rmdir()
        raise


def _write_corpus(corpus: Corpus, work: Path, *, tune: bool) -> dict[str, str]:
    """Write the text into files, and name these as `RunConfig` does."""
    held_out = corpus.validation if tune else corpus.held_out
    files = {}
    for name, content in (("train", corpus.train), ("held_out", held_out)):
        path = work / f"{name}.bin"
        path.write_bytes(content)
        files[f"{name}_file"] = str(path.resolve())
    return files
