"""The rules table: what each pair of a strategy's fields means together, or why it cannot be.

Read by the construction of a strategy (conflicts), by `explain` (meanings) and by the page
docs/composing.md. Three and more fields mean what their pairs mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

__all__ = ["FIELDS", "INSIDE_FIELDS", "RULES", "Rule", "rule_of", "rules_among"]

FIELDS = (
    "amp",
    "recompute",
    "pipeline",
    "gradient_merge",
    "dgc",
    "lars",
    "lamb",
    "localsgd",
    "adaptive_localsgd",
    "low_rank",
)
"""The fields of `DistributedStrategy`, in the order of the table."""


@dataclass(frozen=True)
class Rule:
    """What two fields mean when both are on.

    Attributes:
        pair: The two fields, in the order of `FIELDS`.
        meaning: What the pair does together, or why it cannot; a sentence without its full stop.
        remedy: What to change where the pair conflicts; empty where it works.
    """

    pair: tuple[str, str]
    meaning: str
    remedy: str = ""

    @property
    def works(self) -> bool:
        """Whether the two go together."""
        return not self.remedy


_OVERFLOW = (
    "between two averagings an overflow drops the local step of its own rank only (under a "
    "pipeline, of its replica), and the step still counts; at an averaging all ranks take the "
    "smallest loss scale"
)
_CHANGE = (
    "no gradient is exchanged: the change since the last averaging is sent sparse, at dgc's "
    "sparsity of that step, its value_bits and min_numel, and the rest is kept; whole before "
    "rampup_begin_step; momentum stays in the local optimizer, and local_grad_clip_norm limits "
    "each local gradient"
)
_NO_GRADIENT = (
    "low_rank compresses gradients, and local updates exchange none but changes of the parameters"
)
RULES = (
    Rule(
        ("amp", "recompute"),
        "the repeated forward pass runs under the same autocast as the first one",
    ),
    Rule(
        ("amp", "pipeline"),
        "every stage runs under autocast, the last one scales the loss, and an overflow on one "
        "stage counts for all",
    ),
    Rule(
        ("amp", "gradient_merge"),
        "each microstep's gradient is divided by the loss scale before it is added; an overflow in "
        "any of them drops the whole merged update, once",
    ),
    Rule(
        ("amp", "dgc"),
        "gradients are checked and unscaled before they are accumulated, so residual and momentum "
        "hold unscaled values; a dropped step leaves them and the sparsity ramp as they were",
    ),
    Rule(("amp", "lars"), "trust ratios are taken from unscaled gradients"),
    Rule(
        ("amp", "lamb"),
        "moments are taken from unscaled gradients; a dropped step does not count for their bias "
        "correction",
    ),
    Rule(("amp", "localsgd"), _OVERFLOW),
    Rule(("amp", "adaptive_localsgd"), f"{_OVERFLOW}; the interval follows the unscaled loss"),
    Rule(
        ("amp", "low_rank"),
        "gradients are checked and unscaled before they become factors, so the residual holds "
        "unscaled values; a dropped step leaves it and the factors as they were",
    ),
    Rule(
        ("recompute", "pipeline"),
        "patterns are matched against the whole model, and each stage recomputes the modules that "
        "it holds",
    ),
    Rule(("recompute", "gradient_merge"), "every microstep recomputes"),
    Rule(
        ("recompute", "dgc"),
        "the compressor sees one gradient per parameter and step, after the repeated forward pass",
    ),
    Rule(("recompute", "lars"), "independent: the gradients are the same"),
    Rule(("recompute", "lamb"), "independent: the gradients are the same"),
    Rule(("recompute", "localsgd"), "independent: the gradients of the local steps are the same"),
    Rule(
        ("recompute", "adaptive_localsgd"),
        "the interval follows the loss of the first forward pass, not of the repeated one",
    ),
    Rule(
        ("recompute", "low_rank"),
        "factors are made of one gradient per parameter and step, after the repetition",
    ),
    Rule(
        ("pipeline", "gradient_merge"),
        "an update takes k_steps mini-batches of micro_batches parts each; its gradient is the "
        "mean over all parts, or (avg false) the sum over the mini-batches of the mean over their "
        "parts",
    ),
    Rule(
        ("pipeline", "dgc"),
        "the replicas of one stage exchange among themselves, with messages of their own; means "
        "are over replicas, not over all ranks",
    ),
    Rule(
        ("pipeline", "lars"), "a tensor lives on one stage, so its trust ratio needs no other stage"
    ),
    Rule(
        ("pipeline", "lamb"),
        "a tensor lives on one stage, so its moments and trust ratio need no other stage",
    ),
    Rule(
        ("pipeline", "localsgd"),
        "the replicas of each stage average among themselves, all stages at the same steps",
    ),
    Rule(
        ("pipeline", "adaptive_localsgd"),
        "the replicas of each stage average among themselves; the mean loss goes from the last "
        "stage to all others, so that the interval is one number everywhere",
    ),
    Rule(
        ("pipeline", "low_rank"),
        "the replicas of one stage average the factors of its tensors among themselves; means are "
        "over replicas",
    ),
    Rule(
        ("gradient_merge", "dgc"),
        "the merged gradient is the gradient of one compressed step: only updates exchange, and "
        "the sparsity ramp counts updates",
    ),
    Rule(("gradient_merge", "lars"), "trust ratios are taken from the merged gradient"),
    Rule(("gradient_merge", "lamb"), "moments are taken from the merged gradient"),
    Rule(
        ("gradient_merge", "localsgd"),
        "gradients are merged on each rank alone; the interval between averagings counts updates, "
        "not microsteps",
    ),
    Rule(
        ("gradient_merge", "adaptive_localsgd"),
        "gradients are merged on each rank alone; the interval counts updates and follows the mean "
        "loss of the microsteps of an update",
    ),
    Rule(
        ("gradient_merge", "low_rank"),
        "factors are made of the merged gradient: only updates exchange, and begin_step counts "
        "updates",
    ),
    Rule(
        ("dgc", "lars"),
        "where gradients are exchanged, the compressor runs without momentum and its sparse mean "
        "is LARS's gradient; momentum and weight decay are LARS's",
    ),
    Rule(
        ("dgc", "lamb"),
        "where gradients are exchanged, the compressor runs without momentum and its sparse mean "
        "is LAMB's gradient; moments and weight decay are LAMB's",
    ),
    Rule(("dgc", "localsgd"), _CHANGE),
    Rule(("dgc", "adaptive_localsgd"), f"{_CHANGE}; at the interval in force"),
    Rule(
        ("dgc", "low_rank"),
        "both say what of a gradient travels",
        "remove dgc or low_rank",
    ),
    Rule(("lars", "lamb"), "both replace the optimizer", "remove lars or lamb"),
    Rule(
        ("lars", "localsgd"),
        "each rank updates with LARS on its own; velocities stay local unless average_state is "
        "true; parameters are averaged",
    ),
    Rule(
        ("lars", "adaptive_localsgd"),
        "each rank updates with LARS on its own; velocities stay local unless average_state is "
        "true; parameters are averaged, at an interval that follows LARS's base rate, without "
        "trust ratios",
    ),
    Rule(
        ("lars", "low_rank"),
        "the mean of the factors is LARS's gradient; trust ratios are taken from it",
    ),
    Rule(
        ("lamb", "localsgd"),
        "each rank updates with LAMB on its own; moments stay local unless average_state is true; "
        "parameters are averaged",
    ),
    Rule(
        ("lamb", "adaptive_localsgd"),
        "each rank updates with LAMB on its own; moments stay local unless average_state is true; "
        "parameters are averaged, at an interval that follows LAMB's base rate, without trust "
        "ratios",
    ),
    Rule(
        ("lamb", "low_rank"),
        "the mean of the factors is LAMB's gradient; moments are taken from it",
    ),
    Rule(
        ("localsgd", "adaptive_localsgd"),
        "both set the interval between averagings",
        "remove localsgd or adaptive_localsgd",
    ),
    Rule(
        ("localsgd", "low_rank"),
        _NO_GRADIENT,
        "write localsgd=LocalSGD(..., compression=LowRank(...))",
    ),
    Rule(
        ("adaptive_localsgd", "low_rank"),
        _NO_GRADIENT,
        "write adaptive_localsgd=AdaptiveLocalSGD(..., compression=LowRank(...))",
    ),
)
"""One rule for every pair of `FIELDS`."""
INSIDE_FIELDS = """\
Two more conflicts lie inside the fields. `dgc` together with a `compression` in `localsgd` or
`adaptive_localsgd`: both say how the change is compressed; give one of them. `dgc` with
`state_dtype="bfloat16"` under either of them: what an averaging does not send is kept in the type
of its anchor; leave `state_dtype` out."""
"""What `thinwire.strategy.fields` refuses besides, in Markdown."""

_BY_PAIR = {rule.pair: rule for rule in RULES}


def rule_of(first: str, second: str) -> Rule:
    """The rule of two fields, given in any order.

    Raises:
        KeyError: Not two different fields of a strategy.
    """
    return _BY_PAIR.get((first, second)) or _BY_PAIR[second, first]


def rules_among(fields: Iterable[str]) -> list[Rule]:
    """The rules of all pairs of these fields, in the order of the table."""
    present = set(fields)
    return [
        rule_of(*pair) for pair in combinations([name for name in FIELDS if name in present], 2)
    ]
