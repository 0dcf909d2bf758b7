"""A plan as one HTML file that loads nothing from elsewhere; it looks as the report of a comparison
does.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from thinwire._version import __version__
from thinwire.tools.planning.plan import Plan, Row, seconds_text
from thinwire.tools.report.page import (
    bytes_text,
    cell,
    copied,
    definitions,
    page_of,
    table_of,
    table_row,
)
from thinwire.tools.report.plots import FRAMES, Axis, Frame, grid, mark, sample, svg, text_at

_PRIOR = (
    "What a step is worth is a prior: no formula predicts it. Seconds, bytes and memory are "
    "predicted from the sizes of messages and the network. thinwire compare measures, on this "
    "model and link, what a step is worth."
)
_TITLES = (
    "seconds a step",
    "bytes a rank and step",
    "waiting for the wire",
    "memory a rank",
    "worth, steps of dense (prior)",
    "times as fast as dense",
)
_LETTERS = {
    "k": "local steps between two averagings",
    "d": "steps that a result may come late",
    "f": "parts of the model that are averaged in turn",
    "b": "bits of a value",
    "%": "entries that are sent",
    "r": "rank",
    "n1": "every rank a source of its own, on the same machine or not",
    "gather, split": "how messages are exchanged, where the strategy would not choose so by itself",
}
_BAR, _PITCH = 14, 42
_HATCHING = (
    '<defs><pattern id="waits-#KIND" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" stroke="var(--warn)" stroke-width="5"/>'
    "</pattern></defs>"
)


def render(plan: Plan, command: str) -> str:
    """The whole page."""
    rows = plan.best()
    first, _, rest = plan.reason.partition(": ")
    return page_of(
        f"thinwire plan: {plan.recommended}",
        len(rows),
        [
            f"<h1>{escape(first)}</h1>",
            f'<p class="lead">{escape(rest)}</p>' if rest else "",
            f'<p class="headline">{escape(_about(plan))}</p>',
            f'<p class="headline warn">{escape(_PRIOR)}</p>',
            "<h2>The best setting of every strategy</h2>",
            _table(rows),
            f'<p class="note">{len(plan.strategies)} settings were compared; thinwire plan --all '
            "prints them. Seconds are low to high: what computes is known to a tenth, the rest to "
            "two tenths.</p>",
            "<h2>Time of a step, by part</h2>",
            "<figure>" + "\n".join(_bars(frame, rows) for frame in FRAMES) + "</figure>",
            "<h2>Time to a loss against bytes</h2>",
            f'<figure><ul class="legend">{_legend(rows)}</ul>\n'
            + "\n".join(_points(frame, rows, plan.strategies) for frame in FRAMES)
            + "\n<figcaption>Dense is at 1 on the vertical axis; both axes are logarithmic. Small "
            "dots are the other settings. Heights rest on the prior.</figcaption></figure>",
            "<h2>What a step is worth, and where that is from</h2>",
            definitions({row.name: f"{row.progress:.2f}: {row.progress_source}" for row in rows}),
            "<h2>Make it again</h2>",
            copied("command", command),
            "<h2>What the letters mean</h2>",
            definitions(_LETTERS),
            f'<p class="note">thinwire {escape(__version__)}.</p>',
        ],
    )


def _about(plan: Plan) -> str:
    link, model = plan.link, plan.model
    network = (
        f"{link['workers']} ranks, {link['rate_bit_s'] / 1e6:,.4g} Mbit/s each, "
        f"{1e3 * link['latency_s']:.3g} ms one way, {'measured' if link['measured'] else 'assumed'}"
    )
    return (
        f"{network}. {model['parameters']:,} parameters; a step of {model['step_seconds']:.3g} s "
        f"on {model['device']} with nothing exchanged."
    )


def _table(rows: Sequence[Row]) -> str:
    body = [
        table_row(
            f"{sample(number)}{escape(row.name)}",
            "".join(map(cell, _TITLES, cells(row))),
        )
        for number, row in enumerate(rows)
    ]
    return table_of("The best setting of every strategy", list(map(escape, _TITLES)), body)


def cells(row: Row) -> list[str]:
    """What a table says of a row, beside its name."""
    low, _, high = row.step_seconds
    return [
        f"{seconds_text(low)} to {seconds_text(high)}",
        bytes_text(row.bytes_per_step),
        f"{100 * row.waiting_share:.0f} %",
        bytes_text(row.memory_bytes),
        f"{row.progress:.2f}",
        row.times_sooner,
    ]


def _legend(rows: Sequence[Row]) -> str:
    return "".join(f"<li>{sample(i)}{escape(row.name)}</li>" for i, row in enumerate(rows))


def _bars(frame: Frame, rows: Sequence[Row]) -> str:
    """A bar a row: the step itself, and what the exchange adds to it."""
    tall = replace(frame, height=30.0 + _PITCH * len(rows))
    left, right = 2.0, frame.width - frame.right
    longest = max(row.step_seconds[1] for row in rows)
    parts = [
        text_at(
            left, 14, "the step itself, and hatched what waits for the exchange", "start", "name"
        ),
        _HATCHING,
    ]
    for number, row in enumerate(rows):
        top = 30.0 + _PITCH * number
        seconds = row.step_seconds[1]
        own = seconds * (1 - row.waiting_share)
        middle, end = (left + (right - left) * part / longest for part in (own, seconds))
        values = f"{row.name}: {own:.3g} s itself, {seconds - own:.3g} s waiting"
        parts += [
            text_at(
                left,
                top + 11,
                f"{row.name}: {seconds_text(own)} s + {seconds_text(seconds - own)} s",
                "start",
            ),
            f'<rect x="{left:g}" y="{top + 16:g}" width="{max(1.0, middle - left):.1f}" '
            f'height="{_BAR}" fill="var(--series-{number})"/>',
            f'<rect x="{middle:.1f}" y="{top + 16:g}" width="{end - middle:.1f}" height="{_BAR}" '
            f'fill="url(#waits-{frame.kind})" stroke="var(--soft)"/>',
            f'<g class="pt" transform="translate({end:.1f} {top + 16 + _BAR / 2:g})">'
            f"<title>{escape(values)}</title></g>",
        ]
    title = f"Seconds of a step by part: {', '.join(row.name for row in rows)}"
    return svg(tall, title, [part.replace("#KIND", frame.kind) for part in parts])


def _points(frame: Frame, rows: Sequence[Row], others: Sequence[Row]) -> str:
    x = Axis.around(
        [row.bytes_per_step for row in others],
        frame.left,
        frame.width - frame.right,
        logarithmic=True,
    )
    y = Axis.around(
        [row.time_to_dense_loss for row in others],
        frame.height - frame.bottom,
        frame.top,
        logarithmic=True,
    )
    dots = "".join(
        f"M{x.place(row.bytes_per_step):.1f} {y.place(row.time_to_dense_loss):.1f}h0"
        for row in others
    )
    parts = [
        *grid(frame, x, y, bytes_text),
        f'<path d="{dots}" stroke="var(--soft)" stroke-width="3" stroke-linecap="round" '
        'stroke-opacity="0.45"/>',
        *(
            f'<g fill="var(--series-{number})">'
            + mark(
                number,
                x.place(row.bytes_per_step),
                y.place(row.time_to_dense_loss),
                f"{row.name}: {row.time_to_dense_loss:.2g} of dense's time, "
                f"{bytes_text(row.bytes_per_step)} a step",
            )
            + "</g>"
            for number, row in enumerate(rows)
        ),
        text_at(frame.left - 6, 14, "time to the loss it ends with, dense = 1", "start", "name"),
        text_at(
            (frame.left + frame.width - frame.right) / 2,
            frame.height - 6,
            "bytes that a rank sends in a step",
            "middle",
            "name",
        ),
    ]
    return svg(frame, "Time to a loss against bytes, a mark for each strategy", parts)
