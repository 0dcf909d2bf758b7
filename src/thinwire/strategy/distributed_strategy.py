"""One typed description of how to train: which methods are on, and with which settings."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from thinwire.core.gradients import Clip
from thinwire.local.model import given_optimizer
from thinwire.members.members import Members
from thinwire.strategy import documents
from thinwire.strategy.engine import Engine
from thinwire.strategy.explain.text import explanation
from thinwire.strategy.fields import Fields
from thinwire.strategy.fleet import reader as fleet
from thinwire.strategy.parts import Setup
from thinwire.strategy.prepare import prepare

__all__ = ["DistributedStrategy"]


@dataclass(frozen=True, kw_only=True)
class DistributedStrategy(Fields):
    """What to combine in training; a field that is None is off.

    Every pair of fields either works together, with the meaning in `thinwire.strategy.rules`, or is
    refused here.

    Attributes:
        amp: The forward pass in a narrow type, with or without a loss scale.
        recompute: Less memory for activations, paid with a second forward pass.
        pipeline: The model in stages on several ranks.
        gradient_merge: One update, and one exchange, for several backward passes.
        dgc: Only the largest entries of every gradient travel; the rest is kept until it matters.
        lars: LARS, for large batches, instead of the given SGD.
        lamb: LAMB, for large batches, instead of the given Adam.
        localsgd: Ranks train on their own and average their parameters at an interval.
        adaptive_localsgd: The same as localsgd, at an interval that follows the loss.
        low_rank: Each matrix of gradients travels as two factors of few columns; the rest is kept.

    Raises:
        TypeError: A field is neither None nor its config.
        StrategyError: Fields that do not go together; lists all of them, with what to change.
    """

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: Callable[..., Any] | None = None,
        *,
        grad_clip: Clip | None = None,
        digest_every: int = 64,
        timeout: float | datetime.timedelta | None = None,
        find_unused_parameters: bool = False,
        plan: Any = None,
        members: Members | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Engine:
        """Make the engine that trains `model` by this strategy; the same call on every rank.

        A model and an optimizer belong to one engine, until `engine.close()` is called or the
        engine is gone. A new one then goes on from the parameters as they are.

        Args:
            model: Trained in place, not wrapped in DistributedDataParallel; under a pipeline the
                part of this rank.
            optimizer: Over the model's parameters, torch's or one of `thinwire.optim`; or a
                sequence of several, of different parameters, which all step in each update. The
                same object trains from then on, changed in place where the strategy has another
                method: rates set in its groups, its schedulers and its `state_dict` are those of
                the training. Calling its `step` is an error until `engine.close()`.
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
            plan: What `thinwire.plan` returned, or a row of it such as `plan["dgc"]`: rank 0 warns
                once where 20 rounds in a row, each an update or the local steps up to an averaging,
                take less or more time than it expected.
            members: What `thinwire.join` returned, with `localsgd` or `adaptive_localsgd`: ranks
                that come and go, without torchrun; see `thinwire.local_sgd`. `engine.save` writes a
                checkpoint of this member alone.
            mesh: Of sites and shards, with the dimensions "replicate" and "shard", over all ranks:
                the model was sharded by `fully_shard(model, mesh=mesh["shard"])` before the
                optimizer was made. Each rank exchanges its own shards with those that hold the same
                ones, nothing else crosses the line between the sites, and all ranks vote together.
                Norms are over all shards. With dgc, localsgd, adaptive_localsgd, gradient_merge,
                amp and recompute. With members: the one that `thinwire.join` was given, of this
                site alone.

        Raises:
            StrategyError: The strategy does not go with this model, optimizer or number of ranks;
                nothing has changed.
            Mismatch: Ranks disagree about strategy, model or optimizer.
            RuntimeError: Another engine trains the model, parameters of it, or by the optimizer.
        """
        setup = Setup(
            strategy=self,
            model=model,
            optimizer=given_optimizer(optimizer, model),
            loss_fn=loss_fn,
            grad_clip=grad_clip,
            digest_every=digest_every,
            timeout=timeout,
            find_unused_parameters=find_unused_parameters,
            plan=plan,
            members=members,
            mesh=mesh,
        )
        return prepare(setup)

    def explain(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
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
        given = None if optimizer is None else given_optimizer(optimizer, model)
        text = explanation(self, model, given, grad_clip)
        print(text)
        return text

    def to_dict(self) -> dict[str, Any]:
        """The strategy in plain values (dict, list, str, int, float, bool); what is None is left
        out.
        """
        return documents.to_dict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DistributedStrategy:
        """The strategy that `to_dict` described.

        Raises:
            StrategyError: An unknown or missing key, with its value and the closest known one; a
                conflict.
            TypeError, ValueError: A wrong value, with its dotted name such as
                `strategy.dgc.sparsity`.
        """
        return documents.from_dict(cls, document)

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML with every key explained; parents are made, the file is
        replaced as a whole.

        Raises:
            OSError: The file cannot be written.
        """
        documents.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> DistributedStrategy:
        """Read a YAML file, as `save` writes it or by hand.

        Raises:
            StrategyError: Not YAML, not a strategy, an unknown key or a conflict, with file and
                line.
            TypeError, ValueError: A wrong value, with file and line.
            OSError: The file cannot be read.
        """
        return documents.load(cls, Path(path))

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
        return fleet.from_fleet(cls, description)
