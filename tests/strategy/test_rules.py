"""The table in full: all 55 pairs, what a strategy does with each, and the printed page."""

import itertools
import re
from pathlib import Path

import pytest

import thinwire as tw
from tests.api import FIELDS, RULES, page, rule_of, rules_between
from tests.strategy.test_config import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "composing.md"
CONFLICTS = {
    frozenset({"lars", "lamb"}),
    frozenset({"localsgd", "adaptive_localsgd"}),
    *(
        frozenset({one, other})
        for one in ("low_rank", "compression")
        for other in ("dgc", "localsgd", "adaptive_localsgd", "low_rank")
        if one != other
    ),
}
PAIRS = list(itertools.combinations(CONFIGS, 2))


def test_every_pair_has_one_rule_in_the_order_of_the_fields() -> None:
    assert list(CONFIGS) == list(FIELDS)
    assert [rule.pair for rule in RULES] == PAIRS
    assert len(RULES) == 55
    assert {frozenset(rule.pair) for rule in RULES if not rule.works} == CONFLICTS


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_strategy_of_two_fields_follows_its_rule(pair: tuple[str, str]) -> None:
    rule = rule_of(*reversed(pair))
    fields = {name: CONFIGS[name] for name in pair}
    assert len(rule.meaning) > 20
    assert not rule.meaning.endswith(".")
    if frozenset(pair) in CONFLICTS:
        with pytest.raises(tw.StrategyError) as error:
            tw.DistributedStrategy(**fields)
        for part in (*pair, rule.meaning, rule.remedy):
            assert part in str(error.value)
    else:
        assert tw.DistributedStrategy(**fields).on == fields
        assert rule.remedy == ""


def test_rules_of_three_fields_equal_their_pairs() -> None:
    rules = rules_between(["localsgd", "amp", "dgc"])
    assert [rule.pair for rule in rules] == [
        ("amp", "dgc"),
        ("amp", "localsgd"),
        ("dgc", "localsgd"),
    ]
    assert rules_between(["amp"]) == []
    with pytest.raises(KeyError):
        rule_of("amp", "amp")


def test_page_equals_the_printed_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_matrix_of_the_page_is_true() -> None:
    header, _, *rows = re.findall(r"^\|.*\|$", page().split("| pair |")[0], re.MULTILINE)
    columns = [cell.strip() for cell in header.split("|")[2:-1]]
    told = {}
    for row in rows:
        first, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        told |= {
            (first.strip("*"), column): cell
            for column, cell in zip(columns, cells, strict=True)
            if cell
        }
    assert told == {pair: "**x**" if frozenset(pair) in CONFLICTS else "works" for pair in PAIRS}
