"""The table of faults is whole, and names tests that there are."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.__main__ import BEGIN, END, PAGE, outcome, table, written
from tests.faults.matrix import MATRIX, Row

TESTS = Path(__file__).parents[1]
ROWS = 57


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once() -> None:
    assert [row.number for row in MATRIX] == list(range(1, ROWS + 1))


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: str(row.number))
def test_a_row_names_tests_that_there_are_or_says_why_there_are_none(row: Row) -> None:
    assert row.tests or row.why
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in functions(file), test


def test_the_page_shows_every_row() -> None:
    page = PAGE.read_text()
    shown = page.partition(BEGIN)[2].partition(END)[0]
    for row in MATRIX:
        assert f"\n| {row.number} | {row.fault} | {row.criterion} | " in shown
    assert not re.search(r"\d (failed|missing)", shown)


def test_an_outcome_is_that_of_all_its_tests() -> None:
    row = Row(1, "x", "a fault", "a criterion", ("a::b", "a::c"))
    both = {"a::b": Counter(held=2), "a::c": Counter(held=1)}
    assert outcome(row, both) == "held in 3 tests"
    assert outcome(row, both | {"a::c": Counter(skipped=1)}) == "held in 2 tests, 1 skipped"
    assert outcome(row, {"a::b": Counter(failed=1)}) == "held in 0 tests, 1 failed, 1 missing"
    assert "| 1 | a fault | a criterion | held in 3 tests |" in table([row], both)


def test_what_stands_between_the_marks_is_replaced() -> None:
    assert written(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\nnew\n{END}\nb"
