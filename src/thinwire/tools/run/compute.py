"""Measure a model's step on a rank, without an exchange: its parts, and when each gradient is
ready.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint import random_state, set_random_state
from thinwire.optim import Muon, muon_groups
from thinwire.tools.run.built_in import ByteTransformer, LossFunction, Pair, loss_of, muon_shapes
from thinwire.tools.run.config import ModelSize, TaskError, muon_seconds
from thinwire.tools.run.task import OwnTask, called, device_of, made, own, run_alike

STEPS_S = 4.0
"""Seconds for a model's steps, half of them for Muon's; each is made at least once."""
_UNTIMED_STEPS, _MOST_STEPS = 2, 5
_LR = 1e-4
_SIDE, _PRODUCTS = 1024, 5
"""Side of a matrix whose product is timed, and repetitions."""


def step_of_built_in(size: ModelSize, batch: int, device: str, most_s: float) -> dict[str, Any]:
    """Measure a step of the built-in model, on all ranks at once, within about `most_s`."""
    target = run_alike(lambda: device_of(device, dist.get_rank()), None)
    model = ByteTransformer(size).to(target)
    inputs, targets = torch.randint(256, (2, batch, size.context)).to(target)
    clock = _Clock(None, model, loss_of, (inputs, targets), target)
    return _timed(clock, lambda: torch.optim.AdamW(model.parameters(), lr=_LR), most_s)


def step_of_task(task: str, device: str, workers: int, most_s: float = STEPS_S) -> dict[str, Any]:
    """Measure a step of a user's task, with its own optimizer, for this many workers."""
    rank = dist.get_rank()
    target = run_alike(lambda: device_of(device, rank), task)
    work = OwnTask(task, 0, rank, workers, target)
    make = work.make_optimizer or (lambda params: torch.optim.AdamW(params, lr=_LR))
    clock = _Clock(task, work.model, work.loss_fn, work.first, target)
    return _timed(clock, lambda: make(list(work.model.parameters())), most_s)


def step_of_task_here(
    task: str, step_s: float | None, device: str | None, workers: int
) -> dict[str, Any]:
    """Describe a step of a user's task, of rank 0 of `workers`; without its seconds measure it in
    this process.
    """
    with _single_rank():
        if step_s is None:
            return step_of_task(task, device or "auto", workers)
        model = made(task, 0).model
    if not _trained(model):
        raise TaskError(f"task={task!r}: its model has no parameter with requires_grad=True")
    return {
        **_described(model),
        "device": device,
        "forward_s": None,
        "step_s": float(step_s),
        "ready_s": None,
        "muon_s": muon_seconds(muon_shapes(model), cuda=device == "cuda"),
    }


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    """Form a process group of one rank; the random state is restored afterwards."""
    if dist.is_initialized():
        raise ValueError(
            "task is measured in a single process, but this one belongs to a process group; "
            "run thinwire probe --task under torchrun and give its file as probe"
        )
    drawn = random_state()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        set_random_state(drawn)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def _described(model: nn.Module) -> dict[str, Any]:
    params = _trained(model)
    hidden = muon_shapes(model)
    return {
        "parameters": sum(p.numel() for p in params),
        "shapes": [list(p.shape) for p in params],
        "gradient_bytes": sum(p.nbytes for p in params),
        "muon_parameters": sum(shape.numel() for shape in hidden),
        "muon_largest": max((shape.numel() for shape in hidden), default=0),
    }


def _timed(
    clock: "_Clock", make_optimizer: Callable[[], torch.optim.Optimizer], most_s: float
) -> dict[str, Any]:
    params = _trained(clock.model)
    hooks = [p.register_post_accumulate_grad_hook(clock.mark) for p in params]  # type: ignore[no-untyped-call]
    dist.barrier()
    try:
        runs = run_alike(lambda: _steps(clock, make_optimizer(), most_s / 2), clock.task)
    finally:
        for hook in hooks:
            hook.remove()
    timed = runs[min(_UNTIMED_STEPS, len(runs) - 1) :]
    ready = [median(run["ready"].get(p, run["backward"]) for run in timed) for p in params]
    return {
        "device": clock.device.type,
        "forward_s": median(run["forward"] for run in timed),
        "step_s": median(run["end"] for run in timed),
        **_described(clock.model),
        "ready_s": ready,
        "muon_s": run_alike(lambda: _longer_by_muon(clock, timed, most_s / 2), clock.task),
    }


def _longer_by_muon(clock: "_Clock", timed: list[dict[str, Any]], most_s: float) -> float | None:
    """Return the extra seconds of an update by Muon, measured or estimated; None if it refuses."""
    try:
        optimizer = Muon(muon_groups(clock.model), lr=_LR)
    except (TypeError, ValueError):
        return None
    hidden = muon_shapes(clock.model)
    longer_s = muon_seconds(hidden, cuda=clock.cuda, flop_s=_flop_s(clock.device))
    if (_UNTIMED_STEPS + 1) * (timed[-1]["end"] + longer_s) > most_s:
        return longer_s
    runs = [clock.step(optimizer) for _ in range(_UNTIMED_STEPS + 1)][-2:]
    by_muon, own = (median(run["end"] - run["backward"] for run in some) for some in (runs, timed))
    return float(max(0.0, by_muon - own))


def _flop_s(device: torch.device) -> float:
    """Return the operations a second of a matrix product, in the type of Muon's iterations."""
    square = torch.zeros(
        _SIDE, _SIDE, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None
    )
    best_s = float("inf")
    for _ in range(_PRODUCTS):
        begin_s = time.perf_counter()
        (square @ square).sum().item()  # a wait for the device
        best_s = min(best_s, time.perf_counter() - begin_s)
    return float(2 * _SIDE**3 / best_s)


def _steps(
    clock: "_Clock", optimizer: torch.optim.Optimizer, most_s: float
) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    begin_s = time.perf_counter()
    last_s = 0.0
    while len(runs) < _UNTIMED_STEPS + _MOST_STEPS and (
        not runs or time.perf_counter() - begin_s + last_s < most_s
    ):
        problem = f"step {len(runs) + 1} raised "
        runs.append(own(clock.task, problem, lambda: clock.step(optimizer)))
        last_s = runs[-1]["end"]
    return runs


@dataclass
class _Clock:
    """Times of the events of a step; on a GPU, as its stream sees them."""

    task: str | None
    model: nn.Module
    loss_fn: LossFunction
    batch: Pair
    device: torch.device
    marks: dict[Any, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def mark(self, key: Any) -> None:
        """Record an event of the step, such as a tensor whose gradient is ready."""
        self.marks[key] = time.perf_counter()
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks[key] = event

    def step(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Run one step; return the end of each part, in seconds since its start."""
        inputs, targets = self.batch
        self.marks = {}
        self.mark("begin")
        loss = self.loss_fn(called(self.model, inputs), targets)
        self.mark("forward")
        loss.backward()  # type: ignore[no-untyped-call]
        self.mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        self.mark("end")
        if self.cuda:
            torch.cuda.synchronize()
        begin = self.marks["begin"]
        seconds = {
            key: begin.elapsed_time(mark) / 1e3 if self.cuda else mark - begin
            for key, mark in self.marks.items()
        }
        parts = {name: seconds.pop(name) for name in ("forward", "backward", "end")}
        return {**parts, "ready": seconds}
