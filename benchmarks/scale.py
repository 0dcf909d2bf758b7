"""Seconds and bytes of a step from 2 to 10,000 ranks, simulated: every exchange on three networks.

    python -m benchmarks.scale --out benchmarks/results/scale.json
    python -m benchmarks.scale --quick
    python -m benchmarks.scale --figure docs/scale.svg --drawn-from benchmarks/results/scale.json

No real ranks here; `research.scale.check` compares the simulation with them. The figure needs
matplotlib.
"""

import json
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.common import parser_for, save, surroundings
from benchmarks.simulation import Entries, Method, Whole, simulate
from benchmarks.simulation_lines import Lines, homes, sites, switch
from thinwire.tools.planning.work import transformer

PARAMS, STEP_S, K_STEPS = 124_000_000, 0.35, 32
SITES, NODE_SIZE = 100, 10
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 10_000)
SHOWN = (2, 16, 128, 1000, 10_000)

NETWORKS: dict[str, tuple[str, Callable[[int], Lines]]] = {
    "switch": ("one switch: 1 Gbit/s each, 0.1 ms", lambda ranks: switch(ranks, 1e9, 1e-4)),
    "sites": (
        "100 sites: 10 Gbit/s and 0.1 ms inside, 1 Gbit/s a site and 10 ms between",
        lambda ranks: sites(ranks, SITES, bit_s=1e10, near_s=1e-4, site_bit_s=1e9, far_s=1e-2),
    ),
    "homes": (
        "homes: 20 Mbit/s up, 100 Mbit/s down, 15 ms",
        lambda ranks: homes(ranks, 2e7, 0.015),
    ),
}


def methods(numels: tuple[int, ...]) -> dict[str, Method]:
    """Return the methods that are compared, by name."""

    def dgc(exchange: str, node_size: int = 1) -> Method:
        return Method(numels, Entries(0.999, 1, exchange), 16384, node_size)

    def local(compression: Entries | Whole | None, node_size: int = 1) -> Method:
        return Method(numels, compression, node_size=node_size, k_steps=K_STEPS)

    return {
        "dense ring": Method(numels),
        "DGC 0.1 %, gather": dgc("gather"),
        "DGC 0.1 %, split": dgc("split"),
        f"DGC 0.1 %, nodes of {NODE_SIZE}": dgc("auto", NODE_SIZE),
        "local, dense": local(None),
        "local, 3 %, gather": local(Entries(0.97, 2, "gather", sketch=True)),
        "local, 3 %, split": local(Entries(0.97, 2, "split", sketch=True)),
        "local, 4 bits, split": local(Whole(4, "split")),
        f"local, 3 %, nodes of {NODE_SIZE}": local(Entries(0.97, 2, sketch=True), NODE_SIZE),
    }


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    numels = tuple(map(prod, transformer(PARAMS)))
    rows: list[dict[str, Any]] = []
    for network, (_, lines_of) in NETWORKS.items():
        for ranks in sizes:
            lines = lines_of(ranks)
            for name, method in methods(numels).items():
                if not _has_nodes(network, ranks, method.node_size):
                    continue
                begin_s = time.perf_counter()
                outcome = simulate(method, lines, step_s=STEP_S, steps=method.between)
                rows.append(
                    {
                        "network": network,
                        "ranks": ranks,
                        "method": name,
                        "step_s": outcome.step_s,
                        "line_bytes": float(outcome.sent.max()) / outcome.steps,
                        "error": outcome.error,
                        "took_s": round(time.perf_counter() - begin_s, 2),
                    }
                )
    return {
        "params": PARAMS,
        "step_s": STEP_S,
        "k_steps": K_STEPS,
        "networks": {name: words for name, (words, _) in NETWORKS.items()},
        **surroundings(1),
        "rows": rows,
        "slowest_simulation_s": max(row["took_s"] for row in rows),
    }


def _has_nodes(network: str, ranks: int, node_size: int) -> bool:
    """True if ranks fill several nodes with faster links inside than between."""
    if node_size == 1:
        return True
    return network == "sites" and ranks % (SITES * node_size) == 0


def printed(result: Mapping[str, Any]) -> str:
    """Seconds and bytes of a step, in Markdown."""
    rows = {(r["network"], r["method"], r["ranks"]): r for r in result["rows"]}
    names = list(dict.fromkeys(row["method"] for row in result["rows"]))
    sizes = [ranks for ranks in SHOWN if any(key[2] == ranks for key in rows)]
    lines = [
        f"{result['params']:,} numbers, {result['step_s']} s a step alone, local updates average "
        f"every {result['k_steps']} steps. Seconds of a step, and what the busiest rank puts on "
        "its line for it.",
    ]
    for network, words in result["networks"].items():
        lines += [
            "",
            f"{words[0].upper()}{words[1:]}:",
            "",
            f"| ranks | {' | '.join(f'{ranks:,}' for ranks in sizes)} |",
            "|---" * (len(sizes) + 1) + "|",
        ]
        for name in names:
            if not any(key[:2] == (network, name) for key in rows):
                continue
            found = [rows.get((network, name, ranks)) for ranks in sizes]
            lines.append(f"| {name} | {' | '.join(map(_cell, found))} |")
    lines += [
        "",
        f"The slowest of these {len(result['rows'])} simulations took "
        f"{result['slowest_simulation_s']:.0f} s.",
    ]
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{_seconds(row['step_s'])}, {_amount(row['line_bytes'])}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _amount(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Seconds and bytes against ranks, a column for each network."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "scale", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["method"] for row in result["rows"]))
    figure, axes = plt.subplots(2, len(result["networks"]), figsize=(13, 8), sharex=True)
    for column, (network, words) in enumerate(result["networks"].items()):
        for index, name in enumerate(names):
            own = [r for r in result["rows"] if (r["network"], r["method"]) == (network, name)]
            ranks = [row["ranks"] for row in own]
            style = {"label": name, "color": f"C{index}", "marker": ".", "linewidth": 1.2}
            axes[0][column].loglog(ranks, [row["step_s"] for row in own], **style)
            axes[1][column].loglog(ranks, [row["line_bytes"] for row in own], **style)
        axes[0][column].set_title(words.replace(": ", ":\n", 1), fontsize=9)
        axes[1][column].set_xlabel("ranks")
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("bytes a step on a rank's line")
    for axis in axes.flat:
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--figure", type=Path, help="write the figure, as SVG")
    parser.add_argument("--drawn-from", type=Path, help="results to draw, instead of new ones")
    arguments = parser.parse_args()
    if arguments.drawn_from is None:
        result = measure(SIZES[:6] if arguments.quick else SIZES)
        print(printed(result))
        save(result, arguments.out)
    else:
        result = json.loads(arguments.drawn_from.read_text(encoding="utf-8"))
    if arguments.figure is not None:
        draw(result, arguments.figure)


if __name__ == "__main__":
    main()
