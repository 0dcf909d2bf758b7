"""Common to train.py and ddp.py: arguments, model, evaluation and a line of the log."""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from model import SIZES, Llama
from torch import Tensor


def arguments(rate: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--data", type=Path, default=Path("data"), help="what data.py wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"))
    parser.add_argument("--steps", type=int, default=320, help="updates of each rank")
    parser.add_argument("--batch", type=int, default=8, help="windows of a rank and backward pass")
    parser.add_argument("--merge", type=int, default=1, help="backward passes of an update")
    parser.add_argument("--lr", type=float, default=rate, help="at the end of the warm-up")
    parser.add_argument("--warm-up", type=int, default=32, help="steps; then a cosine to a tenth")
    parser.add_argument("--every", type=int, default=32, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0)
    # a CPU without instructions for bfloat16 takes ten times as long in it
    parser.add_argument("--bfloat16", action="store_true", default=torch.cuda.is_available())
    return parser


def model_of(args: argparse.Namespace) -> tuple[Llama, torch.device]:
    """The model on the device of this rank, with equal parameters on all."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    index = json.loads((args.data / "index.json").read_text(encoding="utf-8"))
    return Llama(SIZES[args.size], index["vocabulary"]).to(device), device


def mean_loss(evaluate: Callable[[Tensor, Tensor], Tensor], batches: list[list[Tensor]]) -> float:
    """Nats a token of equal batches, by a function from inputs and targets to a loss."""
    with torch.no_grad():
        return sum(evaluate(x, y).item() for x, y in batches) / len(batches)


def announce(step: int, loss: Tensor, begun_s: float, every: int) -> None:
    """Print the first step's loss and seconds; lines of the log follow at every so many steps."""
    took_s = time.perf_counter() - begun_s
    print(f"step {step}: loss {loss.item():.4g}, {took_s:.1f} s; next: {every} steps", flush=True)


def report(out: Path, numbers: dict[str, float], stats: dict[str, float], step: int) -> None:
    """Print the first numbers, and append all to log.jsonl."""
    shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    print(f"step {step}: {shown}", flush=True)
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        print(json.dumps({"step": step} | numbers | stats), file=log)
