"""The rules table: the meaning of each pair of a strategy's fields, or the reason why it conflicts.

Read by the construction of a strategy (conflicts), by `explain` (meanings) and by the page
docs/composing.md. Three or more fields combine as their pairs do.

`python -m thinwire.strategy.rules docs/composing.md` writes the page, and so does `make docs`.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """Meaning of two fields that are both on."""

    pair: tuple[str, str]
    meaning: str
    remedy: str = ""

    @property
    def works(self) -> bool:
        """True if the two fields go together."""
        return not self.remedy


_OVERFLOW = (
    "between two averagings an overflow drops the local step of its own rank only (under a "
    "pipeline, of its replica), and the step still counts; at an averaging all ranks take the "
    "smallest loss scale"
)
_CHANGE = (
    "no gradient is exchanged: the change since the last averaging is sent sparse, at dgc's "
    "sparsity of that step, with its value_bits and min_numel, and the rest is kept; dense before "
    "rampup_begin_step; momentum stays in the local optimizer, and local_grad_clip_norm limits "
    "each local gradient"
)
_NO_GRADIENT = "low_rank compresses gradients, but local updates exchange changes of the parameters"
_TABLE: dict[str, dict[str, str | tuple[str, str]]] = {
    "amp": {
        "recompute": "the repeated forward pass runs under the same autocast as the first one",
        "pipeline": "every stage runs under autocast, the last one scales the loss, and an "
        "overflow on one stage counts for all",
        "gradient_merge": "each microstep's gradient is divided by the loss scale before it is "
        "added; an overflow in any of them drops the whole merged update, once",
        "dgc": (
            "gradients are checked and unscaled before they are accumulated, so residual and "
            "momentum hold unscaled values; a dropped step does not change them or the sparsity "
            "ramp"
        ),
        "lars": "trust ratios use unscaled gradients",
        "lamb": (
            "moments use unscaled gradients; a dropped step does not count for their bias "
            "correction"
        ),
        "localsgd": _OVERFLOW,
        "adaptive_localsgd": f"{_OVERFLOW}; the interval follows the unscaled loss",
        "low_rank": (
            "gradients are checked and unscaled before they become factors, so the residual holds "
            "unscaled values; a dropped step does not change it or the factors"
        ),
    },
    "recompute": {
        "pipeline": "patterns are matched against the whole model, and each stage recomputes the "
        "modules that it holds",
        "gradient_merge": "every microstep recomputes",
        "dgc": "the compressor sees one gradient per parameter and step, after the repeated "
        "forward pass",
        "lars": "independent: the gradients are the same",
        "lamb": "independent: the gradients are the same",
        "localsgd": "independent: the gradients of the local steps are the same",
        "adaptive_localsgd": "the interval follows the loss of the first forward pass, not of the "
        "repeated one",
        "low_rank": (
            "factors are computed from one gradient per parameter and step, after the repeated "
            "forward pass"
        ),
    },
    "pipeline": {
        "gradient_merge": "an update takes k_steps mini-batches of micro_batches parts each; its "
        "gradient is the mean over all parts, or (avg false) the sum over the mini-batches of the "
        "mean over their parts",
        "dgc": (
            "the replicas of one stage exchange among themselves, in separate messages; means are "
            "over replicas, not over all ranks"
        ),
        "lars": "a tensor lives on one stage, so its trust ratio needs no other stage",
        "lamb": "a tensor lives on one stage, so its moments and trust ratio need no other stage",
        "localsgd": "the replicas of each stage average among themselves, all stages at the same "
        "steps",
        "adaptive_localsgd": (
            "the replicas of each stage average among themselves; the mean loss goes from the "
            "last stage to all others, so that all ranks have the same interval"
        ),
        "low_rank": "the replicas of one stage average the factors of its tensors among "
        "themselves; means are over replicas",
    },
    "gradient_merge": {
        "dgc": "the merged gradient is the gradient of one compressed step: only updates "
        "exchange, and the sparsity ramp counts updates",
        "lars": "trust ratios use the merged gradient",
        "lamb": "moments use the merged gradient",
        "localsgd": "gradients are merged on each rank alone; the interval between averagings "
        "counts updates, not microsteps",
        "adaptive_localsgd": "gradients are merged on each rank alone; the interval counts "
        "updates and follows the mean loss of the microsteps of an update",
        "low_rank": (
            "factors are computed from the merged gradient: only updates exchange, and begin_step "
            "counts updates"
        ),
    },
    "dgc": {
        "lars": (
            "where gradients are exchanged, the compressor has no momentum and LARS uses its "
            "sparse mean as the gradient; momentum and weight decay are those of LARS"
        ),
        "lamb": (
            "where gradients are exchanged, the compressor has no momentum and LAMB uses its "
            "sparse mean as the gradient; moments and weight decay are those of LAMB"
        ),
        "localsgd": _CHANGE,
        "adaptive_localsgd": f"{_CHANGE}; at the current interval",
        "low_rank": ("both choose the part of a gradient that is sent", "remove dgc or low_rank"),
    },
    "lars": {
        "lamb": ("both replace the optimizer", "remove lars or lamb"),
        "localsgd": "each rank updates with LARS on its own; velocities stay local unless "
        "average_state is true; parameters are averaged",
        "adaptive_localsgd": "each rank updates with LARS on its own; velocities stay local "
        "unless average_state is true; parameters are averaged, at an interval that follows "
        "LARS's base rate, without trust ratios",
        "low_rank": "LARS uses the mean of the factors as its gradient, also for trust ratios",
    },
    "lamb": {
        "localsgd": "each rank updates with LAMB on its own; moments stay local unless "
        "average_state is true; parameters are averaged",
        "adaptive_localsgd": "each rank updates with LAMB on its own; moments stay local unless "
        "average_state is true; parameters are averaged, at an interval that follows LAMB's base "
        "rate, without trust ratios",
        "low_rank": "LAMB uses the mean of the factors as its gradient, also for moments",
    },
    "localsgd": {
        "adaptive_localsgd": (
            "both set the interval between averagings",
            "remove localsgd or adaptive_localsgd",
        ),
        "low_rank": (_NO_GRADIENT, "write localsgd=LocalSGD(..., compression=LowRank(...))"),
    },
    "adaptive_localsgd": {
        "low_rank": (
            _NO_GRADIENT,
            "write adaptive_localsgd=AdaptiveLocalSGD(..., compression=LowRank(...))",
        )
    },
}
"""Meaning, or reason and remedy of the conflict, by pair."""
FIELDS = (*_TABLE, "low_rank")
"""The fields of `DistributedStrategy`, in the order of the table."""
RULES = tuple(
    Rule((first, second), *((entry,) if isinstance(entry, str) else entry))
    for first, others in _TABLE.items()
    for second, entry in others.items()
)
"""Rules of all pairs of `FIELDS`."""
_BY_PAIR = {rule.pair: rule for rule in RULES}


def rule_of(first: str, second: str) -> Rule:
    """Return the rule of two fields, given in any order."""
    return _BY_PAIR.get((first, second)) or _BY_PAIR[second, first]


def rules_between(fields: Iterable[str]) -> list[Rule]:
    """Return the rules of all pairs of these fields, in the order of the table."""
    present = set(fields)
    return [
        rule_of(*pair) for pair in combinations([name for name in FIELDS if name in present], 2)
    ]


_OPENING = """# Combining fields

*Printed from the rules table of the code (`make docs`); the tests walk through the same table.*

A [strategy](notes/strategy.md) has {fields} fields, hence {pairs} pairs. {working} of them work
together, {conflicting} conflict. No field is switched off silently: a conflicting pair raises a
`StrategyError` when the strategy is made. The error lists all conflicts, with what to change.

"""
_ORDER = """
**x** is a conflict; all other pairs work. Three or more fields combine as their pairs do, in the
order of a step:

1. forward pass (autocast, recompute, micro-batches), backward pass of the scaled loss, merge; most
   microsteps end here;
2. agreement on overflow, division by the loss scale;
3. exchange: the mean, dense or compressed, or none under local updates;
4. clipping, weight decay and regularizer, centralization, then the optimizer: the given one, LARS
   or LAMB;
5. averaging of local updates, new interval, new loss scale.

"""
_CLOSING = """
Two more conflicts lie inside the fields. `dgc` together with a `compression` in `localsgd` or
`adaptive_localsgd`: both set the compression of the change; use one of them. `dgc` with
`state_dtype="bfloat16"` under either of them: the residual of an averaging has the dtype of its
anchor; omit `state_dtype`.

`prepare` checks everything that depends on the model, the optimizer or the number of ranks, on all
ranks and before it changes anything: patterns that match nothing, an optimizer that LARS or LAMB
cannot replace, a number of ranks that is not a multiple of the stages.
"""


def page() -> str:
    """Return the page in Markdown."""
    pairs, working = len(RULES), sum(rule.works for rule in RULES)
    opening = _OPENING.format(
        fields=len(FIELDS), pairs=pairs, working=working, conflicting=pairs - working
    )
    return "".join([opening, *_matrix(), _ORDER, *_meanings(), _CLOSING])


def _matrix() -> Iterator[str]:
    yield f"| | {' | '.join(FIELDS[1:])} |\n"
    yield "|---" * len(FIELDS) + "|\n"
    for row, first in enumerate(FIELDS[:-1]):
        rules = [rule_of(first, second) for second in FIELDS[row + 1 :]]
        cells = [""] * row + ["works" if rule.works else "**x**" for rule in rules]
        yield f"| **{first}** | {' | '.join(cells)} |\n"


def _meanings() -> Iterator[str]:
    yield "| pair | together |\n|---|---|\n"
    for rule in RULES:
        text = rule.meaning if rule.works else f"**conflict**: {rule.meaning}; {rule.remedy}"
        if rule.pair[1] == "adaptive_localsgd" and rule.pair[0] != "localsgd":
            same = rule_of(rule.pair[0], "localsgd").meaning
            text = text.replace(same, "as with `localsgd`")
        yield f"| {' and '.join(f'`{name}`' for name in rule.pair)} | {text} |\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
