"""One typed description of how to train: which methods are on, and with which settings."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire import _validate as check
from thinwire.compress.dgc import DGC
from thinwire.compress.low_rank import LowRank
from thinwire.errors import StrategyError
from thinwire.local.config import AdaptiveLocalSGD, LocalSGD
from thinwire.optim.config import LAMB, LARS
from thinwire.pipeline.config import Pipeline
from thinwire.step.config import AMP, GradientMerge, Recompute
from thinwire.strategy.rules import rules_among

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from thinwire.core.clip import Clip
    from thinwire.strategy.engine import Engine

__all__ = ["CONFIGS", "DistributedStrategy"]

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
class DistributedStrategy:
    """What to combine in training; a field that is None is off.

    Every pair of fields either works together, with the meaning in `thinwire.strategy.rules`, or is
    refused here.

    Attributes:
        amp: The forward pass in a narrow type, with or without a loss scale.
        recompute: Less memory for activations, paid with a second forward pass.
        pipeline: The model in stages on several ranks.
        gradient_merge: One update, and one exchange, for several backward passes.
        dgc: Only the largest entries of every gradient travel; the rest is kept until it matters.
        lars: LARS, for large batches, in the place of the given SGD.
        lamb: LAMB, for large batches, in the place of the given Adam.
        localsgd: Ranks train on their own and average their parameters at an interval.
        adaptive_localsgd: The same as localsgd, at an interval that follows the loss.
        low_rank: Each matrix of gradients travels as two factors of few columns; the rest is kept.

    Raises:
        TypeError: A field is neither None nor its config.
        StrategyError: Fields that do not go together; lists all of them, with what to change.
    """

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

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        *,
        grad_clip: Clip | None = None,
        digest_every: int = 64,
        timeout: float | datetime.timedelta | None = None,
        find_unused_parameters: bool = False,
    ) -> Engine:
        """Make the engine that trains `model` by this strategy; the same call on every rank.

        Args:
            model: Trained in place, not wrapped in DistributedDataParallel; under a pipeline the
                part of this rank.
            optimizer: Over the model's parameters, torch's or one of `thinwire.optim`. The same
                object trains from then on, changed in place where the strategy has another method:
                rates set in its groups, its schedulers and its `state_dict` are those of the
                training. Calling its `step` is an error until `engine.close()`.
            loss_fn: `loss_fn(model(inputs), targets)` is this rank's mean loss; None for a loop of
                your own.
            grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`, of the mean gradient
                before weight decay and update; under local updates of this rank's own gradient,
                under a pipeline over all stages. Where `DGCMomentum` trains, `ClipByNorm` only, or
                `local_grad_clip_norm` of `dgc`.
            digest_every: Updates within which ranks that do not hold the same are found, >= 1: a
                digest of parameters and optimizer rides in the agreement of every update; under
                local updates, in that of every averaging. 0 compares nothing.
            timeout: For how long a rank waits for others in one call, in seconds or as a timedelta;
                None: as long as the process group itself would. The same on all ranks. Saving,
                copying the model at the start and compiling may take longer, as long as they go on.
            find_unused_parameters: Whether ranks may use different parameters in a step: a gradient
                that is absent counts as zero where at least one rank has one. Costs 24 bytes a rank
                and update, a byte for every parameter where ranks differ, and the exchange follows
                the backward pass. Without it that is an error.

        Raises:
            StrategyError: The strategy does not go with this model, optimizer or number of ranks;
                nothing has changed.
            Mismatch: Ranks disagree about strategy, model or optimizer.
        """
        from thinwire.strategy.prepare import prepare

        return prepare(
            self,
            model,
            optimizer,
            loss_fn,
            grad_clip=grad_clip,
            find_unused_parameters=find_unused_parameters,
            digest_every=digest_every,
            timeout=timeout,
        )

    def explain(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        grad_clip: Clip | None = None,
    ) -> str:
        """Print, and return, what a step will do, in order.

        Args:
            model: With it the text also says which tensors are exchanged densely, and why.
            optimizer: With it the text also says which optimizer will train, and what is taken
                over.
            grad_clip: As in `prepare`.

        Raises:
            StrategyError, ValueError: The strategy does not go with this model or optimizer, as in
                `prepare`.
        """
        from thinwire.strategy.explain import explanation

        text = explanation(self, model, optimizer, grad_clip)
        print(text)
        return text

    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain values (dict, list, str, int, float, bool); what is None is left
        out.
        """
        from thinwire.strategy.documents import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DistributedStrategy:
        """The strategy that `to_dict` described.

        Raises:
            StrategyError: An unknown or missing key, with its value and the closest known one; a
                conflict.
            TypeError, ValueError: A wrong value, with its dotted name such as
                `strategy.dgc.sparsity`.
        """
        from thinwire.strategy.documents import from_dict

        return from_dict(document)

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML with every key explained; parents are made, the file is
        replaced as a whole.

        Raises:
            OSError: The file cannot be written.
        """
        from thinwire.strategy.yaml_files import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> DistributedStrategy:
        """Read a YAML file, as `save` writes it or by hand.

        Raises:
            StrategyError: Not YAML, not a strategy, an unknown key or a conflict, with file and
                line.
            TypeError, ValueError: A wrong value, with file and line.
            OSError: The file cannot be read.
        """
        from thinwire.strategy.yaml_files import load

        return load(Path(path))

    @classmethod
    def from_fleet(cls, description: Mapping[str, Any]) -> DistributedStrategy:
        """Read a Paddle fleet description, such as `{"gradient_merge": True,
        "gradient_merge_configs": {...}}`.

        Warns:
            UserWarning: Once, with all that has no effect or works differently here.

        Raises:
            TypeError: A flag is not a bool, or a value has a wrong type.
            StrategyError: What cannot be carried over and what is unknown, all of it, with the
                reasons.
        """
        from thinwire.strategy.fleet import from_fleet

        return from_fleet(description)

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
