"""The page of a plan: one file that loads nothing, with every best row, and what is a prior."""

import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from tests.api import Plan
from tests.api import plan_page as render
from tests.processes import ran

NUMBERS: dict[str, Any] = {"params": "124M", "step_seconds": 0.35, "workers": 8}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tw.plan(**NUMBERS, link="100mbit", latency="20ms")


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    return render(plan, "thinwire plan --params <124M>")


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.search(r"(src|href)=|@import|https?://(?!www.w3.org)", page)
    assert set(re.findall(r"url\((.*?)\)", page)) == {"#waits-wide", "#waits-narrow"}


def test_best_rows_are_there_with_source_and_loss_a_prediction(plan: Plan, page: str) -> None:
    assert "a fitted law and measurements of small models" in page
    assert escape(plan.reason.partition(": ")[0]) in page
    for row in plan.best():
        assert f"<dt>{escape(row.name)}</dt>" in page
        assert escape(row.loss_gap_source) in page
    assert "thinwire plan --params &lt;124M&gt;" in page
    assert "100 Mbit/s each, 20 ms one way, assumed" in page


def test_the_command_writes_a_page_and_refuses_early(tmp_path: Path) -> None:
    words = ["plan", "--params", "1M", "--step-seconds", "0.1", "--html"]
    code = (
        "import sys\nfrom thinwire import cli\ntry:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    sys.exit(end.code and end.code + 97 * ('torch' in sys.modules))"
    )

    def said(path: Path) -> subprocess.CompletedProcess[str]:
        return ran([sys.executable, "-c", code, *words, str(path)])

    made = said(tmp_path / "plan.html")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    bad = said(tmp_path / "missing" / "plan.html")
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
    assert "missing/plan.html" in bad.stderr
