"""Runs mini-batches over the stages of a pipeline, after a rehearsal of new shapes."""

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Group, Pending, mapping_of, wrong_call_site
from thinwire.comm.nodes import Grid
from thinwire.errors import Mismatch, PayloadCorrupt, ThinwireError
from thinwire.pipeline.split import Pipeline
from thinwire.pipeline.worker import (
    Parcel,
    Schedule,
    StageWorker,
    content,
    describe,
    micro_batches,
)

_CONCLUSION = struct.Struct("<?Bd4q")
_LOSS_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TRANSFER = "passing activations and gradients between stages"


_Parcels = tuple[Parcel | None, Parcel | None]
"""From the previous stage and to the next one; None at the ends."""


class PipelineRunner:
    """Runs mini-batches through the stages of one replica."""

    # an error in the model or the loss is raised by all stages at the end of the call, after which
    # the pipeline works on; a dead or stopped stage ends it. The first mini-batch with new shapes,
    # types or mode costs one more forward pass, which finds the tensors between stages

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
        self._stage = stage
        self._config = config
        self._grid = grid
        self._scale = scale
        device = next(
            (t.device for t in [*stage.parameters(), *stage.buffers()]), torch.device("cpu")
        )
        self._worker = StageWorker(stage, device, dtype, loss_fn)
        self._parcels: dict[str, _Parcels] = {}
        """By the look of a mini-batch."""
        self._passed_bytes = 0
        self._broken = False
        self._outcomes: Pending[Tensor] | None = None
        """Gather of the stages' outcomes, in flight."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to other stages so far, agreements included."""
        return self._passed_bytes + self._grid.peers.bytes_sent

    def report(self, vote: Any) -> dict[str, Any]:
        """Return this stage's report for an agreement: its error, if any."""
        facts: dict[str, Any] = {}
        if self._outcomes is None:
            return facts
        error = self._worker.error
        if vote.first:
            self._broken = False
            facts |= {} if error is None else {"stage failed": [type(error).__name__, str(error)]}
        if vote.last and (damage := _damage(self._concluded())):
            facts["corrupt"] = damage
        return facts

    def judge(self, vote: Any, answers: Any) -> None:
        """Raise the error of a stage that failed."""
        failed = next(answers.of("stage failed"), None) if vote.first else None
        if failed is None:
            return
        error = self._worker.error
        self.conclude()
        if error is not None:
            raise error
        rank, report = failed
        raise failure(rank % self._grid.stages, self._grid.stages, *report)

    def conclude(self, *, agreed: bool = True) -> Tensor:
        """Return the mean loss of a step from the last stage. Raise if a stage has failed."""
        conclusions = self._concluded()
        self._outcomes = None
        self._broken = False
        if not agreed and any(failed for failed, *_ in conclusions):
            self._raise_on_all()
        self._worker.begin()  # frees the mini-batch
        if not agreed and (damage := _damage(conclusions)):
            raise PayloadCorrupt(f"{damage}. No stage of this replica has made the update")
        _, kind, value, *_ = conclusions[-1]
        return torch.tensor(value, dtype=_LOSS_TYPES[kind], device=self._worker.device)

    def _concluded(self) -> list[tuple[Any, ...]]:
        """Wait for the outcomes of all stages."""
        assert self._outcomes is not None, "a step was made"
        rows = self._outcomes.wait()
        self._outcomes = Pending(lambda: rows)  # the agreement reads them too
        return [_CONCLUSION.unpack(row.numpy().tobytes()) for row in rows.cpu()]

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """Return the mean loss as `step` does, without gradients, in the modules' own mode."""
        loss = self.step(inputs, targets, backward=False)
        assert loss is not None, "it concludes"
        return loss

    def step(
        self,
        inputs: Any,
        targets: Any,
        problem: Exception | None = None,
        *,
        backward: bool = True,
        concludes: bool = True,
    ) -> Tensor | None:
        """Run forward and backward passes of all micro-batches."""
        # `concludes` false: the caller runs an agreement with this runner as a check, then
        # `conclude`. The gradient of the mean loss times the scale is added to `p.grad`
        if self._broken:
            raise ThinwireError(
                "this pipeline broke in an earlier step: restart from the last checkpoint"
            )
        count = self._config.micro_batches
        worker = self._worker
        parts, key, known = self._agreed(inputs, targets, problem, backward=backward)
        self._broken = True  # until all stages have finished
        if not known:
            try:
                learned = rehearse(worker, parts[0][0], self._grid.peers)
            except Exception:
                self._broken = False  # raised on all stages; no message is in flight
                raise
            before, after = [None, *learned, None][self._grid.stage : self._grid.stage + 2]
            self._parcels[key] = before, after
        source, result = self._parcels[key]
        worker.begin(parts, source, result, self._scale() / count if backward else 1.0)
        bits = [0] * 4
        if self._grid.stages == 1:
            for _ in range(count):
                loss = worker()
                if backward:
                    worker.guarded(loss.backward)
        else:
            schedule = Schedule(worker, self._config, self._grid, backward)
            try:
                schedule.run()
            except RuntimeError as error:
                raise self._grid.explain(error, action=_TRANSFER) from error.__context__
            bits = schedule.bits()
        self._passed_bytes += count * (result.nbytes() if result else 0)
        self._passed_bytes += count * (source.nbytes(back=True) if source and backward else 0)
        # not waited for: the agreement of the update has this runner as a check
        self._outcomes = self._gather_outcomes(bits)
        return self.conclude(agreed=False) if concludes else None

    def _agreed(
        self, inputs: Any, targets: Any, problem: Exception | None, *, backward: bool
    ) -> tuple[list[tuple[Any, Any]], str, bool]:
        """Return the micro-batches, the key of their parcels, and True if all stages have them."""
        parts: list[tuple[Any, Any]] = []
        facts: dict[str, Any] = {"call": "step" if backward else "evaluate", "problem": None}
        try:
            if problem is not None:
                raise problem
            if self._worker.loss_fn is None:
                raise RuntimeError(
                    "a pipeline needs a loss function, but prepare got none on this rank: call "
                    "prepare(model, optimizer, loss_fn)"
                )
            if backward and not torch.is_grad_enabled():
                raise RuntimeError(
                    "a step needs gradients, but torch.no_grad() is active: use evaluate instead"
                )
            parts = micro_batches(inputs, targets, self._config.micro_batches)
            facts |= {"inputs": describe(inputs), "targets": describe(targets)}
            facts["content of targets"] = content(targets)
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
        if problem is not None:
            facts["problem"] = f"{type(problem).__name__}: {problem}"
        look = describe(parts[0][0] if parts else None)
        kinds = [f"{p.dtype} {p.requires_grad}" for p in self._stage.parameters()]
        key = json.dumps([facts["call"], look, self._stage.training, kinds])
        known = key in self._parcels
        payload = json.dumps({"facts": facts, "known": known}).encode()
        action = "agreeing on a mini-batch"
        answers = [mapping_of(a) for a in self._grid.peers.gather_bytes(payload, action=action)]
        if problem is not None:
            raise problem
        for rank, answer in enumerate(answers):
            if answer.keys() != {"facts", "known"}:
                raise wrong_call_site(action, rank, answer)
        _require_equal([answer["facts"] for answer in answers])
        return parts, key, all(answer["known"] for answer in answers)

    def _gather_outcomes(self, bits: list[int]) -> Pending[Tensor]:
        """Start the gather of the stages' outcomes."""
        peers = self._grid.peers
        worker = self._worker
        kind = 0
        mean = 0.0
        if losses := worker.losses:
            kind = _LOSS_TYPES.index(losses[0].dtype)
            mean = torch.stack(losses).cpu().double().mean().item()
        outcome = _CONCLUSION.pack(worker.error is not None, kind, mean, *bits)
        message = torch.frombuffer(bytearray(outcome), dtype=torch.uint8).to(peers.device)
        return peers.all_gather(message, action="concluding a step")

    def _raise_on_all(self) -> None:
        """Raise this stage's own error, or one of the same type that names the failing stage."""
        error = self._worker.error
        self._worker.begin()
        report = [] if error is None else [type(error).__name__, str(error)]
        answers = self._grid.peers.gather_bytes(
            json.dumps(report).encode(), action="reporting a failure"
        )
        if error is not None:
            raise error
        stage = next(i for i, answer in enumerate(answers) if json.loads(answer))
        raise failure(stage, self._grid.stages, *json.loads(answers[stage]))


def _damage(conclusions: list[tuple[Any, ...]]) -> str:
    """Return which stage received other bits than its neighbour has sent; empty if none did."""
    bits = [rest for _, _, _, *rest in conclusions]
    for stage, (one, other) in enumerate(pairwise(bits), start=1):
        if one[2] != other[1]:
            return f"stage {stage + 1} of {len(bits)} received damaged bits from stage {stage}"
        if one[3] != other[0]:
            return f"stage {stage} of {len(bits)} received damaged bits from stage {stage + 1}"
    return ""


def _require_equal(facts: list[dict[str, Any]]) -> None:
    for stage, other in enumerate(facts[1:], start=2):
        for name in [*facts[0], *other]:
            ours = facts[0].get(name)
            theirs = other.get(name)
            if ours != theirs:
                raise Mismatch(
                    f"{name} of the mini-batch: stage 1 has {ours}, but stage {stage} has "
                    f"{theirs}. All ranks of a replica (replica = rank // stages) must use the "
                    "same mini-batches: give the sampler the replica and its seed, not the rank"
                )


def rehearse(worker: StageWorker, inputs: Any, peers: Group) -> list[Parcel]:
    """Run one micro-batch through all stages but the last, one after another."""
    # the first stage gets real inputs, the others zeros; buffers and torch's random numbers are
    # restored
    parcels: list[Parcel] = []
    for stage in range(peers.size - 1):
        error: Exception | None = None
        answer: dict[str, Any] = {}
        if peers.rank == stage:
            try:
                with _restoring_buffers(worker.stage, worker.device):
                    source = parcels[-1] if parcels else None
                    worker.begin([(inputs, None)], source)
                    value = worker.output(inputs, source.blanks(worker.device) if source else ())
                    parcel, _ = Parcel.of(value)
                    answer = {"layout": parcel.layout, "tensors": parcel.tensors}
            except Exception as problem:  # raised below, after it was reported
                if stage:
                    problem.add_note(
                        f"Stage {stage + 1} failed in its rehearsal: it runs once on zeros of the "
                        "right shapes and types, to determine its output."
                    )
                error = problem
                answer = {"error": [type(problem).__name__, str(problem)]}
        answers = peers.gather_bytes(
            json.dumps(answer).encode(), action="describing the outputs of stages"
        )
        if error is not None:
            raise error
        description = json.loads(answers[stage])
        if "error" in description:
            raise failure(stage, peers.size, *description["error"])
        tensors = tuple((dtype, tuple(s), back) for dtype, s, back in description["tensors"])
        parcels.append(Parcel(description["layout"], tensors))
    return parcels


def failure(stage: int, stages: int, kind: str, text: str) -> Exception:
    """Return the error to raise if another stage failed; errors in arguments keep their type."""
    kinds = {"TypeError": TypeError, "ValueError": ValueError}
    return kinds.get(kind, ThinwireError)(
        f"stage {stage + 1} of {stages} failed in this step: {kind}: {text}"
    )


@contextmanager
def _restoring_buffers(module: nn.Module, device: torch.device) -> Iterator[None]:
    kept: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = [
        (part, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type):
            yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in kept:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                part._buffers[name] = buffer
