"""Cost of folding a gradient, selecting, encoding and decoding, against torch and memory bandwidth.

    python -m benchmarks.codec --out benchmarks/results/codec.json
    python -m benchmarks.codec --quick

Contenders take turns within one run and the median counts, so the ratios hold on a machine that
others use too.
"""

import os
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import interleaved_ms, markdown, parser_for, save, summary, surroundings
from thinwire.core.feedback import (
    commit_list_,
    propose_list,
    rounding_seed,
    sum_sparse,
    top_k,
)
from thinwire.kernels import for_device
from thinwire.kernels.rules import Fold
from thinwire.layout.message import Layout, Slot, count_sent
from thinwire.wire.message import pack, unpack

MOMENTUM = 0.9
SOURCES = 2
TENSORS = 160


def with_kernels(choice: str, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        os.environ["THINWIRE_KERNELS"] = choice
        return work()

    return run


def fold_ours(grad: Tensor, k: int, dtype: torch.dtype) -> Callable[[], object]:
    residual, buffer = torch.zeros_like(grad, dtype=dtype), torch.zeros_like(grad, dtype=dtype)
    steps = count()

    def run() -> None:
        folds = [Fold(grad, residual, buffer, MOMENTUM, False)]
        [proposal] = propose_list(folds, [k])
        commit_list_(folds, [proposal[:2]], [rounding_seed(next(steps), 0)])

    return run


def fold_list(grad: Tensor, density: float) -> Callable[[], object]:
    """The same for a model's many tensors, in one call for all of them."""
    grads = [part.contiguous() for part in grad.chunk(TENSORS)]
    ks = [count_sent(part.numel(), 1 - density) for part in grads]
    folds = [
        Fold(part, torch.zeros_like(part), torch.zeros_like(part), MOMENTUM, False)
        for part in grads
    ]

    def run() -> None:
        proposals = propose_list(folds, ks)
        commit_list_(folds, [(p.indices, p.values) for p in proposals], [0] * len(folds))

    return run


def fold_eager(grad: Tensor, k: int) -> Callable[[], object]:
    """The same bookkeeping as one would write it at first."""
    residual, buffer = torch.zeros_like(grad), torch.zeros_like(grad)

    def run() -> tuple[Tensor, Tensor]:
        buffer.mul_(MOMENTUM).add_(grad)
        residual.add_(buffer)
        if not torch.isfinite(residual).all():
            raise RuntimeError("not finite")
        indices = torch.topk(residual.abs(), k, sorted=False).indices.sort().values
        values = residual[indices]
        residual[indices] -= values
        buffer[indices] = 0
        return indices, values

    return run


def contenders(
    grad: Tensor, density: float, value_bits: int, *, with_reference: bool
) -> dict[str, dict[str, Callable[[], object]]]:
    """Per operation who does it."""
    k = count_sent(grad.numel(), 1 - density)
    layout = Layout((Slot(grad.numel(), k),), value_bits)
    indices = top_k(grad, k)
    part = (indices, grad[indices])
    message, _ = pack(layout, 0, 0, [part])

    def decode() -> object:
        return [
            unpack(layout, message, step=0, bucket=0, source=s).parts[0] for s in range(SOURCES)
        ]

    operations: dict[str, Callable[[], Callable[[], object]]] = {
        "fold": lambda: fold_ours(grad, k, torch.float32),
        "fold of 160 tensors": lambda: fold_list(grad, density),
        "select": lambda: lambda: top_k(grad, k),
        "encode": lambda: lambda: pack(layout, 0, 0, [part]),
        "decode": lambda: decode,
        "sum": lambda: lambda: sum_sparse([part] * SOURCES, torch.float32),
    }
    table = {name: {"ours": with_kernels("auto", make())} for name, make in operations.items()}
    if with_reference:
        for name, make in operations.items():
            table[name]["reference"] = with_kernels("reference", make())
    table["fold"]["eager"] = fold_eager(grad, k)
    table["fold"]["bfloat16"] = with_kernels("auto", fold_ours(grad, k, torch.bfloat16))
    table["select"]["eager"] = lambda: torch.topk(grad.abs(), k, sorted=False).indices.sort().values
    return table


def measure(numel: int, densities: list[float], value_bits: int, repeats: int) -> dict[str, Any]:
    fast_kernels = for_device(torch.device("cpu")).__name__  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator)
    rows = []
    for density in densities:
        # the reference is slow, and as much slower at one density as at another
        works_of = contenders(grad, density, value_bits, with_reference=density == densities[0])
        for operation, works in works_of.items():
            times, word = summary(interleaved_ms(works, numel, repeats))
            rows.append({"density": density, "operation": operation, **word.floors(5), **times})
    return {
        "numel": numel,
        "value_bits": value_bits,
        "sources": SOURCES,
        "fast_kernels": fast_kernels,
        **surroundings(repeats),
        "milliseconds": rows,
    }


def printed(result: dict[str, Any]) -> str:
    lines = [
        f"{result['numel']:,} float32, {result['threads']} threads, {result['value_bits']} bit(s) "
        f"a value, decode and sum of {SOURCES} sources, medians of {result['repeats']}",
        "",
    ]
    titles = ["density", "operation", "ours : floor", "ours : floor by adding", "ours : fold"]
    titles += ["reference : ours", "eager : ours", "ours ms", "reference ms", "eager ms"]
    rows, fold_ms = [], 1.0
    for row in result["milliseconds"]:
        ours, is_fold = row["ours"], row["operation"].startswith("fold")
        fold_ms = ours if row["operation"] == "fold" else fold_ms
        cells = [
            f"{row['density']:.2%}",
            row["operation"],
            *(
                f"{ours / row[floor]:.2f}" if is_fold else ""
                for floor in ("floor", "floor by adding")
            ),
            f"{ours / fold_ms:.3f}",
            f"{row['reference'] / ours:.1f}" if "reference" in row else "",
            f"{row['eager'] / ours:.1f}" if "eager" in row else "",
            f"{ours:.2f}",
            f"{row['reference']:.1f}" if "reference" in row else "",
            f"{row['eager']:.1f}" if "eager" in row else "",
            f"{row['floor']:.1f}" if is_fold else "",
        ]
        rows.append(cells)
    return "\n".join([*lines, *markdown([*titles, "floor ms"], rows), *narrow_folds(result)])


def narrow_folds(result: dict[str, Any]) -> list[str]:
    """Return the cost of folding a float32 gradient into bfloat16 momentum buffer and residual."""
    folds = [row for row in result["milliseconds"] if "bfloat16" in row]
    if not folds:
        return []
    titles = ["density", "fold in bfloat16 : ours", "fold in bfloat16 : floor of 3 words"]
    rows = []
    for row in folds:
        ratios = row["bfloat16"] / row["ours"], row["bfloat16"] / (0.6 * row["floor"])
        cells = [f"{value:.2f}" for value in (*ratios, row["bfloat16"])]
        rows.append([f"{row['density']:.2%}", *cells])
    return ["", *markdown([*titles, "bfloat16 ms"], rows)]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--numel", type=int, default=25_000_000, help="entries of the tensor")
    parser.add_argument(
        "--densities", type=float, nargs="+", default=[0.001, 0.01, 0.25], help="fractions sent"
    )
    parser.add_argument("--value-bits", type=int, default=1, help="1, 2, 4, 8, 16 or 32")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    numel, repeats = (200_000, 3) if arguments.quick else (arguments.numel, arguments.repeats)
    result = measure(numel, arguments.densities, arguments.value_bits, repeats)
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
