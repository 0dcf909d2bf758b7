"""The fields of a strategy, their configs, and the check that they go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args, get_type_hints

from thinwire import _validate as check
from thinwire.compress import COMPRESSIONS
from thinwire.compress.dgc import DGC
from thinwire.compress.low_rank import LowRank
from thinwire.compress.protocol import Compression
from thinwire.core.loss_scale import LossScale
from thinwire.errors import StrategyError
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.optim.layerwise import LAMB, LARS
from thinwire.pipeline.split import Pipeline
from thinwire.step.config import AMP, GradientMerge, Recompute
from thinwire.strategy.rules import rules_between


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Fields of `DistributedStrategy`, which documents them, and values derived from them."""

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
    compression: Compression | None = None

    expected_replicas: ClassVar[int | None] = None
    """Required number of ranks for each stage, if `from_fleet` was given one; `prepare` compares.

    It is not saved in the file.
    """

    def __post_init__(self) -> None:
        for name, value in self.on.items():
            kinds = tuple(COMPRESSIONS.values()) if name == "compression" else (CONFIGS[name],)
            advice = f"write {name}={kinds[-1].__name__}(...), or None for off"
            check.instance(name, value, kinds, advice=advice)
        conflicts = [
            f"{' and '.join(rule.pair)}: {rule.meaning}; {rule.remedy}"
            for rule in rules_between(self.on)
            if not rule.works
        ]
        conflicts += self._conflicts_inside()
        if conflicts:
            raise StrategyError("fields of the strategy conflict: " + "; ".join(conflicts))

    @property
    def gradient_compression(self) -> Compression | None:
        """Config of the field that compresses gradients, or changes of local updates; or None."""
        return self.dgc or self.low_rank or self.compression

    @property
    def on(self) -> dict[str, Any]:
        """Return the fields that are on, with their configs, in the order of the fields."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: config for name, config in present.items() if config is not None}

    @property
    def local(self) -> LocalSGD | AdaptiveLocalSGD | None:
        """Config of local updates; None if they are off."""
        return self.localsgd or self.adaptive_localsgd

    @property
    def _merge_steps(self) -> int:
        """Microbatches of an update on one rank."""
        return 1 if self.gradient_merge is None else self.gradient_merge.k_steps

    @property
    def _loss_scale(self) -> LossScale | None:
        return None if self.amp is None else self.amp.loss_scale

    def _conflicts_inside(self) -> Iterator[str]:
        for name in ("localsgd", "adaptive_localsgd"):
            if self.dgc is None or name not in self.on:
                continue
            if self.on[name].compression is not None:
                yield (
                    f"dgc and {name}.compression: both set the compression of the change; remove "
                    f"dgc, or give {name} compression=None"
                )
            if self.dgc.state_dtype == "bfloat16":
                yield (
                    f"dgc.state_dtype='bfloat16' and {name}: the residual of an averaging has the "
                    "dtype of its anchor; omit state_dtype"
                )
        if self.pipeline is not None and self.localsgd is not None and self.localsgd.by_time:
            yield (
                "pipeline and localsgd.round_seconds: the stages of a replica step together, but "
                "each would end a round by its own clock; omit round_seconds"
            )


_HINTS = get_type_hints(Fields)
CONFIGS: dict[str, type] = {field.name: get_args(_HINTS[field.name])[0] for field in fields(Fields)}
"""The config of every field."""
