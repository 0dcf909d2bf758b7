"""A user's own training task for the commands that train, such as `thinwire compare --task`."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire import _validate as check


@dataclass(frozen=True, kw_only=True)
class Task:
    """A user's own model, loss and data, trained instead of the built-in task of a command.

    `thinwire compare --task FILE.py:NAME` calls your function NAME with the seed, once per rank and
    strategy. The function returns the task. All ranks must make the same model.

    Example::

        def make(seed):
            torch.manual_seed(seed)
            model = torch.nn.Linear(8, 1)
            loss_fn = torch.nn.MSELoss()
            return tw.Task(model=model, loss_fn=loss_fn, batches=my_batches, evaluate=my_evaluate)

    Attributes:
        model: A module. All ranks start from rank 0's parameters.
        loss_fn: `loss_fn(model(inputs), targets)` is the mean loss of a batch, a tensor of shape
            ().
        batches: `batches(rank, world)` is an iterator without end over this rank's (inputs,
            targets). Inputs are the arguments of the model: a tensor, a tuple for several
            arguments, or a mapping for keyword arguments.
        evaluate: `evaluate(model)` is the held-out loss, a number; called on every rank, in
            evaluation mode and without gradients, and averaged over them.
        optimizer: `optimizer(params)` makes the optimizer. Its learning rates are the peaks of the
            schedule. None takes the optimizer of the command.

    Raises:
        TypeError: An attribute has another type.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    batches: Callable[[int, int], Iterator[tuple[Any, Any]] | Iterable[tuple[Any, Any]]]
    evaluate: Callable[[nn.Module], float | Tensor]
    optimizer: Callable[[list[Parameter]], Optimizer] | None = None

    def __post_init__(self) -> None:
        check.instance("model", self.model, nn.Module)
        for name in ("loss_fn", "batches", "evaluate"):
            _require_callable(name, getattr(self, name))
        if self.optimizer is not None:
            _require_callable("optimizer", self.optimizer)


def _require_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r} of type {type(value).__name__}")
