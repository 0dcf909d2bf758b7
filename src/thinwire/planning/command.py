"""`thinwire plan`: the answer before the run, from numbers alone; torch is loaded for `--out`
only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from thinwire.lab.report.measures import bytes_text
from thinwire.planning.plan import Plan, Row
from thinwire.planning.plan import plan as predicted

__all__ = ["EXAMPLE", "plan"]

EXAMPLE = (
    "Example: thinwire plan --params 124M --step-seconds 0.35 --workers 8 --link 100mbit "
    "--latency 20ms --out best.yaml"
)
_SHOWN = 6


def plan(
    *,
    params: str,
    step_seconds: float,
    workers: int = 2,
    link: str = "100mbit",
    latency: Annotated[str, Parameter(allow_leading_hyphen=True)] = "0ms",
    device: str = "cpu",
    out: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Predict a step of every strategy on a network, and say which one to take.

    Seconds and bytes follow from the sizes of messages and the rate of the network. How much of a
    step of dense each step is worth is a prior; its source is in every row.

    Args:
        params: Trainable numbers of the model, such as 124M.
        step_seconds: A step of one rank with nothing exchanged.
        workers: Ranks.
        link: Each rank's rate in each direction, such as 100mbit, up to 400gbit.
        latency: One way, such as 20ms.
        device: cpu or cuda: what computes.
        out: Writes the recommended strategy as a strategy file.
        as_json: Prints the plan as JSON.
    """
    made = predicted(
        params=params,
        step_seconds=step_seconds,
        workers=workers,
        link=link,
        latency=latency,
        device=device,
    )
    if as_json:
        print(json.dumps(made.to_dict(), indent=1))
    else:
        _print(made)
    if out is not None:
        _write(made, out, as_json)


def _print(made: Plan) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(made.reason, markup=False)
    titles = ("s a step", "bytes a step", "waiting", "MiB", "worth", "time")
    table = Table("", *titles, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    table.columns[0].no_wrap = True
    for row in _shown(made):
        low, _, high = row.step_seconds
        table.add_row(
            row.name,
            f"{low:.3g} to {high:.3g}",
            bytes_text(row.bytes_per_step),
            f"{100 * row.waiting_share:.0f} %",
            f"{row.memory_bytes / 2**20:,.0f}",
            f"{row.progress:.2f}",
            f"{row.time_to_dense_loss:.3g}",
        )
    console.print(table)
    console.print(
        "waiting: for the wire. worth: steps of dense that one step is worth, "
        f"{made.strategies[0].progress_source}; thinwire compare measures it. "
        "time: until dense's last loss, over dense's own.",
        markup=False,
    )


def _shown(made: Plan) -> list[Row]:
    """The best ones, and those of thinwire compare as they are."""
    best = made.strategies[:_SHOWN]
    return [row for row in made.strategies if row in best or " " not in row.name]


def _write(made: Plan, out: Path, as_json: bool) -> None:
    from thinwire.strategy.distributed_strategy import DistributedStrategy
    from thinwire.strategy.yaml_files import text_of

    document = made[made.recommended].document
    if document is None:
        raise ValueError(
            f"out={str(out)!r}: {made.recommended} is a hook of torch for DistributedDataParallel, "
            "for which there is no strategy file: leave --out out"
        )
    text = f"# Written by thinwire plan: {made.reason}\n"
    out.write_text(text + text_of(DistributedStrategy.from_dict(document)), encoding="utf-8")
    if not as_json:
        print(f"strategy file of {made.recommended}: {out}")
