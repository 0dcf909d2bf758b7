"""Traffic of one step of DGC by number of sources: all-gather, all-to-all, and nodes.

    python -m benchmarks.scaling --out benchmarks/results/scaling.json
    python -m benchmarks.scaling --quick

Bytes, no times, as the functions count them that lay out the messages; tests compare these counts
with those of real ranks.
"""

from typing import Any

from benchmarks.common import parser_for, save, surroundings
from thinwire.layout.message import Layout, Slot, count_sent
from thinwire.layout.shares import split_plan
from thinwire.layout.traffic import GATHER, SPLIT, chosen_split, messages

TENSORS = 160
NODE_SIZE = 8
COUNTED = tuple(2**i for i in range(1, 11))


def layout_of(numel: int, density: float) -> Layout:
    numel_of = numel // TENSORS
    return Layout((Slot(numel_of, count_sent(numel_of, 1 - density)),) * TENSORS, 1)


def _auto(layout: Layout, sources: int) -> str:
    return GATHER if chosen_split("auto", layout, sources) is None else SPLIT


def busiest(layout: Layout, sources: int, exchange: str) -> dict[str, int]:
    """Entries, each room for one, and bytes that the source which moves most sends and receives."""
    sizes = messages(layout, exchange, sources)
    if not sizes.to_owners:
        copies = 2 * (sources - 1)
        return {"entries": copies * _entries(layout), "bytes": copies * sizes.to_all}
    owner = sizes.to_owners.index(max(sizes.to_owners))
    plan = split_plan(layout, sources)
    first, second = ([_entries(part) for part in parts] for parts in (plan.first, plan.second))
    others = first[owner] + second[owner]
    into = (sources - 1) * (sizes.to_owners[owner] + sizes.to_all)
    return {
        "entries": sum(first) + sum(second) + (sources - 2) * others,
        "bytes": sizes.sent(owner, sources) + into,
    }


def _entries(layout: Layout) -> int:
    return sum(slot.k for slot in layout.slots)


def counted(ranks: int, layout: Layout) -> dict[str, Any]:
    nodes = ranks // NODE_SIZE
    between = _auto(layout, nodes) if nodes > 1 else None
    return {
        "sources": ranks,
        **{way: busiest(layout, ranks, way) for way in (GATHER, SPLIT)},
        "auto": _auto(layout, ranks),
        "nodes": None
        if between is None
        else {"auto": between, "bytes": busiest(layout, nodes, between)["bytes"]},
    }


def measure(numel: int, density: float) -> dict[str, object]:
    layout = layout_of(numel, density)
    return {
        "numel": numel,
        "tensors": TENSORS,
        "density": density,
        "node_size": NODE_SIZE,
        "k": _entries(layout),
        "message_bytes": layout.nbytes,
        **surroundings(1),
        "counted": [counted(sources, layout) for sources in COUNTED],
    }


def printed(result: dict[str, Any]) -> str:
    k, message = result["k"], result["message_bytes"]
    width = result["node_size"]
    lines = [
        f"{result['numel']:,} numbers in {result['tensors']} tensors, {result['density']:.1%} sent "
        f"at one bit: k = {k:,} entries, {message:,} bytes a message. Entries and bytes of the "
        "busiest source, sent and received. A gathered message counts as sent once, and an entry "
        "is room for one.",
        "",
        "| sources | gather: entries | bytes | split: entries | bytes | gather : split, bytes | "
        f"auto | as ranks of nodes of {width}: bytes between nodes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["counted"]:
        gather, split, nodes = row["gather"], row["split"], row["nodes"]
        cells = [
            f"{row['sources']:,}",
            *(
                text
                for way in (gather, split)
                for text in (f"{way['entries'] / k:.2f} k", f"{way['bytes']:,}")
            ),
            f"{gather['bytes'] / split['bytes']:.2f}",
            row["auto"],
            "" if nodes is None else f"{nodes['bytes']:,} ({nodes['auto']})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    last = result["counted"][-1]
    lines += [
        "",
        f"From {result['counted'][0]['sources']} to {last['sources']:,} sources a gather grows "
        f"{last['gather']['bytes'] / result['counted'][0]['gather']['bytes']:,.0f} times, in "
        f"bytes. The split exchange stays at {last['split']['entries'] / k:.2f} k entries, "
        f"{last['split']['bytes'] / message:.2f} messages: with so many sources each part is "
        "short, and its header (32 bytes) and scales weigh as much as its entries.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="entries of all tensors together"
    )
    parser.add_argument("--density", type=float, default=0.001, help="fraction sent")
    arguments = parser.parse_args()
    result = measure(1_000_000 if arguments.quick else arguments.numel, arguments.density)
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
