"""Time of an update by Muon, and its distance from float64, by three methods, beside AdamW.

    python -m research.muon.updates --threads 1
    python -m research.muon.updates --quick
    python -m research.muon.updates --ranks 4

Contenders take turns within one run and the median of the processor's time counts. With `--ranks`
they are steps of the matrices alone, on as many ranks of this machine at once, with one thread
each: every rank all of them, or each a shard of all of them. There the time until all ranks are
ready counts too, which is long where ranks share processors; that of one rank is the processor's.
"""

import time
from collections.abc import Callable
from statistics import mean, median
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from benchmarks.common import parser_for, save, surroundings
from benchmarks.ranks import on_ranks
from thinwire.core import muon
from thinwire.core.muon import MuonRule, newton_schulz
from thinwire.tools.run.built_in import ByteTransformer
from thinwire.tools.run.config import parse_size

RULE = MuonRule(
    weight_decay=0.0,
    momentum=0.95,
    nesterov=True,
    coefficients=(3.4445, -4.7750, 2.0315),
    iterations=5,
    eps=1e-7,
    match_rms_adamw=True,
    dtype=torch.float32,
)
SHAPE = (256, 1024)
RANKS = (256, 64, 16, 1)


def one_by_one(matrix: Tensor, rule: MuonRule) -> Tensor:
    """The iteration without the shortcut, which is for exact products alone."""
    with patch.object(muon, "products_are_exact", lambda _: False):
        return newton_schulz(matrix, rule)


def steps_ms(size: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a step of each contender, on the model of `thinwire compare`."""
    torch.manual_seed(0)
    model = ByteTransformer(parse_size(size))
    by_gram = tw.optim.Muon(tw.optim.muon_groups(model), lr=1e-3)
    narrow = tw.optim.Muon(tw.optim.muon_groups(model), lr=1e-3, ns_dtype="bfloat16")
    adamw = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)

    def without_gram() -> None:
        with patch.object(muon, "newton_schulz", one_by_one):
            by_gram.step()

    contenders: dict[str, Callable[[], object]] = {
        "float32": by_gram.step,
        "float32, iteration by iteration": without_gram,
        "bfloat16": narrow.step,
        "AdamW": adamw.step,
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, step in contenders.items():
            begun = time.process_time()
            step()
            taken[name].append(1e3 * (time.process_time() - begun))
    return {name: median(times) for name, times in taken.items()}


def errors(rank: int) -> dict[str, float]:
    """Of the update of a matrix of this rank, beside float64, over its Frobenius norm."""
    torch.manual_seed(0)
    matrix = torch.randn(SHAPE[0], rank) @ torch.randn(rank, SHAPE[1])
    exact = one_by_one(matrix.double(), RULE._replace(dtype=torch.float64))
    found = {"float32": newton_schulz, "float32, iteration by iteration": one_by_one}
    return {
        name: float((way(matrix, RULE) - exact).norm() / exact.norm())
        for name, way in found.items()
    }


def sharded_steps(
    rank: int, ranks: int, sizes: tuple[str, ...], repeats: int
) -> dict[str, dict[str, float]]:
    """Steps of whole matrices and of their shards, on every rank at once."""
    found = {}
    for size in sizes:
        torch.manual_seed(0)
        whole, cut = ByteTransformer(parse_size(size)), ByteTransformer(parse_size(size))
        for block in cut.modules():
            if isinstance(block, torch.nn.Linear):
                fully_shard(block)
        fully_shard(cut)
        optimizers = {}
        for name, model in (("whole", whole), ("shards", cut)):
            matrices = [p for p in model.parameters() if p.ndim == 2]
            for p in matrices:
                p.grad = p.detach().clone()
            optimizers[name] = tw.optim.Muon(matrices, lr=1e-3)
        wall: dict[str, list[float]] = {name: [] for name in optimizers}
        work: dict[str, list[float]] = {name: [] for name in optimizers}
        for _ in range(repeats + 1):
            for name, optimizer in optimizers.items():
                dist.barrier()
                begun, begun_work = time.perf_counter(), time.process_time()
                optimizer.step()
                work[name].append(1e3 * (time.process_time() - begun_work))
                dist.barrier()
                wall[name].append(1e3 * (time.perf_counter() - begun))
        # the first makes buffers and groups
        row = {f"{name}, all ranks": median(times[1:]) for name, times in wall.items()}
        own = {f"{name}, processor of a rank": median(times[1:]) for name, times in work.items()}
        of_all: list[dict[str, float]] = [{}] * ranks
        dist.all_gather_object(of_all, own)
        row |= {name: mean(row_of[name] for row_of in of_all) for name in own}
        for kind in ("all ranks", "processor of a rank"):
            row[f"share, {kind}"] = row[f"shards, {kind}"] / row[f"whole, {kind}"]
        found[size] = row
    return found


def printed(title: str, table: dict[str, dict[str, float]], form: str) -> None:
    """A line for each row."""
    print(title)
    for name, row in table.items():
        print(" ", name, *(f"| {key} {form.format(value)}" for key, value in row.items()))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, help="steps on so many ranks instead")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    repeats = 1 if args.quick else args.repeats
    sizes = ("tiny",) if args.quick else ("small", "medium")
    if args.ranks is not None:
        steps = on_ranks(sharded_steps, args.ranks, sizes, repeats)[0]
        printed(f"ms a step of {args.ranks} ranks, and shares", steps, "{:.2f}")
        save({**surroundings(repeats), "ranks": args.ranks, "step_ms": steps}, args.out)
        return
    steps = {size: steps_ms(size, repeats) for size in sizes}
    apart = {f"rank {rank}": errors(rank) for rank in RANKS}
    printed("ms a step", steps, "{:.1f}")
    printed(f"error, {SHAPE[0]} x {SHAPE[1]}", apart, "{:.0e}")
    save({**surroundings(repeats), "step_ms": steps, "error": apart}, args.out)


if __name__ == "__main__":
    main()
