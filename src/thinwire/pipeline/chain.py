"""A sequential model as the chain of modules that it calls one after another."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

__all__ = ["ChainModule", "assemble", "chain", "obstacle"]


@dataclass(frozen=True, slots=True)
class ChainModule:
    """A module of the chain, called once, on what the one before it returned."""

    path: tuple[str, ...]
    """Its own name and before it those of the containers around it."""
    module: nn.Module

    @property
    def name(self) -> str:
        """As in `named_modules()` of the model."""
        return ".".join(self.path)


def obstacle(module: nn.Module) -> str | None:
    """The reason why a module cannot be taken apart into those that it calls; None if it can."""
    if not isinstance(module, nn.Sequential):
        return "only an nn.Sequential says in which order its modules run"
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        return "it has a forward of its own"
    if any(module.parameters(recurse=False)) or any(module.buffers(recurse=False)):
        return "it has parameters or buffers of its own beside its modules"
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        return "it has hooks, which would never be called (register them on a module inside)"
    return None if len(module) else "it is empty"


def chain(model: nn.Module, path: tuple[str, ...] = ()) -> Iterator[ChainModule]:
    """The modules that the model calls, in order; a module that cannot be taken apart is
    one link.
    """
    if obstacle(model) is None:
        # named_children() skips a module that comes a second time
        for name, child in model._modules.items():
            assert child is not None
            yield from chain(child, (*path, name))
    else:
        yield ChainModule(path, model)


def assemble(container: nn.Module, links: Sequence[ChainModule], depth: int = 0) -> nn.Sequential:
    """A container with some consecutive links of it, under the same names; what is whole is taken
    as it is.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, group in groupby(links, key=lambda link: link.path[depth]):
        child, inside = container.get_submodule(name), list(group)
        whole = len(inside) == sum(1 for _ in chain(child))
        parts[name] = child if whole else assemble(child, inside, depth + 1)
    stage = nn.Sequential(parts)
    stage.training = container.training
    return stage
