"""`thinwire plan` and `thinwire probe`; torch is loaded only for `--out` and the probe."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from thinwire._files import replace_file
from thinwire._launched import launched_rank
from thinwire._version import __version__
from thinwire.errors import ThinwireError
from thinwire.tools.app import Count, Names, Seconds
from thinwire.tools.compare.strategies import strategy_text
from thinwire.tools.compare.tables import drawn
from thinwire.tools.doctor.pairs import Line, mbit_s
from thinwire.tools.network.netns import parse_loss
from thinwire.tools.planning.plan import (
    GROUPED,
    GROUPS,
    RELAY,
    RELAYED,
    Plan,
    Row,
    gap_text,
    seconds_text,
)
from thinwire.tools.planning.plan import plan as predicted
from thinwire.tools.planning.work import FORMAT
from thinwire.tools.report.page import FRAMES, Column, bytes_text, page
from thinwire.tools.report.progress import display_for
from thinwire.tools.run.config import (
    DEVICES,
    parse_size,
    require_nothing_beside,
    require_one_of,
    require_task,
    require_within,
)
from thinwire.tools.run.launch import by_first, joined

_HEADS = (
    "seconds a step",
    "sent by a rank a step",
    "waits for the network",
    "peak of memory",
    "loss above dense's, %",
    "speed-up to dense's loss",
)
_LETTERS = {
    "k": "local steps between averagings",
    "d": "delay of a result, in steps",
    "f": "fragments, averaged one after another",
    "b": "bits per value",
    "%": "share of the entries that is sent",
    "gather, split": "exchange of the messages, if it is not the default",
    RELAY: RELAYED,
    GROUPS: GROUPED,
    "m": "local steps between means inside a group",
}
_AXES = ("bytes_per_step", "time_to_dense_loss")


def render(plan: Plan, command: str) -> str:
    """Return the plan as one HTML page."""
    rows = plan.best()
    sent, times = ([getattr(row, key) for row in plan.strategies] for key in _AXES)
    return page(
        "plan.html",
        plan=plan,
        rows=rows,
        about=_about(plan),
        titles=[f"{row.name}{'' if row.measured else ', not measured'}" for row in rows],
        columns=[
            Column(head, texts)
            for head, texts in zip(_HEADS, zip(*map(cells, rows), strict=True), strict=True)
        ],
        longest=max(row.step_seconds[1] for row in rows),
        seconds_text=seconds_text,
        plots=[
            (frame, frame.x_axis(sent, logarithmic=True), frame.y_axis(times, logarithmic=True))
            for frame in FRAMES
        ],
        sources={row.name: f"{gap_text(row.loss_gap)} %: {row.loss_gap_source}" for row in rows},
        command=command,
        letters=_LETTERS,
        version=__version__,
    )


def _about(plan: Plan) -> str:
    link, model = plan.link, plan.model
    up, down = (f"{link[key] / 1e6:,.4g} Mbit/s" for key in ("rate_bit_s", "down_bit_s"))
    line = up if up == down else f"{up} up and {down} down"
    numel = f"{model['parameters']:,} parameters"
    numel += f" and {model['frozen']:,} that do not change" if model["frozen"] else ""
    sites = f" in sites of {link['shard']}" if link["shard"] > 1 else ""
    return (
        f"{link['workers']} ranks{sites}, {line} each, {1e3 * link['latency_s']:.3g} ms one way, "
        f"{'measured' if link['measured'] else 'assumed'}. {numel}; "
        f"a step of {model['step_seconds']:.3g} s on {model['device']} with nothing exchanged. "
        f"{_more(plan)}"
    )


def _more(plan: Plan) -> str:
    """Name the share of a line that is filled where packets are lost, and bytes inside a site."""
    link = plan.link
    inside = plan[plan.recommended].bytes_inside_site
    text = ""
    if link["loss"]:
        filled = min(link["rate_bit_s"], link["down_bit_s"])
        text = (
            f"Of {link['line_bit_s'] / 1e6:.3g} Mbit/s, {filled / 1e6:.3g} are filled at "
            f"{100 * link['loss']:g} % loss by {link['streams']} connections (cubic). "
        )
    if inside:
        text += f"In a step each rank sends {bytes_text(inside)} to the other ranks of its site."
    return text.strip()


def cells(row: Row) -> list[str]:
    """Return the table cells of a row, without its name."""
    low, _, high = row.step_seconds
    return [
        f"{seconds_text(low)} to {seconds_text(high)}",
        bytes_text(row.bytes_per_step),
        f"{100 * row.waiting_share:.0f} %",
        bytes_text(row.memory_bytes),
        gap_text(row.loss_gap),
        row.times_sooner,
    ]


EXAMPLE = """Example:

thinwire plan --params 124M --step-seconds 0.35 --workers 8 --link 100mbit
"""
PROBE_EXAMPLE = """Example:

torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -m thinwire probe
"""
_TIMEOUT_S = 60.0
_OF_OUTPUT = ("out", "html", "all_rows", "as_json", "quiet")
"""Arguments of `plan` that say where the result goes."""


def plan(  # noqa: D417 - the other arguments are described once, at thinwire.plan
    *,
    params: str | None = None,
    trainable: str | None = None,
    step_seconds: Seconds | None = None,
    workers: Count | None = None,
    link: str | None = None,
    latency: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    device: str | None = None,
    probe: Path | None = None,
    task: str | None = None,
    up: str | None = None,
    down: str | None = None,
    loss: str | None = None,
    shard: Count = 1,
    strategies: Names | None = None,
    matrix: Path | None = None,
    out: Path | None = None,
    html: Path | None = None,
    all_rows: Annotated[bool, Parameter(name="--all")] = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    quiet: bool = False,
) -> None:
    """Predict a training step of every strategy on a network and recommend one.

    Seconds and bytes follow from message sizes and the rate of the network. The loss above dense
    training follows from a fitted law and from measurements; every row names its source.

    Args:
        out: Write the recommended strategy to this file. If it is a hook of torch, write the next
            best that is not.
        html: Write a self-contained page with table and plots.
        all_rows: Print every setting, instead of the best of each strategy.
        as_json: Print the plan as JSON, with every setting.
        quiet: Show no progress.
    """
    asked = {name: value for name, value in locals().items() if name not in _OF_OUTPUT}
    _require_writable("out", out)
    _require_writable("html", html)
    if out is not None and html is not None and out.resolve() == html.resolve():
        raise ValueError(f"out and html are the same file, {str(out)!r}; give two files")
    measures = task is not None and step_seconds is None and sys.stderr.isatty()
    with (
        contextlib.redirect_stdout(sys.stderr),  # what a task prints is not of the plan
        display_for(quiet=quiet or not measures).strategy("plan") as bar,
    ):
        bar.note(f"a step of {task}")
        made = predicted(**asked)
    # files first: whoever reads what is printed may leave early
    notes = ""
    if html is not None:
        text = render(made, shlex.join(["thinwire", *sys.argv[1:]]))
        replace_file(html, text.encode("utf-8", "backslashreplace"))
        notes = f"page: {html}\n"
    if out is not None:
        row = _write(made, out)
        hook = "" if row.name == made.recommended else f"; {made.recommended} is a hook of torch"
        about = f"strategy file of {row.name}: {out}; optimizer: {row.optimizer or 'any'}{hook}"
        notes += f"{about}\n"
    if as_json:
        print(json.dumps(made.to_dict(), indent=1))
    else:
        _print(made, made.strategies if all_rows else made.best())
        print(notes, end="")


_shared = (predicted.__doc__ or "").partition("Args:\n")[2].partition("\n    Returns:")[0]
plan.__doc__ = (plan.__doc__ or "").replace("    Args:\n", f"    Args:\n{_shared.rstrip()}\n")


def _print(made: Plan, rows: Sequence[Row]) -> None:
    from rich.console import Console

    best = made[made.recommended]
    optimizer = f"  # optimizer: {best.optimizer.partition(' for ')[0]}" if best.optimizer else ""
    print(f"{best.python}{optimizer}")
    lines = [[row.name + " *" * (not row.measured), *cells(row)] for row in rows]
    short = [[text.replace(" to ", "-") for text in line] for line in lines]
    table = drawn(_HEADS, short)
    hidden = len(made.strategies) - len(rows)
    letters = [f"{key}: {text}." for key, text in _LETTERS.items()]
    explained = (
        f"{' '.join(letters)}\n"
        "Losses are at equal steps, low to high. never: not within four times dense's steps. "
        "*: outside of what was measured. The loss of "
        f"{made.strategies[0].name} is from {made.strategies[0].loss_gap_source}. "
        "thinwire compare measures it."
        + (f"\n{hidden} more settings: --all; with the source of each: --json." if hidden else "")
    )
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:  # by itself it would end the process where nobody reads
        for part in filter(None, (made.reason, table, _more(made), explained)):
            console.print(part)
    print(captured.get(), end="")


def _require_writable(name: str, path: Path | None) -> None:
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return  # whoever reads from a pipe would take an attempt for the end
    target = path.resolve()  # a link stays one
    new = not target.exists()
    try:
        target.open("ab").close()
    except OSError as error:
        why = f"cannot be written: {error.strerror}; give a file in an existing folder"
        raise ValueError(f"{name}={str(path)!r} {why}") from error
    if new:
        target.unlink(missing_ok=True)


def _write(made: Plan, out: Path) -> Row:
    """Write the best strategy that a file can hold."""
    rows = (made[made.recommended], *made.strategies)
    row = next(row for row in rows if row.document is not None)
    low, _, high = row.step_seconds
    text = (
        f"# Written by thinwire plan: {made.reason}\n"
        f"# {row.name}. Expected: {seconds_text(low)} to {seconds_text(high)} s a step. "
        "prepare(..., plan=) warns where a run leaves this.\n"
        f"# Optimizer: {row.optimizer or 'any'}\n"
    )
    out.write_text(text + strategy_text(row.document or {}), encoding="utf-8")
    return row


def probe(
    *,
    out: Path,
    task: str | None = None,
    size: str | None = None,
    batch: Count | None = None,
    device: str = "auto",
    loss: str | None = None,
    quiet: bool = False,
) -> None:
    """Measure the network between the ranks of torchrun, and a training step.

    Measures latency and rate of every pair, over one connection and several, packets lost, rates of
    all ranks at once, forward pass, backward pass and ready time of each gradient. It takes at most
    10 seconds (a few more if latencies exceed 20 ms) and 32 MiB a rank, and names what it left out.

    Args:
        out: File to write, for thinwire plan --probe.
        task: Your own model instead of the built-in one, as FILE.py:NAME.
        size: Size of the built-in model; medium by default.
        batch: Sequences per step of the built-in model; 8 by default.
        device: auto, cpu or cuda.
        loss: Share of the packets that the line is known to lose, such as 0.2%, for the plan.
        quiet: Show no progress.
    """
    launched = launched_rank(os.environ)
    if launched is None:
        raise ValueError(
            "probe measures the network between ranks, and torchrun has started none here: "
            "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 "
            "--master-port 29500 -m thinwire probe --out probe.json"
        )
    if launched[1] == 1:
        raise ValueError(
            "probe measures the network between ranks, but torchrun started only one; start as "
            "many as will train"
        )
    require_one_of("device", device, DEVICES)
    if task is not None:
        require_task(task)
        require_nothing_beside(task, size=size, batch=batch)
    batch = 8 if batch is None else batch
    require_within("batch", batch, 1, 4096)
    shape = parse_size("medium" if size is None else size)
    stated = 0.0 if loss is None else parse_loss(loss)
    shared = {"task": task, "size": size, "batch": batch, "device": device, "loss": stated}
    from thinwire.tools.run.probe import probe as measured

    display = display_for(quiet=quiet or launched[0] != 0)
    try:
        with joined(shared, _TIMEOUT_S), display.strategy("probe") as bar:
            by_first(lambda: _require_writable("out", out))  # which writes it
            found = measured(task, shape, batch, device, bar.note)
    except RuntimeError as error:
        raise ThinwireError(
            f"rank {launched[0]}: another rank has left or did not answer for {_TIMEOUT_S:.0f} "
            f"s ({str(error).splitlines()[0]}); see its output"
        ) from error
    if launched[0] == 0:
        kept = {"format": FORMAT, "thinwire": __version__, "loss": stated, **found}
        out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(_summary(found))
        print(f"probe: {out}")


def _summary(found: Mapping[str, Any]) -> str:
    late = max(found["pairs"], key=lambda pair: pair["latency_s"])
    busy = min(found["together"], key=lambda rank: rank["bytes_s"])
    compute = found["compute"]
    slowest = list[str]()
    timed = [pair for pair in found["pairs"] if pair["bytes_s"] is not None]
    if timed:
        slow = dict(min(timed, key=lambda pair: pair["bytes_s"]))
        (rank, to), _ = slow.pop("ranks"), slow.pop("latency_s")
        line = Line(**slow)
        text = f"{line}: {line.advice}" if line.advice else str(line)
        slowest = [f"slowest pair: rank {rank} to {to}: {text}"]
    lines = [
        f"{found['ranks']} ranks, {found['seconds']:.1f} s, {bytes_text(found['bytes'])} a rank",
        *slowest,
        f"largest latency: ranks {late['ranks']}, {1e3 * late['latency_s']:.2f} ms one way",
        f"slowest while all send: rank {busy['rank']}, {mbit_s(busy['bytes_s'])} Mbit/s",
        f"a step: {1e3 * compute['step_s']:.0f} ms on rank {compute['rank']}, "
        f"{compute['parameters']:,} parameters, {compute['device']}",
        *(f"not measured: {item}" for item in found["not_measured"]),
    ]
    return "\n".join(lines)
