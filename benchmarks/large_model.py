"""124 M parameters over 20 Mbit/s: the start, 20 updates of DGC, two averagings of sparse local
updates.

    python -m benchmarks.large_model --out benchmarks/results/large_model.json

Needs root, for two network namespaces with a link between them, and 10 GB of memory; takes some ten
minutes, most of it the copy of the model where replicas differ. `--quick` is small and on the
machine's own loopback.
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import parser_for, save, surroundings
from thinwire.tools.network.netns import Link, network, why_unavailable
from thinwire.tools.run.config import Job
from thinwire.tools.run.launch import run_workers

WORKERS = 2
FULL = {"vocabulary": 50257, "width": 768, "blocks": 18, "rows": 2, "length": 8}
QUICK = {"vocabulary": 500, "width": 64, "blocks": 2, "rows": 2, "length": 8}
PARTS = ("equal", "dgc", "local", "different")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--link", default="20mbit", help="rate of the emulated link, as in thinwire compare"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="of the process group, in seconds"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    shape = QUICK if arguments.quick else FULL
    link = Link.parse("loopback" if arguments.quick else arguments.link)
    if link.emulated and (reason := why_unavailable()) is not None:
        sys.exit(
            f"the link cannot be emulated here: network namespaces {reason}; --quick runs on "
            "loopback"
        )
    job = Job(
        task="benchmarks.large_model_run:Run",
        config={"parts": arguments.parts, **shape},
        timeout_s=arguments.timeout,
    )
    around, begin = surroundings(1), time.perf_counter()
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        emulated = stack.enter_context(network(WORKERS, link)) if link.emulated else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for event in run_workers(job, WORKERS, emulated, folder / "run"):
            if event["event"] == "said":
                print(f"{time.perf_counter() - begin:6.0f} s  {event['text']}", flush=True)
            found = event
    rows = found["rows"]
    print(f"{found['params']:,} parameters, {link}, time-out {arguments.timeout:g} s")
    for row in rows:
        print(
            f"  {row['what']:58} {row['seconds']:8.1f} s {row['bytes_sent'] / 1e6:10.2f} MB sent "
            "by rank 0"
        )
    result: dict[str, object] = {
        **around,
        "workers": WORKERS,
        "link": str(link),
        "timeout_s": arguments.timeout,
        "shape": shape,
        "params": found["params"],
        "seconds": round(time.perf_counter() - begin),
        "rows": rows,
    }
    save(result, arguments.out)


if __name__ == "__main__":
    main()
