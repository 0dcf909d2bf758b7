"""Several optimizers that train one model, combined into one."""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of one model, combined: the groups and the state of all of them.

    Hooks, schedulers and clipping remain separate for each optimizer.

    Args:
        optimizers: At least two, of different parameters.

    >>> a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> several = SeveralOptimizers([torch.optim.SGD([a], 0.1), torch.optim.AdamW([b], 0.01)])
    >>> [group["lr"] for group in several.param_groups]
    [0.1, 0.01]
    """

    # torch's constructor would register the parameters again
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.defaults = self.optimizers[0].defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of all optimizers: a new list of the same group objects."""
        return [group for opt in self.optimizers for group in opt.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """State of all optimizers."""
        return ChainMap(*(dict(opt.state) for opt in self.optimizers))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of one optimizer, with parameters numbered through."""
        whole: dict[str, Any] = {"state": {}, "param_groups": [], "each": []}
        first = 0
        for optimizer in self.optimizers:
            own = optimizer.state_dict()
            groups, state = own.pop("param_groups"), own.pop("state")
            whole["param_groups"] += [
                {**group, "params": [first + key for key in group["params"]]} for group in groups
            ]
            whole["state"] |= {first + k: entry for k, entry in state.items() if isinstance(k, int)}
            # the user may have entries of their own
            rest = {key: entry for key, entry in state.items() if not isinstance(key, int)}
            whole["each"].append({**own, "state": rest})
            first += sum(len(group["params"]) for group in groups)
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; keys of parameters may be any numbers."""
        groups = list(state_dict["param_groups"])
        own = state_dict["each"]
        if len(own) != len(self.optimizers) or len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state is of {len(own)} optimizers with {len(groups)} groups, and there are "
                f"{len(self.optimizers)} with {len(self.param_groups)}"
            )
        for optimizer, rest in zip(self.optimizers, own, strict=True):
            own = [groups.pop(0) for _ in optimizer.param_groups]
            keys = params_in(own)
            state = {key: state_dict["state"][key] for key in keys if key in state_dict["state"]}
            state |= rest["state"]
            optimizer.load_state_dict({**rest, "state": state, "param_groups": own})


def params_in(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of all groups, or their keys in a state."""
    return [param for group in groups for param in group["params"]]


def all_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that it combines, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def kinds_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class names of all its optimizers, for messages and comparisons."""
    return " and ".join(type(opt).__name__ for opt in all_of(optimizer))


def combined(optimizers: Any, names: Mapping[Tensor, str]) -> Any:
    """Return one optimizer for the user's argument: an optimizer, or a sequence of them."""
    if isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Sequence):
        return optimizers
    listed = list(optimizers)
    if not listed:
        raise ValueError("optimizer must be one or several, got an empty sequence")
    owners: dict[Tensor, int] = {}
    for index, opt in enumerate(listed):
        if not isinstance(opt, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer[{index}] must be a torch.optim.Optimizer, got {type(opt).__name__}"
            )
        for param in params_in(opt.param_groups):
            if (first := owners.setdefault(param, index)) != index:
                name = names.get(param, f"of shape {tuple(param.shape)}")
                raise ValueError(
                    f"parameter {name} is in optimizer {first} ({type(listed[first]).__name__}) "
                    f"and in optimizer {index} ({type(opt).__name__}), counted from 0: give each "
                    "parameter to one of them"
                )
    return listed[0] if len(listed) == 1 else SeveralOptimizers(listed)
