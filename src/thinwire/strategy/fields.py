"""The fields of a strategy, their configs, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from thinwire import _validate as check
from thinwire.compress.dgc import DGC
from thinwire.compress.low_rank import LowRank
from thinwire.errors import StrategyError
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.optim.config import LAMB, LARS
from thinwire.pipeline.config import Pipeline
from thinwire.step.config import AMP, GradientMerge, Recompute
from thinwire.strategy.rules import rules_among

__all__ = ["CONFIGS", "Fields"]

CONFIGS: dict[str, type] = {
    "amp": AMP,
    "recompute": Recompute,
    "pipeline": Pipeline,
    "gradient_merge": GradientMerge,
    "dgc": DGC,
    "lars": LARS,
    "lamb": LAMB,
    "localsgd": LocalSGD,
    "adaptive_localsgd": AdaptiveLocalSGD,
    "low_rank": LowRank,
}
"""The config of every field."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of `DistributedStrategy`, which documents them, and what follows from them."""

    amp: AMP | None = None
    recompute: Recompute | None = None
    pipeline: Pipeline | None = None
    gradient_merge: GradientMerge | None = None
    dgc: DGC | None = None
    lars: LARS | None = None
    lamb: LAMB | None = None
    localsgd: LocalSGD | None = None
    adaptive_localsgd: AdaptiveLocalSGD | None = None
    low_rank: LowRank | None = None

    expected_replicas: ClassVar[int | None] = None
    """How many ranks must hold each stage, where `from_fleet` was told so; `prepare` compares.

    Not part of the file.
    """

    def __post_init__(self) -> None:
        for name, config in CONFIGS.items():
            value = getattr(self, name)
            if value is not None:
                advice = f"write {name}={config.__name__}(...), or None for off"
                check.instance(name, value, config, advice=advice)
        conflicts = [
            *self._conflicting_fields(),
            *self._double_compression(),
            *self._narrow_changes(),
            *self._rounds_by_time(),
        ]
        if conflicts:
            raise StrategyError("parts of the strategy do not go together: " + "; ".join(conflicts))

    @property
    def compression(self) -> DGC | LowRank | None:
        """How gradients, or what local updates send, are compressed by a field of its own."""
        return self.dgc or self.low_rank

    @property
    def on(self) -> dict[str, Any]:
        """The fields that are on, with their configs, in the order of the fields."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: config for name, config in present.items() if config is not None}

    @property
    def local(self) -> LocalSGD | AdaptiveLocalSGD | None:
        """How ranks train on their own between averagings, if they do."""
        return self.localsgd or self.adaptive_localsgd

    def _conflicting_fields(self) -> list[str]:
        return [
            f"{' and '.join(rule.pair)}: {rule.meaning}; {rule.remedy}"
            for rule in rules_among(self.on)
            if not rule.works
        ]

    def _double_compression(self) -> list[str]:
        local = ("localsgd", "adaptive_localsgd")
        return [
            f"dgc and {name}.compression: both say how the change is compressed; remove dgc, or "
            f"give {name} compression=None"
            for name in local
            if self.dgc is not None and name in self.on and self.on[name].compression is not None
        ]

    def _narrow_changes(self) -> list[str]:
        local = ("localsgd", "adaptive_localsgd")
        return [
            f"dgc.state_dtype='bfloat16' and {name}: what an averaging does not send is kept in "
            "the type of its anchor; leave state_dtype out"
            for name in local
            if self.dgc is not None and name in self.on and self.dgc.state_dtype == "bfloat16"
        ]

    def _rounds_by_time(self) -> list[str]:
        if self.pipeline is None or self.localsgd is None or not self.localsgd.by_time:
            return []
        return [
            "pipeline and localsgd.round_seconds: the stages of a replica make their steps "
            "together, and each would end a round by its own clock; leave round_seconds out"
        ]
