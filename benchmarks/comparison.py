"""Long comparisons over slow links: results of `thinwire compare` without the single steps, and a
table for people.

python -m benchmarks.comparison --name compare_20mbit_2_workers runs/20mbit-2
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import markdown
from thinwire.tools.compare.record import Point, common_loss, first_reached
from thinwire.tools.report.page import bytes_text

RESULTS = Path(__file__).parent / "results"
SINGLE_STEPS = ("step_ms", "bare_step_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--name", required=True, help="of the file in benchmarks/results, without suffix"
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        help="--out of thinwire compare; further ones hold strategies run later, alone",
    )
    arguments = parser.parse_args()
    results = joined(
        [json.loads((folder / "results.json").read_text()) for folder in arguments.folders]
    )
    for run in results["strategies"]:
        for key in SINGLE_STEPS:
            del run[key]
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


def joined(parts: Sequence[Any]) -> Any:
    """The first results with the strategies of the others, which were run over the same link
    without dense.
    """
    first, *others = parts
    if not others:
        return first
    first["strategies"] += [run for part in others for run in part["strategies"]]
    if first["failed"] and first["failed"]["strategy"] in {
        run["strategy"] for run in first["strategies"]
    }:
        first["failed"] = None
    curves = [[Point(**point) for point in run["evaluations"]] for run in first["strategies"]]
    first["common_loss"] = common_loss(curves)
    for run, curve in zip(first["strategies"], curves, strict=True):
        for kind in ("dense", "common"):
            loss = first[f"{kind}_loss"]
            run[f"seconds_to_{kind}_loss"] = first_reached(
                ((point.seconds, point.loss) for point in curve), loss
            )
            run[f"bytes_to_{kind}_loss"] = first_reached(
                ((point.library_bytes, point.loss) for point in curve), loss
            )
    return first


def table(results: Mapping[str, Any]) -> list[str]:
    """One line per strategy, in Markdown."""
    dense = next(run for run in results["strategies"] if run["strategy"] == "dense")
    seconds, sent = dense["seconds"], dense["evaluations"][-1]["library_bytes"]
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("strategy", lambda run: run["strategy"]),
        ("steps", lambda run: str(run["steps"])),
        ("held-out loss", lambda run: f"{run['final_loss']:.3f}"),
        (
            "time to dense's last loss",
            lambda run: _part(run["seconds_to_dense_loss"], seconds, "{:.0f} s".format),
        ),
        (
            "sent per worker until then",
            lambda run: _part(run["bytes_to_dense_loss"], sent, bytes_text),
        ),
        ("sent in all", lambda run: bytes_text(run["evaluations"][-1]["library_bytes"])),
        ("kernel's count : library's", _kernel_share),
        ("step", lambda run: f"{run['median_step_ms']:.0f} ms"),
        ("step without exchange", lambda run: f"{run['median_bare_step_ms']:.0f} ms"),
    ]
    rows = ([form(run) for _, form in columns] for run in results["strategies"])
    return markdown([title for title, _ in columns], rows)


def _part(value: float | None, whole: float, form: Callable[[float], str]) -> str:
    if value is None:
        return "not reached"
    return (
        form(value)
        if value >= whole
        else f"{form(value)} (1/{whole / value:.{1 if whole < 100 * value else 0}f})"
    )


def _kernel_share(run: Mapping[str, Any]) -> str:
    last = run["evaluations"][-1]
    return f"{last['kernel_bytes'] / last['library_bytes']:.2f}"


if __name__ == "__main__":
    main()
