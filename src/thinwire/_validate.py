"""Argument checks shared by all modules, with one wording and one rule for every kind of value."""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

import torch

from thinwire._wording import closest, closest_or_all, shown

_T = TypeVar("_T")


def by_name(target: _T) -> _T:
    """Let a call of a class or function name the right word for an unknown or unnamed argument."""
    kind: Any = target
    function = kind.__init__ if isinstance(target, type) else kind
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        for word in options:
            if word not in parameters:
                raise TypeError(
                    f"{kind.__name__}() has no argument {word!r}{closest_or_all(word, known)}"
                )
        if len(args) > most:
            raise TypeError(
                f"{kind.__name__}() got {shown(args[most])} without a name: write NAME=...; known "
                f"are {', '.join(known)}"
            )
        return function(*args, **options)

    if function is kind:
        return called  # type: ignore[return-value]
    kind.__init__ = called
    return target


def real(
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    finite: bool = True,
) -> float:
    """Return `value` as a float; raise `TypeError` or `ValueError` unless it is in the range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number (int or float), got {shown(value)} of type "
            f"{type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of a double
        number = math.inf
    inside = (
        not math.isnan(number)
        and (math.isfinite(number) or not finite)
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
        and (below is None or number < below)
    )
    if not inside:
        signs = {">=": at_least, ">": above, "<=": at_most, "<": below}
        limits = [f"{sign} {bound:g}" for sign, bound in signs.items() if bound is not None]
        bounds = f" {' and '.join(limits)}" if limits else ""
        raise ValueError(
            f"{name} must be a {'finite ' if finite else ''}number{bounds}, got {shown(value)}"
        )
    return number


def integer(name: str, value: Any, *, at_least: int | None = None) -> int:
    """Return `value` as an int; raise `TypeError` or `ValueError` unless it is in the range."""
    try:
        # of tensors Python takes one of one element or of bool too
        of_tensor = isinstance(value, torch.Tensor) and (value.ndim or value.dtype == torch.bool)
        if isinstance(value, bool) or of_tensor:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {shown(value)} of type {type(value).__name__}"
        ) from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} must be an integer >= {at_least}, got {shown(value)}")
    return number


def set_fields(config: object, kind: Callable[..., Any], *names: str, **limits: Any) -> None:
    """Replace fields of a frozen dataclass by their values as `kind` returns them."""
    for name in names:
        object.__setattr__(config, name, kind(name, getattr(config, name), **limits))


def boolean(name: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise `TypeError`."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} must be True or False, got {shown(value)} of type {type(value).__name__}"
        )
    return value


def scalar(name: str, value: object, *, at_least: float | None = None) -> float:
    """Return `real(...)` of a number or of a tensor of one element, which is read once."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be a number or a tensor of one element, got shape "
                f"{tuple(value.shape)}"
            )
        if value.dtype == torch.bool:
            raise TypeError(f"{name} must be a number, got a tensor of type {value.dtype}")
        value = value.item()
    return real(name, value, at_least=at_least)


def instance(name: str, value: object, kinds: type | tuple[type, ...], *, advice: str = "") -> None:
    """Raise `TypeError` unless `value` is an instance of one of `kinds`."""
    if not isinstance(value, kinds):
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        names = " or ".join(kind.__name__ for kind in allowed)
        hint = f"; {advice}" if advice else ""
        raise TypeError(
            f"{name} must be {names}, got {shown(value)} of type {type(value).__name__}{hint}"
        )


def sequence(
    kind: Callable[..., Any], name: str, values: Any, *, advice: str = "", **limits: Any
) -> tuple[Any, ...]:
    """Return the entries of a list or tuple as `kind` returns them, as a tuple."""
    instance(name, values, (tuple, list), advice=advice)
    return tuple(kind(f"{name}[{i}]", value, **limits) for i, value in enumerate(values))


def words(name: str, value: Any, *, advice: str = "") -> tuple[str, ...]:
    """Return a list or tuple of strings as a tuple; raise `TypeError` for anything else."""
    instance(name, value, (tuple, list), advice=advice)
    for i, word in enumerate(value):
        instance(f"{name}[{i}]", word, str, advice=advice)
    return tuple(value)


def entries(name: str, value: Any, content: str) -> list[Any]:
    """Return the entries of an iterable; a tensor, a string or a mapping is none."""
    if isinstance(value, torch.Tensor | str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} must be a list of {content}, got {shown(value)} of type {type(value).__name__}"
        )
    return list(value)


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` unless `value` is one of `allowed`; suggest the closest for a string."""
    choices = list(allowed)
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {choices}, got {shown(value)}{closest(value, choices)}"
        )


def same_shapes(
    kind: str, came: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor], *, advice: str
) -> None:
    """Raise `ValueError` unless a saved state has the same tensors as here, by name and shape."""
    for name in {**came, **here}:
        before, now = (tuple(t[name].shape) if name in t else "nothing" for t in (came, here))
        if before != now:
            raise ValueError(
                f"state does not fit: {kind}, {name} has shape {before} in it and {now} here. "
                f"{advice}"
            )
