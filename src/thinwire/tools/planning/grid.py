"""Settings that a plan compares, and the progress of a step of each."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import product
from json import loads
from math import log
from typing import Any, NamedTuple

from thinwire.layout.traffic import GATHER, SPLIT
from thinwire.tools.compare.strategies import STRATEGIES
from thinwire.tools.run.config import Recipe

Document = Mapping[str, Any]
Candidate = tuple[str, Recipe, Document | None]
"""Name, recipe and document of a setting."""

_RAMP_STEPS = 100
"""Warm-up steps of methods that ramp up."""
LEFT_OUT = ("adaptive-localsgd", "dense-muon", "fp16-muon")
"""Strategies of `thinwire compare` without a fixed interval, or that differ only in the
optimizer.
"""
_INTERVALS = (4, 8, 16, 32, 64, 128)
_FRAGMENTS = (1, 4)
_RANKS = (2, 4, 8)
_SPARSITIES, _SPARSE_BITS = (0.9, 0.75), (2, 4)
"""Compression settings of parameter changes."""
_RAMP_ENDS, _RAMP_BITS = (0.999, 0.99), (1, 4)
"""Compression settings of gradients, whose sparsity ramps up."""
_BITS = (1, 2, 4, 8)


def candidates(workers: int, node_size: int = 1) -> Iterator[Candidate]:
    """Every strategy as `thinwire compare` has it, each followed by other settings of it."""
    # no density and no rank is below those whose progress is known: with their progress it would
    # win by that assumption
    for name, recipe in STRATEGIES.items():
        if name in LEFT_OUT:
            continue
        base = recipe.document(_RAMP_STEPS)
        yield name, recipe, base
        for words, document in _variants(base or {}, workers, node_size):
            if document != base:
                yield f"{name} {words}", recipe, document


def _variants(base: Document, workers: int, node_size: int) -> Iterator[tuple[str, Document]]:
    for field, own in base.items():
        if field == "localsgd":
            yield from _local(own, workers)
        elif "sparsity" in own:
            for words, changed in _ramped(own, workers, node_size):
                yield words, {field: changed}
        elif "rank" in own:
            for rank in _RANKS:
                yield f"r{rank}", {field: {**own, "rank": rank}}


def _ramped(own: Document, workers: int, node_size: int) -> Iterator[tuple[str, Document]]:
    first = own["sparsity"][:-1]
    for sparsity in _RAMP_ENDS:
        for bits in _RAMP_BITS:
            for word, more in _exchanges(workers):
                levels = [*(level for level in first if level < sparsity), sparsity]
                changed = {**own, "sparsity": levels, "value_bits": bits, **more}
                words = f"{_density(sparsity)} b{bits}{word}"
                yield words, changed
                if node_size > 1:
                    yield f"{words} n1", {**changed, "node_size": 1}


def _local(own: Mapping[str, Any], workers: int) -> Iterator[tuple[str, Document]]:
    for words, compression in _compressions(own.get("compression"), workers):
        changed = own if compression is None else {**own, "compression": compression}
        for k_steps in _INTERVALS:
            for fragments in _FRAGMENTS:
                distance = k_steps // fragments
                for delay in sorted({0, distance // 4}):
                    yield (
                        f"k{k_steps}"
                        + (f" d{delay}" if delay else "")
                        + (f" f{fragments}" if fragments > 1 else "")
                        + words,
                        {
                            "localsgd": {**changed, "k_steps": k_steps}
                            | ({"delay": delay} if delay else {})
                            | ({"fragments": fragments} if fragments > 1 else {})
                        },
                    )


def _compressions(
    base: Mapping[str, Any] | None, workers: int
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Return label and content of each compression; the base comes first."""
    yield "", None
    if base is None:
        return
    ((tag, own),) = base.items()
    choices: list[tuple[str, dict[str, float]]] = [
        (f" {_density(sparsity)} b{bits}", {"sparsity": sparsity, "value_bits": bits})
        for sparsity in _SPARSITIES
        for bits in _SPARSE_BITS
    ]
    if tag == "quantized":
        choices = [(f" b{bits}", {"value_bits": bits}) for bits in _BITS]
    for words, choice in choices:
        for word, more in _exchanges(workers):
            made = {**own, **choice, **more}
            if made != own:
                yield f"{words}{word}", {tag: made}


def _exchanges(workers: int) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield "", {}
    for way in (GATHER, SPLIT) if workers > 2 else ():
        yield f" {way}", {"exchange": way}


def _density(sparsity: float) -> str:
    return f"{100 * (1 - sparsity):.3g}%"


_Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
_REPORTED = ("k_steps", "sent", "value_bits", "rank", "delay", "fragments")


class Progress(NamedTuple):
    """Steps of dense training that one step is worth, until dense's last loss, and its source."""

    share: float
    source: str


@cache
def _measured() -> list[dict[str, Any]]:
    text = files("thinwire.tools.planning").joinpath("progress.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = loads(text)
    return found


def progress_of(method: str, document: Mapping[str, Any], workers: int) -> Progress:
    """Return the progress of the nearest measured setting of the same method."""
    if method == "dense":
        return Progress(1.0, "by definition")
    asked = _settings(document)

    def distance(run: Mapping[str, Any]) -> tuple[float, ...]:
        known = {**_known(method), **run}
        return (
            abs(log(known["k_steps"] / asked["k_steps"])),
            abs(_lateness(known) - _lateness(asked)),
            *(abs(log(known[key] / asked[key])) for key in ("sent", "value_bits", "rank")),
            abs(log(run["workers"] / workers)),
        )

    nearest = min((run for run in _measured() if run["method"] == method), key=distance)
    known = {**_known(method), **nearest}
    share, notes = nearest["progress"], ""
    local = "localsgd" in document
    later = local and _lateness(asked) > _lateness(known)
    if later:
        late, loses, source = _loss_by_lateness()
        factor = 1 - min(1.0, loses * (_lateness(asked) - _lateness(known)) / late)
        share, notes = share * factor, f"; times {factor:.2g} for the delay, from {source}"
    if local:
        factor, source = _loss_by_workers(method, known["k_steps"], nearest["workers"], workers)
        if factor < 1:
            share, notes = (
                share * factor,
                f"{notes}; times {factor:.2g} for the ranks, from {source}",
            )
    others = [
        f"{'density' if key == 'sent' else key}={known[key]:g}"
        for key in _REPORTED
        if known[key] != asked[key] and not (later and key == "delay")
    ]
    if known["exchange"] != asked["exchange"]:
        others.append(f"exchange={known['exchange']}")
    known_for = f"; known for {', '.join(others)}" if others else ""
    return Progress(share, nearest["source"] + notes + known_for)


def _lateness(settings: Mapping[str, Any]) -> float:
    """Return the delay as a fraction of the interval."""
    return float(settings["delay"] / settings["k_steps"])


@cache
def _alike_but(key: str) -> list[_Pair]:
    """Yield pairs of measured runs that differ only in this setting."""

    def rest(run: Mapping[str, Any]) -> dict[str, Any]:
        return {name: run[name] for name in run if name not in (key, "progress", "source")}

    pairs = product(_measured(), repeat=2)
    return [(a, b) for a, b in pairs if rest(a) == rest(b) and a.get(key) != b.get(key)]


@cache
def _loss_by_lateness() -> tuple[float, float, str]:
    """Return a measured delay per interval, the fraction of progress it costs, and the source."""
    for run, other in _alike_but("delay"):
        if "delay" in run and "delay" not in other:
            lost = max(0.0, 1 - run["progress"] / other["progress"])
            name = f"{run['method']} k{run['k_steps']} d{run['delay']}"
            return run["delay"] / run["k_steps"], lost, name
    raise LookupError("progress.json has no setting with a delay beside the same setting without")


@cache
def _loss_by_workers(method: str, k_steps: int, known: int, asked: int) -> tuple[float, str]:
    """Return the factor on a progress from `known` to `asked` ranks, and its source."""

    def distance(pair: _Pair) -> tuple[float, ...]:
        run, other = pair
        return (
            abs(log(other["workers"] / asked)),
            run["method"] != method,
            (run["method"] == "muon-local") != (method == "muon-local"),
            abs(log(run["k_steps"] / k_steps)),
        )

    pairs = [
        pair
        for pair in _alike_but("workers")
        if pair[0]["workers"] == known
        and pair[0]["k_steps"] > 1
        and distance(pair)[0] < abs(log(known / asked))
    ]
    if not pairs:
        return 1.0, ""
    run, other = min(pairs, key=distance)
    name = f"{run['method']} k{run['k_steps']} with {other['workers']}"
    return min(1.0, other["progress"] / run["progress"]), name


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect progress; 1 or 0 for settings missing from a document."""
    local = document.get("localsgd", {})
    of_changes: Mapping[str, Any] = next(iter((local.get("compression") or {}).values()), {})
    # of gradients a field by itself says what is sent
    of_gradients = next((own for field, own in document.items() if field != "localsgd"), None)
    own = of_gradients or of_changes
    sparsity = own.get("sparsity", 0.0)
    return {
        "k_steps": local.get("k_steps", 1),
        "sent": round(1 - (sparsity if isinstance(sparsity, float) else sparsity[-1]), 6),
        "value_bits": own.get("value_bits", 32),
        "rank": document.get("low_rank", {}).get("rank", 1),
        "delay": local.get("delay", 0),
        "fragments": local.get("fragments", 1),
        "exchange": own.get("exchange", "auto"),
    }


@cache
def _known(method: str) -> dict[str, Any]:
    """Return the settings of a strategy in `thinwire compare`."""
    return _settings(STRATEGIES[method].document(1) or {})
