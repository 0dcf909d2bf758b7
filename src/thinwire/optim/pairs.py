"""Checked arguments of the two phases of a step, backward and update."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire._wording import closest
from thinwire.core.sharded import is_sharded
from thinwire.optim.groups import ParamRecord

ParamGrad = tuple[Tensor, Tensor]
"""Parameter and gradient, of the same shape."""


def checked_callbacks(callbacks: object) -> list[Callable[[Tensor, Tensor], object]]:
    """Return the callbacks of `backward` as a checked sequence; None becomes an empty one."""
    given: Any = () if callbacks is None else callbacks
    check.instance("callbacks", given, Iterable, advice="each called as (param, grad)")
    calls = list(given)
    for i, call in enumerate(calls):
        if not callable(call):
            raise TypeError(f"callbacks[{i}] must be callable as (param, grad), got {call!r}")
    return calls


def differentiate(loss: Tensor, wanted: Sequence[Tensor], order: Sequence[Tensor]) -> None:
    """Accumulate the gradients of `wanted`; those of all others in `order` stay as they were."""
    check.instance("loss", loss, Tensor)
    if not any(map(is_sharded, wanted)):
        if wanted:
            torch.autograd.backward(loss, inputs=wanted)
        return
    # under FSDP the graph ends at gathered parameters, from which FSDP makes the gradients of the
    # shards: a selection is not possible
    ours = set(map(id, wanted))
    kept = [(p, p.grad) for p in order if id(p) not in ours]
    for p, _ in kept:
        p.grad = None
    try:
        torch.autograd.backward(loss)
    finally:
        for p, grad in kept:
            p.grad = grad


def selected(
    order: Sequence[Tensor], records: Mapping[Tensor, ParamRecord], wanted: Any, unwanted: Any
) -> list[Tensor]:
    """Return the parameters that need gradients and are `wanted` (None: all) and not `unwanted`."""
    chosen = set(order) if wanted is None else _resolved("parameters", wanted, records)
    chosen -= set() if unwanted is None else _resolved("no_grad_set", unwanted, records)
    return [param for param in order if param in chosen and param.requires_grad]


def checked_pairs(
    params_grads: object, order: Sequence[Tensor], records: Mapping[Tensor, ParamRecord]
) -> list[ParamGrad]:
    """Return the pairs that have a gradient, in the order of the optimizer."""
    pairs = check.entries("params_grads", params_grads, "(parameter, gradient) pairs")
    found: dict[Tensor, Tensor | None] = {}
    for i, pair in enumerate(pairs):
        where = f"params_grads[{i}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Tensor):
            raise TypeError(f"{where} must be a (parameter, gradient) pair, got {pair!r}")
        param, grad = pair
        if param not in records:
            raise ValueError(
                f"{where}: the parameter of shape {tuple(param.shape)} is not one of this "
                "optimizer's"
            )
        name = records[param].label
        if param in found:
            raise ValueError(f"{where}: {name} is given twice; add its gradients up first")
        if grad is not None:
            check.instance(f"{where}: the gradient of {name}", grad, Tensor)
            if grad.shape != param.shape:
                raise ValueError(
                    f"{where}: the gradient of {name} must have shape {tuple(param.shape)}, got "
                    f"{tuple(grad.shape)}"
                )
        found[param] = grad
    return [(p, g) for p in order if (g := found.get(p)) is not None and p.requires_grad]


def _resolved(argument: str, entries: object, records: Mapping[Tensor, ParamRecord]) -> set[Tensor]:
    by_name: dict[str, list[Tensor]] = {}
    for param, record in records.items():
        if record.name is not None:
            by_name.setdefault(record.name, []).append(param)
    found = set()
    for entry in check.entries(argument, entries, "parameters or names"):
        if isinstance(entry, Tensor):
            if entry not in records:
                raise ValueError(
                    f"{argument}: a parameter of shape {tuple(entry.shape)} is not one of this "
                    "optimizer's"
                )
            found.add(entry)
        else:
            check.instance(f"an entry of {argument}", entry, (Tensor, str))
            if not by_name:
                raise ValueError(
                    f"{argument}: {entry!r} is a name, but the parameters have none; give "
                    "model.named_parameters() to the optimizer"
                )
            matches = by_name.get(entry, [])
            if len(matches) != 1:
                raise ValueError(
                    f"{argument}: {len(matches)} parameters have the name {entry!r}, but exactly "
                    f"one is required{closest(entry, by_name)}"
                )
            found.add(matches[0])
    return found
