"""All benchmarks one after the other, in less than ten minutes: figures as JSON, one table, and the
page in docs.

    python -m benchmarks
    python -m benchmarks --only codec optimizers
    python -m benchmarks --quick --folder /tmp/figures

Each runs in a process of its own, so that none warms up another.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.common import bare_parser

SUITE: dict[str, list[str]] = {
    name: ["--threads", "2"] if name in ("codec", "optimizers", "startup") else []
    for name in report.SECTIONS
}
"""The benchmarks in order, with their arguments."""


def main() -> int:
    parser = bare_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=SUITE, default=list(SUITE), help="some of them"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small and short: shows that they run, measures nothing",
    )
    parser.add_argument("--folder", type=Path, default=report.RESULTS, help="for the JSON files")
    arguments = parser.parse_args()
    if arguments.quick and arguments.folder == report.RESULTS:
        parser.error(
            "--quick measures nothing: name another --folder, so that no figures are overwritten"
        )
    failed = [
        name for name in arguments.only if not run(name, arguments.folder, quick=arguments.quick)
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    elif arguments.folder == report.RESULTS:
        report.write()
    else:
        print(report.limits_table(report.read(arguments.folder)))
    return len(failed)


def run(name: str, folder: Path, *, quick: bool) -> bool:
    """Run a benchmark in the terminal; return True if it succeeded."""
    module, out = f"benchmarks.{name}", ["--out", os.path.relpath(folder / f"{name}.json")]
    begin = time.perf_counter()
    print(f"== {name}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", module, *SUITE[name], *out, *["--quick"] * quick], check=False
    )
    print(
        f"== {name}: {time.perf_counter() - begin:.0f} s, exit status {done.returncode}", flush=True
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
