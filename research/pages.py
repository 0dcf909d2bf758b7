"""The tables of pages that come from rows: of evidence, of the law, of the planner, of topics here.

python -m research.pages            # puts them between the marks of the pages
python -m research.pages --check    # fails where a page has others
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import gaps, late, track
from benchmarks.choosing import Scope, evidence, planned, settings, short, table, whole
from benchmarks.common import bare_parser, json_lines
from research.lag import variants
from research.large import methods
from research.law import groups
from research.lines import streams
from research.members import joining, keep_batch
from research.recipes import run as recipes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("choosing", "integrations", "track")]
PAGES += sorted((ROOT / "research").rglob("README.md"))
MARK = re.compile(r"(<!-- evidence: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
LINES = evidence()


def of_scope(make: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return what makes a table of evidence from the words of a mark."""
    return lambda size, *numbers: make(LINES, Scope(int(numbers[0]), size, *map(int, numbers[1:])))


def rows_of(module: str) -> list[dict[str, object]]:
    """Return the rows of a topic's results."""
    found: list[dict[str, object]] = json.loads((ROOT / "research" / module).read_text())["rows"]
    return found


TABLES: dict[str, Callable[..., list[str]]] = {
    "table": of_scope(table),
    "short": of_scope(short),
    "settings": of_scope(settings),
    "whole": of_scope(whole),
    "track": lambda: track.table(json_lines(track.RESULTS), track.entries()),
    "plan": lambda params, step_s, workers, latency: planned(
        params, float(step_s), int(workers), latency
    ),
    "groups": lambda: groups.table(json_lines(groups.RESULTS)),
    "law": lambda: gaps.fit_table(gaps.measured()),
    "memory": methods.memory_table,
    "large": methods.tables,
    "lag": lambda size, *numbers: variants.table(
        json_lines(variants.RESULTS), size, *map(int, numbers)
    ),
    "joining": lambda: joining.table(rows_of("members/joining.json")),
    "late": lambda: late.table(json_lines(late.RESULTS)),
    "keep_batch": lambda: keep_batch.table(json_lines(keep_batch.RESULTS)),
    "streams": lambda: streams.table(rows_of("lines/streams.json")),
    "recipes": lambda: recipes.table(json.loads(recipes.RESULTS.read_text())),
}
"""By the first word of a mark what makes its table from the others."""


def filled(page: str) -> str:
    """Return a page with the tables of today between its marks."""

    def made(mark: re.Match[str]) -> str:
        kind, *words = mark[2].split()
        text = "\n".join(TABLES[kind](*words))
        return f"{mark[1]}\n{text}\n\n{mark[3]}"

    return MARK.sub(made, page)


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--check", action="store_true")
    check, old = parser.parse_args().check, []
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (now := filled(before)) != before:
            old.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(now, encoding="utf-8")
    if check and old:
        sys.exit(f"old tables in {', '.join(old)}: run python -m research.pages")


if __name__ == "__main__":
    main()
