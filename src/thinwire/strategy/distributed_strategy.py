"""The typed description of a training run: the methods that are on, with their settings."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from thinwire import _validate as check
from thinwire.core.gradients import Clip
from thinwire.local.model import given_optimizer
from thinwire.members.members import Members
from thinwire.strategy import documents, fleet
from thinwire.strategy.engine import Engine
from thinwire.strategy.explain import explanation
from thinwire.strategy.fields import Fields
from thinwire.strategy.prepare import prepare
from thinwire.strategy.stages import Setup


@check.by_name
@dataclass(frozen=True, kw_only=True)
class DistributedStrategy(Fields):
    """Methods to combine in training. A field that is None is off.

    Every pair of fields either works together or is refused here; `thinwire.strategy.rules` has the
    meaning of each pair.

    Example::

        strategy = DistributedStrategy(dgc=DGC(sparsity=(0.99,)), recompute=Recompute(["blocks.*"]))
        engine = strategy.prepare(model, optimizer, loss_fn)
        loss = engine.train_step(inputs, targets)

    Attributes:
        amp: Forward pass in a narrow type, with or without a loss scale.
        recompute: Less memory for activations, at the cost of a second forward pass.
        pipeline: Stages of the model on several ranks.
        gradient_merge: One update, with one exchange, for several backward passes.
        dgc: Only the largest entries of each gradient are sent; the rest is kept as a residual.
        lars: LARS, for large batches, in place of the given SGD.
        lamb: LAMB, for large batches, in place of the given Adam.
        localsgd: Ranks train independently and average their parameters at an interval.
        adaptive_localsgd: As localsgd, but the interval follows the loss.
        low_rank: Each gradient matrix is sent as two factors of few columns; the error is kept.
        compression: Any method for gradients, such as `Quantized`; what is not sent is kept.

    Raises:
        TypeError: A field is neither None nor its config.
        StrategyError: Fields that do not go together; lists all conflicts, with what to change.
    """

    @check.by_name
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
        streams: int | None = None,
        verify: Literal["after", "before"] = "after",
    ) -> Engine:
        """Make the engine that trains `model` under this strategy. All ranks make the same call.

        A model and an optimizer belong to one engine until it is closed or garbage collected. A new
        engine then continues from the current parameters.

        Example::

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            engine = DistributedStrategy(dgc=DGC()).prepare(model, optimizer, loss_fn)
            for inputs, targets in loader:
                loss = engine.train_step(inputs, targets)

        Args:
            model: Trained in place. Do not wrap it in DistributedDataParallel. Under a pipeline
                each rank trains its own stage.
            optimizer: Optimizer of the model's parameters, from torch or `thinwire.optim`. Or a
                sequence of optimizers of different parameters, which all step in each update. The
                same object trains, changed in place if the strategy replaces its method: its
                groups, schedulers and `state_dict` stay live. Calling its `step` is an error until
                `engine.close()`.
            loss_fn: `loss_fn(model(inputs), targets)` is this rank's mean loss; None if your loop
                computes the loss.
            grad_clip: `ClipByGlobalNorm`, `ClipByNorm` or `ClipByValue`, applied to the mean
                gradient before weight decay and update. Under local updates it clips this rank's
                own gradient; under a pipeline it spans all stages. With `dgc` and an SGD,
                `ClipByNorm` only, or `local_grad_clip_norm` of `dgc`.
            digest_every: Updates within which diverged ranks are detected, >= 1. The agreement of
                every update carries a digest of parameters and optimizer; under local updates, the
                agreement of every averaging. 0 disables it.
            timeout: Longest wait for other ranks in one call, in seconds or as a timedelta, the
                same on all ranks. None takes the time-out of the process group. Saving, the initial
                copy of the model and compilation may take longer, as long as they make progress.
            find_unused_parameters: True if ranks may use different parameters in a step; otherwise
                that is an error. A missing gradient counts as zero if at least one rank has one.
                Costs 24 bytes a rank and update, and a byte for every parameter if ranks differ.
                The exchange then follows the backward pass.
            plan: Result of `thinwire.plan`, or a row of it such as `plan["dgc"]`. Rank 0 warns once
                if 20 rounds in a row take less or more time than planned. A round is an update, or
                the local steps up to an averaging.
            members: Result of `thinwire.join`, for ranks that join and leave without torchrun; see
                `thinwire.local_sgd`. Needs `localsgd` or `adaptive_localsgd`. `engine.save` writes
                a checkpoint of this member alone.
            mesh: Device mesh of all ranks with the dimensions "replicate" (sites) and "shard".
                Shard the model by `fully_shard(model, mesh=mesh["shard"])` before making the
                optimizer. Each rank exchanges its shards with the ranks that hold the same ones;
                only these exchanges and the votes of all ranks cross sites. Norms are over all
                shards. Works with dgc, localsgd, adaptive_localsgd, gradient_merge, amp and
                recompute. With members: the mesh given to `thinwire.join`, of this site alone.
            streams: Connections to each other rank for large messages, >= 1, the same on all ranks;
                None: by their number, at most 32. Fewer if a rank may open few files. Same bits.
            verify: When ranks compare what exists only after a dense sum, such as the sum itself:
                "before" the update is applied, by one more collective, or "after", in the next
                update and before anything is saved.

        Raises:
            StrategyError: The strategy does not go with this model, optimizer or number of ranks;
                nothing has changed.
            Mismatch: Ranks disagree about strategy, model or optimizer.
            RuntimeError: Another engine trains the model, some of its parameters, or uses the
                optimizer.
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
            streams=streams,
            verify=verify,
        )
        return prepare(setup)

    def explain(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        grad_clip: Clip | None = None,
    ) -> str:
        """Print and return the stages of a step, in order.

        Example::

            DistributedStrategy(localsgd=LocalSGD(k_steps=16)).explain(model, optimizer)

        Args:
            model: If given, the text also says which tensors are exchanged densely, and why.
            optimizer: If given, the text also says which optimizer will train, and which settings
                it takes over.
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
        """Return the strategy as plain values (dict, list, str, int, float, bool), without fields
        that are None.

        Example:
            >>> from thinwire import GradientMerge
            >>> DistributedStrategy(gradient_merge=GradientMerge(k_steps=4)).to_dict()
            {'gradient_merge': {'k_steps': 4, 'avg': True}}
        """
        return documents.to_dict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DistributedStrategy:
        """Return the strategy that `to_dict` described.

        Example:
            >>> DistributedStrategy.from_dict({"gradient_merge": {"k_steps": 4}}).on
            {'gradient_merge': GradientMerge(k_steps=4, avg=True)}

        Raises:
            StrategyError: An unknown or missing key, with its value and the closest known one; a
                conflict.
            TypeError, ValueError: A wrong value, with its dotted name such as
                `strategy.dgc.sparsity`.
        """
        return documents.from_dict(cls, document)

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML with every key explained. Parents are made; an existing file
        is replaced atomically.

        Example::

            DistributedStrategy(dgc=DGC()).save("strategy.yaml")

        Raises:
            OSError: The file cannot be written.
        """
        documents.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> DistributedStrategy:
        """Read a YAML file, written by `save` or by hand.

        Example::

            strategy = DistributedStrategy.load("strategy.yaml")

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

        Example:
            >>> fleet = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
            >>> DistributedStrategy.from_fleet(fleet).gradient_merge
            GradientMerge(k_steps=4, avg=True)

        Warns:
            UserWarning: Once, with every setting that has no effect or works differently here.

        Raises:
            TypeError: A flag is not a bool, or a value has a wrong type.
            StrategyError: Some settings are unknown or cannot be carried over; lists all of them,
                with the reasons.
        """
        return fleet.from_fleet(cls, description)
