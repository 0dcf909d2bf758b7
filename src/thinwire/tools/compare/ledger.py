"""The course of a comparison so far, and the results that follow from it at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.tools.compare.results import describe_machine, summarise
from thinwire.tools.compare.settings import Settings
from thinwire.tools.run.text import Corpus

__all__ = ["Ledger"]


@dataclass(kw_only=True)
class Ledger:
    """The strategies that have finished, that failed, and the one that is at work.

    Attributes:
        settings: What is compared.
        corpus: What is trained on; None for a task of the user's.
        emulated: Whether the link is emulated.
        reason: Why not.
        started_s: Unix time of the start.
        common: Settings of all strategies, for the report.
        runs: What was measured of those that finished.
        failures: Name and error of those that failed.
        current: The one at work.
        progress: Share of it that is over, in [0, 1].
    """

    settings: Settings
    corpus: Corpus | None
    emulated: bool
    reason: str | None
    started_s: float
    common: Mapping[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    current: str | None = None
    progress: float = 0.0

    @property
    def missing(self) -> list[str]:
        """Those that have neither finished nor failed, in the order of the command line."""
        over = {entry["strategy"] for entry in (*self.runs, *self.failures)}
        return [recipe.name for recipe in self.settings.strategies if recipe.name not in over]

    def begin(self, name: str) -> None:
        """Note that the strategy `name` is at work from here on."""
        self.current, self.progress = name, 0.0

    def finish(self, run: dict[str, Any]) -> None:
        """Note that it has finished."""
        self.runs.append(run)
        self.current = None

    def fail(self, error: str) -> None:
        """Note that it has failed."""
        assert self.current is not None, "a strategy had begun"
        self.failures.append({"strategy": self.current, "error": error})
        self.current = None

    def results(self, by: str | None = None) -> dict[str, Any]:
        """The content of `results.json`; at least one strategy has finished.

        Args:
            by: What interrupts the comparison; None where nothing does.
        """
        interrupted = None
        if self.missing:
            begun = [name for name in self.missing if name == self.current]
            interrupted = {
                "by": by,
                "during": self.current,
                "progress": self.progress if begun else None,
                "not_begun": [name for name in self.missing if name not in begun],
            }
        return summarise(
            self.runs,
            settings=self.settings,
            model=self.settings.model,
            corpus=self.corpus,
            machine=describe_machine(),
            emulated=self.emulated,
            reason=self.reason,
            failures=self.failures,
            interrupted=interrupted,
            started_s=self.started_s,
            common=self.common,
        )
