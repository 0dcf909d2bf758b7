"""Cost of one update of LAMB, LARS and outer SGD, against memory bandwidth, torch and others.

    python -m benchmarks.optimizers --threads 2 --out benchmarks/results/optimizers.json
    python -m benchmarks.optimizers --quick

25 M float32 parameters in 160 tensors, once all of one size and once those of a transformer.
Contenders take turns within one run and the median counts. Others than torch are measured where
they are installed.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Work, interleaved_ms, parser_for, save, summary, surroundings
from thinwire import optim
from thinwire.kernels.rules import OuterRule
from thinwire.local.averaging import outer_step_

FLOOR_WORDS = {"LAMB": 10, "LARS": 10, "outer SGD": 5}
"""Per parameter: read p, g, m, v; write m, v; norms; then read and write p.

Outer: read s, change, b; write s, b.
"""

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def equal_shapes(numel: int) -> list[tuple[int, ...]]:
    return [(numel // 160,)] * 160


def transformer_shapes(numel: int) -> list[tuple[int, ...]]:
    """13 blocks of 12 tensors, and four more: positions, the last norm, an embedding that makes up
    the sum.
    """
    width = int((numel / 168) ** 0.5)
    block = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
    ]
    block += [(width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
    rest = [(256, width), (width,), (width,)]
    missing = numel - sum(torch.Size(shape).numel() for shape in 13 * block + rest)
    return [(missing // width, width), *rest, *(13 * block)]


def timm_module(name: str) -> Any:
    """One file of timm's optimizers; importing the package would need torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        return None
    package = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(found.origin).parent / "optim")]
    sys.modules.setdefault("timm_optim", package)
    return importlib.import_module(f"timm_optim.{name}")


class ForeachLamb(torch.optim.Optimizer):
    """LAMB as one would write it with torch's list operations; without groups, exclusions and
    checks.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.params = list[Tensor](params)
        self.means = [torch.zeros_like(p) for p in params]
        self.squares = [torch.zeros_like(p) for p in params]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Make one update."""
        self.steps += 1
        grads = [p.grad for p in self.params if p.grad is not None]
        torch._foreach_lerp_(self.means, grads, 0.1)
        torch._foreach_mul_(self.squares, 0.999)
        torch._foreach_addcmul_(self.squares, grads, grads, 0.001)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, (1 - 0.999**self.steps) ** 0.5)
        torch._foreach_add_(roots, 1e-6)
        updates = torch._foreach_div(self.means, roots)
        torch._foreach_div_(updates, 1 - 0.9**self.steps)
        torch._foreach_add_(updates, self.params, alpha=0.01)
        norms, lengths = torch._foreach_norm(self.params), torch._foreach_norm(updates)
        ratios = torch._foreach_div(norms, list(lengths))
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(self.params, updates, alpha=-1e-3)


def lambs() -> Iterator[tuple[str, Maker | None]]:
    yield "ours", optim.Lamb
    yield "ours, foreach=False", lambda params: optim.Lamb(params, foreach=False)
    yield "foreach LAMB", ForeachLamb
    timm = timm_module("lamb")
    yield (
        "timm Lamb",
        timm and (lambda params: timm.Lamb(params, max_grad_norm=None, always_adapt=True)),
    )
    found = importlib.util.find_spec("pytorch_optimizer")
    other: Any = importlib.import_module("pytorch_optimizer") if found else None
    yield (
        "pytorch_optimizer Lamb",
        other and (lambda params: other.Lamb(params, weight_decay=0.01, max_grad_norm=0.0)),
    )


def larses() -> Iterator[tuple[str, Maker | None]]:
    yield "ours", lambda params: optim.Lars(params, lr=0.1)
    yield "ours, foreach=False", lambda params: optim.Lars(params, lr=0.1, foreach=False)
    timm = timm_module("lars")
    yield (
        "timm Lars",
        timm and (lambda params: timm.Lars(params, lr=0.1, momentum=0.9, weight_decay=5e-4)),
    )


def baselines() -> Iterator[tuple[str, Maker | None]]:
    yield "torch AdamW, foreach", lambda params: torch.optim.AdamW(params, foreach=True)
    yield "torch AdamW, fused", lambda params: torch.optim.AdamW(params, fused=True)


def outer_steps(shapes: list[tuple[int, ...]], changes: list[Tensor]) -> dict[str, Work]:
    """SGD with Nesterov momentum on anchors, as local updates make it after an averaging."""
    rule = OuterRule(lr=0.7, momentum=0.9, nesterov=True)
    buffers = {
        contender: [[torch.zeros(shape) for shape in shapes] for _ in range(2)]
        for contender in ("ours", "torch SGD")
    }

    def ours() -> None:
        for anchor, change, buffer in zip(
            buffers["ours"][0], changes, buffers["ours"][1], strict=True
        ):
            anchor.sub_(outer_step_(change, buffer, rule))

    params = [torch.nn.Parameter(anchor) for anchor in buffers["torch SGD"][0]]
    for param, change in zip(params, changes, strict=True):
        param.grad = change
    sgd = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True, fused=True)
    return {
        "ours": ours,
        "torch SGD, fused": sgd.step,
    }


def step_of(make: Maker, shapes: list[tuple[int, ...]], grads: list[Tensor]) -> Work:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return make(params).step


def measure(method: str, layout: str, numel: int, repeats: int) -> dict[str, object]:
    shapes = {"equal": equal_shapes, "transformer": transformer_shapes}[layout](numel)
    generator = torch.Generator().manual_seed(0)
    grads = [0.01 * torch.randn(shape, generator=generator) for shape in shapes]
    before = torch.stack(torch._foreach_norm(grads))
    if method == "outer SGD":
        works = outer_steps(shapes, grads)
        makers: dict[str, Maker | None] = dict.fromkeys(works)
    else:
        makers = dict([*{"LAMB": lambs, "LARS": larses}[method](), *baselines()])
        works = {
            name: step_of(make, shapes, grads) for name, make in makers.items() if make is not None
        }
    total = sum(grad.numel() for grad in grads)
    times_ms = interleaved_ms(works, total, repeats)
    (medians, word), (fastest, _) = summary(times_ms), summary(times_ms, min)
    if not torch.equal(before, torch.stack(torch._foreach_norm(grads))):
        raise RuntimeError(
            "a contender has changed the gradients, which all of them share; leave it out"
        )
    return {
        "method": method,
        "tensors": f"{len(shapes)}, {layout}",
        "numel": total,
        **word.floors(FLOOR_WORDS[method]),
        "milliseconds": {name: medians.get(name) for name in makers},
        "fastest": {name: fastest.get(name) for name in makers},
    }


def printed(result: dict[str, Any]) -> str:
    lines = [
        f"{result['threads']} threads, medians of {result['repeats']}, load "
        f"{result['load_average']}",
        "",
        "| method | tensors | who | time : ours | fastest : ours | time : floor | time : floor by "
        "adding | ms | floor ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines += [
            f"| {row['method']} | {row['tensors']} | {contender} | {cells(row, contender)} |"
            for contender in row["milliseconds"]
        ]
    return "\n".join(lines)


def cells(row: dict[str, Any], contender: str) -> str:
    ms, fastest, floor = row["milliseconds"], row["fastest"], row["floor"]
    if ms[contender] is None:
        return "not installed" + " | " * 5
    ratios = [
        ms[contender] / ms["ours"],
        fastest[contender] / fastest["ours"],
        ms[contender] / floor,
        ms[contender] / row["floor by adding"],
    ]
    return " | ".join(
        [*(f"{ratio:.2f}" for ratio in ratios), f"{ms[contender]:.1f}", f"{floor:.1f}"]
    )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--numel", type=int, default=25_000_000, help="parameters in all 160 tensors together"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    numel, repeats = (400_000, 3) if arguments.quick else (arguments.numel, arguments.repeats)
    facts = surroundings(repeats)
    rows = [
        measure(method, layout, numel, repeats)
        for layout in ("equal", "transformer")
        for method in FLOOR_WORDS
    ]
    result = {**facts, "rows": rows}
    print(printed(result))
    save(result, arguments.out)


if __name__ == "__main__":
    main()
