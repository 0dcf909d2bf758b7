"""A strategy as plain text: a step in order, the pairs, advice, the effect on a model."""

import textwrap
from collections.abc import Iterable
from types import NoneType

from torch import nn
from torch.optim import Optimizer

from thinwire import _validate as check
from thinwire.core.gradients import Clip
from thinwire.strategy.explain.advice import advice
from thinwire.strategy.explain.model import about_model, about_optimizer
from thinwire.strategy.explain.order import step_order
from thinwire.strategy.fields import Fields
from thinwire.strategy.rules import rules_between

_COLUMNS = 100


def explanation(
    strategy: Fields,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    grad_clip: Clip | None = None,
) -> str:
    """Return the text of `DistributedStrategy.explain`, at most 100 columns wide."""
    check.instance("model", model, (nn.Module, NoneType))
    check.instance("optimizer", optimizer, (Optimizer, NoneType))
    fields = (
        ", ".join(strategy.on)
        or "nothing: gradients are averaged over all ranks, as by DistributedDataParallel"
    )
    meanings = [f"{' and '.join(rule.pair)}: {rule.meaning}" for rule in rules_between(strategy.on)]
    parts = [
        _wrapped(f"On: {fields}"),
        _section("A step, in order", _numbered(step_order(strategy, grad_clip))),
        _section("Together", meanings),
        _section("To know", advice(strategy)),
        _section("This model", [] if model is None else about_model(strategy, model, optimizer)),
        _section(
            "This optimizer",
            [] if optimizer is None else about_optimizer(strategy, optimizer, model, grad_clip),
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _section(title: str, texts: Iterable[str]) -> str:
    lines = [_wrapped(text, "  ") for text in texts]
    return "\n".join([title, *lines]) if lines else ""


def _numbered(texts: list[str]) -> list[str]:
    return [f"{i}. {text}" for i, text in enumerate(texts, start=1)]


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=f"{indent}   ",
        break_on_hyphens=False,
    )
