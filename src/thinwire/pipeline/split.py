"""Splitting a sequential model into stages."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from torch import nn

from thinwire import _validate as check
from thinwire._names import plain_name
from thinwire.errors import StrategyError
from thinwire.pipeline.chain import ChainModule, assemble, chain, obstacle
from thinwire.pipeline.config import Pipeline

__all__ = ["partition", "split_model"]


def split_model(model: nn.Module, config: Pipeline) -> list[nn.Module]:
    """The stages of a model, which share its modules and parameters; nothing is copied, moved or
    changed.

    A model can be cut where it is an `nn.Sequential`, also between the modules of such containers
    inside it. A stage has modules, parameters and buffers under their names in the model. Without
    split points the largest stage has as few parameters as it can, and every stage begins with a
    module that has parameters.

    Args:
        model: An `nn.Sequential`, if there is more than one stage.
        config: `stages` and `split_points` are used.

    Returns:
        One module per stage; calling them one after another is calling the model.

    Raises:
        ValueError: A split point that is no module of the model, or not in execution order.
        StrategyError: The model cannot be cut (there), and why: it is not sequential, has too few
            modules, a parameter or buffer would be on two stages, or a stage would have no
            parameters.
    """
    if config.stages == 1:
        return [model]
    why = obstacle(model)
    if why is not None:
        raise StrategyError(
            f"the model, {_article(model)}, cannot be cut into {config.stages} stages: {why}. Make "
            "it an nn.Sequential of its parts, in which containers of this kind may be nested, or "
            "leave pipeline out"
        )
    links = list(chain(model))
    begins = (
        _places(model, links, config.split_points)
        if config.split_points
        else _balanced(links, config.stages)
    )
    pieces = [links[begin:end] for begin, end in pairwise([*begins, len(links)])]
    _require_parameters(pieces)
    _require_one_owner(pieces)
    return [assemble(model, piece) for piece in pieces]


def _article(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _balanced(links: Sequence[ChainModule], stages: int) -> list[int]:
    """Where stages begin; only at modules with parameters, so that an activation stays with what it
    follows.
    """
    heads = [i for i, link in enumerate(links) if any(True for _ in link.module.parameters())]
    if len(heads) < stages:
        raise StrategyError(
            f"{stages} stages, but the model is a sequence of only {len(heads)} modules with "
            f"parameters: use at most {len(heads)} stages, or break its modules up into more"
        )
    seen: set[nn.Parameter] = set()
    sizes = [sum(p.numel() for p in _new(links[head].module, seen)) for head in heads]
    return [0, *(heads[i] for i in partition(sizes, stages)[1:])]


def _new(module: nn.Module, seen: set[nn.Parameter]) -> Iterator[nn.Parameter]:
    """The parameters that no module before had."""
    for p in module.parameters():
        if p not in seen:
            seen.add(p)
            yield p


def _places(model: nn.Module, links: Sequence[ChainModule], points: Sequence[str]) -> list[int]:
    """Where stages begin, from the names of the modules at which the second and later ones do."""
    begins = [0]
    names = ["the first module", *points]
    for point in points:
        place = _place(model, links, point)
        if place == 0:
            raise ValueError(
                f"split_points: {point!r} is where the model begins, so stage 1 would be empty"
            )
        if place <= begins[-1]:
            raise ValueError(
                f"split_points must be in execution order, got {point!r}, which runs "
                f"{'at the same place as' if place == begins[-1] else 'before'} "
                f"{names[len(begins) - 1]!r}"
            )
        begins.append(place)
    return begins


def _place(model: nn.Module, links: Sequence[ChainModule], point: str) -> int:
    path = tuple(point.split("."))
    for i, link in enumerate(links):
        if link.path[: len(path)] == path:
            return i
    modules = dict(model.named_modules(remove_duplicate=False))
    around = next((link for link in links if path[: len(link.path)] == link.path), None)
    if point not in modules or around is None:
        places = [repr(link.name) for link in links[1:]]
        shown = [*places[:8], f"... {places[-1]}"] if len(places) > 9 else places
        raise ValueError(
            f"split_points: the model has no module {point!r}{check.closest(point, modules)}; it "
            f"can be cut at {', '.join(shown)}"
        )
    raise StrategyError(
        f"split_points: {point!r} lies inside {around.name!r}, {_article(around.module)}, which "
        f"cannot be cut: {obstacle(around.module)}. Split before or after {around.name!r}"
    )


def _require_parameters(pieces: Sequence[Sequence[ChainModule]]) -> None:
    for i, piece in enumerate(pieces, start=1):
        if not any(True for link in piece for _ in link.module.parameters()):
            raise StrategyError(
                f"stage {i} of {len(pieces)}, {piece[0].name!r} to {piece[-1].name!r}, has no "
                "parameters: there is nothing to train on its rank. Move a split point or use "
                "fewer stages"
            )


def _require_one_owner(pieces: Sequence[Sequence[ChainModule]]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for i, piece in enumerate(pieces, start=1):
        for link in piece:
            tensors = [
                *link.module.named_parameters(link.name),
                *link.module.named_buffers(link.name),
            ]
            for name, tensor in tensors:
                stage, first = owners.setdefault(id(tensor), (i, plain_name(name)))
                if stage != i:
                    raise StrategyError(
                        f"{first!r} on stage {stage} and {plain_name(name)!r} on stage {i} are one "
                        "tensor, which two ranks cannot both own: do not tie them, or put both "
                        "modules on one stage with split_points"
                    )


def partition(sizes: Sequence[int], parts: int) -> list[int]:
    """Divide a row of sizes into contiguous parts, the largest as small as it can be; among such
    divisions, one with the most even parts.

    Exact, by dynamic programming over prefixes, O(parts · n²). Even means the least sum of squares.

    Args:
        sizes: n sizes, >= 0, in order.
        parts: 1 to n.

    Returns:
        The index at which each part begins, the first of them 0; no part is empty.
    """
    ends = [0, *accumulate(sizes)]
    n = len(sizes)
    limit = _prefixes(ends, parts, limit=ends[n], even=False)[-1][n][0]
    rows = _prefixes(ends, parts, limit=limit, even=True)
    begins, end = [], n
    for row in reversed(rows):
        end = row[end][1]
        begins.append(end)
    return begins[::-1]


def _prefixes(
    ends: list[int], parts: int, *, limit: float, even: bool
) -> list[dict[int, tuple[float, int]]]:
    """Per number of parts and length of a prefix: the least cost, and where the last part
    begins.
    """
    rows: list[dict[int, tuple[float, int]]] = []
    before: dict[int, tuple[float, int]] = {0: (0, 0)}
    for _ in range(parts):
        row = {}
        for end in range(1, len(ends)):
            options = [
                (
                    cost + (ends[end] - ends[begin]) ** 2
                    if even
                    else max(cost, ends[end] - ends[begin]),
                    begin,
                )
                for begin, (cost, _) in before.items()
                if begin < end and ends[end] - ends[begin] <= limit
            ]
            if options:
                row[end] = min(options)
        rows.append(row)
        before = row
    return rows
