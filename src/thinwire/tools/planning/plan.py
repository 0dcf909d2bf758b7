"""Predict the strategy that reaches a loss soonest, with the reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isfinite, isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.layout.traffic import GATHER, streams_between
from thinwire.tools.compare.strategies import STRATEGIES, choose, compression_of
from thinwire.tools.network.netns import Link
from thinwire.tools.planning.grid import LEFT_OUT, Candidate, candidates, in_groups
from thinwire.tools.planning.loss import MOST_STEPS, loss_gap, rate_factor, steps_to_dense_loss
from thinwire.tools.planning.matrix import Matrix
from thinwire.tools.planning.methods import BRIEF, cost_of, memory_of
from thinwire.tools.planning.network import Network, filled_bit_s
from thinwire.tools.planning.work import Probe, Workload, work_of
from thinwire.tools.run.config import (
    OPTIMIZERS,
    Recipe,
    parse_count,
    require_one_of,
    require_sites,
    require_task,
    require_whole,
    require_within,
)

if TYPE_CHECKING:
    from thinwire.strategy.distributed_strategy import DistributedStrategy

_FASTEST_BIT_S, _UNLIMITED_BIT_S = 4e11, 2e10
"""Fastest allowed line, and the rate assumed for none and loopback."""
_MOST_WORKERS, _MOST_PARAMS = 100_000, 10**13
_DOUBT, _DOUBT_ON_TOP = 0.1, 0.2
_NEAR = 1.2
"""Ratio of sizes below which a straight line between their seconds is accurate enough."""
_WHOLE_S = 10.0
_UNMEASURED = "; not measured: "
RELAY, RELAYED = "relay", "members join with relay=True, on a host that sends on all messages"
"""End of a row's name, and its meaning."""
GROUPS, GROUPED = "n", "ranks of a group of near sites, which average first"
_FAST_STEP_S = 2e-8
"""Seconds a parameter below which a step is taken for a GPU's."""
_WORTH = 1.05
"""Smallest speed-up over dense at which a strategy is recommended, at the pessimistic end."""
Interval = tuple[float, float, float]
_Groups = dict[tuple[str, ...], Network]
"""Networks with groups of near sites, by the order of these."""
_POSITIONAL = ("LocalSGD", "Quantized")
"""Configs whose first value is written without its name."""


@dataclass(frozen=True)
class Row:
    """Prediction for one strategy.

    Attributes:
        name: Name of the strategy; a variant adds its differences.
        step_seconds: Seconds of a step: low, mid and high.
        bytes_per_step: Bytes that a rank sends; to other sites if the model is sharded.
        memory_bytes: Most bytes that a process needs at a time, without activations.
        memory: Bytes by what needs them; of the last two, update and exchange, one at a time.
        waiting_share: Fraction of a step spent waiting for the exchange.
        progress: Steps of dense training that a step is worth, until dense's final loss, from
            `loss_gap`.
        loss_gap: Loss above dense's with the same optimizer at equal steps: low, mid and high; 0.02
            is 2 %.
        loss_gap_source: Source of `loss_gap`.
        measured: False if interval, delay, bits, workers or else are outside of what `loss_gap` was
            fitted to, which widens it; of dense too where its batch was not measured.
        time_to_dense_loss: Time to dense's final loss relative to dense's own, both with the
            optimizer of the strategy; smaller is better. Beyond four times dense's steps, the
            number of steps relative to dense's.
        time_at_worst: The same at the high ends of `step_seconds` and `loss_gap`, for any number of
            steps. Rows are sorted by it, those that never reach dense's loss last.
        document: Content of a strategy file; None for a hook of torch.
        optimizer: Optimizer that the strategy requires; None for any.
        reaches_dense_loss: True if four times dense's steps are expected to suffice.
        bytes_inside_site: Bytes that a rank sends to the others that shard the model with it.
        lr_factor: Best learning rate over that of dense Muon with up to four workers, as measured
            for local Muon; None for others.
        python: The config in Python, of names of thinwire; for a hook of torch the code that adds
            it.
    """

    name: str
    step_seconds: tuple[float, float, float]
    bytes_per_step: float
    memory_bytes: int
    memory: Mapping[str, int]
    waiting_share: float
    progress: float
    loss_gap: tuple[float, float, float]
    loss_gap_source: str
    measured: bool
    time_to_dense_loss: float
    time_at_worst: float
    document: Mapping[str, Any] | None
    optimizer: str | None = None
    reaches_dense_loss: bool = True
    bytes_inside_site: float = 0.0
    lr_factor: float | None = None
    python: str = ""

    @property
    def strategy(self) -> str:
        """Name of the strategy in `thinwire compare`, without the variant."""
        return self.name.partition(" ")[0]

    @property
    def times_sooner(self) -> str:
        """Speed-up to dense's loss, 1 / `time_to_dense_loss`, with two digits; or "never"."""
        return _times(self.time_to_dense_loss) if self.reaches_dense_loss else "never"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data, without the document."""
        own = ["document", "optimizer", "python", "reaches_dense_loss"]
        if not self.bytes_inside_site:  # models are whole
            own.append("bytes_inside_site")
        shown = {key: value for key, value in vars(self).items() if key not in own}
        shown["progress_source"] = self.loss_gap_source
        return {k: list(v) if isinstance(v, tuple) else v for k, v in shown.items()}


@dataclass(frozen=True)
class Plan:
    """Result of `plan`: a row per strategy and setting, by time to dense's loss at worst.

    Example:
        >>> found = plan(params="124M", step_seconds=0.35, workers=8, link="100mbit")
        >>> found["dense"].loss_gap
        (0.0, 0.0, 0.0)

    Attributes:
        recommended: Name of the recommended strategy.
        reason: Reason, in a sentence.
        strategies: All rows, best first.
        link: Assumed or measured network.
        model: Assumed or measured model: parameters, and seconds of a step without an exchange.
    """

    recommended: str
    reason: str
    strategies: tuple[Row, ...]
    link: Mapping[str, Any]
    model: Mapping[str, Any]

    def __getitem__(self, name: str) -> Row:
        """Return the row of a strategy."""
        found = next((row for row in self.strategies if row.name == name), None)
        if found is None:
            raise KeyError(
                f"{name!r} is not a row of this plan; its strategies are "
                f"{', '.join(row.strategy for row in self.best())}"
            )
        return found

    def best(self) -> tuple[Row, ...]:
        """Return the best row of every strategy, best first."""
        found: dict[str, Row] = {}
        for row in self.strategies:
            found.setdefault(row.strategy, row)
        return tuple(found.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {**vars(self), "strategies": [row.to_dict() for row in self.strategies]}


def plan(
    *,
    params: int | str | None = None,
    step_seconds: float | None = None,
    workers: int | None = None,
    link: str | None = None,
    latency: str | None = None,
    device: str | None = None,
    probe: str | Path | None = None,
    task: str | None = None,
    up: str | None = None,
    down: str | None = None,
    loss: str | None = None,
    shard: int = 1,
    strategies: Sequence[str] | None = None,
    trainable: int | str | None = None,
    matrix: str | Path | None = None,
) -> Plan:
    """Predict a training step of every strategy on a network and recommend one.

    The model is given by `params` and `step_seconds`, by `task`, or by `probe`; the network by
    `workers`, `link` (or `up` and `down`) and `latency`, or by `probe`.

    Example:
        >>> found = plan(params="124M", step_seconds=0.35, workers=8, link="100mbit")
        >>> found.recommended.startswith("muon-local")
        True
        >>> found["dense"].step_seconds[1] > 100 * found.best()[0].step_seconds[1]
        True

    Args:
        params: Number of trainable parameters, such as 124_000_000 or "124M".
        step_seconds: Seconds of a step of one rank without an exchange. With a task, by default
            measured in this process, in up to seven steps.
        workers: Number of ranks; 2 by default.
        link: Rate of each rank in each direction, up to "400gbit"; "100mbit" by default. "none" and
            "loopback" count as 20gbit.
        latency: One-way latency, such as "20ms"; none by default.
        device: Device that computes, "cpu" or "cuda"; by default cuda if a step takes less than 20
            ns a parameter. For a task that is measured here, cuda if there is one.
        probe: File of `thinwire probe`, instead of all of these.
        task: Function that returns a `thinwire.Task`, as "FILE.py:NAME"; its model gives the
            shapes. With a probe, the network is the probe's, and so is the step if it is of this
            task.
        up: Rate at which each rank sends, such as "10mbit", instead of `link`; with `down`.
        down: Rate at which each rank receives.
        loss: Share of the packets that is lost, each way, such as "0.2%"; CUBIC then fills less
            of a line, by the default number of streams.
        shard: Number of ranks of a site, among which FSDP shards the model. They share the site's
            link; with a probe, each has its own.
        strategies: Names of `thinwire compare` and strategy files to predict beside dense; all
            names by default.
        trainable: Number of the parameters that change, such as "25M", if the rest is frozen, as by
            LoRA; with `params`.
        matrix: CSV file of lines between sites, instead of `link` and `latency`: from,to,ms,mbit
            (round trip, rate). Rows with "groups" average inside groups of near sites first.

    Returns:
        The strategies, best first.

    Raises:
        TypeError, ValueError: An argument is invalid; the message has its value and what is
            allowed.
    """
    if task is not None and params is not None:
        raise ValueError(
            f"params={params!r} and task={task!r}: the task's model has its own number of "
            "parameters; omit one of them"
        )
    if step_seconds is not None:
        _require_seconds(step_seconds)
    recipes = _chosen(strategies)
    grouped: _Groups = {}
    given = {"link": link, "up": up, "down": down, "latency": latency, "loss": loss}
    if probe is not None:
        _require_alone("probe", probe, params=params, matrix=matrix, **given)
        network, work, named, lost = Probe.read(Path(probe))
        if workers not in (None, network.ranks):
            raise ValueError(
                f"workers={workers}, but probe={str(probe)!r} was measured with {network.ranks} "
                "ranks; omit workers, or run the probe with as many ranks"
            )
        if task is not None and (task != named or step_seconds is not None):
            work = _of_task(task, step_seconds, device, network.ranks)
        else:
            _require_alone("probe", probe, step_seconds=step_seconds, device=device)
        task = task or named
    else:
        network, lost, grouped = _assumed_network(workers, given, matrix, shard)
        if task is None:
            work = _assumed_work(params, step_seconds, device, trainable)
        else:
            work = _of_task(task, step_seconds, device, network.ranks)
    if trainable is not None and params is None:
        raise ValueError(f"trainable={trainable!r} needs params, the size of the whole model")
    # without a task shapes are assumed
    works = [work, work] if params is None else [*map(work.resized, _sizes(work.numel))]
    line = _between_sites(network, shard, shared=probe is None)
    streams = streams_between(line.ranks)
    network = _filled(line, lost, streams)
    nodes = [_filled(way, lost, streams) for way in grouped.values()]
    nodes += [network] if network.node is not None else []
    # progress is against dense with the same optimizer, so time is too
    dense_s = {
        one.recipe.optimizer: _step_seconds(one, works, work.numel, shard, network)[1]
        for one in candidates(network.ranks, (STRATEGIES["dense"], STRATEGIES["dense-muon"]))
    }
    rows = [
        _row(one, work, works, shard, way, dense_s[one.recipe.optimizer])
        for one, way in _offered(recipes, work, shard, network, nodes)
    ]
    rows.sort(
        key=lambda r: (not r.reaches_dense_loss, r.time_at_worst, r.bytes_per_step, len(r.name))
    )
    groups = {way.node_size: sites for sites, way in grouped.items()}
    recommended, reason = _recommended(rows, groups)
    about = {
        "rate_bit_s": network.bit_s,
        "down_bit_s": network.down,
        "latency_s": network.latency_s,
        "loss": lost,
        "streams": streams,
        "line_bit_s": min(line.bit_s, line.down),
        "workers": network.ranks * shard,
        "shard": shard,
        "node_size": network.node_size,
        "groups": groups,
        "measured": probe is not None,
    }
    computes = {"step_seconds": work.step_s, "device": "cuda" if work.cuda else "cpu"}
    model = {"parameters": work.numel, "frozen": work.frozen, **computes, "task": task}
    return Plan(recommended, reason, tuple(rows), about, model)


def _chosen(strategies: Sequence[str] | None) -> list[Recipe]:
    """Return the recipes of these strategies, and dense first."""
    if strategies is None:
        return [recipe for recipe in STRATEGIES.values() if recipe.name not in LEFT_OUT]
    dense = STRATEGIES["dense"]
    return [dense, *(recipe for recipe in choose(strategies) if recipe is not dense)]


def _filled(line: Network, lost: float, streams: int) -> Network:
    """Return the network that connections fill of a line that loses packets."""
    most_bit_s = filled_bit_s(line.latency_s, lost, streams)
    bit_s, down_bit_s = min(line.bit_s, most_bit_s), min(line.down, most_bit_s)
    return replace(line, bit_s=bit_s, down_bit_s=down_bit_s)


def _offered(
    recipes: Sequence[Recipe],
    work: Workload,
    shard: int,
    network: Network,
    nodes: Sequence[Network],
) -> Iterator[tuple[Candidate, Network]]:
    """Yield what the model can train with; a relay too where directions differ, as at home, and
    groups of near sites.
    """
    home = network.bit_s != network.down and network.ranks > 2
    relay = replace(network, relay=True)
    for one in candidates(network.ranks, recipes):
        strategy = one.strategy
        if one.recipe.optimizer == "muon" and work.muon_numel == 0:
            continue
        # on a sharded model dense is HSDP; changes are compressed shard by shard
        if shard > 1 and (
            one.recipe.hook or not getattr(strategy.gradient_compression, "elementwise", True)
        ):
            continue
        yield one, network
        if strategy.localsgd is None:
            continue
        # the host passes on whole messages, and sums are gathered
        if home and getattr(compression_of(strategy), "exchange", GATHER) == GATHER:
            yield replace(one, name=f"{one.name} {RELAY}"), relay
        for way in nodes:
            for words, local in in_groups(strategy.localsgd, way.node_size):
                name = f"{one.name} {GROUPS}{way.node_size}{words}"
                yield replace(one, name=name, strategy=replace(strategy, localsgd=local)), way


def _between_sites(network: Network, shard: int, *, shared: bool) -> Network:
    """Return the network between ranks of different sites that hold the same shard."""
    require_whole("shard", shard)
    require_sites(network.ranks, shard)
    if shard == 1:
        return network
    lines = shard if shared else 1
    return replace(
        network,
        ranks=network.ranks // shard,
        bit_s=network.bit_s / lines,
        down_bit_s=network.down / lines,
        node=None,
    )


def _require_alone(source: str, file: str | Path | None, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is given, but {source}={str(file)!r} has measured it; omit one "
                "of them"
            )


def _assumed_network(
    workers: int | None, given: Mapping[str, str | None], matrix: str | Path | None, shard: int
) -> tuple[Network, float, _Groups]:
    """Return the network as if it lost nothing, the share that it loses, and networks with groups
    of near sites.
    """
    if workers is not None:
        require_within("workers", workers, 2, _MOST_WORKERS)
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a text such as 100mbit, 20ms or 0.2%, got {value!r}")
    link, up, down, latency, loss = given.values()
    delay = "0ms" if latency is None else latency
    share = "0%" if loss is None else loss
    line = Link.parse(link, delay, up=up, down=down, loss=share, at_most=_FASTEST_BIT_S)
    if matrix is None:
        bit_s = line.rate_bit_s or _UNLIMITED_BIT_S
        network = Network(bit_s, line.latency_s, workers or 2, down_bit_s=line.down_bit_s)
        return network, line.loss, {}
    _require_alone("matrix", matrix, **{**given, "loss": None})
    if shard > 1:
        raise ValueError(f"matrix={str(matrix)!r} is between whole models: omit shard")
    found = Matrix.read(Path(matrix))
    network = found.network(workers or len(found.sites))
    return network, line.loss, dict(found.groups(network.ranks))


def _assumed_work(
    params: int | str | None,
    step_seconds: float | None,
    device: str | None,
    trainable: int | str | None,
) -> Workload:
    if params is None or step_seconds is None:
        missing = "params" if params is None else "step_seconds"
        raise ValueError(
            f"{missing} is missing; give params and step_seconds, or a task (FILE.py:NAME), or "
            "a probe, which has measured both"
        )
    whole = _parsed_params("params", params)
    numel = whole if trainable is None else _parsed_params("trainable", trainable)
    if numel > whole:
        raise ValueError(f"trainable={trainable!r} is more than params={params!r}")
    if device is None:
        device = "cuda" if step_seconds < _FAST_STEP_S * whole else "cpu"
    require_one_of("device", device, ("cpu", "cuda"))
    return Workload.assumed(numel, whole, float(step_seconds), cuda=device == "cuda")


def _of_task(task: str, step_seconds: float | None, device: str | None, workers: int) -> Workload:
    """Return a task's shapes and step; the step is measured here unless given."""
    require_task(task)
    if device is not None:
        require_one_of("device", device, ("cpu", "cuda"))
    from thinwire.tools.run.compute import step_of_task_here

    return work_of(step_of_task_here(task, step_seconds, device, workers))


def _require_seconds(seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"step_seconds must be a number, got {seconds!r}")
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError(f"step_seconds={seconds!r} is out of range; it must be positive")


def _parsed_params(name: str, params: int | str) -> int:
    if isinstance(params, str):
        params = parse_count(name, params, "write one such as 124M")
    require_within(name, params, 1, _MOST_PARAMS)
    return params


def _sizes(numel: int) -> Iterator[int]:
    """Yield the smallest size, the largest, and others that enclose a number ever closer."""
    low = 1
    high = _MOST_PARAMS
    yield from (low, high)
    while high > low * _NEAR and high - low > 1:
        middle = max(low + 1, isqrt(low * high))
        yield middle
        low, high = (middle, high) if middle <= numel else (low, middle)


def _step_seconds(
    one: Candidate, works: Sequence[Workload], numel: int, shard: int, network: Network
) -> Interval:
    """Return the seconds of a step: low, mid and high."""
    # A larger model can be faster: its buckets begin earlier, or its tensors are large enough to be
    # compressed. Where shapes are assumed, that says nothing about a user's model. So the seconds
    # of a size are kept between those of the two that enclose it. Two numbers have the same sizes
    # until they part, hence none takes less than a smaller one, nor less on a slower network.
    found = []
    for work in works:
        part = work.sharded(shard).by(one.recipe.optimizer)
        mid = cost_of(one.strategy, one.recipe.hook, part, network).step_s
        # compute within 10 %, the rest within 20 %
        doubt = _DOUBT * part.step_s + _DOUBT_ON_TOP * (mid - part.step_s)
        found.append((work.numel, (mid - doubt, mid, mid + doubt)))
    (low, low_s), (high, high_s), *inner = found
    for size, seconds in inner:
        least, mid, most = map(min, map(max, seconds, low_s), high_s)
        if size <= numel:
            low = size
            low_s = (least, mid, most)
        else:
            high = size
            high_s = (least, mid, most)
    share = (numel - low) / max(1, high - low)
    least, mid, most = (a + share * (b - a) for a, b in zip(low_s, high_s, strict=True))
    return least, mid, most


def _row(
    one: Candidate,
    work: Workload,
    works: Sequence[Workload],
    shard: int,
    network: Network,
    dense_s: float,
) -> Row:
    optimizer = one.recipe.optimizer
    strategy = one.strategy
    part = work.sharded(shard).by(optimizer)
    cost = cost_of(strategy, one.recipe.hook, part, network)
    memory = memory_of(cost, part, optimizer)
    brief = {key: memory[key] for key in BRIEF}
    size = work.numel + work.frozen
    method = one.recipe.hook or one.recipe.name
    lora = bool(work.frozen)
    gap = loss_gap(method, strategy, optimizer, size, network.ranks, adapters=lora)
    steps = steps_to_dense_loss(gap.mid, size)
    reaches = steps <= MOST_STEPS
    most_steps = steps_to_dense_loss(gap.high, size)
    seconds = _step_seconds(one, works, work.numel, shard, network)
    return Row(
        one.name,
        seconds,
        cost.bytes,
        sum(memory.values()) - sum(brief.values()) + max(brief.values()),
        memory,
        max(0.0, 1 - part.step_s / seconds[1]),
        1 / steps,
        (gap.low, gap.mid, gap.high),
        gap.source + f"{_UNMEASURED}{gap.unmeasured}" * bool(gap.unmeasured),
        not gap.unmeasured,
        seconds[1] / dense_s * steps if reaches else steps,
        seconds[2] / dense_s * most_steps,
        None if one.recipe.hook else strategy.to_dict(),
        OPTIMIZERS.get(optimizer or ""),
        reaches,
        work.bytes_inside(optimizer, shard),
        rate_factor(strategy, optimizer, network.ranks),
        one.recipe.code or _python(strategy),
    )


def _python(strategy: "DistributedStrategy") -> str:
    calls = {name: _call(config) for name, config in strategy.on.items()}
    if len(calls) == 1:
        return calls.popitem()[1]
    return f"DistributedStrategy({', '.join(f'{name}={call}' for name, call in calls.items())})"


def _call(config: Any) -> str:
    """Return a config in Python, without its defaults."""
    name = type(config).__name__
    words = list[str]()
    for field in sorted(fields(config), key=lambda field: bool(field.kw_only)):
        value = getattr(config, field.name)
        text = _call(value) if is_dataclass(value) else repr(value)
        if name in _POSITIONAL and not words:
            words.append(text)
        elif value != field.default:
            words.append(f"{field.name}={text}")
    return f"{name}({', '.join(words)})"


def _times(share: float) -> str:
    return f"{float(f'{1 / share:.2g}'):,g}"


def _recommended(rows: Sequence[Row], groups: Mapping[int, Sequence[str]]) -> tuple[str, str]:
    best = rows[0]
    dense = next(row for row in rows if row.name == "dense")
    if best.time_at_worst * _WORTH > dense.time_at_worst:
        best = dense
    beyond = "".join(best.loss_gap_source.partition(_UNMEASURED)[1:])
    if best is dense:
        return "dense", (
            f"use dense: its step of {dense.step_seconds[1]:.3g} s waits for the network "
            f"{100 * dense.waiting_share:.0f} % of the time, and at the pessimistic end of its "
            f"prediction no strategy is more than 5 % faster{beyond}"
        )
    by = f"; with {best.optimizer}" if best.optimizer else ""
    if best.lr_factor:
        twice = "twice " if best.lr_factor > 1 else ""
        by += f"; learning rate: {twice}the best of dense Muon with few workers"
    by += f"; {RELAYED}" if best.name.endswith(f" {RELAY}") else ""
    for node_size, sites in groups.items():
        if f"{GROUPS}{node_size}" in best.name.split():  # "n4" is also in "n40"
            by += f"; ranks in the order of {', '.join(sites)}"
    return best.name, (
        f"use {best.name}: a step of {seconds_text(best.step_seconds[1])} s instead of dense's "
        f"{seconds_text(dense.step_seconds[1])} s. At equal steps its loss is expected "
        f"{gap_text(best.loss_gap)} % above dense's; it reaches dense's loss about "
        f"{best.times_sooner} times as fast as dense, {_times(best.time_at_worst)} times at the "
        f"pessimistic end{by}{beyond}"
    )


def gap_text(gap: tuple[float, float, float]) -> str:
    """Format a gap as low to high in percent, with at most two digits."""
    low, _, high = (f"{float(f'{100 * value:.2g}'):g}" for value in gap)
    return low if low == high else f"{low} to {high}"


def seconds_text(seconds: float) -> str:
    """Format seconds with two significant digits, never as a power of ten."""
    return f"{seconds:.0f}" if seconds >= _WHOLE_S else f"{seconds:.2g}"
