"""What tests of several folders have in common: engines, steps, bits, and what a test catches."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.api import Pending, main

__all__ = ["answer", "arriving", "bits", "descend", "engine_of", "refusal", "warned"]


def engine_of(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None = nn.functional.mse_loss,
    *,
    optimizer: Any = None,
    lr: float = 0.1,
    momentum: float = 0.0,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> tw.Engine:
    """An engine with these fields, of SGD where none is given; `options` are those of `prepare`."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr, momentum)
    strategy = tw.DistributedStrategy(**fields)
    return strategy.prepare(model, optimizer, loss_fn, **options or {})


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """The step of a plain loop, for this loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def bits(tensors: Iterable[Tensor]) -> str:
    """A digest of every bit, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def warned() -> Iterator[list[str]]:
    """Yield a list that has the texts of all warnings of the block once it has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


@contextmanager
def arriving(kind: type, name: str, change: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
    """What this exchange brings to this process is `change` of what came, and of its action."""
    given = getattr(kind, name)

    def exchanged(self: Any, *args: Any, action: str, **more: Any) -> Pending[Tensor]:
        pending = given(self, *args, action=action, **more)
        return Pending(lambda: change(pending.wait(), action))

    with patch.object(kind, name, exchanged):
        yield


def answer(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    """The output and the errors of the command line, which ends with this status."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == status
    return capsys.readouterr()


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command line refuses these words."""
    out, line = answer(capsys, *words, status=2)
    assert (out, line[:10], line.count("\n")) == ("", "thinwire: ", 1)
    return line
