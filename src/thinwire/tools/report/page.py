"""The parts of pages, each one HTML file that needs nothing else: style and script are inside, and
nothing is loaded.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire._files import replace_file
from thinwire.tools.report.plots import PALETTE


def bytes_text(count: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    size = count
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def loss_text(loss: float) -> str:
    """With three digits behind the point, and more where these were not three that say
    something.
    """
    return f"{loss:.{loss_digits([loss])}f}"


def loss_digits(losses: Sequence[float]) -> int:
    """Digits behind the point that tell these losses apart."""
    smallest = min((abs(loss) for loss in losses if loss), default=1.0)
    return min(9, max(3, 2 - math.floor(math.log10(smallest))))


def number(value: float, digits: int) -> str:
    """With commas between thousands; a share that vanishes has no sign."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def page_of(title: str, colours: int, body: Iterable[str]) -> str:
    """A whole page of these lines, with style and script inside."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_series_colours(colours)}{_resource('report.css')}</style>\n</head>\n<body>",
            "<main>",
            *body,
            f"</main>\n<script>{_resource('report.js')}</script>\n</body>\n</html>\n",
        ]
    )


def write_page(page: str, path: Path) -> None:
    """Write a file in one piece."""
    # a file's name need not be text
    replace_file(path, page.encode("utf-8", "backslashreplace"))


def _resource(name: str) -> str:
    """The style `report.css` or the script `report.js`."""
    return "\n" + files("thinwire.tools.report").joinpath(name).read_text(encoding="utf-8")


def _series_colours(count: int) -> str:
    """CSS variables `--series-0`, `--series-1`, ... for light and dark pages."""
    light, dark = (
        " ".join(
            f"--series-{number}: {PALETTE[number % len(PALETTE)][shade]};"
            for number in range(count)
        )
        for shade in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


# the roles are those of the elements, which narrow pages lay out as blocks and thereby take from
# them
def table_of(label: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table of strategies: the heads of its columns, and rows by `table_row`."""
    columns = "".join(
        f'<th scope="col" role="columnheader">{head}</th>' for head in ("strategy", *heads)
    )
    return "\n".join(
        [
            f'<table role="table" aria-label="{label}">',
            f'<thead role="rowgroup"><tr role="row">{columns}</tr></thead>',
            '<tbody role="rowgroup">',
            *rows,
            "</tbody>\n</table>",
        ]
    )


def cell(label: str, text: str, more: str = "") -> str:
    """A cell of a table, with the head of its column for narrow pages."""
    return (
        f'<td role="cell"{more} data-label="{escape(label)}">'
        f'<span class="value">{escape(text)}</span></td>'
    )


def table_row(head: str, cells: str, more: str = "") -> str:
    """A row of a table, with more attributes of the row if need be."""
    return f'<tr role="row"{more}><th scope="row" role="rowheader">{head}</th>{cells}</tr>'


def copied(name: str, text: str) -> str:
    """A text with a button that copies it."""
    button = f'<button type="button" data-copy="{name}">copy</button>'
    return f'{button}\n<pre id="{name}">{escape(text)}</pre>'


def definitions(entries: Mapping[str, Any]) -> str:
    """Names and values below each other; without those that are None."""
    items = "\n".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(value_text(value))}</dd>"
        for key, value in entries.items()
        if value is not None
    )
    return f"<dl>\n{items}\n</dl>"


def value_text(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_text(entry)}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
