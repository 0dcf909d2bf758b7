"""The rules table: the meaning of each pair of a strategy's fields, or the reason why it conflicts.

Read by the construction of a strategy (conflicts), by `explain` (meanings) and by the page
docs/composing.md. Three or more fields combine as their pairs do.

`python -m thinwire.strategy.rules docs/composing.md` writes the page, and so does `make docs`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from thinwire.compress import DGC, LowRank
from thinwire.compress.protocol import Compression


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
_TABLE: dict[str, dict[str, str | tuple[str, str]]] = {
    "amp": {
        "recompute": "the repeated forward pass runs under the same autocast as the first one",
        "pipeline": (
            "every stage runs under autocast, the last one scales the loss, and an overflow on one "
            "stage counts for all"
        ),
        "gradient_merge": (
            "each microstep's gradient is divided by the loss scale before it is added; an overflow"
            " in any of them drops the whole merged update, once"
        ),
        "lars": "trust ratios use unscaled gradients",
        "lamb": (
            "moments use unscaled gradients; a dropped step does not count for their bias "
            "correction"
        ),
        "localsgd": _OVERFLOW,
        "adaptive_localsgd": f"{_OVERFLOW}; the interval follows the unscaled loss",
    },
    "recompute": {
        "pipeline": (
            "patterns are matched against the whole model, and each stage recomputes the modules "
            "that it holds"
        ),
        "gradient_merge": "every microstep recomputes",
        "lars": "independent: the gradients are the same",
        "lamb": "independent: the gradients are the same",
        "localsgd": "independent: the gradients of the local steps are the same",
        "adaptive_localsgd": "the interval follows the loss of the first forward pass, not of the "
        "repeated one",
    },
    "pipeline": {
        "gradient_merge": (
            "an update takes k_steps mini-batches of micro_batches parts each; its gradient is the "
            "mean over all parts, or (avg false) the sum over the mini-batches of the mean over "
            "their parts"
        ),
        "lars": "a tensor lives on one stage, so its trust ratio needs no other stage",
        "lamb": "a tensor lives on one stage, so its moments and trust ratio need no other stage",
        "localsgd": "the replicas of each stage average among themselves, all stages at the same "
        "steps",
        "adaptive_localsgd": (
            "the replicas of each stage average among themselves; the mean loss goes from the last "
            "stage to all others, so that all ranks have the same interval"
        ),
    },
    "gradient_merge": {
        "lars": "trust ratios use the merged gradient",
        "lamb": "moments use the merged gradient",
        "localsgd": (
            "gradients are merged on each rank alone; the interval between averagings counts "
            "updates, not microsteps"
        ),
        "adaptive_localsgd": (
            "gradients are merged on each rank alone; the interval counts updates and follows the "
            "mean loss of the microsteps of an update"
        ),
    },
    "lars": {
        "lamb": (
            "both replace the optimizer",
            "remove lars or lamb",
        ),
        "localsgd": (
            "each rank updates with LARS on its own; velocities stay local unless average_state is "
            "true; parameters are averaged"
        ),
        "adaptive_localsgd": (
            "each rank updates with LARS on its own; velocities stay local unless average_state is "
            "true; parameters are averaged, at an interval that follows LARS's base rate, without "
            "trust ratios"
        ),
    },
    "lamb": {
        "localsgd": (
            "each rank updates with LAMB on its own; moments stay local unless average_state is "
            "true; parameters are averaged"
        ),
        "adaptive_localsgd": (
            "each rank updates with LAMB on its own; moments stay local unless average_state is "
            "true; parameters are averaged, at an interval that follows LAMB's base rate, without "
            "trust ratios"
        ),
    },
    "localsgd": {
        "adaptive_localsgd": (
            "both set the interval between averagings",
            "remove localsgd or adaptive_localsgd",
        ),
    },
}
"""Meaning, or reason and remedy of the conflict, by pair."""
METHODS: dict[str, Mapping[str, str]] = {
    "dgc": DGC.meanings,
    "low_rank": LowRank.meanings,
    "compression": Compression.meanings,
}
"""Fields that compress gradients, with their meanings beside other fields."""
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
    "compression",
)
"""The fields of `DistributedStrategy`."""


def _rule(first: str, second: str) -> Rule:
    methods = [name for name in (first, second) if name in METHODS]
    if len(methods) == 2:
        reason = "both choose the part of a gradient that is sent"
        return Rule((first, second), reason, f"remove {first} or {second}")
    if not methods:
        entry = _TABLE[first][second]
        return Rule((first, second), *((entry,) if isinstance(entry, str) else entry))
    method = methods[0]
    other = second if method == first else first
    if (meaning := METHODS[method].get(other)) is not None:
        return Rule((first, second), meaning)
    reason = f"{method} compresses gradients, but local updates exchange changes"
    return Rule((first, second), reason, f"write it as compression= of the config of {other}")


RULES = tuple(_rule(*pair) for pair in combinations(FIELDS, 2))
"""Rules of all pairs of `FIELDS`."""
_BY_PAIR = {rule.pair: rule for rule in RULES}


def rule_of(first: str, second: str) -> Rule:
    """Return the rule of two fields, given in any order."""
    return _BY_PAIR.get((first, second)) or _BY_PAIR[second, first]


def rules_between(fields: Iterable[str]) -> list[Rule]:
    """Return the rules of all pairs of these fields, in the order of the table."""
    present = set(fields)
    return [rule for rule in RULES if present.issuperset(rule.pair)]


_OPENING = """# Combining fields

*Printed from the rules table of the code (`make docs`); the tests walk through the same table.*

A [strategy](notes/strategy.md) has {fields} fields, hence {pairs} pairs. {working} of them work
together, {conflicting} conflict. A conflicting pair raises a `StrategyError` that lists all
conflicts, with what to change.

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
Two more conflicts lie inside the fields. `dgc` beside a `compression` of `localsgd` or
`adaptive_localsgd`: both set the compression of the change. `dgc` with `state_dtype="bfloat16"`
beside either: the residual of an averaging has the dtype of its anchor.

`prepare` checks what depends on the model, the optimizer or the number of ranks, on all ranks and
before it changes anything.
"""


def page() -> str:
    """Return the page in Markdown."""
    pairs = len(RULES)
    working = sum(rule.works for rule in RULES)
    opening = _OPENING.format(
        fields=len(FIELDS), pairs=pairs, working=working, conflicting=pairs - working
    )
    return "".join([opening, *_matrix(), _ORDER, *_meanings(), _CLOSING])


def _matrix() -> Iterator[str]:
    yield f"| | {' | '.join(FIELDS[1:])} |\n"
    yield "|---" * len(FIELDS) + "|\n"
    for row, first in enumerate(FIELDS[:-1]):
        rules = [rule for rule in RULES if rule.pair[0] == first]
        cells = [""] * row + ["works" if rule.works else "**x**" for rule in rules]
        yield f"| **{first}** | {' | '.join(cells)} |\n"


_LIKE = {"adaptive_localsgd": "localsgd", "low_rank": "dgc", "compression": "dgc"}


def _meanings() -> Iterator[str]:
    yield "| pair | together |\n|---|---|\n"
    for rule in RULES:
        text = rule.meaning if rule.works else f"**conflict**: {rule.meaning}; {rule.remedy}"
        for one, like in _LIKE.items():
            if rule.works and rule.pair[1] == one:
                same = rule_of(rule.pair[0], like).meaning
                text = text.replace(same, f"as with `{like}`")
        yield f"| {' and '.join(f'`{name}`' for name in rule.pair)} | {text} |\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
