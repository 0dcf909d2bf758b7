"""Two workers over 1 Gbit/s: what a step costs, and how much of the exchange the backward pass
hides.

    python -m benchmarks.overlap --out benchmarks/results/overlap.json
    python -m benchmarks.overlap --digest --repeats 25 --out benchmarks/results/digest.json

The second one shows instead what the rolling digest costs: engines with it and without it take
turns.

Needs root, for two network namespaces with a link between them; `--quick` uses the machine's own
loopback.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, parser_for, save, surroundings
from benchmarks.overlap_run import WITHOUT
from thinwire.tools.network.netns import Link, network, why_unavailable
from thinwire.tools.run.config import Job
from thinwire.tools.run.launch import run_workers

WORKERS = 2
FULL = {"width": 512, "blocks": 8, "rows": 4, "length": 40, "bucket_mb": [1, 5, 25, 100]}
QUICK = {"width": 64, "blocks": 2, "rows": 2, "length": 8, "bucket_mb": [1, 25]}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--link", default="1gbit", help="rate of the emulated link, as in thinwire compare"
    )
    parser.add_argument(
        "--digest", action="store_true", help="the cost of the rolling digest instead"
    )
    arguments = parser.parse_args()
    shape, repeats = (QUICK, 2) if arguments.quick else (FULL, arguments.repeats)
    link = Link.parse("loopback" if arguments.quick else arguments.link)
    if link.emulated and (reason := why_unavailable()) is not None:
        sys.exit(
            f"the link cannot be emulated here: network namespaces {reason}; --quick runs on "
            "loopback"
        )
    config = {"repeats": repeats, **shape, "digest": arguments.digest}
    around, begin = surroundings(repeats), time.perf_counter()
    found = run(config, link)
    result: dict[str, object] = {
        **around,
        "threads": 1,
        "workers": WORKERS,
        "link": str(link),
        "shape": shape,
        "params": found["params"],
        "seconds": round(time.perf_counter() - begin),
        "rows": [
            cost(name, found) if arguments.digest else row(name, found)
            for name in contenders(found)
        ],
        "milliseconds": found["milliseconds"],
        "cpu_milliseconds": found["cpu_milliseconds"],
    }
    save(result, arguments.out)
    print(printed_costs(result) if arguments.digest else printed(result))


def run(config: dict[str, Any], link: Link) -> dict[str, Any]:
    """Run the contenders and return the report of rank 0."""
    with contextlib.ExitStack() as stack:
        emulated = stack.enter_context(network(WORKERS, link)) if link.emulated else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = Job(task="benchmarks.overlap_run:Contenders", config=config, timeout_s=120)
        *_, last = run_workers(job, WORKERS, emulated, folder / "run")
    return dict(last)


def contenders(found: dict[str, Any]) -> list[str]:
    """Those with a row of their own."""
    return [name for name in found["milliseconds"] if not name.endswith(WITHOUT)]


def cost(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of the digest: median differences within a round, and shares of a step."""
    result: dict[str, Any] = {"name": name, "waits": statistics.median(found["waits"][name])}
    for key in ("milliseconds", "cpu_milliseconds"):
        pairs = list(zip(found[key][name], found[key][name + WITHOUT], strict=True))
        without = statistics.median(b for _, b in pairs)
        added = statistics.median(a - b for a, b in pairs)
        result |= {key: without, f"{key} added": added, f"{key} added, share": added / without}
    return result


def printed_costs(result: Any) -> str:
    """A table in Markdown."""
    lines = [
        f"{_size(result)}, medians of {result['repeats']} pairs of steps, one thread a worker.",
        "",
    ]
    titles = ["engine", "step without digest", "added", "processor time without", "added"]
    rows = []
    for row in result["rows"]:
        cells = [row["name"]]
        for key in ("milliseconds", "cpu_milliseconds"):
            added = f"{row[f'{key} added']:+.1f} ms, {row[f'{key} added, share']:+.1%}"
            cells += [f"{row[key]:.0f} ms", added]
        rows.append([*cells, f"{row['waits']:.0f} ms"])
    return "\n".join(lines + markdown([*titles, "left to wait, with it"], rows))


def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The figures of one contender; times are medians over the steps."""
    times = found["milliseconds"]
    ratios = {
        f"over {other}": statistics.median(
            a / b for a, b in zip(times[name], times[other], strict=True)
        )
        for other in ("DDP", "bare")
    }
    steps = [step for step in found["buckets"][name] if step]
    counts = sorted({len(step) for step in steps})
    ways = [
        {
            "milliseconds": statistics.median(step[index][0] for step in steps),
            "hidden": statistics.median(
                step[index][1] / step[index][0] for step in steps if step[index][0] > 0
            ),
        }
        for index in range(min(counts, default=0))
    ]
    shares = [sum(hidden for _, hidden in step) / sum(way for way, _ in step) for step in steps]
    return {
        "name": name,
        "milliseconds": statistics.median(times[name]),
        **ratios,
        "collectives": counts,
        "hidden": statistics.median(shares) if shares else None,
        "buckets": ways,
    }


def printed(result: Any) -> str:
    """Tables in Markdown."""
    lines = [
        f"{_size(result)}, medians of {result['repeats']} steps, one thread a worker.",
        "",
    ]
    titles = ["contender", "step : DDP", "step : bare", "hidden"]
    rows = []
    for row in result["rows"]:
        hidden = "" if row["hidden"] is None else f"{row['hidden']:.0%}"
        shares = " ".join(f"{way['hidden']:.2f}" for way in row["buckets"][:12])
        more = f" and {len(row['buckets']) - 12} more" if len(row["buckets"]) > 12 else ""
        ratios = [f"{row[f'over {other}']:.2f}" for other in ("DDP", "bare")]
        step = f"{row['milliseconds']:.0f} ms"
        rows.append([row["name"], *ratios, hidden, shares + more, step])
    titles += ["share of each collective that is hidden", "step"]
    return "\n".join(lines + markdown(titles, rows))


def _size(result: Any) -> str:
    return (
        f"{result['params'] / 1e6:.1f} M parameters, {result['workers']} workers, link "
        f"{result['link']}"
    )


if __name__ == "__main__":
    main()
