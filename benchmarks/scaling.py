"""Traffic of one step of DGC by number of sources: all-gather, all-to-all, and nodes.

    python -m benchmarks.scaling --out benchmarks/results/scaling.json
    python -m benchmarks.scaling --quick

Bytes, no times. Real ranks over gloo show that the counted bytes are those that are given to the
collectives; counting goes on where no machine has so many ranks.
"""

import multiprocessing as mp
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import parser_for, save, surroundings
from thinwire.comm import Group, Nodes, sources_of
from thinwire.compress.entries import Proposed, send_entries
from thinwire.compress.protocol import combined
from thinwire.core.feedback import Proposal
from thinwire.exchange.round import Round
from thinwire.layout.message import Layout, Slot, count_sent
from thinwire.layout.shares import split_plan
from thinwire.layout.traffic import GATHER, SPLIT, Messages, chosen_split, messages

TENSORS = 160
NODE_SIZE = 8
RANKS = (2, 4, 8)
COUNTED = tuple(2**i for i in range(1, 11))


def layout_of(numel: int, density: float) -> Layout:
    numel_of = numel // TENSORS
    return Layout((Slot(numel_of, count_sent(numel_of, 1 - density)),) * TENSORS, 1)


def proposals(layout: Layout, source: int) -> dict[str, Proposed]:
    """Return a made-up message of a source; its length does not depend on positions."""
    generator = torch.Generator().manual_seed(source)
    found = {}
    for key, slot in enumerate(layout.slots):
        indices = torch.randperm(slot.numel, generator=generator)[: slot.k].sort().values
        values = torch.randn(slot.k, generator=generator)
        found[str(key)] = Proposed(Proposal(indices, values, finite=True), slot.numel, slot.k)
    return found


def work(
    rank: int, ranks: int, store: str, layout: Layout, ways: list[tuple[str, int]], answers: Any
) -> None:
    """One rank: per way the bytes that it gave to others and got from them, between sources."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = []
    for exchange, node_size in ways:
        sources = sources_of(Group(), node_size)
        one_round = Round(sources, step=0)
        own = proposals(layout, sources.rank)
        context = one_round.context(0)
        sending = send_entries(context, own, value_bits=layout.value_bits, exchange=exchange)
        one_round.launch(own.keys(), combined([sending]))
        one_round.finish()
        leaders = sources.leaders if isinstance(sources, Nodes) else sources
        found.append(None if leaders is None else (leaders.bytes_sent, leaders.bytes_received))
    answers.put((rank, found))
    dist.destroy_process_group()


def measured(ranks: int, layout: Layout) -> list[dict[str, Any]]:
    """Real ranks, with every exchange and, where there are four or more, in two nodes."""
    ways = [(exchange, size) for size in {1: 0, ranks // 2: 0} for exchange in (GATHER, SPLIT)]
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, str(Path(folder, "store")), layout, ways, answers)
        processes = [
            context.Process(target=work, args=(rank, *arguments), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = dict(answers.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return [
        row(ranks, way, layout, [found[rank][i] for rank in range(ranks)])
        for i, way in enumerate(ways)
    ]


def row(ranks: int, way: tuple[str, int], layout: Layout, found: list[Any]) -> dict[str, Any]:
    exchange, node_size = way
    sources = ranks // node_size
    counted = messages(layout, exchange, sources)
    leaders = found[::node_size]
    for source, (sent, received) in enumerate(leaders):
        as_counted = counted.sent(source, sources), counted.received(source, sources)
        assert (sent, received) == as_counted, (way, source)
    assert all(answer is None for rank, answer in enumerate(found) if rank % node_size)
    most = max(sent + received for sent, received in leaders)
    return {
        "ranks": ranks,
        "node_size": node_size,
        "exchange": exchange,
        "bytes": most,
        "as_counted": True,
    }


def _auto(layout: Layout, sources: int) -> str:
    return GATHER if chosen_split("auto", layout, sources) is None else SPLIT


def busiest(layout: Layout, sources: int, exchange: str) -> dict[str, int]:
    """Entries, each room for one, and bytes that the source which moves most sends and receives."""
    sizes = messages(layout, exchange, sources)
    owner = sizes.to_owners.index(max(sizes.to_owners)) if sizes.to_owners else 0
    if sizes.to_owners:
        plan = split_plan(layout, sources)
        first, second = ([_entries(part) for part in parts] for parts in (plan.first, plan.second))
        entries = Messages(tuple(first), second[owner])
        received = (sources - 1) * first[owner] + sum(second) - second[owner]
    else:
        entries = Messages((), _entries(layout))
        received = entries.received(owner, sources)
    return {
        "entries": entries.sent(owner, sources) + received,
        "bytes": sizes.sent(owner, sources) + sizes.received(owner, sources),
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


def measure(numel: int, density: float, ranks: tuple[int, ...]) -> dict[str, object]:
    layout = layout_of(numel, density)
    return {
        "numel": numel,
        "tensors": TENSORS,
        "density": density,
        "node_size": NODE_SIZE,
        "k": _entries(layout),
        "message_bytes": layout.nbytes,
        **surroundings(1),
        "measured": [row for size in ranks for row in measured(size, layout)],
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
        "",
        "Real ranks over gloo; every rank's counters equal what is counted:",
        "",
        "| ranks | ranks of a node | exchange | bytes of the busiest source |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['ranks']} | {row['node_size']} | {row['exchange']} | {row['bytes']:,} |"
        for row in result["measured"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="entries of all tensors together"
    )
    parser.add_argument("--density", type=float, default=0.001, help="fraction sent")
    arguments = parser.parse_args()
    numel, ranks = (1_000_000, RANKS[:1]) if arguments.quick else (arguments.numel, RANKS)
    result = measure(numel, arguments.density, ranks)
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
