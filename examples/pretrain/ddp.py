"""The rival of train.py: torchrun --nproc-per-node 2 examples/pretrain/ddp.py.

The same model, data and schedule in DistributedDataParallel, with AdamW or (--muon) dense Muon.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
from common import announce, arguments, mean_loss, model_of, report
from data import Windows, batches, held_out
from model import SIZES, Llama, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


def optimizer_of(args: argparse.Namespace, model: Llama) -> torch.optim.Optimizer:
    if args.muon:
        import thinwire as tw

        return tw.optim.Muon(tw.optim.muon_groups(model), lr=args.lr, weight_decay=0.1)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def main(args: argparse.Namespace) -> None:
    model, device = model_of(args)
    data = Windows(args.data, "train", SIZES[args.size].context)
    validation = held_out(args.data, data.context, args.batch, device)
    source = batches(data, args.batch, DistributedSampler(data, seed=args.seed), device)
    optimizer = optimizer_of(args, model)

    def share(step: int) -> float:
        done = (step - args.warm_up) / max(1, args.steps - args.warm_up)
        return step / args.warm_up if done < 0 else 0.55 + 0.45 * math.cos(math.pi * done)

    def loss_at(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bfloat16):
            return loss_of(model(x), y)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    ddp = DistributedDataParallel(model)
    tokens, begun_s = 0, time.perf_counter()
    for step in range(1, args.steps + 1):
        for micro in range(args.merge):
            ddp.require_backward_grad_sync = micro == args.merge - 1
            x, y = next(source)
            loss = loss_at(x, y, ddp)
            (loss / args.merge).backward()
            tokens += x.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == 1 and dist.get_rank() == 0:
            announce(step, loss, begun_s, args.every)
        if step % args.every == 0 or step == args.steps:
            if dist.get_rank() == 0:
                speed = tokens / (time.perf_counter() - begun_s)
                numbers = {"tokens_s": speed, "loss": loss.item()}
                numbers["validation"] = mean_loss(loss_at, validation)
                report(args.out, numbers, {}, step)
            dist.barrier()
            tokens, begun_s = 0, time.perf_counter()


if __name__ == "__main__":
    parser = arguments(rate=1.5e-3)
    parser.add_argument("--muon", action="store_true", help="dense Muon in place of AdamW")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group()
    main(args)
    dist.destroy_process_group()
