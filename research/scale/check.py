"""The simulation beside real ranks: seconds and bytes of steps of 2 to 16 ranks on a shaped link.

    python -m research.scale.check --out research/scale/check.json
    python -m research.scale.check --quick

Needs root. Every rank is a process in a network namespace of its own (token buckets; latency by the
laboratory's forwarder; queues are deep, so that nothing is lost). The link is so slow that the wire
and not the cores decide. A step is timed from a barrier to its end on the slowest rank. The
simulation is given the seconds of the same step without a network, each rank a group of its own,
as many at once on the same cores. Bytes must be equal, on every rank.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.common import markdown, parser_for, save, surroundings
from benchmarks.ranks import on_ranks
from benchmarks.simulation import Entries, Method, Whole, simulate
from benchmarks.simulation_lines import switch
from thinwire.tools.network.netns import Link, Network, inside, network, tbf_settings

SHAPES = ((250, 1000),) * 4
NUMELS = (250_000,) * 4
K_STEPS = 2
WARM_UP, GATE_S = 3, 300.0
"""Steps before those that are timed, in which TCP learns the rate that each connection has now; and
how long ranks wait for each other before a step."""
QUEUE_BYTES = 8_000_000
PLACES = tuple((ranks, "4mbit", "20ms") for ranks in (2, 4, 8, 16))

Step = Callable[[], float]
"""Makes a step, and gives the bytes that this rank has sent so far."""


def gradients(**options: Any) -> Callable[[torch.nn.ParameterList], Step]:
    def made(params: torch.nn.ParameterList) -> Step:
        optimizer = tw.optim.DGCMomentum(params.named_parameters(), lr=0.01, **options)

        def step() -> float:
            optimizer.step()
            return float(optimizer.stats()["bytes_sent"])

        return step

    return made


def local(**options: Any) -> Callable[[torch.nn.ParameterList], Step]:
    def made(params: torch.nn.ParameterList) -> Step:
        optimizer = torch.optim.SGD(params.parameters(), lr=0.01)
        config = tw.LocalSGD(K_STEPS, begin_step=0, **options)
        sync = tw.local_sgd(params, optimizer, config).__enter__()

        def step() -> float:
            for _ in range(K_STEPS):
                optimizer.step()
            return float(sync.stats()["bytes_sent"])

        return step

    return made


TENTH: dict[str, Any] = {"sparsity": (0.9,), "value_bits": 8, "min_numel": 1}
METHODS: dict[str, tuple[Callable[[torch.nn.ParameterList], Step], Method]] = {
    "dense ring": (gradients(rampup_begin_step=10**6), Method(NUMELS)),
    "DGC 10 %, gather": (
        gradients(exchange="gather", **TENTH),
        Method(NUMELS, Entries(0.9, 8, "gather")),
    ),
    "DGC 10 %, split": (
        gradients(exchange="split", **TENTH),
        Method(NUMELS, Entries(0.9, 8, "split")),
    ),
    "DGC 10 %, nodes of 2": (
        gradients(node_size=2, exchange="gather", **TENTH),
        Method(NUMELS, Entries(0.9, 8, "gather"), node_size=2),
    ),
    "local, 4 bits, split": (
        local(compression=tw.Quantized(exchange="split")),
        Method(NUMELS, Whole(4, "split"), k_steps=K_STEPS),
    ),
}


def drawn(rank: int) -> torch.nn.ParameterList:
    """Parameters with the gradients of a rank, the same in every step."""
    generator = torch.Generator().manual_seed(rank)
    params = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def of_the(method: Method, ranks: int) -> bool:
    """True if this many ranks suffice for a method."""
    return ranks % method.node_size == 0 and ranks // method.node_size > 1


def work(rank: int, ranks: int, repeats: int, gate: Any) -> dict[str, Any]:
    """One rank, or a group of its own without a network: of every method seconds and bytes of each
    step.
    """
    together, found = dist.is_initialized(), {}
    for name, (make, method) in METHODS.items():
        if not (of_the(method, ranks) if together else method.node_size == 1):
            continue
        step = make(drawn(rank))
        before, seconds, sent = [step() for _ in range(WARM_UP)][-1], [], []
        for _ in range(repeats):
            gate.wait()
            if together:
                dist.barrier()
            begin_s = time.perf_counter()
            now = step()
            seconds.append(time.perf_counter() - begin_s)
            sent.append(now - before)
            before = now
        found[name] = seconds, sent
    return found


def deepen(net: Network) -> None:
    """Queues that lose nothing: those of the laboratory hold a tenth of a second of the rate."""
    from pyroute2 import IPRoute

    rate_bit_s = net.link.rate_bit_s
    assert rate_bit_s is not None, "shaped"
    settings = {**tbf_settings(rate_bit_s), "limit": QUEUE_BYTES}

    def change(names: Iterable[str]) -> None:
        with IPRoute() as ip:
            for name in names:
                ip.tc("change", "tbf", ip.link_lookup(ifname=name)[0], handle=0x10000, **settings)

    for fd in net.namespace_fds:
        inside(fd, partial(change, [net.interface]))
    inside(net.hub_fd, partial(change, [f"port{rank}" for rank in range(len(net.addresses))]))


def measured(ranks: int, net: Network | None, repeats: int) -> list[dict[str, Any]]:
    """By rank what it found; without a network each is a group of its own."""
    gate = multiprocessing.get_context("forkserver").Barrier(ranks, timeout=GATE_S)
    return on_ranks(work, ranks, repeats, gate, net=net, group=net is not None)


def rows(ranks: int, link: Link, repeats: int) -> list[dict[str, Any]]:
    alone = measured(ranks, None, max(repeats, 3))
    alone_s = {
        name: statistics.median(map(max, zip(*(report[name][0] for report in alone), strict=True)))
        for name in alone[0]
    }
    with network(ranks, link) as net:
        deepen(net)
        found = measured(ranks, net, repeats)
    assert link.rate_bit_s is not None, "shaped"
    made = []
    for name, (_, method) in METHODS.items():
        if name not in found[0]:
            continue
        whole_s = alone_s.get(name, alone_s["DGC 10 %, gather"])
        lines = switch(ranks, link.rate_bit_s, link.latency_s)
        outcome = simulate(method, lines, step_s=whole_s / method.between, steps=method.between)
        slowest = [max(report[name][0][i] for report in found) for i in range(repeats)]
        sent = [[report[name][1][i] for report in found] for i in range(repeats)]
        made.append(
            {
                "ranks": ranks,
                "link": str(link),
                "method": name,
                "simulated_s": outcome.seconds,
                "measured_s": min(slowest),
                "all_s": slowest,
                "alone_s": whole_s,
                "bytes": int(outcome.sent.max()),
                "bytes_equal": all(report == outcome.sent.tolist() for report in sent),
            }
        )
    return made


def printed(result: dict[str, Any]) -> str:
    lines = [
        f"{sum(NUMELS):,} numbers, the faster of {result['repeats']} steps; an averaging of "
        f"local updates and its {K_STEPS} steps count as one.",
        "",
    ]
    titles = ["ranks", "link", "exchange", "simulated", "measured", "simulated : measured"]
    titles += ["bytes given by the busiest rank", "equal on all ranks"]
    rows = []
    for r in result["rows"]:
        seconds = f"{r['simulated_s']:.2f} s", f"{r['measured_s']:.2f} s"
        ratio, equal = r["simulated_s"] / r["measured_s"], "yes" if r["bytes_equal"] else "**no**"
        place = r["ranks"], r["link"], r["method"]
        rows.append([*place, *seconds, f"{ratio:.2f}", f"{r['bytes']:,}", equal])
    return "\n".join(lines + markdown(titles, rows))


def main() -> None:
    parser = parser_for(__doc__)
    parser.set_defaults(repeats=3)
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    cells = [(2, "20mbit", "20ms")] if arguments.quick else list(PLACES)
    found: list[dict[str, Any]] = []
    result = {**surroundings(repeats), "rows": found}
    for ranks, rate, latency in cells:
        found += rows(ranks, Link.parse(rate, latency), repeats)
        print(printed({**result, "rows": found}).splitlines()[-1], flush=True)
        save(result, arguments.out)
    print(printed(result))


if __name__ == "__main__":
    main()
