"""Scripts in the manner of public ones move to thinwire by a few lines, and train."""

import json
import math

import pytest

from benchmarks.recipes import RECIPES, RESULTS, after, before, changed_lines, held_out_loss, table
from tests.integrations.packages import needs
from tests.test_examples import ROOT

CLASSES = dict.fromkeys(RECIPES, 256) | {"timm_train": 10}
"""Of what a script predicts: bytes, or digits."""
ALONE = [name for name, recipe in RECIPES.items() if recipe.package in (None, "sklearn")]


@pytest.mark.parametrize("name", RECIPES)
def test_few_lines_change(name: str) -> None:
    assert 0 < changed_lines(name) <= 8
    assert "thinwire" in after(name) and "thinwire" not in before(name)


def trained(name: str) -> None:
    old, new = held_out_loss(before(name)), held_out_loss(after(name))
    assert old < math.log(CLASSES[name]) - 0.3, "it has learned"
    # 48 steps, of which local training averages every eighth
    assert new < old + 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_recipe_trains(name: str) -> None:
    trained(name)


@pytest.mark.slow
@pytest.mark.integrations
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs(recipe.package))
        for name, recipe in RECIPES.items()
        if recipe.package and name not in ALONE
    ],
)
def test_recipe_with_another_package_trains(name: str) -> None:
    trained(name)


def test_the_page_shows_the_table_of_the_results() -> None:
    """python -m benchmarks.recipes prints it."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [row["recipe"] for row in rows] == list(RECIPES)
    assert all(row["changed_lines"] == changed_lines(row["recipe"]) for row in rows)
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    assert "\n".join(table(rows)) in page
