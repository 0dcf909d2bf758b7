"""The figures that are to stay below a limit, each read from the JSON of one benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """A ratio, or a time in seconds, and what it may be at most."""

    figure: str
    """Ratio that is limited."""
    benchmark: str
    """Whose JSON it comes from."""
    at_most: float
    value: Callable[[Any], float | None]
    """From the JSON; None where a contender was not installed."""
    unit: str = ""


def fold(contender: str, operation: str = "fold") -> Callable[[Any], float]:
    """The fold at 0.1 % over a contender of the same operation."""
    return lambda result: _row(result, operation)["ours"] / _row(result, operation)[contender]


def coding(result: Any) -> float:
    """Encoding, and decoding two sources, over the fold."""
    return float(
        (_row(result, "encode")["ours"] + _row(result, "decode")["ours"])
        / _row(result, "fold")["ours"]
    )


def _row(result: Any, operation: str) -> Any:
    return next(
        r for r in result["milliseconds"] if r["operation"] == operation and r["density"] == 0.001
    )


def lamb(*others: str) -> Callable[[Any], float | None]:
    """LAMB over the fastest of some contenders, the worse of the two sets of tensors."""

    def value(result: Any) -> float | None:
        ratios = []
        for row in result["rows"]:
            times = [row["milliseconds"].get(other) for other in others]
            if row["method"] == "LAMB" and None in times:
                return None
            if row["method"] == "LAMB":
                ratios.append(row["milliseconds"]["ours"] / min(times))
        return max(ratios)

    return value


def lamb_floor(result: Any) -> float:
    """LAMB over moving ten words a parameter, the worse of the two sets of tensors."""
    return float(
        max(r["milliseconds"]["ours"] / r["floor"] for r in result["rows"] if r["method"] == "LAMB")
    )


def split_entries(result: Any) -> float:
    """Entries sent and received by a source of 1,024, over those of one message."""
    return float(result["counted"][-1]["split"]["entries"] / result["k"])


def compiling_dgc(result: Any) -> float:
    """Processor seconds that compiling for DGC at one bit a value takes, where nothing is in the
    cache.
    """
    return float(
        next(row["cpu"] for row in result["compiling_s"] if row["work"] == "DGC, one bit a value")
    )


def compiled_again(result: Any) -> float:
    """Functions that a process compiles although an earlier one has filled the cache."""
    return float(sum(row["compiled"] for row in result["steps_s"] if row["cache"] == "warm"))


def peak(name: str, other: str) -> Callable[[Any], float]:
    """The memory of one contender at its peak, over that of another."""

    def value(result: Any) -> float:
        words = {row["name"]: row["peak"] for row in result["rows"]}
        return float(words[name] / words[other])

    return value


def over_ddp(contender: str) -> Callable[[Any], float]:
    """The median of the steps of a contender, each over DDP's of the same round."""
    return lambda result: float(
        next(row["over DDP"] for row in result["rows"] if row["name"] == contender)
    )


LIMITS = [
    Limit(
        "DGC fold and select : floor of 5 words at the rate of copying", "codec", 2.0, fold("floor")
    ),
    Limit(
        "the same of 160 tensors : the same floor",
        "codec",
        2.5,  # 1.9 took kernels with three times the code
        fold("floor", "fold of 160 tensors"),
    ),
    Limit(
        "DGC fold and select : eager `torch.topk` with the same bookkeeping",
        "codec",
        0.1,
        fold("eager"),
    ),
    Limit("encode, and decode of two sources at 0.1 % : fold", "codec", 0.15, coding),
    Limit("LAMB step : floor of 10 words at the rate of copying", "optimizers", 1.5, lamb_floor),
    Limit(
        "LAMB step : fastest of timm, pytorch_optimizer and a foreach LAMB",
        "optimizers",
        0.5,  # timm is faster than it was: the kernels of 0.3 measure 0.451
        lamb("timm Lamb", "pytorch_optimizer Lamb", "foreach LAMB"),
    ),
    Limit(
        "LAMB step : `torch.optim.AdamW(fused=True)`", "optimizers", 2.2, lamb("torch AdamW, fused")
    ),
    Limit(
        "split exchange, entries sent and received of 1,024 sources : k",
        "scaling",
        6.0,
        split_entries,
    ),
    Limit(
        "import, added to torch's",
        "startup",
        0.05,
        lambda result: float(result["imports_s"]["thinwire"]),
        " s",
    ),
    Limit("compiling for DGC with an empty cache, processor", "startup", 6.0, compiling_dgc, " s"),
    Limit("functions compiled where the cache is warm", "startup", 0, compiled_again),
    Limit(
        "Peak memory, DGCMomentum attached with state in bfloat16 : plain DDP with SGD's momentum",
        "memory",
        1.05,
        peak("DGCMomentum attached to DDP, bfloat16", "DDP, SGD with momentum"),
    ),
    Limit(
        "Peak memory, DGCMomentum attached : DDP with PowerSGD",
        "memory",
        0.8,
        peak("DGCMomentum attached to DDP", "DDP, PowerSGD of rank 2, SGD with momentum"),
    ),
    Limit(
        "DGC step under DDP over 1 Gbit/s, two workers : dense",
        "overlap",
        0.6,
        over_ddp("DDP, DGCMomentum attached"),
    ),
]
