"""Names of a model's tensors, the same with or without `torch.compile`."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_WRAPPED = "_orig_mod"
"""Attribute of a compiled module that holds the original module."""


def plain_name(name: str) -> str:
    """Return the name, each of its words, without the prefixes of `torch.compile`."""
    if _WRAPPED not in name:
        return name
    words = ([part for part in word.split(".") if part != _WRAPPED] for word in name.split(" "))
    return " ".join(map(".".join, words))


def plain_names(names: Iterable[str]) -> list[str]:
    """Return the plain names, or all names unchanged if two of them would become equal.

    That happens in a model with an attribute of the wrapper's name.
    """
    given = list(names)
    plain = [plain_name(name) for name in given]
    return plain if len(set(plain)) == len(set(given)) else given


def require_shapes(model: nn.Module) -> None:
    """Raise `ValueError` for a model with parameters or buffers that have no shape yet."""
    for name, tensor in [*named_parameters(model), *named_buffers(model)]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: it is of a lazy module, which learns it in the first "
                "forward pass. Run one, such as model(example), before the optimizer is made"
            )


def is_quantized(param: Tensor) -> bool:
    """Return True for a frozen parameter that only its module can read: packed, or a wrapper."""
    plain = param.requires_grad or type(param) in (Tensor, Parameter)
    if plain or hasattr(param, "to_local") or is_lazy(param):
        return False
    packed = not (param.is_floating_point() or param.is_complex())
    return packed or is_traceable_wrapper_subclass(param)


def named_parameters(model: nn.Module) -> list[tuple[str, Parameter]]:
    """Return `model.named_parameters()` with plain names, without those that are quantized."""
    named = {name: p for name, p in model.named_parameters() if not is_quantized(p)}
    return list(zip(plain_names(named), named.values(), strict=True))


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return `model.named_buffers()` as a list, with plain names."""
    named = dict(model.named_buffers())
    return list(zip(plain_names(named), named.values(), strict=True))


def non_persistent_buffers(model: nn.Module) -> frozenset[str]:
    """Return the plain names of buffers registered with persistent=False.

    torch's `state_dict` leaves them out: caches, which a forward pass may make or replace.
    """
    lasting = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }
    return frozenset(name for name, buffer in named_buffers(model) if id(buffer) not in lasting)


def matches(name: str, pattern: str) -> bool:
    """Return True if a glob pattern matches this name, both as given or both plain."""
    return fnmatchcase(name, pattern) or fnmatchcase(plain_name(name), plain_name(pattern))
