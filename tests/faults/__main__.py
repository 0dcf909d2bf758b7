"""Make the faults and print what became of each: `python -m tests.faults [pytest's options]`.

A test says which fault it makes: `@pytest.mark.fault("SIGKILL in the middle of an exchange")`.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest


class Table:
    """Counts outcomes by fault, and prints them at the end."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[Any]:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            for mark in item.iter_markers("fault"):
                fault = mark.args[0] if mark.args else item.nodeid.partition("[")[0]
                self.outcomes.setdefault(fault, Counter())[report.outcome] += 1
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for fault, counts in self.outcomes.items():
            found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            terminalreporter.write_line(f"{fault}: {found}")


if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-m", "fault", *sys.argv[1:]], plugins=[Table()]))
