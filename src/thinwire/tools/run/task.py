"""Task that a rank trains: a built-in one, or the user's own."""

import contextlib
import copy
import hashlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.task import Task
from thinwire.tools.run.built_in import Digits, LossFunction, NextByte, Pair, seed_of
from thinwire.tools.run.config import ConvolutionSize, RunConfig, TaskError
from thinwire.tools.run.launch import everyones

R = TypeVar("R")


def work_of(config: RunConfig) -> "Workload":
    """Return the task of a run on this rank; collective over all ranks."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    device = device_of(config.device, rank)
    if config.task is not None:
        return OwnTask(config.task, config.seed, rank, world, device)
    if isinstance(config.model, ConvolutionSize):
        return Digits(config, config.model, rank, world, device)
    return NextByte(config, config.model, rank, world, device)


def device_of(choice: str, rank: int) -> torch.device:
    """Return the device of a rank: its GPU, or the CPU."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    require_gpu()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def require_gpu() -> None:
    """Raise TaskError if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise TaskError("device='cuda', but torch finds no GPU; use --device cpu, or omit it")


def own(word: str | None, problem: str, work: Callable[[], R]) -> R:
    """Run the code of a user's task; its errors name it and say what failed."""
    try:
        return work()
    except (StopIteration, TaskError):
        raise
    except (Exception, SystemExit) as error:
        begin = "" if word is None else f"task={word!r}: "
        raise TaskError(f"{begin}{problem}{type(error).__name__}: {error}") from error


def run_alike(work: Callable[[], R], word: str | None, problem: str = "") -> R:
    """Run work that succeeds or fails on all ranks alike."""
    result: list[R] = []
    failure = None
    try:
        result.append(own(word, problem, work))
    except TaskError as error:
        failure = str(error)
    problems = everyones(failure)
    found = next(((rank, text) for rank, text in enumerate(problems) if text), None)
    if found is not None:
        where = "" if all(problems) else f" (on rank {found[0]})"
        raise TaskError(f"{found[1]}{where}")
    return result[0]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Keep backward passes from the parameters of a model: a user's loss may read them while a copy
    of the model is trained.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def called(model: nn.Module, inputs: Any) -> Any:
    """Call the model on a batch; a tuple is its arguments, a mapping its keywords."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


@final
class OwnTask:
    """User's task for `world` ranks, of which fewer may be present."""

    def __init__(self, word: str, seed: int, rank: int, world: int, device: torch.device) -> None:
        self.word = word
        self.rank = rank
        self.world = world
        self.device = device
        self.taken = 0
        self.evaluated = False
        seed_all(seed)  # a task may draw its parameters without a word of seeds
        self.task = self._alike(lambda: made(word, seed))
        self._alike(self._compared)
        self.model = self._alike(lambda: self.task.model.to(device), f"model.to({device}) raised ")
        self.loss_fn: LossFunction = self._loss
        self.make_optimizer = self.task.optimizer
        # a task may draw its batches likewise, and those of each rank are its own
        seed_all(seed_of(seed, rank))
        self.iterator = self._alike(lambda: iter(self.task.batches(rank, world)))
        self.first = self._alike(self._drawn)
        self.left: list[Pair] = [self.first]
        self.alike = self._alike(self._all_begin_alike)
        self._alike(self._tried)

    def next_batch(self) -> Pair:
        return self.left.pop() if self.left else self._drawn()

    def some_batch(self, seed: int) -> Pair:
        """See `NextByte`; returns the first batch of this rank."""
        return self.first

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        return self._own("loss_fn", lambda: self.task.loss_fn(outputs, targets))

    def evaluate(self, model: nn.Module) -> float:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        problem = f"evaluate(model) after {self.taken} batches raised "
        with torch.no_grad():
            loss = self._alike(lambda: float(self.task.evaluate(model)), problem)
        for module, training in modes:  # some may be kept in evaluation mode
            module.training = training
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        mean = float(total) / dist.get_world_size()
        first = not self.evaluated
        self.evaluated = True
        if first and not isfinite(mean):
            raise self._error(f"evaluate(model) returned {mean} before the first update")
        return mean

    def _drawn(self) -> Pair:
        call = f"batches({self.rank}, {self.world})"
        try:
            pair = self._own(call, lambda: next(self.iterator))
        except StopIteration:
            raise self._error(
                f"{call} ended after {self.taken} batches; it must never end, so start over at "
                "the end of the data"
            ) from None
        try:
            inputs, targets = pair
        except (TypeError, ValueError) as error:
            raise self._error(
                f"{call} must yield pairs (inputs, targets): {type(error).__name__}: {error}"
            ) from error
        self.taken += 1
        inputs, targets = _mapped(lambda tensor: tensor.to(self.device), (inputs, targets))
        return inputs, targets

    def _all_begin_alike(self) -> bool:
        digests = _mapped(_digest, self.first)  # objects other than tensors count by their text
        firsts = everyones(hashlib.sha256(repr(digests).encode()).digest())
        return len(firsts) > 1 and len(set(firsts)) == 1

    def _tried(self) -> None:
        """Train a copy on the first batch; random state and buffers are restored."""
        inputs, targets = self.first
        model = copy.deepcopy(self.model)
        with torch.random.fork_rng(devices=[]):
            loss = self._own(
                "loss_fn(model(inputs), targets)",
                lambda: self.loss_fn(called(model, inputs), targets),
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise self._error(
                "loss_fn(model(inputs), targets) must be a tensor of one number with a gradient, "
                f"got {_loss_text(loss, model)}"
            )
        if not isfinite(found := float(loss.detach())):
            raise self._error(f"the loss of the first batch is {found}")
        if (make := self.make_optimizer) is not None:
            made = self._own("optimizer(params)", lambda: make(list(model.parameters())))
            if not isinstance(made, torch.optim.Optimizer):
                raise self._error(f"optimizer(params) must be a torch optimizer, got {made!r}")
            if getattr(made, "has_schedule", False):
                raise self._error(
                    "optimizer(params) has a schedule as learning rate, but all strategies use "
                    "that of the command; give a number, which becomes the peak rate"
                )

    def _compared(self) -> None:
        looks = [
            (name, tuple(p.shape), str(p.dtype)) for name, p in self.task.model.named_parameters()
        ]
        all_looks = everyones(looks)
        for rank, other in enumerate(all_looks):
            for here, there in zip_longest(all_looks[0], other):
                if here != there:
                    raise self._error(
                        f"ranks built different models: rank 0 has {_look(here)}, rank {rank} "
                        f"{_look(there)}; build the same model on all ranks, from the seed only"
                    )

    def _own(self, call: str, work: Callable[[], R]) -> R:
        return own(self.word, f"{call} raised ", work)

    def _alike(self, work: Callable[[], R], problem: str = "") -> R:
        return run_alike(work, self.word, problem)

    def _error(self, problem: str) -> TaskError:
        return TaskError(f"task={self.word!r}: {problem}")


Workload = NextByte | Digits | OwnTask
"""One task on one rank."""


def made(word: str, seed: int) -> Task:
    """Import the file and call its function; raise TaskError if that returns no task."""
    path, _, name = word.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec, "a task names a Python file"
    assert spec.loader, "that of source files"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    own(word, f"{path} cannot be imported: ", partial(spec.loader.exec_module, module))
    make = getattr(module, name, None)
    if not callable(make):
        raise TaskError(f"task={word!r}: {path} has no function {name}")
    task = own(word, f"{name}({seed}) raised ", lambda: make(seed))
    if not isinstance(task, Task):
        raise TaskError(
            f"task={word!r}: {name}({seed}) must return a thinwire.Task, got {type(task).__name__}"
        )
    return task


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _loss_text(loss: object, model: nn.Module) -> str:
    """Describe the error of a loss that is not a scalar with a gradient."""
    if not isinstance(loss, Tensor):
        return f"{loss!r:.80}"
    if loss.numel() != 1:
        return f"shape {tuple(loss.shape)}; take its mean"
    if not any(p.requires_grad for p in model.parameters()):
        return "one without a gradient: no parameter of the model is trainable"
    return "one without"


def _look(entry: tuple[str, tuple[int, ...], str] | None) -> str:
    if entry is None:
        return "no further parameter"
    name, shape, dtype = entry
    return f"{name} of shape {list(shape)} in {dtype.removeprefix('torch.')}"


def _mapped(work: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a batch with all of its tensors replaced."""
    if isinstance(value, Tensor):
        return work(value)
    if isinstance(value, Mapping):
        return {key: _mapped(work, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_mapped(work, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    data = tensor.detach().cpu().contiguous()
    content = data.flatten().view(torch.uint8).numpy()
    return data.dtype, tuple(data.shape), hashlib.sha256(content.tobytes()).digest()
