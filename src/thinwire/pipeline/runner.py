"""Forward and backward passes of a mini-batch over the stages of a pipeline."""

import json
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.comm import Pending, elsewhere, mapping_of
from thinwire.comm.grid import Grid
from thinwire.errors import Mismatch, ThinwireError
from thinwire.pipeline.config import Pipeline
from thinwire.pipeline.rehearsal import failure, rehearse
from thinwire.pipeline.structure import content, describe, micro_batches
from thinwire.pipeline.worker import Parcel, StageWorker

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

__all__ = ["PipelineRunner"]

_CONCLUSION = struct.Struct("<?Bd")
_LOSS_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KEPT_SCHEDULES = 4
_TRANSFER = "passing activations and gradients between stages"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Schedule of the mini-batches of one look."""

    source: Parcel | None
    result: Parcel | None
    schedule: "PipelineScheduleSingle | None"


class PipelineRunner:
    """The pipeline of one replica, which runs mini-batches through its stages; every rank of it
    makes the same calls.

    Communication: per call 24 bytes a rank to agree on the mini-batch and 10 to tell the loss and
    how it ended; nobody waits for these before an update, whose agreement tells of failures, as the
    runner is a check of it. Per micro-batch what a stage returns goes to the next one, and where
    that needs a gradient, this comes back. The first mini-batch of a new look (shapes, types,
    training or evaluation mode) costs the forward pass of one micro-batch more, in which the stages
    learn what they will receive.

    Failure: an error in the model or the loss function is raised by all stages at the end of the
    call, by its own rank as it was; gradients are then to be discarded, and the pipeline goes on. A
    dead or stopped stage is `PeerLost` or `PeerStalled` on the others within the time-out of the
    group; after it the pipeline is of no more use.

    Args:
        stage: This rank's, one of those that `split_model` returns; its device is that of its first
            parameter.
        config: Of the pipeline.
        grid: The ranks; as many stages as `config` has.
        loss_fn: (output of the last stage, targets) -> the mean loss over a micro-batch, one
            element. None: nothing can be run.
        dtype: Of autocast, for the forward pass and the loss; None: without.
        scale: The factor of the loss in force, asked for in every step.
    """

    def __init__(
        self,
        stage: nn.Module,
        config: Pipeline,
        grid: Grid,
        loss_fn: Callable[..., Any] | None,
        *,
        dtype: torch.dtype | None = None,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._stage, self._config, self._grid, self._scale = stage, config, grid, scale
        self._device = next(
            (t.device for t in [*stage.parameters(), *stage.buffers()]), torch.device("cpu")
        )
        self._worker = StageWorker(stage, self._device, dtype, loss_fn)
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        self._passed_bytes = 0
        self._broken = False
        self._ending: Pending[Tensor] | None = None
        """How the passes ended on all stages, on its way."""
        if grid.stages > 1:
            # it takes seconds, here while no stage waits for another
            import thinwire.pipeline.schedule  # noqa: F401

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank gave to the other stages so far, agreements included."""
        return self._passed_bytes + self._grid.peers.bytes_sent

    def step(
        self,
        inputs: Any,
        targets: Any,
        problem: Exception | None = None,
        *,
        concludes: bool = True,
    ) -> Tensor | None:
        """Forward and backward passes of all micro-batches.

        Args:
            inputs: Of the model: a tensor (B, ...), a tuple of several arguments, or a mapping of
                keyword arguments, cut along their first dimension. Used by the first stage.
            targets: Tensor, or tensors nested in tuples, lists and mappings; a first dimension is B
                or a multiple of it. Used by the last stage; equal on all stages.
            problem: An error of this stage before the step; raised, and told to the others.
            concludes: Whether to wait for how it ended on other stages. Where not, an agreement
                follows that has this runner as a check, and then `conclude`.

        Returns:
            None where it does not conclude, else the mean loss over the micro-batches, shape (),
            detached, unscaled, the same on all stages. To `p.grad` of this stage is added the
            gradient of that mean times the loss scale.

        Raises:
            ValueError: `micro_batches` does not divide B; the loss has more than one element.
            Mismatch: The stages were given different mini-batches.
            ThinwireError: Another stage failed.
        """
        return self._run(inputs, targets, backward=True, problem=problem, concludes=concludes)

    def say(self, turn: Any) -> dict[str, Any]:
        """What this stage tells all ranks in an agreement: its error."""
        if self._ending is None or not turn.first:
            return {}
        self._broken = False
        error = self._worker.error
        return {} if error is None else {"stage failed": [type(error).__name__, str(error)]}

    def judge(self, turn: Any, answers: Any) -> None:
        """Raise the error of a stage that failed."""
        failed = next(answers.of("stage failed"), None) if turn.first else None
        if failed is None:
            return
        error = self._worker.error
        self.conclude()
        if error is not None:
            raise error
        rank, told = failed
        raise failure(rank % self._grid.stages, self._grid.stages, *told)

    def conclude(self) -> Tensor:
        """The mean loss of a step that did not wait for it, once all ranks have agreed."""
        assert self._ending is not None, "a step was made"
        ending, self._ending = self._ending, None
        rows = ending.wait().cpu()
        self._worker.begin([], None, None, 1.0)  # frees the mini-batch
        _, kind, value = _CONCLUSION.unpack(rows[-1].numpy().tobytes())
        return torch.tensor(value, dtype=_LOSS_TYPES[kind], device=self._device)

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """The mean loss without gradients, as `step` returns it; in training or evaluation mode as
        the modules are.
        """
        loss = self._run(inputs, targets, backward=False)
        assert loss is not None, "it concludes"
        return loss

    def _run(
        self,
        inputs: Any,
        targets: Any,
        *,
        backward: bool,
        problem: Exception | None = None,
        concludes: bool = True,
    ) -> Tensor | None:
        if self._broken:
            raise ThinwireError(
                "this pipeline broke in an earlier step: restart from the last checkpoint"
            )
        count, worker = self._config.micro_batches, self._worker
        parts, key, known = self._agreed(inputs, targets, problem, backward=backward)
        self._broken = True  # until the stages have come to an end together
        if not known:
            self._remember(key, self._new_plan(parts[0][0], backward=backward))
        plan = self._plans[key]
        self._plans.move_to_end(key)
        worker.begin(parts, plan.source, plan.result, self._scale() / count if backward else 1.0)
        if plan.schedule is None:
            self._run_alone(count, backward=backward)
        else:
            self._run_schedule(plan.schedule, count, backward=backward)
        self._passed_bytes += count * (plan.result.bytes_forth if plan.result else 0)
        self._passed_bytes += count * (plan.source.bytes_back if plan.source and backward else 0)
        self._ending = self._told_ending()
        if not concludes:
            return None
        loss = self._concluded()
        worker.begin([], None, None, 1.0)  # frees the mini-batch
        return loss

    def _agreed(
        self, inputs: Any, targets: Any, problem: Exception | None, *, backward: bool
    ) -> tuple[list[tuple[Any, Any]], str, bool]:
        """The micro-batches, the key of their plan, whether all stages have it; or an error on all
        stages.
        """
        parts: list[tuple[Any, Any]] = []
        facts: dict[str, Any] = {"call": "step" if backward else "evaluate", "problem": None}
        try:
            if problem is not None:
                raise problem
            if self._worker.loss_fn is None:
                raise RuntimeError(
                    "a pipeline needs a loss function, and prepare was given none on this rank: "
                    "pass prepare(model, optimizer, loss_fn)"
                )
            if backward and not torch.is_grad_enabled():
                raise RuntimeError(
                    "a step needs gradients, which torch.no_grad() turned off: use evaluate instead"
                )
            parts = micro_batches(inputs, targets, self._config.micro_batches)
            facts |= {
                "inputs": describe(inputs),
                "targets": describe(targets),
                "content of targets": content(targets),
            }
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        if problem is not None:
            facts["problem"] = f"{type(problem).__name__}: {problem}"
        key = json.dumps(
            [
                facts["call"],
                describe(parts[0][0] if parts else None),
                self._stage.training,
                self._looks(),
            ]
        )
        known = key in self._plans
        payload = json.dumps({"facts": facts, "known": known}).encode()
        what = "agreeing on a mini-batch"
        answers = [mapping_of(a) for a in self._grid.peers.gather_bytes(payload, what=what)]
        if problem is not None:
            raise problem
        for rank, answer in enumerate(answers):
            if answer.keys() != {"facts", "known"}:
                raise elsewhere(what, rank, answer)
        _require_equal([answer["facts"] for answer in answers])
        return parts, key, all(answer["known"] for answer in answers)

    def _looks(self) -> list[str]:
        """Properties of a stage that may change, and with them what it sends."""
        return [f"{p.dtype} {p.requires_grad}" for p in self._stage.parameters()]

    def _new_plan(self, inputs: Any, *, backward: bool) -> _Plan:
        grid = self._grid
        try:
            parcels: list[Parcel | None] = [
                None,
                *rehearse(self._worker, inputs, grid.peers, self._device),
                None,
            ]
        except Exception:
            self._broken = False  # it was raised on all stages, and nothing is on its way
            raise
        source, result = parcels[grid.stage], parcels[grid.stage + 1]
        if grid.stages == 1:
            return _Plan(source, result, None)
        from thinwire.pipeline.schedule import make_schedule

        schedule = make_schedule(
            self._worker,
            self._config,
            grid,
            self._device,
            source=source,
            result=result,
            backward=backward,
        )
        return _Plan(source, result, schedule)

    def _remember(self, key: str, plan: _Plan) -> None:
        self._plans[key] = plan
        while len(self._plans) > _KEPT_SCHEDULES:  # each holds memory to receive into
            self._plans.popitem(last=False)

    def _run_alone(self, count: int, *, backward: bool) -> None:
        for _ in range(count):
            loss = self._worker()
            if backward:
                self._worker.guarded(loss.backward)

    def _run_schedule(
        self, schedule: "PipelineScheduleSingle", count: int, *, backward: bool
    ) -> None:
        target = (
            torch.zeros(count, device="cpu") if self._grid.stage == self._grid.stages - 1 else None
        )  # the worker has the real ones
        run = schedule.step if backward else schedule.eval
        try:
            run(target=target, return_outputs=False)
        except RuntimeError as error:
            raise self._grid.explain(error, what=_TRANSFER) from error

    def _told_ending(self) -> Pending[Tensor]:
        """What all stages say of their passes, on its way."""
        peers, worker = self._grid.peers, self._worker
        mine = _CONCLUSION.pack(worker.error is not None, *self._mean_loss())
        message = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(peers.device)
        return peers.all_gather(message, what="concluding a step")

    def _concluded(self) -> Tensor:
        """The mean loss, from the last stage, if no stage failed."""
        assert self._ending is not None, "told just now"
        ending, self._ending = self._ending, None
        rows = ending.wait().cpu()
        conclusions = [_CONCLUSION.unpack(row.numpy().tobytes()) for row in rows]
        self._broken = False
        if any(failed for failed, _, _ in conclusions):
            self._raise_on_all()
        _, kind, value = conclusions[-1]
        return torch.tensor(value, dtype=_LOSS_TYPES[kind], device=self._device)

    def _mean_loss(self) -> tuple[int, float]:
        """Type and value of the mean loss over the micro-batches, on the last stage."""
        losses = self._worker.losses
        if not losses:
            return 0, 0.0
        mean = torch.stack(losses).mean(dtype=torch.float64)
        return _LOSS_TYPES.index(losses[0].dtype), mean.item()

    def _raise_on_all(self) -> None:
        """Raise this stage's own error, or one of the same kind that names the stage which
        failed.
        """
        error = self._worker.error
        self._worker.begin([], None, None, 1.0)
        told = [] if error is None else [type(error).__name__, str(error)]
        answers = self._grid.peers.gather_bytes(
            json.dumps(told).encode(), what="telling what failed"
        )
        if error is not None:
            raise error
        stage = next(i for i, answer in enumerate(answers) if json.loads(answer))
        raise failure(stage, self._grid.stages, *json.loads(answers[stage]))


def _require_equal(facts: list[dict[str, Any]]) -> None:
    for stage, other in enumerate(facts[1:], start=2):
        for name in [*facts[0], *other]:
            ours, theirs = facts[0].get(name), other.get(name)
            if ours != theirs:
                raise Mismatch(
                    f"{name} of the mini-batch: stage 1 has {ours}, stage {stage} has {theirs}. "
                    "All ranks of a replica (replica = rank // stages) must make the same calls "
                    "with the same mini-batches: give the sampler the replica and its seed, not "
                    "the rank"
                )
