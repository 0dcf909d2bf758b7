"""Held-out loss of compressed changes: local updates of several ranks, simulated in one process.

    python -m benchmarks.changes --steps 1000 --size small --contenders uncompressed quantized-4

Every rank trains the byte transformer of `thinwire compare` by AdamW on batches of its own; every
`--k-steps` steps the changes travel by the library's own codes and messages, handed from rank to
rank in this process. All contenders see the same batches. One line each at the end of its run:
held-out loss at the common anchor, its distance to the uncompressed run of the same seed if that
ran before, and bytes a rank and averaging. Not part of `make bench`.
"""

import argparse
import copy
import json
import math
import time
from typing import cast

import torch
from torch import Tensor, nn

import thinwire as tw
from benchmarks.common import bare_parser
from thinwire.compress.protocol import ERRORS, AllGather, ChangeCompression, Context
from thinwire.tools.run.built_in import ByteTransformer
from thinwire.tools.run.config import parse_size
from thinwire.tools.run.text import read_standard_library

CONTENDERS: dict[str, ChangeCompression | None] = {
    "uncompressed": None,
    **{f"quantized-{bits}": tw.Quantized(bits) for bits in (1, 2, 4, 8, 16)},
    "sparse-senders": tw.Sparse(0.9),
    "sparse-all": tw.Sparse(0.9, mean_over="all"),
}
HELD_OUT = 256
WARM_STEPS = 100


class Text:
    """Sequences of bytes, drawn alike for all contenders."""

    def __init__(self, context: int) -> None:
        corpus = read_standard_library()
        self.train, self.held_out = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8)
            for part in (corpus.train, corpus.held_out)
        )
        self.context = context

    def batch(self, data: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (count, context) each."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - self.context, (count,), generator=generator)
        rows = torch.stack([data[i : i + self.context + 1] for i in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Ranks:
    """Models of several ranks, their anchor, and what each has kept."""

    def __init__(
        self, model: nn.Module, count: int, lr: float, compression: ChangeCompression | None
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
            for m in self.models
        ]
        self.compression = compression
        self.anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.kept = [
            {ERRORS: {n: torch.zeros_like(a) for n, a in self.anchor.items()}} for _ in self.models
        ]

    @torch.no_grad()
    def average(self, step: int) -> int:
        """Move all models to the mean, as far as it travels; the bytes that one rank sent."""
        params = [dict(m.named_parameters()) for m in self.models]
        changes = [{n: a - own[n] for n, a in self.anchor.items()} for own in params]
        if self.compression is None:
            means = {n: sum(c[n] for c in changes) / len(changes) for n in self.anchor}
            nbytes = sum(4 * a.numel() for a in self.anchor.values())
        else:
            for change, kept in zip(changes, self.kept, strict=True):
                for name, folded in change.items():
                    folded.add_(kept[ERRORS][name], alpha=self.compression.decay)
            given = enumerate(zip(changes, self.kept, strict=True))
            count = len(changes)
            sendings = [
                self.compression.send(Context(step, 0, r, count), c, k) for r, (c, k) in given
            ]
            gathers = [cast("AllGather", next(sending)[0]) for sending in sendings]
            rows = torch.stack([gather.message for gather in gathers])
            nbytes = rows.shape[1]
            for sending, change, kept in zip(sendings, changes, self.kept, strict=True):
                try:
                    sending.send([rows])
                except StopIteration as end:
                    means = {
                        name: end.value.take_mean_(name, folded, kept)
                        for name, folded in change.items()
                    }
        for name, anchor in self.anchor.items():
            anchor.sub_(means[name])
            for own in params:
                own[name].copy_(anchor)
        return nbytes


def rate_factor(step: int, steps: int) -> float:
    warm = min(WARM_STEPS, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def run(name: str, seed: int, text: Text, options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(seed)
    ranks = Ranks(
        ByteTransformer(parse_size(options.size)), options.ranks, options.lr, CONTENDERS[name]
    )
    nbytes = 0
    for step in range(options.steps):
        for rank, (model, optimizer) in enumerate(zip(ranks.models, ranks.optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = options.lr * rate_factor(step, options.steps)
            loss = loss_of(
                model, text.batch(text.train, options.batch, 1_000_003 * seed + 1009 * step + rank)
            )
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % options.k_steps == 0 or step + 1 == options.steps:
            nbytes = ranks.average(step + 1)
    with torch.no_grad():
        pieces = [
            loss_of(ranks.models[0], text.batch(text.held_out, 32, i))
            for i in range(HELD_OUT // 32)
        ]
    return {"loss": float(torch.stack(pieces).mean()), "bytes": nbytes}


def main() -> None:
    parser = bare_parser(__doc__)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--size", default="small", help="as of thinwire compare")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--k-steps", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = Text(parse_size(options.size).context)
    for seed in options.seeds:
        reference = None
        for name in options.contenders:
            begin = time.perf_counter()
            found = run(name, seed, text, options)
            if name == "uncompressed":
                reference = found["loss"]
            line = {"contender": name, "seed": seed, "steps": options.steps, **found}
            if reference is not None:
                line["percent above uncompressed"] = round(100 * (found["loss"] / reference - 1), 3)
            print(json.dumps({**line, "seconds": round(time.perf_counter() - begin)}), flush=True)


if __name__ == "__main__":
    main()
