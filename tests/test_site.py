"""Computed parts of the site: the plot of the landing page and the answers of the chooser."""

import re
import runpy
from pathlib import Path

import pytest

import thinwire as tw

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"


def test_the_plot_shows_the_factors_of_readme() -> None:
    figure = runpy.run_path(str(SITE / "figure.py"))["figure"]()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stated = re.findall(r"(\d+) times sooner than", readme.replace("**", ""))
    drawn = re.findall(r">(\d+) times sooner<", figure)
    assert drawn == stated * 2  # the plot for a wide page, and for a narrow one
    assert [f"| {factor} x |" in figure for factor in stated] == [True, True]


def test_answers_of_the_chooser_are_code() -> None:
    answers = runpy.run_path(str(SITE / "answers.py"))
    for scope in ("LINKS", "MODELS"):
        for name in list(answers[scope])[1:]:
            del answers[scope][name]
    rows = [line.split(" | ") for line in answers["table"]().splitlines()[2:]]
    assert len(rows) == len(answers["WORKERS"]) * len(answers["OPTIMIZERS"])
    for row in rows:
        for method in (row[4], row[5]):
            assert isinstance(eval(method.split("`")[1], {"tw": tw}), tw.LocalSGD)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (tw.Quantized(1), "tw.Quantized(1)"),
        (tw.LocalSGD(8, compression=tw.Sparse(0.99)), "tw.LocalSGD(8, "),
    ],
)
def test_code_makes_the_config_that_it_was_made_from(config: object, code: str) -> None:
    written = runpy.run_path(str(SITE / "answers.py"))["code"](config)
    assert written.startswith(code)
    assert eval(written, {"tw": tw}) == config
