"""The two phases of a step, gradients and update, as methods of every optimizer; and the rate read
and set by hand.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import _validate as check
from thinwire.core.sharded import is_sharded
from thinwire.optim.grouped import GroupedOptimizer
from thinwire.optim.groups import ParamPlace
from thinwire.schedules import is_scheduled

__all__ = ["ParamGrad", "TwoPhase", "checked_pairs", "selected"]

ParamGrad = tuple[Tensor, Tensor]
"""A parameter and its gradient, of the same shape."""


class TwoPhase(GroupedOptimizer):
    """The middle part of `CommonOptimizer`: its two-phase methods, and the rate read and set."""

    _given: list[ParamGrad] | None = None
    """The pairs of the update that `apply_gradients` is making; None where they come from `p.grad`.
    """

    def backward(
        self,
        loss: Tensor,
        parameters: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
        callbacks: Iterable[Callable[[Tensor, Tensor], object]] | None = None,
    ) -> list[ParamGrad]:
        """Differentiate `loss`; the first half of `minimize`.

        Gradients accumulate in `p.grad` as in torch; those of parameters outside the selection stay
        as they were.

        Args:
            loss: Shape (), or whatever `torch.Tensor.backward` takes without arguments.
            parameters: Parameters or names to differentiate for; None for all of this optimizer.
            no_grad_set: Parameters or names to leave out; it wins over `parameters`.
            callbacks: Each is called as `callback(param, grad)` once for every listed parameter, in
                order, afterwards.

        Returns:
            The pairs (p, p.grad) in the optimizer's order, without parameters that have no
            gradient.

        Raises:
            TypeError: A callback that cannot be called, or an entry that is neither parameter nor
                name.
            ValueError: An unknown name, a name without named parameters, or a parameter of somebody
                else.
        """
        check.instance("loss", loss, Tensor)
        if callbacks is not None:
            check.instance("callbacks", callbacks, Iterable, advice="each called as (param, grad)")
        calls = [] if callbacks is None else list(callbacks)
        for i, call in enumerate(calls):
            if not callable(call):
                raise TypeError(f"callbacks[{i}] must be callable as (param, grad), got {call!r}")
        wanted = selected(self._ordered_params(), self._common.places, parameters, no_grad_set)
        if any(map(is_sharded, wanted)):
            self._backward_through_shards(loss, wanted)
        elif wanted:
            torch.autograd.backward(loss, inputs=wanted)
        pairs = [(p, p.grad) for p in wanted if p.grad is not None]
        for call in calls:
            for param, grad in pairs:
                call(param, grad)
        return pairs

    def _backward_through_shards(self, loss: Tensor, wanted: Sequence[Tensor]) -> None:
        """The graph ends at parameters that were gathered, from which FSDP makes the gradients of
        the shards: it cannot be told which are wanted.
        """
        ours = set(map(id, wanted))
        kept = [(p, p.grad) for p in self._ordered_params() if id(p) not in ours]
        for p, _ in kept:
            p.grad = None
        try:
            torch.autograd.backward(loss)
        finally:
            for p, grad in kept:
                p.grad = grad

    def apply_gradients(self, params_grads: Iterable[tuple[Tensor, Tensor | None]]) -> list[Any]:
        """Make one whole update from the given pairs; the second half of `minimize`.

        `step()` runs with these pairs instead of `p.grad`, hooks included. Neither they nor
        `p.grad` are changed.

        Args:
            params_grads: (parameter, gradient) pairs; a parameter that is not listed, or with None,
                is not updated.

        Returns:
            An empty list: there is no graph of operators.

        Raises:
            TypeError: No iterable of pairs.
            ValueError: A parameter that is foreign or repeated, or a gradient of another shape.
        """
        self._given = checked_pairs(params_grads, self._ordered_params(), self._common.places)
        try:
            self.step()
        finally:
            self._given = None
        return []

    def apply_optimize(
        self, loss: Tensor, params_grads: Iterable[tuple[Tensor, Tensor | None]]
    ) -> list[Any]:
        """`apply_gradients(params_grads)`; `loss` is there for the signature and not used."""
        return self.apply_gradients(params_grads)

    def minimize(
        self,
        loss: Tensor,
        parameters: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
    ) -> tuple[list[Any], list[ParamGrad]]:
        """`backward`, then `apply_gradients`. Do not call `loss.backward()` before; gradients are
        not cleared.

        Returns:
            An empty list, and the pairs that `backward` gave.
        """
        pairs = self.backward(loss, parameters, no_grad_set)
        return self.apply_gradients(pairs), pairs

    def clear_grad(self) -> None:
        """Set all gradients to None."""
        self.zero_grad(set_to_none=True)

    def get_lr(self) -> float:
        """The rate that the next update will use, of the first group without an `lr` of its own
        (else of the first).
        """
        return float(self.param_groups[self._groups_of_constructor()[0]]["lr"])

    def set_lr(self, value: float) -> None:
        """Set the rate of all groups without an `lr` of their own; of all groups if every one has
        its own.

        Args:
            value: >= 0.

        Raises:
            TypeError: No number.
            ValueError: Negative or not finite.
            RuntimeError: A schedule, a list or a `ScheduledLR` drives the rate of one of them.
        """
        rate = check.real("value", value, at_least=0)
        chosen = self._groups_of_constructor()
        if is_scheduled(self) or any(self._common.schedules[i] is not None for i in chosen):
            raise RuntimeError(
                f"set_lr({value}) is not possible while a schedule drives the learning rate"
            )
        for i in chosen:
            self.param_groups[i]["lr"] = rate

    def _groups_of_constructor(self) -> list[int]:
        """Groups that follow the constructor's rate, or all if there is none."""
        following = [i for i, own in enumerate(self._common.own_lr) if not own]
        return following or list(range(len(self.param_groups)))


def selected(
    order: Sequence[Tensor],
    places: Mapping[Tensor, ParamPlace],
    parameters: object,
    no_grad_set: object,
) -> list[Tensor]:
    """The parameters of `order` that `parameters` names and `no_grad_set` does not, and that take
    gradients.

    Raises:
        TypeError: Neither a parameter nor a name is given.
        ValueError: An unknown name, a name without named parameters, or a parameter of somebody
            else.
    """
    wanted = set(order) if parameters is None else _resolved("parameters", parameters, places)
    unwanted = set() if no_grad_set is None else _resolved("no_grad_set", no_grad_set, places)
    return [
        param
        for param in order
        if param in wanted and param not in unwanted and param.requires_grad
    ]


def checked_pairs(
    params_grads: object, order: Sequence[Tensor], places: Mapping[Tensor, ParamPlace]
) -> list[ParamGrad]:
    """The pairs that have a gradient, in the order of the optimizer.

    Raises:
        TypeError: No iterable of (parameter, gradient) pairs.
        ValueError: A parameter that is foreign or repeated, or a gradient of another shape.
    """
    if isinstance(params_grads, Tensor | str | Mapping) or not isinstance(params_grads, Iterable):
        raise TypeError(
            f"params_grads must be a list of (parameter, gradient) pairs, got {params_grads!r}"
        )
    found: dict[Tensor, Tensor | None] = {}
    for i, pair in enumerate(params_grads):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Tensor):
            raise TypeError(f"params_grads[{i}] must be a (parameter, gradient) pair, got {pair!r}")
        param, grad = pair
        _check_pair(i, param, grad, found, places)
        found[param] = grad
    return [(p, g) for p in order if (g := found.get(p)) is not None and p.requires_grad]


def _check_pair(
    i: int,
    param: Tensor,
    grad: object,
    found: Mapping[Tensor, object],
    places: Mapping[Tensor, ParamPlace],
) -> None:
    if param not in places:
        raise ValueError(
            f"params_grads[{i}]: the parameter of shape {tuple(param.shape)} is not one of this "
            "optimizer's"
        )
    name = places[param].label
    if param in found:
        raise ValueError(f"params_grads[{i}]: {name} is given twice; add its gradients up first")
    if grad is None:
        return
    check.instance(f"params_grads[{i}]: the gradient of {name}", grad, Tensor)
    if isinstance(grad, Tensor) and grad.shape != param.shape:
        raise ValueError(
            f"params_grads[{i}]: the gradient of {name} must have shape {tuple(param.shape)}, got "
            f"{tuple(grad.shape)}"
        )


def _resolved(argument: str, entries: object, places: Mapping[Tensor, ParamPlace]) -> set[Tensor]:
    if isinstance(entries, Tensor | str) or not isinstance(entries, Iterable):
        raise TypeError(f"{argument} must be a list or set of parameters or names, got {entries!r}")
    by_name: dict[str, list[Tensor]] = {}
    for param, place in places.items():
        if place.name is not None:
            by_name.setdefault(place.name, []).append(param)
    return {_one(argument, entry, by_name, places) for entry in entries}


def _one(
    argument: str,
    entry: object,
    by_name: Mapping[str, list[Tensor]],
    places: Mapping[Tensor, ParamPlace],
) -> Tensor:
    if isinstance(entry, Tensor):
        if entry not in places:
            raise ValueError(
                f"{argument}: a parameter of shape {tuple(entry.shape)} is not one of this "
                "optimizer's"
            )
        return entry
    if not isinstance(entry, str):
        raise TypeError(
            f"{argument} must hold parameters or names, got {entry!r} of type "
            f"{type(entry).__name__}"
        )
    if not by_name:
        raise ValueError(
            f"{argument}: {entry!r} is a name, but the parameters have none; give "
            "model.named_parameters() to the optimizer"
        )
    matches = by_name.get(entry, [])
    if len(matches) != 1:
        hint = check.closest(entry, by_name)
        raise ValueError(
            f"{argument}: {len(matches)} parameters have the name {entry!r}, needed is one{hint}"
        )
    return matches[0]
