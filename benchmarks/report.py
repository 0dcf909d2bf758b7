"""The table of limits and the page benchmarks/performance.md, both made from the JSON of the
benchmarks and nothing else.

python -m benchmarks.report            # makes them
python -m benchmarks.report --check    # fails where they are not those of today
"""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from benchmarks.limits import LIMITS, Limit

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLE = RESULTS / "limits.md"
PAGE = ROOT / "benchmarks" / "performance.md"

SECTIONS = {
    "codec": "Compression: fold, select, encode, decode",
    "optimizers": "Optimizers: LAMB, LARS and the outer step",
    "scaling": "Many sources: gathered messages and sums by shares",
    "scale": "Two to 10,000 ranks, simulated",
    "startup": "Starting: imports and first steps",
    "memory": "Memory: plain DDP, PowerSGD and ours",
    "overlap": "Overlap: two workers over 1 Gbit/s",
}
_HEAD = """# Performance

Made by `make bench` from the JSON files in `benchmarks/results`; what is compared and how to read
it is said in [benchmarks](README.md). Machines are shared and noisy, so a figure is a
ratio within one run: the contenders take turns and medians count. Times are there for orientation.
"""


def made() -> dict[Path, str]:
    """Return the text of both files."""
    results = read(RESULTS)
    return {TABLE: limits_table(results) + "\n", PAGE: page(results)}


def write() -> None:
    """Make both files anew."""
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")
    print(made()[TABLE])


def old() -> list[str]:
    """Return which files are not those of today, and limits of no benchmark."""
    found = [path.name for path, text in made().items() if path.read_text("utf-8") != text]
    return found + [limit.figure for limit in LIMITS if limit.benchmark not in SECTIONS]


def read(folder: Path) -> dict[str, Any]:
    """Return the results of the benchmarks by name."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def page(results: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    parts = [_HEAD, "## Limits\n", limits_table(results) + "\n"]
    for name, title in SECTIONS.items():
        module, result = importlib.import_module(f"benchmarks.{name}"), results[name]
        parts += [
            f"## {title}\n",
            f"`{result['command']}`, {machine(result)}\n",
            module.printed(result) + "\n",
        ]
    return "\n".join(parts)


def limits_table(results: Mapping[str, Any]) -> str:
    """Every figure that has a limit, in Markdown."""
    rows = [_row(limit, results) for limit in LIMITS if limit.benchmark in results]
    return "\n".join(markdown(["figure", "at most", "measured", "met", "benchmark"], rows))


def _row(limit: Limit, results: Mapping[str, Any]) -> list[str]:
    value = limit.value(results[limit.benchmark])
    met = "not measured" if value is None else "yes" if value <= limit.at_most else "**no**"
    shown = "" if value is None else f"{value:.3g}{limit.unit}"
    at_most = f"{limit.at_most:g}{limit.unit}"
    return [limit.figure, at_most, shown, met, f"`{limit.benchmark}`"]


def machine(result: Mapping[str, Any]) -> str:
    """Where a benchmark ran, in words."""
    facts = result["machine"]
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gib']} GiB, torch "
        f"{facts['torch']}, load {result['load_average']} at the start"
    )


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        write()
    elif wrong := old():
        sys.exit(f"old: {', '.join(wrong)}: run make bench, or python -m benchmarks.report")
