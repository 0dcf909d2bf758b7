"""The config of a pipeline, and the division of a sequential model into its stages."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from torch import nn

from thinwire import _validate as check
from thinwire._names import plain_name
from thinwire._wording import closest
from thinwire.errors import StrategyError


@check.by_name
@dataclass(frozen=True)
class Pipeline:
    """Splits the model into stages on consecutive ranks. Ranks / stages replicas of the pipeline
    train in parallel.

    Example:
        >>> Pipeline(stages=2, micro_batches=4).schedule
        '1f1b'

    Attributes:
        stages: Parts of the model, >= 1; the number of ranks must be a multiple of it.
        micro_batches: Equal parts into which every rank's mini-batch is cut, >= 1.
        schedule: "1f1b" (fewer live activations) or "gpipe" (all forward passes first); the result
            is the same.
        split_points: Names of the modules at which stages 2, 3, ... begin, in execution order;
            empty: a sequential model is cut by itself, balanced by parameter count.

    Raises:
        TypeError, ValueError: A wrong value.

    Source: GPipe, arXiv 1811.06965; PipeDream (1F1B), arXiv 1806.03377.
    """

    stages: int
    micro_batches: int
    schedule: str = "1f1b"
    split_points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check.set_fields(self, check.integer, "stages", "micro_batches", at_least=1)
        check.instance("schedule", self.schedule, str, advice='write "1f1b" or "gpipe"')
        check.one_of("schedule", self.schedule, ("1f1b", "gpipe"))
        advice = 'write a single name as ("blocks.4",)'
        check.set_fields(self, check.words, "split_points", advice=advice)
        points = self.split_points
        if len(set(points)) != len(points):
            raise ValueError(f"split_points must be different modules, got {list(points)}")
        if points and len(points) != self.stages - 1:
            raise ValueError(
                f"split_points must name the first modules of stages 2 to {self.stages} "
                f"({self.stages - 1} names), got {len(points)}: {list(points)}"
            )


@dataclass(frozen=True, slots=True)
class ChainModule:
    """A module of the chain, called once, on the output of the previous one."""

    path: tuple[str, ...]
    """Its own name, preceded by those of the containers around it."""
    module: nn.Module

    @property
    def name(self) -> str:
        """Name as in `named_modules()` of the model."""
        return ".".join(self.path)


def obstacle(module: nn.Module) -> str | None:
    """Return why a module cannot be taken apart into the modules that it calls, or None."""
    if not isinstance(module, nn.Sequential):
        return "only an nn.Sequential defines the order of its modules"
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        return "it defines its own forward"
    if any(module.parameters(recurse=False)) or any(module.buffers(recurse=False)):
        return "it has parameters or buffers outside its modules"
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    if any(getattr(module, f"_{kind}_hooks") for kind in kinds):
        return "it has hooks, which would not be called (register them on a module inside it)"
    return None if len(module) else "it is empty"


def chain(model: nn.Module, path: tuple[str, ...] = ()) -> Iterator[ChainModule]:
    """Return the modules that the model calls, in order; one with an obstacle stays whole."""
    if obstacle(model) is None:
        # named_children() skips a module that comes a second time
        for name, child in model._modules.items():
            assert child is not None
            yield from chain(child, (*path, name))
    else:
        yield ChainModule(path, model)


def assemble(container: nn.Module, links: Sequence[ChainModule], depth: int = 0) -> nn.Sequential:
    """Return a container of consecutive links under their names; whole containers stay."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, group in groupby(links, key=lambda link: link.path[depth]):
        child = container.get_submodule(name)
        inside = list(group)
        whole = len(inside) == sum(1 for _ in chain(child))
        parts[name] = child if whole else assemble(child, inside, depth + 1)
    stage = nn.Sequential(parts)
    stage.training = container.training
    return stage


def split_model(model: nn.Module, config: Pipeline) -> list[nn.Module]:
    """Return the stages of a model."""
    # a Sequential is cut between its modules, also inside nested containers; without split points
    # the largest stage is as small as possible
    if config.stages == 1:
        return [model]
    why = obstacle(model)
    if why is not None:
        raise StrategyError(
            f"the model, {_article(model)}, cannot be cut into {config.stages} stages: {why}. "
            "Make it an nn.Sequential of its parts (nested ones are allowed), or remove pipeline"
        )
    links = list(chain(model))
    points = config.split_points
    begins = _starts(model, links, points) if points else _balanced(links, config.stages)
    pieces = [links[begin:end] for begin, end in pairwise([*begins, len(links)])]
    _check_stages(pieces)
    return [assemble(model, piece) for piece in pieces]


def _article(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _balanced(links: Sequence[ChainModule], stages: int) -> list[int]:
    """Return the starts of the stages: at modules with parameters."""
    heads = [i for i, link in enumerate(links) if any(True for _ in link.module.parameters())]
    if len(heads) < stages:
        raise StrategyError(
            f"the pipeline has {stages} stages, but the model has only {len(heads)} modules with "
            f"parameters in sequence: use at most {len(heads)} stages, or divide its modules"
        )
    # a parameter counts at the first module that has it
    firsts = {p: i for i in reversed(heads) for p in links[i].module.parameters()}
    sizes = [sum(p.numel() for p, first in firsts.items() if first == i) for i in heads]
    return [0, *(heads[i] for i in partition(sizes, stages)[1:])]


def _starts(model: nn.Module, links: Sequence[ChainModule], points: Sequence[str]) -> list[int]:
    """Return the starts of the stages, from the names of their first modules."""
    begins = [0]
    names = ["the first module", *points]
    for point in points:
        index = _index_of(model, links, point)
        if index == 0:
            raise ValueError(
                f"split_points: {point!r} is the first module of the model, so stage 1 would be "
                "empty: name a later module"
            )
        if index <= begins[-1]:
            raise ValueError(
                f"split_points must be in execution order, got {point!r}, which runs "
                f"{'at the same place as' if index == begins[-1] else 'before'} "
                f"{names[len(begins) - 1]!r}"
            )
        begins.append(index)
    return begins


def _index_of(model: nn.Module, links: Sequence[ChainModule], point: str) -> int:
    path = tuple(point.split("."))
    for i, link in enumerate(links):
        if link.path[: len(path)] == path:
            return i
    modules = dict(model.named_modules(remove_duplicate=False))
    around = next((link for link in links if path[: len(link.path)] == link.path), None)
    if point not in modules or around is None:
        names = [repr(link.name) for link in links[1:]]
        shown = [*names[:8], f"... {names[-1]}"] if len(names) > 9 else names
        raise ValueError(
            f"split_points: the model has no module {point!r}{closest(point, modules)}; it "
            f"can be cut at {', '.join(shown)}"
        )
    raise StrategyError(
        f"split_points: {point!r} lies inside {around.name!r}, {_article(around.module)}, which "
        f"cannot be cut: {obstacle(around.module)}. Split before or after {around.name!r}"
    )


def _check_stages(pieces: Sequence[Sequence[ChainModule]]) -> None:
    """Refuse a stage without parameters, and a tensor on two stages."""
    owners: dict[int, tuple[int, str]] = {}
    for i, piece in enumerate(pieces, start=1):
        if not any(True for link in piece for _ in link.module.parameters()):
            raise StrategyError(
                f"stage {i} of {len(pieces)}, {piece[0].name!r} to {piece[-1].name!r}, has no "
                "parameters, so its rank has nothing to train. Move a split point or use fewer "
                "stages"
            )
        for link in piece:
            module = link.module
            own = link.name
            for name, tensor in [*module.named_parameters(own), *module.named_buffers(own)]:
                stage, first = owners.setdefault(id(tensor), (i, plain_name(name)))
                if stage != i:
                    raise StrategyError(
                        f"{first!r} on stage {stage} and {plain_name(name)!r} on stage {i} are "
                        "one tensor, which cannot be on two ranks: untie them, or put both "
                        "modules on one stage with split_points"
                    )


def partition(sizes: Sequence[int], parts: int) -> list[int]:
    """Divide a row of sizes into contiguous parts with the smallest possible maximum."""
    # exact, by dynamic programming over prefixes, O(parts n^2)
    ends = [0, *accumulate(sizes)]
    n = len(sizes)
    limit = _prefixes(ends, parts, limit=ends[n], even=False)[-1][n][0]
    rows = _prefixes(ends, parts, limit=limit, even=True)
    begins = []
    end = n
    for row in reversed(rows):
        end = row[end][1]
        begins.append(end)
    return begins[::-1]


def _prefixes(
    ends: list[int], parts: int, *, limit: float, even: bool
) -> list[dict[int, tuple[float, int]]]:
    """Return by parts and length of a prefix the least cost, and where the last part begins."""
    rows: list[dict[int, tuple[float, int]]] = []
    before: dict[int, tuple[float, int]] = {0: (0, 0)}
    for _ in range(parts):
        row = {}
        for end in range(1, len(ends)):
            sizes = {b: ends[end] - ends[b] for b in before if b < end}
            options = [
                (before[b][0] + size**2 if even else max(before[b][0], size), b)
                for b, size in sizes.items()
                if size <= limit
            ]
            if options:
                row[end] = min(options)
        rows.append(row)
        before = row
    return rows
