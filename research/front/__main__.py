"""Loss against bits: what every averaging of an ensemble costs, and what it ends at.

python -m research.front --size 0.87M --workers 4 --figure docs/front.svg
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import thinwire as tw
from benchmarks.common import bare_parser, json_lines, markdown
from benchmarks.ensemble import RESULTS
from benchmarks.law import numel_of

_FREE = ("decay", "mean", "outer", "split")
"""Options that send nothing more."""


class Point(NamedTuple):
    """One setting; `gap` is over dense training with the same seeds, at its best rate."""

    words: str
    bits: float
    """Sent a parameter and local step, by a worker to each other one."""
    gap: float
    seeds: int
    kind: str


def bits_of(cell: Mapping[str, Any], options: Mapping[str, Any], numel: int) -> float:
    """Return the bits of a parameter in one averaging, as messages of the library have them."""
    bits = float(cell["bits"])
    if "top" in options:
        sparse = tw.Sparse(1 - options["top"], value_bits=cell["bits"], mean_over="all")
        return 8 * sparse.layout(1, [numel]).nbytes / numel
    return bits * options.get("rank", 1.0) / options.get("group", 1)


def points(lines: Sequence[Mapping[str, Any]], size: str, workers: int) -> list[Point]:
    """Return all settings, each at its best rate, in the order of their bits."""
    losses: dict[tuple[int, int, str], dict[float, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for line in lines:
        cell, options = line["cell"], line["options"]
        mine = (cell["size"], cell["workers"], cell["part"]) == (size, workers, "held_out")
        if (
            mine
            and line["loss"] is not None
            and not options.keys() - {"top", "group", "rank", *_FREE}
        ):
            key = cell["interval"], cell["bits"], json.dumps(options, sort_keys=True)
            losses[key][cell["lr"]][cell["seed"]] = line["loss"]
    dense: dict[int, float] = {}
    for by_seed in losses.pop((0, 32, "{}"), {}).values():
        for seed, loss in by_seed.items():
            dense[seed] = min(loss, dense.get(seed, loss))
    found = []
    for (interval, bits, text), by_rate in losses.items():
        options = json.loads(text)
        gaps = [
            [loss / dense[seed] - 1 for seed, loss in by_seed.items() if seed in dense]
            for by_seed in by_rate.values()
        ]
        most = max(map(len, gaps))
        best = min((own for own in gaps if len(own) == most), key=fmean)
        sent = bits_of({"bits": bits}, options, numel_of(size)) / interval
        usual = "all" if bits == 1 else "more"
        kind = next((name for name in ("top", "group", "rank", "outer") if name in options), usual)
        words = " ".join(
            [f"H={interval}", f"{bits} bits", *(f"{k}={v}" for k, v in options.items())]
        )
        found.append(Point(words, sent, fmean(best), most, kind))
    return sorted(found, key=lambda point: point.bits)


def draw(found: Sequence[Point], path: Path) -> None:
    """Draw the gaps over the bits, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "front"
    names = {
        "all": "all entries at one bit, every H steps",
        "more": "all entries at more bits",
        "top": "largest entries",
        "group": "one sign for several entries",
        "rank": "factors",
        "outer": "all entries, outer momentum",
    }
    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, label in names.items():
        own = [point for point in found if point.kind == kind]
        if own:
            bits, gaps = [p.bits for p in own], [100 * p.gap for p in own]
            axes.plot(bits, gaps, "o-" if kind == "all" else "o", label=label, markersize=4)
    axes.set_xscale("log")
    axes.set_xlabel("bits a parameter and step")
    axes.set_ylabel("loss over dense Muon, %")
    axes.set_ylim(0, 12)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--size", default="0.87M")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, help="draw it, as SVG (matplotlib)")
    given = parser.parse_args()
    found = points(json_lines(given.results), given.size, given.workers)
    rows = [[p.words, f"{p.bits:.4f}", f"{p.gap:+.2%}", p.seeds] for p in found]
    print("\n".join(markdown(["averaging", "bits a step", "over dense Muon", "seeds"], rows)))
    if given.figure:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
