"""Make all faults of the table, print what became of each, and write that into the docs."""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.matrix import MATRIX, Row

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("outcomes.md")
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
Outcomes = dict[str, Counter[str]]


def made(rows: Sequence[Row], at_once: int) -> Outcomes:
    """By file and function how many tests passed, failed and were skipped."""
    chosen = sorted({test for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
        command += [
            "-n",
            str(at_once),
            "--dist",
            "worksteal",
            *(f"tests/{test}" for test in chosen),
        ]
        subprocess.run(command, cwd=ROOT, check=False)
        return _read(report)


def _read(report: Path) -> Outcomes:
    found: Outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        place = f"{module.removeprefix('tests.').replace('.', '/')}.py::{name}"
        kinds = {child.tag for child in case}
        bad = kinds & {"failure", "error"}
        outcome = "failed" if bad else "skipped" if "skipped" in kinds else "held"
        found.setdefault(place, Counter())[outcome] += 1
    return found


def outcome(row: Row, outcomes: Outcomes) -> str:
    """In a few words."""
    if not row.tests:
        return "not made"
    counts = sum((outcomes.get(test, Counter({"missing": 1})) for test in row.tests), Counter())
    held = counts.pop("held", 0)
    others = [f"{n} {kind}" for kind, n in sorted(counts.items())]
    tests = "1 test" if held == 1 else f"{held} tests"
    return ", ".join([f"held in {tests}", *others])


def table(rows: Sequence[Row], outcomes: Outcomes) -> str:
    """In Markdown."""
    lines = ["| | fault | what must hold | outcome | not covered |", "|---|---|---|---|---|"]
    part = ""
    for row in rows:
        if row.part != part:
            part = row.part
            lines.append(f"| | **{part}** | | | |")
        seen = outcome(row, outcomes)
        lines.append(f"| {row.number} | {row.fault} | {row.criterion} | {seen} | {row.why} |")
    return "\n".join(lines)


def written(page: str, text: str) -> str:
    """The page with this text between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="of the rows; all without any")
    parser.add_argument("--at-once", type=int, default=2, help="processes of pytest")
    given = parser.parse_args()
    rows = [row for row in MATRIX if not given.numbers or row.number in given.numbers]
    outcomes = made(rows, given.at_once)
    found = table(rows, outcomes)
    print(found)
    if not given.numbers:
        date = time.strftime("%Y-%m-%d")
        text = f"Made on {date}, by `python -m tests.faults`:\n\n{found}"
        PAGE.write_text(written(PAGE.read_text(), text))
    bad = [row.number for row in rows if {"failed", "missing"} & set(_kinds(row, outcomes))]
    print(f"rows that do not hold: {bad or 'none'}")
    return 1 if bad else 0


def _kinds(row: Row, outcomes: Outcomes) -> set[str]:
    return {kind for test in row.tests for kind in outcomes.get(test, Counter({"missing": 1}))}


if __name__ == "__main__":
    sys.exit(main())
