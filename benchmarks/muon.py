"""What an update by Muon takes, and how far rounding takes it from float64: by the small Gram
matrices, iteration by iteration, and in bfloat16, beside AdamW.

    python -m benchmarks.muon --threads 1
    python -m benchmarks.muon --quick

Contenders take turns within one run and the median of the processor's time counts.
"""

import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.common import parser_for, save, surroundings
from thinwire.core import muon
from thinwire.core.muon import MuonRule, newton_schulz
from thinwire.tools.run.model import ByteTransformer
from thinwire.tools.run.size import parse_size

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
    return {name: median(each) for name, each in taken.items()}


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


def main() -> None:
    args = parser_for(__doc__).parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    repeats = 1 if args.quick else args.repeats
    sizes = ("tiny",) if args.quick else ("small", "medium")
    steps = {size: steps_ms(size, repeats) for size in sizes}
    apart = {f"rank {rank}": errors(rank) for rank in RANKS}
    for title, table, form in (
        ("ms a step", steps, "{:.1f}"),
        (f"error, {SHAPE[0]} x {SHAPE[1]}", apart, "{:.0e}"),
    ):
        print(title)
        for name, row in table.items():
            print(" ", name, *(f"| {key} {form.format(each)}" for key, each in row.items()))
    save({**surroundings(repeats), "step_ms": steps, "error": apart}, args.out)


if __name__ == "__main__":
    main()
