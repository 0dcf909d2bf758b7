"""Names of a model's tensors, the same whether `torch.compile` has wrapped the model, parts of it,
or nothing.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

__all__ = [
    "matches",
    "named_buffers",
    "named_parameters",
    "non_persistent_buffers",
    "plain_name",
    "plain_names",
    "require_shapes",
]

_WRAPPED = "_orig_mod"
"""Under which a compiled module has the one that it compiles."""


def plain_name(name: str) -> str:
    """The name without what `torch.compile` puts into it; of words between blanks, each."""
    if _WRAPPED not in name:
        return name
    words = ([part for part in word.split(".") if part != _WRAPPED] for word in name.split(" "))
    return " ".join(map(".".join, words))


def plain_names(names: Iterable[str]) -> list[str]:
    """The plain ones; all as they came where two of them would become one, as in a model that gives
    an attribute of its own that name.
    """
    given = list(names)
    plain = [plain_name(name) for name in given]
    return plain if len(set(plain)) == len(set(given)) else given


def require_shapes(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers that have no shape yet.

    Raises:
        ValueError: Names the first one.
    """
    for name, tensor in [*named_parameters(model), *named_buffers(model)]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet: it is of a lazy module, which learns it in the first "
                "forward pass. Run one, such as model(example), before the optimizer is made"
            )


def named_parameters(model: nn.Module) -> list[tuple[str, Parameter]]:
    """As `model.named_parameters()`, with plain names."""
    pairs = list(model.named_parameters())
    return list(zip(plain_names(name for name, _ in pairs), (p for _, p in pairs), strict=True))


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """As `model.named_buffers()`, with plain names."""
    pairs = list(model.named_buffers())
    return list(zip(plain_names(name for name, _ in pairs), (b for _, b in pairs), strict=True))


def non_persistent_buffers(model: nn.Module) -> frozenset[str]:
    """The plain names of those that were registered with persistent=False, and that torch's
    `state_dict` leaves out: caches, which a forward pass may make or replace.
    """
    lasting = {
        id(buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return frozenset(name for name, buffer in named_buffers(model) if id(buffer) not in lasting)


def matches(name: str, pattern: str) -> bool:
    """Whether a glob pattern is for this name, as it is or plain; the pattern may be of either."""
    return fnmatchcase(name, pattern) or fnmatchcase(plain_name(name), plain_name(pattern))
