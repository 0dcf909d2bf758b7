"""The report as one HTML file that needs nothing else: no script, no font, no image from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from thinwire.lab.plots import PALETTE, loss_plot
from thinwire.lab.table import lines

__all__ = ["render", "write_report"]

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2430; --soft: #5a6675; --line: #d8dee6; --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --ink: #e6ebf2; --soft: #9aa7b8; --line: #303a47; --panel: #1a2029; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.headline { margin: 0 0 1rem; padding: .75rem 1rem; background: var(--panel); border-left: 4px solid var(--series-0); }
.headline.warn { border-left-color: #d97706; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; color: var(--soft); font-weight: 400; white-space: normal; }
thead th { font-weight: 600; } .swatch { display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .4em; }
figure { margin: 0 0 1.5rem; } svg { width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif; }
figcaption, .note { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def render(results: Mapping[str, Any]) -> str:
    """The whole page for the content of `results.json`."""
    warn = "" if results["link"]["emulated"] or results["link"]["reason"] is None else " warn"
    time_axis = "training time in seconds, evaluation not counted"
    byte_axis = "bytes sent per worker, as counted by the library"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>thinwire compare: {escape(', '.join(run['strategy'] for run in results['strategies']))}</title>",
            f"<style>{_STYLE}{_series_colours(len(results['strategies']))}</style>\n</head>\n<body>",
            f'<p class="headline{warn}">{escape(results["headline"])}</p>',
            _failure(results["failed"]),
            "<h1>One model, one link, several strategies</h1>",
            _table(results),
            '<p class="note">A steady step is one after the ramp of the method. "Without exchange" is the same step '
            "on a copy of the model, measured in between. The share for the wire includes coding what is sent.</p>",
            "<h2>Loss against time</h2>",
            f"<figure>{loss_plot(results, 'seconds', time_axis)}</figure>",
            "<h2>Loss against bytes</h2>",
            f"<figure>{loss_plot(results, 'library_bytes', byte_axis)}"
            "<figcaption>Logarithmic; the evaluation before the first step is left out.</figcaption></figure>",
            "<h2>Strategies</h2>",
            _definitions({run["strategy"]: _strategy_text(run) for run in results["strategies"]}),
            *(
                f"<h2>{title}</h2>\n{_definitions(results[key])}"
                for title, key in (("Settings", "settings"), ("Model", "model"), ("Text", "text"), ("Link", "link"))
            ),
            f"<h2>Machine</h2>\n{_definitions(results['machine'])}",
            f'<p class="note">thinwire {escape(results["thinwire"])}, {escape(results["started"])}. '
            "Every figure and every evaluation is in results.json beside this file.</p>\n</body>\n</html>\n",
        ]
    )


def write_report(results: Mapping[str, Any], path: Path) -> None:
    """Writes the page in one piece."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(render(results), encoding="utf-8")
    draft.replace(path)


def _series_colours(count: int) -> str:
    light, dark = (
        " ".join(f"--series-{number}: {PALETTE[number % len(PALETTE)][shade]};" for number in range(count))
        for shade in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _failure(failed: Mapping[str, str] | None) -> str:
    if failed is None:
        return ""
    return f'<p class="headline warn">{escape(failed["strategy"])} failed: {escape(failed["error"])}</p>'


def _table(results: Mapping[str, Any]) -> str:
    heads = "".join(
        f'<th><span class="swatch" style="background: var(--series-{number})"></span>{escape(run["strategy"])}</th>'
        for number, run in enumerate(results["strategies"])
    )
    body = "\n".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
        for label, texts in lines(results)
    )
    table = f"<table>\n<thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="scroll">{table}</div>'


def _strategy_text(run: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key} {_value_text(value)}" for key, value in run["settings"].items())
    return f"{run['summary']}. {settings}. Bytes counted by: {run['library_bytes_counted_by']}."


def _definitions(entries: Mapping[str, Any]) -> str:
    items = "\n".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(_value_text(value))}</dd>"
        for key, value in entries.items()
        if value is not None
    )
    return f"<dl>\n{items}\n</dl>"


def _value_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
