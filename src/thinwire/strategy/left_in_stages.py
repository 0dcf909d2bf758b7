"""Models that an engine with a pipeline has trained: each rank has the current values of its own
stage only.
"""

import weakref

import torch
from torch import nn
from torch.nn import Parameter

from thinwire._names import named_buffers, named_parameters
from thinwire.comm import Group
from thinwire.comm.replicate import make_models_equal_
from thinwire.errors import StrategyError

__all__ = ["Cut", "cut_of", "gather_stages_", "holds_one_stage", "remember_cut"]

Cut = tuple[frozenset[str], ...]
"""By stage the names of its parameters and buffers in the model. In the layout of
`thinwire.comm.Grid` the first replica's stage s is on rank s."""

_cuts: weakref.WeakKeyDictionary[nn.Module, Cut] = weakref.WeakKeyDictionary()


def cut_of(model: nn.Module) -> Cut | None:
    """The stages in which a model was trained last; None where it was trained whole."""
    return _cuts.get(model)


def remember_cut(model: nn.Module, stages: list[nn.Module]) -> None:
    """Say that from now on ranks have the current values of one stage each; or, with one stage,
    of the whole model.
    """
    if len(stages) == 1:
        _cuts.pop(model, None)
        return
    _cuts[model] = tuple(
        frozenset(name for name, _ in [*named_parameters(stage), *named_buffers(stage)])
        for stage in stages
    )


def holds_one_stage(
    cut: Cut | None, optimizer: torch.optim.Optimizer, names: dict[Parameter, str]
) -> bool:
    """Whether an optimizer is one that a pipeline has left with the parameters of its stage."""
    held = {names.get(p, "") for group in optimizer.param_groups for p in group["params"]}
    return cut is not None and bool(held) and any(held <= stage for stage in cut)


def gather_stages_(model: nn.Module, cut: Cut, group: Group) -> None:
    """Give all ranks the values of each stage from the rank of the first replica that has it.

    Raises:
        StrategyError: There are fewer ranks than stages now.
    """
    if group.size < len(cut):
        raise StrategyError(
            f"this model was trained in {len(cut)} stages, each rank has the current values of its "
            f"own only, and there are {group.size} ranks now: load a checkpoint, or a file that "
            "`thinwire export` has made of it, into a new model"
        )
    params, buffers = dict(named_parameters(model)), dict(named_buffers(model))
    for rank, names in enumerate(cut):
        make_models_equal_(
            {f"parameter {name}": p.detach() for name, p in params.items() if name in names},
            {f"buffer {name}": b for name, b in buffers.items() if name in names},
            group,
            source=rank,
        )
