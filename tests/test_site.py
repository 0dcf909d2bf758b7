"""Computed parts of the site: the plot of the landing page and the answers of the chooser."""

import re
import runpy
from pathlib import Path
from typing import Any

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
    seconds = re.findall(r"\| ([0-9,]+) \|[^|]*\|$", figure, re.MULTILINE)
    assert len(seconds) == 3
    assert all(f"| {number} |" in readme.replace("**", "") for number in seconds)


def test_the_picture_of_readme_is_the_plot() -> None:
    made = runpy.run_path(str(SITE / "figure.py"))
    assert made["PICTURE"].read_text(encoding="utf-8") == made["alone"]()


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


def test_plan_readme_and_chooser_give_one_answer() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    words = re.search(r"^thinwire plan (.*?) +#", readme, re.MULTILINE)
    assert words is not None
    pairs = [pair.split() for pair in words[1].removeprefix("--").split(" --")]
    given: dict[str, Any] = {key.replace("-", "_"): value for key, value in pairs}
    given |= {"step_seconds": float(given["step_seconds"]), "workers": int(given["workers"])}
    plan = tw.plan(**given)
    advised = re.search(
        r"^\| a slower link, a transformer or MLP \|.*?`(.*?)`", readme, re.MULTILINE
    )
    assert advised is not None
    code = re.sub(r"\b(?=LocalSGD|Quantized)", "tw.", advised[1])
    answers = runpy.run_path(str(SITE / "answers.py"))
    document = plan[plan.recommended].document
    assert document is not None
    made = tw.DistributedStrategy.from_dict(document).localsgd
    assert eval(code, {"tw": tw}) == made
    for scope, kept in (
        ("LINKS", "50 Mbit/s, 20 ms"),
        ("MODELS", "124 M, 0.35 s"),
        ("OPTIMIZERS", "Muon"),
    ):
        for name in set(answers[scope]) - {kept}:
            del answers[scope][name]
    row = next(line for line in answers["table"]().splitlines() if " | 4 | " in line)
    said = [eval(cell.split("`")[1], {"tw": tw}) for cell in row.split(" | ")[4:]]
    assert said == [made, made]
    assert (answers["LINKS"]["50 Mbit/s, 20 ms"], answers["MODELS"]["124 M, 0.35 s"]) == (
        (given["link"], given["latency"]),
        (given["params"], given["step_seconds"]),
    )
