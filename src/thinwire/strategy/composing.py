"""The page docs/composing.md, printed from the rules table.

`python -m thinwire.strategy.composing docs/composing.md` writes it, and so does `make docs`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from thinwire.strategy.rules import FIELDS, INSIDE_FIELDS, RULES, rule_of

__all__ = ["page"]

_OPENING = """# What goes together

*Printed from the rules table of the code (`make docs`); the tests walk through the same table.*

A [strategy](notes/strategy.md) has {fields} fields, hence {pairs} pairs. {working} of them work
together, {conflicting} conflict. Nothing is ever switched off silently: a pair that cannot be is a
`StrategyError` where the strategy is made, which lists all conflicts and says what to change.

"""
_ORDER = """
**x** conflicts, all others work. Three and more fields mean what their pairs mean, in the order of
a step:

1. forward pass (autocast, recompute, micro-batches), backward pass of the scaled loss, merge; most
   microsteps end here;
2. agreement about overflow, division by the loss scale;
3. exchange: the mean, dense or compressed, or none under local updates;
4. clipping, weight decay and regularizer, centralization, then the optimizer: the given one, LARS
   or LAMB;
5. averaging of local updates, new interval, new loss scale.

"""
_CLOSING = f"""
{INSIDE_FIELDS}

What depends on the model, the optimizer or the number of ranks is checked by `prepare`, before
anything is changed, on all ranks: patterns that match nothing, an optimizer that LARS or LAMB
cannot replace, ranks that the stages do not divide.
"""


def page() -> str:
    """The page in Markdown."""
    working = sum(rule.works for rule in RULES)
    counts = {
        "fields": len(FIELDS),
        "pairs": len(RULES),
        "working": working,
        "conflicting": len(RULES) - working,
    }
    opening = _OPENING.format(**counts)
    return (
        opening
        + "".join(f"{line}\n" for line in _matrix())
        + _ORDER
        + "".join(_meanings())
        + _CLOSING
    )


def _matrix() -> Iterator[str]:
    columns = FIELDS[1:]
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for row, first in enumerate(FIELDS[:-1]):
        cells = [
            _cell(first, second) if row <= column else "" for column, second in enumerate(columns)
        ]
        yield f"| **{first}** | {' | '.join(cells)} |"


def _cell(first: str, second: str) -> str:
    return "works" if rule_of(first, second).works else "**x**"


def _meanings() -> Iterator[str]:
    yield "| pair | together |\n|---|---|\n"
    for rule in RULES:
        said = rule.meaning if rule.works else f"**conflict**: {rule.meaning}; {rule.remedy}"
        yield f"| {' and '.join(f'`{name}`' for name in rule.pair)} | {said} |\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
