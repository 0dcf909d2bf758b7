"""The three methods by which a strategy replaces an optimizer: what each takes over, and what
stands in its way.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire.compress.dgc import DGC
from thinwire.core.clip import ClipByNorm
from thinwire.optim import SGD, Adam, AdamW, DGCMomentum, Lamb, Lars, LazyAdam
from thinwire.optim.config import LAMB, LARS
from thinwire.optim.groups import TakenOver
from thinwire.strategy.rebuild import Recipe

__all__ = ["ADAMS", "SGDS", "as_dgc", "as_lamb", "as_lars"]

SGDS = (torch.optim.SGD, SGD)
ADAMS = (torch.optim.Adam, torch.optim.AdamW, Adam, AdamW, LazyAdam)

_SGD_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "momentum": float,
    "nesterov": bool,
    "weight_decay": float,
}
_SGD_UNUSED = {"dampening": 0, "differentiable": False, "fused": None}
_ADAM_UNUSED = {
    "eps": None,
    "amsgrad": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": None,
}


def as_dgc(
    optimizer: torch.optim.Optimizer,
    told: TakenOver,
    dgc: DGC,
    process_group: dist.ProcessGroup | None,
    num_trainers: int | None,
) -> Recipe:
    """An SGD as `DGCMomentum`."""
    arguments = {
        "momentum": float(optimizer.defaults["momentum"]),
        "nesterov": bool(optimizer.defaults["nesterov"]),
        "weight_decay": float(optimizer.defaults["weight_decay"]),
        "maximize": bool(optimizer.defaults["maximize"]),
        "rampup_begin_step": dgc.rampup_begin_step,
        "rampup_step": dgc.rampup_step,
        "sparsity": dgc.sparsity,
        "local_grad_clip_norm": dgc.local_grad_clip_norm,
        "min_numel": dgc.min_numel,
        "value_bits": dgc.value_bits,
        "state_dtype": dgc.state_dtype,
        "node_size": dgc.node_size,
        "exchange": dgc.exchange,
        "process_group": process_group,
        "num_trainers": num_trainers,
    }
    recipe = Recipe(
        kind=DGCMomentum,
        arguments=arguments,
        keys=_SGD_KEYS,
        unused=_SGD_UNUSED,
        state=("momentum_buffer",),
    )
    clip = told.grad_clip
    if clip is not None and not isinstance(clip, ClipByNorm):
        recipe.problems.append(
            f"dgc takes over ClipByNorm only, and the optimizer clips by {clip}: other norms do "
            "not commute with local accumulation. Use ClipByNorm, or dgc's local_grad_clip_norm"
        )
    elif clip is not None and dgc.local_grad_clip_norm is not None:
        recipe.problems.append(
            f"the optimizer's grad_clip={clip} and dgc's "
            f"local_grad_clip_norm={dgc.local_grad_clip_norm} limit the same gradient: give one of "
            "them"
        )
    recipe.problems += _sgd_problems("dgc", told)
    recipe.notes += [
        "momentum, Nesterov and weight decay act inside DGCMomentum, which exchanges by itself"
    ]
    return recipe


def as_lars(optimizer: torch.optim.Optimizer, told: TakenOver, lars: LARS) -> Recipe:
    """An SGD as `Lars`."""
    arguments = {
        "momentum": float(optimizer.defaults["momentum"]),
        "nesterov": bool(optimizer.defaults["nesterov"]),
        "maximize": bool(optimizer.defaults["maximize"]),
        "trust_coefficient": lars.lars_coeff,
        "weight_decay": lars.lars_weight_decay,
        "eps": lars.epsilon,
    }
    recipe = Recipe(kind=Lars, arguments=arguments, keys=_SGD_KEYS, unused=_SGD_UNUSED, state=())
    recipe.patterns = lars.exclude_from_weight_decay
    recipe.problems += _sgd_problems("lars", told)
    _settle_decay_(recipe, optimizer, told, "lars", lars.lars_weight_decay)
    return recipe


def as_lamb(optimizer: torch.optim.Optimizer, told: TakenOver, lamb: LAMB) -> Recipe:
    """An Adam as `Lamb`."""
    arguments = {
        "betas": _floats(optimizer.defaults["betas"]),
        "maximize": bool(optimizer.defaults["maximize"]),
        "weight_decay": lamb.lamb_weight_decay,
    }
    keys: Mapping[str, Callable[[Any], Any]] = {"betas": _floats, "weight_decay": float}
    state = ("step", "exp_avg", "exp_avg_sq")
    recipe = Recipe(kind=Lamb, arguments=arguments, keys=keys, unused=_ADAM_UNUSED, state=state)
    recipe.patterns = lamb.exclude_from_weight_decay
    if any(group.get("amsgrad") for group in told.groups):
        recipe.problems.append(
            "lamb has no amsgrad, which the optimizer asks for: set amsgrad=False"
        )
    recipe.problems += _differentiable("lamb", told)
    _settle_decay_(recipe, optimizer, told, "lamb", lamb.lamb_weight_decay)
    recipe.notes.append(
        f"eps is LAMB's own 1e-06, not the optimizer's {optimizer.defaults['eps']:g}"
    )
    return recipe


def _sgd_problems(field: str, told: TakenOver) -> Iterator[str]:
    dampening = [group["dampening"] for group in told.groups if group.get("dampening")]
    if dampening:
        yield (
            f"{field} has no dampening, and the optimizer asks for {dampening[0]}: set dampening=0"
        )
    yield from _differentiable(field, told)


def _differentiable(field: str, told: TakenOver) -> Iterator[str]:
    if any(group.get("differentiable") for group in told.groups):
        yield (
            f"{field} cannot be differentiated through, which the optimizer asks for: set "
            "differentiable=False"
        )


def _settle_decay_(
    recipe: Recipe, optimizer: torch.optim.Optimizer, told: TakenOver, field: str, decay: float
) -> None:
    """Changes `recipe`: nothing may decay twice, and nobody's choice of decay may get lost."""
    own = float(optimizer.defaults["weight_decay"])
    usual = float(inspect.signature(type(optimizer)).parameters["weight_decay"].default)
    if own not in (0.0, usual, decay):
        recipe.problems.append(
            f"the optimizer's weight_decay={own} and {field}_weight_decay={decay} are two decays "
            f"for the same parameters: set {field}_weight_decay={own} and leave the optimizer's out"
        )
    recipe.own_decay = own
    kept = [i for i, group in enumerate(told.groups) if float(group["weight_decay"]) != own]
    recipe.notes.append(
        f"weight_decay is {field}'s {decay}"
        + (f", but for groups {kept}, which keep their own" * bool(kept))
    )


def _floats(betas: Any) -> tuple[float, ...]:
    return tuple(float(beta) for beta in betas)
