"""Loss of a method above dense training (docs/law.md), and the cost of closing the gap."""

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.tools.compare.strategies import compression_of

if TYPE_CHECKING:
    from thinwire.local.config import LocalSGD
    from thinwire.strategy.distributed_strategy import DistributedStrategy

_LAW = {"muon": (0.465, -0.198), "adamw": (0.413, -0.165)}
"""Coefficient and exponent of beta(N) = c N^e, by inner optimizer."""
_OWN = {"muon": 0.8, "adamw": 1.25}
"""Ratio of our gaps to the law's, at 16 steps and full precision: 0.87 million parameters, 2 and 4
workers, 1,500 steps (benchmarks/results/evidence.jsonl).
"""
_ADAPTED = 0.0069
"""Exponent for LoRA's adapters inside AdamW, at 16 steps and full precision: 0.48 % with
`_ADAPTED_WORKERS` (research/fine_tuning); for a model of any size.
"""
_ADAPTED_WORKERS = 2
_AT_DENSE_RATE = {False: 4, True: 2}
"""Most workers whose best rate is dense's; True: at the longest measured interval and beyond."""
_STEPS, _BY_STEPS = 16, 0.6
"""The gap grows as steps^0.6: local AdamW from 16 to 32 steps, local Muon from 8 to 16."""
_BY_BITS = {1: 1.25, 2: 1.1}
_BY_SHARE = {(0.1, 1): 1.25, (0.05, 1): 1.4, (0.03, 2): 1.9}
"""The largest entries of a change by Muon, averaged over all ranks, by share and bits: between one
run of 0.87 million parameters with 267 averagings and nine of 0.045 million with 112.
"""
_SPARSE, _SPLIT, _LATE = 1.15, 1.3, 1.4
"""Factors on a gap for a sparse change and all-to-all sums; a delay adds 1.4 for each interval that
it lasts."""
_OUTER, _LITTLE_MOMENTUM = 2.3, 0.3
"""Factor for more outer momentum than this, in runs of about 50 averagings."""
_GRADIENTS = {
    "powersgd": {2: 0.245, 4: 0.268},
    "low-rank": {2: 0.228, 4: 0.274},
    "dgc": {2: 0.621, 4: 0.742},
    "fp16": {2: -0.006, 4: 0.002},
}
"""Gaps by workers, from the same runs; below 0.01 they are chance."""
_NEVER_RUN = 0.0, 0.25, 1.5
"""Gap of a compression of gradients without runs: none, low-rank's, and twice DGC's."""
_CHANCE = 0.01
_MOST_WORKERS, _INTERVALS = 96, (4, 32)
MEASURED = {
    ("muon", 1.0, 1): (4, 16),
    ("adamw", 1.0, 4): (16, 16),
    ("adamw", 1.0, 32): (16, 32),
    ("adamw", 0.1, 2): (16, 16),
}
"""Shortest and longest measured interval, by inner optimizer, share of the entries and bits: with
three seeds of one setting."""
_CHANGES = ("NoneType", "Quantized", "Sparse")
"""Compressions of changes with runs, by their classes."""
_DOUBT, _BEYOND_STEPS, _BEYOND_WORKERS = 2.5, 0.5, 0.25
"""Ratio of high to mid and of mid to low, see research/law/README.md. It counts
once more for a setting without runs. Outside of measured intervals and workers it grows as these
powers of the distance, a ratio: at three times as many workers the law was 1.26 times off.
"""
_SEQUENCES = 16
"""Of 512 tokens, of a worker and step, which a plan does not know."""
MOST_STEPS = 4.0
"""Multiple of dense's steps beyond which a strategy is said never to reach dense's loss."""


class LossGap(NamedTuple):
    """Loss above dense training, as a fraction, with the same inner optimizer at equal steps."""

    low: float
    mid: float
    high: float
    source: str
    unmeasured: str
    """What is outside of what was measured."""


def beta(optimizer: str, numel: int) -> float:
    """Return the exponent of the law for a number of parameters."""
    # Source: fitted to losses of MuLoCo, arXiv 2505.23725: 16 workers, 30 steps, 150 M to 3.1 B.
    factor, power = _LAW[optimizer]
    return float(factor * numel**power)


def law(optimizer: str, numel: int, workers: int) -> float:
    """Return the gap of the law, K^beta(N) - 1."""
    return float(workers ** beta(optimizer, numel) - 1)


def loss_gap(
    method: str,
    strategy: "DistributedStrategy",
    optimizer: str | None,
    numel: int,
    workers: int,
    *,
    adapters: bool = False,
) -> LossGap:
    """Return the gap of a strategy; `method` is a name of `thinwire compare` or a hook of torch.

    `numel` counts parameters that do not change too; with `adapters` only LoRA's change.
    """
    if strategy.localsgd is not None:
        change, inner = compression_of(strategy), optimizer or "adamw"
        found = _of_local(strategy.localsgd, change, inner, numel, workers)
        return _of_adapters(found, inner, numel, workers, change) if adapters else found
    if method in _GRADIENTS:
        return _of_gradients(method, workers)
    if strategy.gradient_compression is None:
        return _of_dense(numel, workers)
    return LossGap(*_NEVER_RUN, "no run with these settings", "this compression of gradients")


def _of_dense(numel: int, workers: int) -> LossGap:
    """Return how far the batch of more workers than were measured may be off at equal tokens."""
    # Source: McCandlish et al., 2018, arXiv 1812.06162: a batch of B takes 1 + B / B_crit times the
    # tokens of a small one. Zhang et al., 2024, arXiv 2410.21676: 22.91 D^0.47 sequences of 512
    # tokens take 1.2 times, with D in millions; five times as many take twice.
    critical = 5 * 22.91 * (20e-6 * numel) ** 0.47 / _SEQUENCES
    tokens = 1 + max(0, workers - _MOST_WORKERS) / (critical + _MOST_WORKERS)
    off = tokens ** elasticity(numel) - 1
    return LossGap(
        0.0 - off,
        0.0,
        off,
        f"by definition; its batch beyond that of {_MOST_WORKERS} workers by arXiv 1812.06162 and "
        f"2410.21676, {_SEQUENCES} sequences of 512 tokens a worker assumed",
        _too_many(workers),
    )


def _too_many(workers: int, most: int = _MOST_WORKERS) -> str:
    return f"{workers} workers, more than {most}" if workers > most else ""


def _beyond(workers: int, most: int = _MOST_WORKERS) -> float:
    """Return the factor by which more workers than were measured widen an interval."""
    return float(max(1.0, workers / most) ** _BEYOND_WORKERS)


def _of_local(local: "LocalSGD", change: Any, optimizer: str, numel: int, workers: int) -> LossGap:
    # a change without compression has the density of all entries in float32
    unsent = change.unsent_share(change.settled_step) if change else 0.0
    density = round(1 - unsent, 6), getattr(change, "value_bits", 32)
    factor = _factor(local, change, density, optimizer)
    whole = law(optimizer, numel, workers)
    mid = whole * factor
    if local.node_steps:
        # all workers part as if all averaged so often, and groups of them for the whole interval
        groups = law(optimizer, numel, workers // (local.node_size or 1))
        inside = factor * (local.node_steps / local.k_steps) ** _BY_STEPS
        mid = whole * inside + groups * (factor - inside)
    coefficient, power = _LAW[optimizer]
    outside = _unmeasured(local, change, density, optimizer, workers)
    doubt = _DOUBT * prod(outside.values())
    return LossGap(
        mid / doubt,
        mid,
        mid * doubt,
        f"{workers}^beta - 1, beta = {coefficient:g} N^{power:g} (fitted to arXiv 2505.23725), "
        f"times {factor:.2g} for interval and bits (benchmarks/results/evidence.jsonl, 2 and 4 "
        "workers; law_wide.jsonl, 24 to 96); for 90 averagings and more; low is mid / "
        f"{doubt:.3g}, high mid x {doubt:.3g}",
        ", ".join(outside),
    )


def _of_adapters(whole: LossGap, optimizer: str, numel: int, workers: int, change: Any) -> LossGap:
    """Return the gap with LoRA, by the factors of a model that trains whole."""
    own = (workers**_ADAPTED - 1) / (law(optimizer, numel, workers) * _OWN[optimizer])
    seen = workers <= _ADAPTED_WORKERS and change is None
    doubt = 1.0 if seen else _DOUBT
    beyond = "" if seen else f"adapters with more than {_ADAPTED_WORKERS} workers or compressed"
    return LossGap(
        whole.low * own / doubt,
        whole.mid * own,
        whole.high * own * doubt,
        "research/fine_tuning/lora.jsonl: adapters end 0.5 % above with two workers and 16 steps",
        ", ".join(filter(None, (whole.unmeasured, beyond))),
    )


def _unmeasured(
    local: "LocalSGD", change: Any, density: tuple[float, int], optimizer: str, workers: int
) -> dict[str, float]:
    """Name the settings of local updates outside of what the law was fitted to, each with the
    factor by which it widens the interval.
    """
    (share, bits), key, kind = density, (optimizer, *density), type(change).__name__
    way = getattr(change, "exchange", "auto")
    shortest, longest = MEASURED.get(key, _INTERVALS)
    never_run = kind not in _CHANGES
    text = f"{bits} bits" + f" of {share:.0%}" * (share < 1)
    off = max(shortest / local.k_steps, local.k_steps / longest)
    found = [
        (_too_many(workers), workers > _MOST_WORKERS, _beyond(workers)),
        (f"an interval of {local.k_steps} steps", off > 1, off**_BEYOND_STEPS),
        (kind if never_run else text, never_run or key not in MEASURED, _DOUBT),
        (f"a delay of {local.delay}", local.delay > 0, _DOUBT),
        (f"{local.fragments} fragments", local.fragments > 1, _DOUBT),
        (f"exchange={way}", way == "split", _DOUBT),
    ]
    return {words: factor for words, outside, factor in found if outside}


def _factor(local: "LocalSGD", change: Any, density: tuple[float, int], optimizer: str) -> float:
    """Return the factor of interval, bits and delay on the gap of the law."""
    factor = _OWN[optimizer] * (local.k_steps / _STEPS) ** _BY_STEPS
    if type(change).__name__ not in _CHANGES:
        factor *= max(_BY_SHARE.values())
    elif optimizer == "muon" and getattr(change, "mean_over", "") == "all":
        factor *= _BY_SHARE.get(density, _BY_SHARE[0.03, 2])
    elif hasattr(change, "sparsity"):
        factor *= _SPARSE
    else:
        factor *= _BY_BITS.get(density[1], 1.0)
    factor *= _SPLIT if getattr(change, "exchange", "") == "split" else 1
    factor *= _OUTER if local.outer_momentum > _LITTLE_MOMENTUM else 1
    return float(factor * (1 + _LATE * local.delay / local.k_steps))


def rate_factor(
    strategy: "DistributedStrategy", optimizer: str | None, workers: int
) -> float | None:
    """Return the best learning rate over dense Muon's with few workers; None if not measured."""
    # Source: research/law/README.md: 2 workers (0.14 M parameters), 4 and 8 (0.87 M), 4 to 32
    # steps, one bit
    if strategy.localsgd is None or optimizer != "muon":
        return None
    most = _AT_DENSE_RATE[strategy.localsgd.k_steps >= _INTERVALS[1]]
    return 2.0 if workers > most else 1.0


def _of_gradients(method: str, workers: int) -> LossGap:
    gaps = _GRADIENTS[method]
    known = min(gaps, key=lambda count: abs(count - workers))
    gap = gaps[known]
    source = (
        f"benchmarks/results/evidence.jsonl: {gap:+.1%} with {known} workers, 0.87 million "
        "parameters, 1,500 steps, inside AdamW"
    )
    most = max(gaps)
    many = _too_many(workers, most)
    beyond = _beyond(workers, most)
    if abs(gap) < _CHANCE:
        off = beyond * _CHANCE
        return LossGap(-off, 0.0, off, f"{source}, within chance", many)
    return LossGap(gap / 3 / beyond, gap, 2 * beyond * gap, source, many)


def elasticity(numel: int) -> float:
    """Return the percentage by which a loss falls for 1 % more steps, at 20 tokens a parameter."""
    # Source: Hoffmann et al., 2022, arXiv 2203.15556: L = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28.
    by_tokens = 410.7 / (20 * numel) ** 0.28
    return float(0.28 * by_tokens / (1.69 + 406.4 / numel**0.34 + by_tokens))


def steps_to_dense_loss(gap: float, numel: int) -> float:
    """Return the steps until dense's last loss, relative to dense's: (1 + gap)^(1 / elasticity)."""
    # numbers so large that a float cannot hold them are never, whatever they are
    return float(min(1e6, (1 + max(0.0, gap)) ** min(1e3, 1 / elasticity(numel))))
