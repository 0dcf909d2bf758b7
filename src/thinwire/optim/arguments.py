"""Keyword arguments that all optimizers share, defined once."""

from collections.abc import Iterable
from inspect import Parameter, Signature
from typing import TypedDict

from thinwire.core.gradients import Clip, Regularizer
from thinwire.optim.groups import Exclusion


class Common(TypedDict, total=False):
    """Keywords of all optimizers; each is None if it is not given."""

    grad_clip: Clip | None
    regularizer: Regularizer | None
    exclude_from_weight_decay: Exclusion


class CommonOwn(Common, total=False):
    """Keywords of all methods that are not torch's."""

    maximize: bool
    foreach: bool | None


def require_known(kind: type, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `TypeError`, as Python does, for a keyword that the constructor of `kind` lacks."""
    for key in given:
        if key not in known:
            raise TypeError(
                f"{kind.__name__}.__init__() got an unexpected keyword argument {key!r}"
            )


def spelled_out(constructor: Signature, common: type) -> Signature:
    """Return the signature with the common arguments by name in place of `**common`, for `help`."""
    own = [p for p in constructor.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
    shared = [
        Parameter(
            key,
            Parameter.KEYWORD_ONLY,
            default=False if key == "maximize" else None,
            annotation=kind,
        )
        for key, kind in common.__annotations__.items()
    ]
    return constructor.replace(parameters=[*own, *shared])
