"""Collect the measurements of a comparison into its record."""

import platform
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from thinwire.layout.traffic import ring_bytes
from thinwire.tools.compare.record import (
    Asked,
    Failure,
    Interruption,
    Results,
    Run,
    common_loss,
)
from thinwire.tools.compare.verdict import verdict
from thinwire.tools.run.config import OPTIMIZERS
from thinwire.tools.run.launch import cores
from thinwire.tools.run.text import Corpus

if TYPE_CHECKING:  # it needs the extra of the command
    from thinwire.tools.compare.settings import Settings

_AS_GIVEN = ("workers", "steps", "seconds", "seed", "seeds", "shard", "task", "device")
"""Settings that the record has as they were given."""
_LOSS_UNITS = {"transformer": "nats per byte", "convolution": "nats"}
_SCHEDULE = "rate: linear warm-up over a tenth, cosine to a tenth"


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and versions; no host name, no user name."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    named = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return named[1] if named else platform.processor() or platform.machine()


@dataclass(kw_only=True)
class Ledger:
    """Strategies that have finished, that have failed, and the one that is running."""

    settings: "Settings"
    corpus: Corpus | None
    emulated: bool
    reason: str | None
    started_s: float
    common: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=describe_machine)
    failures: list[Failure] = field(default_factory=list)
    current: str | None = None
    progress: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Strategies that have neither finished nor failed, in command-line order."""
        over = {run.strategy for run in self.runs} | {failure.strategy for failure in self.failures}
        return [recipe.name for recipe in self.settings.strategies if recipe.name not in over]

    def begin(self, name: str) -> None:
        """Note that the strategy `name` is running from here on."""
        self.current = name
        self.progress = 0.0

    def results(self, by: str | None = None) -> Results:
        """Return the record with its derived values; needs one run. `by` names an interruption."""
        settings = self.settings
        runs = self.runs
        task = self.settings.task
        target = common_loss([run.evaluations for run in runs])
        dense = next((run.evaluations[-1].loss for run in runs if run.strategy == "dense"), None)
        own = "" if task is None else "the task's own, else "
        optimizer = own + OPTIMIZERS[settings.optimizer]
        results = Results(
            started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_s)),
            headline=_headline(settings, self.emulated, self.reason),
            command=settings.command,
            link=Asked(
                str(settings.link)
                if settings.joined_rank is None
                else "the network between the ranks",
                settings.link.slower_bit_s,
                settings.link.latency_s,
                self.emulated,
                self.reason,
            ),
            settings={
                **{name: getattr(settings, name) for name in _AS_GIVEN},
                "batch_per_worker": settings.batch if task is None else None,
                "loss_of": "the validation part" if settings.tune else "the held-out part",
                "optimizer": f"{optimizer}; {_SCHEDULE}",
                "loss_unit": _LOSS_UNITS[settings.model.kind] if task is None else None,
                **self.common,
            },
            model={
                **(asdict(settings.model) if task is None else {"task": task}),
                "parameters": runs[0].parameters,
            },
            text=_about(self.corpus),
            machine=self.machine,
            failures=[*self.failures],
            interrupted=self._interrupted(by),
            common_loss=target,
            dense_loss=dense,
            strategies=[self._derived(run.reaching(target, dense)) for run in runs],
        )
        results.verdict, results.winner = verdict(results)
        return results

    def _interrupted(self, by: str | None) -> Interruption | None:
        missing = self.missing
        if not missing:
            return None
        during = self.current if self.current in missing else None
        progress = None if during is None else self.progress
        return Interruption(by, during, progress, [one for one in missing if one != during])

    def _derived(self, run: Run) -> Run:
        settings = self.settings
        link = self.settings.link
        recipe = next(recipe for recipe in settings.strategies if recipe.name == run.strategy)
        dense_bytes = ring_bytes(settings.sites, run.gradient_bytes)
        sent = run.library_bytes_per_step
        run = replace(
            run,
            summary=recipe.summary,
            document=recipe.document(self.common["ramp_steps"]),
            code=recipe.code,
            library_bytes_counted_by=recipe.counted_by,
            ratio_to_dense=dense_bytes / sent if sent and dense_bytes else None,
            exchange_share=max(0.0, 1 - run.median_bare_step_ms / run.median_step_ms),
        )
        if not self.emulated and link.rate_bit_s is not None:
            sent_s = link.seconds(run.evaluations[-1].library_bytes)
            run.seconds_on_asked_link = run.seconds + sent_s
        return run


def _about(corpus: Corpus | None) -> dict[str, Any]:
    if corpus is None:
        return {"source": "the task's own data"}
    return {
        "source": corpus.source,
        "files": corpus.files,
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "held_out_bytes": len(corpus.held_out),
        "sha256": corpus.digest,
    }


def _headline(settings: "Settings", emulated: bool, reason: str | None) -> str:
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    if settings.shard > 1:
        workers = f"{settings.sites} sites of {settings.shard} ranks that shard the model"
    tuning = " Losses are on the validation part." if settings.tune else ""
    if emulated:
        direction = " in each direction" if settings.link.down_bit_s is None else ""
        return (
            f"{workers}, each in a network namespace of its own, over an emulated link of "
            f"{settings.link}{direction}.{tuning}"
        )
    if settings.joined_rank is not None:
        return f"{workers}, started by a launcher, over the network between them.{tuning}"
    loopback = f"{workers} over this machine's loopback"
    if reason is None:
        return f"{loopback}, as requested: no link was emulated.{tuning}"
    return (
        f"The link of {settings.link} was NOT emulated ({reason}): {loopback}. The report and "
        f"--all add the time of the bytes on that link, without its latency.{tuning}"
    )
