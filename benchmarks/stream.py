"""Bytes of a version of a model: our differences, five formats in use, and the entropy.

python -m benchmarks.stream            # all cases; needs the packages numba and zstandard
python -m benchmarks.stream --quick    # small and short, without results

Synthetic: 34 million bfloat16 weights, normal with deviation 0.02, and a normal change of one size.
Training: transformers of 0.87 and 3.3 million parameters of `benchmarks.law`, with AdamW; bfloat16
copies of their float32 weights a step and 16 steps apart, and the float32 weights. Fine-tuning: the
same models at constant rates of 1e-5 and 1e-6. Rounds: the float32 anchors of local updates of the
smaller one, with Muon, one bit and 16 steps, from one averaging to the next.

Bytes are per parameter. The entropy is that of the steps in units in the last place given the
exponent of the old value, from counts of each tensor; it leaves out the bytes of these counts.
Every message is decoded and compared. Speeds are megabytes of new weights for a second of one
thread's processor time, the median of five; speeds on a machine with other work count as ratios.
Those of one and of two threads over eight tensors are for a second of the clock, the best of five.
The five formats are written here from what their users say of them. zstd at level 19 has the first
million entries of a tensor.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import bare_parser, markdown, save, surroundings
from benchmarks.gaps import Cell
from benchmarks.law import Training, alone, works_of
from thinwire.stream.coder import decode, encode
from thinwire.tools.run.training import rate_factor

RESULTS = Path(__file__).parent / "results" / "stream.json"
NUMEL = 34_000_000
CHANGES = {"1 %": 2.4e-7, "15 %": 6.6e-6, "50 %": 4.5e-5, "100 %": 3e-3}
"""Deviation of the change that alters so many of the weights."""
STEPS, TUNING_STEPS, RATE, BATCH = 256, 32, 0.006, 8
"""Of the training and of a fine-tuning; the peak rate of AdamW, as tuned for this size."""
AT = (32, 128, 240)
"""Steps of the training after which versions are compared."""
TUNING_RATES = (1e-5, 1e-6)
SLOW_ENTRIES = 1 << 20
REPEATS = 5
"""Of a measurement of speed."""
Array = Any


def bits(tensor: Tensor) -> Array:
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")


def zstd(data: Array, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)


def index_and_value(old: Array, new: Array) -> float:
    return int(np.count_nonzero(old != new)) * (4 + old.itemsize)


def gaps_and_value(old: Array, new: Array) -> float:
    """Gaps between changes, in the fewest whole bytes that hold the largest, and new values."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=0)
    width = next(w for w in (1, 2, 4) if not gaps.size or gaps.max() < 1 << 8 * w)
    return len(zstd(gaps.astype(f"u{width}").tobytes() + new[changed].tobytes(), 3))


def xor_planes(old: Array, new: Array) -> float:
    xor = (old ^ new)[:SLOW_ENTRIES]
    planes = xor.view(np.uint8).reshape(-1, old.itemsize).T.copy()
    return len(zstd(planes, 19)) * old.size / max(xor.size, 1)


FORMATS: dict[str, Callable[[Array, Array], float]] = {
    "index and value": index_and_value,
    "gaps, value, zstd 3": gaps_and_value,
    "XOR, zstd 3": lambda old, new: len(zstd(old ^ new, 3)),
    "XOR planes, zstd 19": xor_planes,
    "full, zstd 3": lambda old, new: len(zstd(new, 3)),
}


def entropy_bytes(old: Array, new: Array, mantissa: int) -> float:
    """Entropy of the step of each entry given its old exponent, by counts."""
    half = 1 << 8 * old.itemsize - 1

    def ordered(values: Array) -> Array:
        signed = values.astype(np.int64)
        return np.where(signed < half, signed, half - 1 - signed)

    exponents = (old & (half - 1)) >> mantissa
    total = 0.0
    for exponent in np.unique(exponents):
        chosen = exponents == exponent
        steps = ordered(new[chosen]) - ordered(old[chosen])
        steps = np.where(old[chosen] < half, steps, -steps)
        counts = np.bincount(steps - steps.min())
        counts = counts[counts > 0]
        total -= float((counts * np.log2(counts / counts.sum())).sum()) / 8
    return total


def compared(case: str, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return bytes a parameter of one version of a model."""
    numel = sum(tensor.numel() for tensor in new.values())
    changed, ours, entropy = 0, 0, 0.0
    formats = dict.fromkeys(FORMATS, 0.0)
    for name, tensor in new.items():
        message, became = encode(old[name], tensor), old[name].clone()
        decode(became, message)
        before, after = bits(old[name]), bits(tensor)
        if not np.array_equal(bits(became), after):
            raise AssertionError(f"{case}: {name} is not what was encoded")
        ours += len(message)
        changed += int(np.count_nonzero(before != after))
        if tensor.dtype == torch.bfloat16:
            entropy += entropy_bytes(before, after, 7)
        for each, size in FORMATS.items():
            formats[each] += size(before, after)
    row = {"ours": ours, "entropy": entropy, **formats}
    dtype = str(next(iter(new.values())).dtype).removeprefix("torch.")
    found = {"case": case, "dtype": dtype, "parameters": numel, "changed": changed / numel}
    return found | {key: round(value / numel, 6) for key, value in row.items()}


def synthetic(numel: int, move: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = 0.02 * torch.randn(numel, generator=generator)
    return old.bfloat16(), (old + move * torch.randn(numel, generator=generator)).bfloat16()


def speeds(old: Tensor, new: Tensor) -> dict[str, Any]:
    """Return MB/s of one core, and of threads."""
    message, became = encode(old, new), old.clone()
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(old, new),
        "decode": lambda: decode(became.copy_(old), message),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            begin = time.process_time()
            work()
            taken[name].append(time.process_time() - begin)
    return {
        "mb_s": {name: round(old.nbytes / median(s) / 1e6, 1) for name, s in taken.items()},
        "threads": {f"{count} threads": threaded(old, new, count) for count in (1, 2)},
    }


def threaded(old: Tensor, new: Tensor, count: int) -> dict[str, float]:
    """Return MB/s of threads that each take one of eight tensors in turn."""
    pairs = list(zip(old.chunk(8), new.chunk(8), strict=True))
    messages = [encode(*pair) for pair in pairs]
    became = [before.clone() for before, _ in pairs]
    best = {"encode": float("inf"), "decode": float("inf")}
    with ThreadPoolExecutor(count) as pool:
        for _ in range(REPEATS):
            begin = time.perf_counter()
            list(pool.map(lambda pair: encode(*pair), pairs))
            best["encode"] = min(best["encode"], time.perf_counter() - begin)
            for tensor, (before, _) in zip(became, pairs, strict=True):
                tensor.copy_(before)
            begin = time.perf_counter()
            list(pool.map(decode, became, messages))
            best["decode"] = min(best["decode"], time.perf_counter() - begin)
    return {name: round(old.nbytes / s / 1e6, 1) for name, s in best.items()}


def copied(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}


def rounds(quick: bool, workers: int) -> dict[str, Any]:
    """Train with local updates; return what a version of the anchors takes."""
    interval, size = (2, "0.04M") if quick else (16, "0.87M")
    cell = Cell(part="held_out", size=size, workers=workers, interval=interval, bits=1,
                optimizer="muon", steps=STEPS, batch=BATCH, lr=0.024, seed=5, data="")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, alone():
        training = Training(cell, works_of(cell, "cpu", Path(folder)))
        assert training.sync is not None
        anchors, before = training.sync.averagings[0].anchors, dict[str, Tensor]()
        for count in (8, 9):
            while training.sync.rounds < count:
                training.step()
            old, before = before, {name: tensor.clone() for name, tensor in anchors.items()}
    return compared(f"{size}, rounds of {workers} workers", old, before)


def versions(size: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Train and fine-tune; yield what versions of the weights take."""
    steps, at = (8, (4,)) if quick else (STEPS, AT)
    cell = Cell(part="held_out", size=size, workers=1, interval=0, bits=32, optimizer="adamw",
                steps=STEPS, batch=BATCH, lr=RATE, seed=5, data="")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, alone():
        (work,) = works_of(cell, "cpu", Path(folder))
        optimizer = torch.optim.AdamW(work.model.parameters(), lr=RATE)

        def run(count: int, rate: Callable[[int], float], first: int = 0) -> None:
            for step in range(first, first + count):
                optimizer.param_groups[0]["lr"] = rate(step)
                optimizer.zero_grad()
                inputs, targets = work.next_batch()
                work.loss_fn(work.model(inputs), targets).backward()
                optimizer.step()

        def pairs(name: str, rate: Callable[[int], float], first: int) -> Iterator[dict[str, Any]]:
            dtypes = (torch.bfloat16, torch.float32)
            old = [copied(work.model, dtype) for dtype in dtypes]
            for apart in (1, 16):
                run(apart - (apart > 1), rate, first + (apart > 1))
                for before, dtype in zip(old, dtypes, strict=True):
                    yield compared(
                        f"{size}, {name}, {apart} apart", before, copied(work.model, dtype)
                    )

        def falling(step: int) -> float:
            return RATE * rate_factor(step / STEPS)

        done = 0
        for first in at:
            run(first - done, falling, done)
            yield from pairs(f"training, step {first}", falling, first)
            done = first + 16
        run(max(steps - done, 0), falling, done)
        for rate in TUNING_RATES:
            run(1 if quick else TUNING_STEPS, lambda _, rate=rate: rate)  # type: ignore[misc]
            yield from pairs(f"fine-tuning at {rate:.0e}", lambda _, rate=rate: rate, 0)  # type: ignore[misc]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Bytes a parameter, what is above the entropy, and the part of XOR with zstd."""
    titles = ["case", "changed", "ours", "above entropy", "of XOR, zstd 3", "entropy", *FORMATS]
    lines = []
    for row in rows:
        above = f"{row['ours'] / row['entropy'] - 1:.1%}" if row["entropy"] else "–"
        part = f"{row['ours'] / row['XOR, zstd 3']:.2f}"
        figures = [f"{row[name]:.4f}" if row[name] else "–" for name in ("entropy", *FORMATS)]
        name = f"{row['case']}, {row['dtype']}"
        lines.append([name, f"{row['changed']:.2%}", f"{row['ours']:.4f}", above, part, *figures])
    return markdown(titles, lines)


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="small and short, without results")
    parser.add_argument(
        "--only", choices=["synthetic", "trained", "rounds"], help="keep the other results"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    result["surroundings"] = surroundings(REPEATS)
    if arguments.only in (None, "synthetic"):
        result["synthetic"], result["speeds"] = [], {}
        for name, move in CHANGES.items():
            old, new = synthetic(200_000 if arguments.quick else NUMEL, move)
            result["synthetic"].append(compared(f"synthetic, {name}", {"w": old}, {"w": new}))
            result["speeds"][name] = speeds(old, new)
            print(result["synthetic"][-1], result["speeds"][name], file=sys.stderr, flush=True)
        old = old.float()
        new = old - torch.where(torch.rand_like(old) < 0.5, 1.1e-3, -1e-3)
        result["speeds"]["one bit, float32"] = speeds(old, new)
    if arguments.only in (None, "trained"):
        result["trained"] = []
        for size in ("0.04M",) if arguments.quick else ("0.87M", "3.3M"):
            for row in versions(size, arguments.quick):
                result["trained"].append(row)
                print(row, file=sys.stderr, flush=True)
    if arguments.only in (None, "rounds"):
        result["rounds"] = [rounds(arguments.quick, workers) for workers in (2, 4, 6)]
    parts = (result.get(part, []) for part in ("synthetic", "trained", "rounds"))
    print("\n".join(table([row for part in parts for row in part])))
    if timed := result.get("speeds"):
        threads = [f"{name}, {count}" for count, t in timed["1 %"]["threads"].items() for name in t]
        titles = ["changed", *timed["1 %"]["mb_s"], *threads]
        rows = (
            [name, *t["mb_s"].values()]
            + [speed for each in t["threads"].values() for speed in each.values()]
            for name, t in timed.items()
        )
        print("\n".join(["", *markdown(titles, rows)]))
    if not arguments.quick:
        save(result, RESULTS)


if __name__ == "__main__":
    main()
