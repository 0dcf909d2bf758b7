"""Use of a device that trains over a slow line: what of an averaging is not hidden.

    python -m benchmarks.use --out benchmarks/results/use.json

Two ranks over an emulated line of 20 Mbit/s and 150 ms one way (`thinwire run`). A step sleeps for
1 s, as if a GPU worked. Exposed is what `optimizer.step()` takes beyond an update: waiting for
agreements and messages, and the library's own work in processor seconds, so that other processes of
a busy machine do not count (`wall_ms` in the JSON is that time by the clock). Use is the time of
the steps over that and what is exposed. What is exposed of one averaging does not depend on the
steps between two, so its share at any interval follows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import bare_parser, markdown, save
from benchmarks.use_worker import COMPRESSIONS
from thinwire.tools.compare.results import describe_machine

LINK, LATENCY, STEP_S = "20mbit", "150ms", 1.0
_WORKER = Path(__file__).with_name("use_worker.py")
_SHORT, _LONG = 4, 32


def cells(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Return the settings: steps between two averagings, method, fragments and delay."""
    for method in names:
        for fragments, delay in ((1, 0), (1, 3), (4, 3)):
            yield {"method": method, "fragments": fragments, "delay": delay, "distance": _SHORT}
        yield {"method": method, "fragments": 4, "delay": 4, "distance": _LONG}


def measure(cell: dict[str, Any], averagings: int) -> dict[str, Any]:
    """Return the row of one setting."""
    steps = averagings * cell["distance"]
    given = json.dumps({**cell, "steps": steps, "step_s": STEP_S})
    command = [sys.executable, "-m", "thinwire", "run", "--workers", "2", "--link", LINK]
    command += ["--latency", LATENCY, "--quiet", "--", str(_WORKER), given]
    done = subprocess.run(
        command,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    for line in done.stdout.splitlines():
        if "ROW " in line:
            row: dict[str, Any] = json.loads(line.partition("ROW ")[2])
            return row
    raise SystemExit(f"{given}: {done.stdout}{done.stderr}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    titles = ["changes", "fragments", "delay", "steps between", "exposed, ms", "agreements, ms"]
    titles += ["messages, ms", "work, ms", "exposed, %", "use, %", "steps for 0.3 %"]
    lines = []
    for row in rows:
        shown = [row[key] for key in ("method", "fragments", "delay", "distance")]
        shown += [
            f"{row.get(f'{kind}_ms', 0):.0f}"
            for kind in ("exposed", "agreements", "messages", "work")
        ]
        share = row["exposed_share"]
        shown += [f"{100 * part:.2f}" for part in (share, 1 / (1 + share))]
        lines.append([*shown, f"{row['exposed_ms'] / 1e3 / STEP_S / 0.003:.0f}"])
    return "\n".join(markdown(titles, lines))


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=COMPRESSIONS, default=["plain", "1 bit"])
    parser.add_argument("--averagings", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for cell in cells(given.methods):
        rows.append(measure(cell, given.averagings if cell["distance"] == _SHORT else 2))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    about = {
        "command": "python -m benchmarks.use",
        "machine": describe_machine(),
        "line": f"{LINK}, {LATENCY} one way",
        "step_seconds": STEP_S,
        "rows": rows,
    }
    save(about, given.out)


if __name__ == "__main__":
    main()
