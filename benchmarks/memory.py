"""Memory of training on every rank: plain DDP, PowerSGD and ours, at the peak of a step and after.

    python -m benchmarks.memory --out benchmarks/results/memory.json
    python -m benchmarks.memory --quick

Every contender trains the same perceptron on two ranks over gloo, in fresh processes; the sharded
ones on two sites of two shards. Figures are
resident memory beyond what the process had before the model was made, in words of four bytes per
parameter, of the rank that has more.
"""

import gc
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.common import markdown, parser_for, save, surroundings
from benchmarks.ranks import on_ranks

RANKS = 2
SITES, SHARDED_RANKS = 2, 4
WIDTHS = {"full": (1250, 4000), "quick": (100, 320), "warm": (60, 120)}
"""Narrow and wide sides of the layers; five of them are 25 million parameters, the largest a fifth.
"""
BATCH = 8

Step = Callable[[], None]
Kept = Callable[[], Any]
"""The tensors of optimizer and exchange, in nested dicts."""
Builder = Callable[[nn.Module, Tensor], tuple[Step, Kept]]


def perceptron(widths: tuple[int, int]) -> nn.Sequential:
    narrow, wide = widths
    layers: list[nn.Module] = []
    for i in range(5):
        layers += [nn.Linear(narrow, wide) if i % 2 == 0 else nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers)


def loop(forward: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        forward(inputs).square().mean().backward()
        optimizer.step()

    return step


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-4)


def muon(params: Any) -> torch.optim.Optimizer:
    """Muon for the matrices, AdamW for the biases."""
    given = list(params)
    matrices, rest = ([p for p in given if (p.ndim == 2) == wanted] for wanted in (True, False))
    return tw.optim.Muon([{"params": matrices}, {"params": rest, "muon": False}], lr=1e-4)


def ddp(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Builder:
    def build(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
        optimizer = make(model.parameters())
        return loop(
            DistributedDataParallel(model, **options), optimizer, inputs
        ), lambda: optimizer.state

    return build


def power_sgd(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
    """Rank 2, with its error feedback and warm start, which are torch's defaults, from the third
    step on.

    In a single bucket: with two in flight, torch's hook waits inside a callback, which gloo never
    returns from.
    """
    wrapped = DistributedDataParallel(model, bucket_cap_mb=10_000)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook)
    optimizer = sgd(model.parameters())
    return loop(wrapped, optimizer, inputs), lambda: [
        optimizer.state,
        state.error_dict,
        state.p_memory_dict,
        state.q_memory_dict,
    ]


def attached(state_dtype: str, **options: Any) -> Builder:
    def build(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
        wrapped = DistributedDataParallel(model, **options)
        optimizer = tw.optim.DGCMomentum(
            model.named_parameters(), lr=1e-3, min_numel=1000, state_dtype=state_dtype
        )
        optimizer.attach(wrapped)
        return loop(wrapped, optimizer, inputs), lambda: optimizer.state

    return build


def engine(make: Callable[[Any], torch.optim.Optimizer], state_dtype: str) -> Builder:
    def build(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
        strategy = tw.DistributedStrategy(dgc=tw.DGC(min_numel=1000, state_dtype=state_dtype))
        prepared = strategy.prepare(
            model, make(model.named_parameters()), lambda y, _: y.square().mean()
        )

        def step() -> None:
            prepared.train_step(inputs, None)

        return step, lambda: [
            prepared._steps.optimizer.state,
            prepared._steps.saved_exchange(),
        ]

    return build


def sharded(model: nn.Module) -> DeviceMesh:
    """Shard layer by layer inside each of two sites."""
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (SITES, SHARDED_RANKS // SITES), mesh_dim_names=names)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return mesh


def fsdp(make: Callable[[Any], torch.optim.Optimizer]) -> Builder:
    def build(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
        sharded(model)
        optimizer = make(model.parameters())
        return loop(model, optimizer, inputs), lambda: optimizer.state

    return build


def sharded_dgc(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
    mesh = sharded(model)
    optimizer = tw.optim.DGCMomentum(model.parameters(), lr=1e-3, min_numel=1000, mesh=mesh)
    return loop(model, optimizer, inputs), lambda: optimizer.state


def sharded_engine(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
    mesh = sharded(model)
    strategy = tw.DistributedStrategy(dgc=tw.DGC(min_numel=1000))
    prepared = strategy.prepare(
        model, adam(model.parameters()), lambda y, _: y.square().mean(), mesh=mesh
    )

    def step() -> None:
        prepared.train_step(inputs, None)

    return step, lambda: [prepared._steps.optimizer.state, prepared._steps.saved_exchange()]


def sharded_local(
    compression: tw.Quantized | None, make: Callable[[Any], torch.optim.Optimizer] = adam
) -> Builder:
    def build(model: nn.Module, inputs: Tensor) -> tuple[Step, Kept]:
        mesh = sharded(model)
        optimizer = make(model.parameters())
        config = tw.LocalSGD(2, begin_step=0, compression=compression)
        sync = tw.local_sgd(model, optimizer, config, mesh=mesh).__enter__()

        def kept() -> list[Any]:
            averager = sync._averager
            assert averager is not None, "entered"
            return [optimizer.state, averager.averaging.anchors, averager.averaging.kept]

        return loop(model, optimizer, inputs), kept

    return build


CONTENDERS: dict[str, Builder] = {
    "DDP, SGD with momentum": ddp(sgd),
    "DDP, SGD with momentum, gradient_as_bucket_view": ddp(sgd, gradient_as_bucket_view=True),
    "DDP, PowerSGD of rank 2, SGD with momentum": power_sgd,
    "DGCMomentum attached to DDP": attached("float32"),
    "DGCMomentum attached to DDP, bfloat16": attached("bfloat16"),
    "DGCMomentum attached to DDP, bfloat16, gradient_as_bucket_view": attached(
        "bfloat16", gradient_as_bucket_view=True
    ),
    "engine, dgc, SGD with momentum": engine(sgd, "float32"),
    "engine, dgc in bfloat16, SGD with momentum": engine(sgd, "bfloat16"),
    "DDP, Adam": ddp(adam),
    "engine, dgc, Adam": engine(adam, "float32"),
    "engine, dgc in bfloat16, Adam": engine(adam, "bfloat16"),
}
"""By name what builds a step; the first is what the others are compared with."""
SHARDED: dict[str, Builder] = {
    "fully_shard, SGD with momentum": fsdp(sgd),
    "fully_shard, DGCMomentum": sharded_dgc,
    "fully_shard, Adam": fsdp(adam),
    "fully_shard, engine, dgc, Adam": sharded_engine,
    "fully_shard, local updates, Adam": sharded_local(None),
    "fully_shard, local updates in 4 bits, Adam": sharded_local(tw.Quantized(4)),
    "fully_shard, Muon": fsdp(muon),
    "fully_shard, local updates at 1 bit, Muon": sharded_local(tw.Quantized(1), muon),
}
"""Those of two sites of two shards; words are per parameter that a rank holds."""


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most that was since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def reset_peak() -> bool:
    """Reset the peak to the resident memory; return False if the kernel refuses."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def nbytes(tree: Any) -> int:
    """Of all tensors in nested dicts and lists; those of the keys are the parameters and do not
    count.
    """
    if isinstance(tree, Tensor):
        return own(tree).numel() * tree.element_size()
    entries = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    return sum(map(nbytes, entries))


def measured(name: str, size: str, steps: int) -> dict[str, Any]:
    """Return the memory of this rank, measured in a fresh process."""
    build = (CONTENDERS | SHARDED)[name]
    inputs = {kind: torch.randn(BATCH, WIDTHS[kind][0]) for kind in ("warm", size)}
    warm, _ = build(perceptron(WIDTHS["warm"]), inputs["warm"])
    for _ in range(4):  # libraries, compilers and threads are there from now on
        warm()
    del warm
    gc.collect()
    before = resident_bytes("VmRSS")
    model = perceptron(WIDTHS[size])
    step, kept = build(model, inputs[size])
    for _ in range(3):
        step()
    was_reset = reset_peak()
    for _ in range(steps):
        step()
    peak, resident = resident_bytes("VmHWM") - before, resident_bytes("VmRSS") - before
    numel = sum(own(p).numel() for p in model.parameters())
    words = {"peak": peak, "resident": resident, "kept": nbytes(kept())}
    return {
        "numel": numel,
        "peak_is_of_steps": was_reset,
        **{k: v / 4 / numel for k, v in words.items()},
    }


def work(rank: int, size: int, name: str, shape: str, steps: int, threads: int) -> dict[str, Any]:
    """One rank of one contender."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return measured(name, shape, steps)


def race(name: str, shape: str, steps: int, threads: int) -> dict[str, Any]:
    """One contender on fresh processes; of each figure the larger one."""
    size = SHARDED_RANKS if name in SHARDED else RANKS
    ranks = on_ranks(work, size, name, shape, steps, threads)
    figures = {key: max(report[key] for report in ranks) for key in ("peak", "resident", "kept")}
    settled = all(report["peak_is_of_steps"] for report in ranks)
    return {"name": name, "numel": ranks[0]["numel"], "peak_is_of_steps": settled, **figures}


def measure(size: str, steps: int) -> dict[str, object]:
    around = surroundings(steps)
    # freed tensors go back to the system at once, and do not blur the peak
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows = []
    for name in [*CONTENDERS, *SHARDED]:
        rows.append(race(name, size, steps, torch.get_num_threads()))
        print(f"   {name}: {rows[-1]['peak']:.2f} words at the peak", file=sys.stderr, flush=True)
    return {"numel": rows[0]["numel"], "ranks": RANKS, "batch": BATCH, **around, "rows": rows}


def printed(result: dict[str, Any]) -> str:
    rows = result["rows"]
    first = rows[0]
    whole = (
        ""
        if all(row["peak_is_of_steps"] for row in rows)
        else ", peaks since the start of the process"
    )
    lines = [
        f"{result['numel']:,} float32 parameters, {result['ranks']} ranks, {result['repeats']} "
        f"steps{whole}; words of four bytes per parameter",
        "",
    ]
    titles = ["who", "peak : plain DDP", "kept : plain DDP", "peak", "between steps"]
    table = []
    for row in rows:
        ratios = [f"{row[key] / first[key]:.2f}" for key in ("peak", "kept")]
        words = [f"{row[key]:.2f}" for key in ("peak", "resident", "kept")]
        table.append([row["name"], *ratios, *words])
    return "\n".join(lines + markdown([*titles, "kept by optimizer and exchange"], table))


def main() -> None:
    parser = parser_for(__doc__)
    parser.set_defaults(repeats=3, threads=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure("quick" if arguments.quick else "full", arguments.repeats)
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
