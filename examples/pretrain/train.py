"""Pretrains a Llama by local Muon: ranks train alone, and average at one bit an entry.

    python examples/pretrain/data.py                                             # once
    python examples/pretrain/train.py                                            # alone
    torchrun --nproc-per-node 2 examples/pretrain/train.py                       # fixed ranks
    python examples/pretrain/train.py --join tcp://10.0.0.1:29400 --token token  # a member

Started again, it continues from the last checkpoint in --out. Members come and go: docs/members.md.
"""

import argparse
import os
import signal
import time
from functools import partial

import torch
import torch.distributed as dist
from common import announce, arguments, mean_loss, model_of, report
from data import Windows, batches, held_out
from model import SIZES, loss_of

import thinwire as tw
from thinwire.schedules import CosineDecay, WarmUp


def strategy_of(args: argparse.Namespace, device: torch.device) -> tw.DistributedStrategy:
    size = SIZES[args.size]
    # with recompute memory is short: what averagings need lies in that of the host
    state_device = "cpu" if size.recompute and device.type == "cuda" else None
    return tw.DistributedStrategy(
        localsgd=tw.LocalSGD(
            args.k_steps, begin_step=0, compression=tw.Quantized(1), state_device=state_device
        ),
        amp=tw.AMP("bfloat16") if args.bfloat16 and size.dtype == torch.float32 else None,
        recompute=tw.Recompute(("model.layers.*",)) if size.recompute else None,
        gradient_merge=tw.GradientMerge(args.merge) if args.merge > 1 else None,
    )


def main(args: argparse.Namespace, members: tw.Members | None = None) -> None:
    model, device = model_of(args)
    data = Windows(args.data, "train", SIZES[args.size].context)
    sampler = tw.ShardedSampler(data, seed=args.seed, members=members)
    validation = held_out(args.data, data.context, args.batch, device)
    decay = CosineDecay(args.lr / 10, args.lr, max(1, args.steps - args.warm_up))
    rate = WarmUp(args.lr, args.warm_up).then(decay, at=args.warm_up)
    optimizer = tw.optim.Muon(tw.optim.muon_groups(model), lr=rate, weight_decay=0.1)
    engine = strategy_of(args, device).prepare(
        model, optimizer, loss_of, grad_clip=tw.ClipByGlobalNorm(1.0), members=members
    )
    if engine.load(args.out, if_any=True):
        sampler.load_state_dict(engine.extra["sampler"])
    source, sync = batches(data, args.batch, sampler, device), engine.sync
    tokens, begun_s, begin = 0, time.perf_counter(), sync.step
    while sync.step < args.steps and not sync.left:
        step, (x, y) = sync.step, next(source)
        loss = engine.train_step(x, y)
        tokens += x.numel()
        fixed = dist.get_rank() if dist.is_initialized() else 0
        leads = (fixed if members is None else members.rank) == 0
        if leads and step == begin:
            announce(sync.step, loss, begun_s, args.every)
        if sync.step == step or (sync.step % args.every and sync.step < args.steps):
            continue
        if members is None:  # a joiner would miss it: give members --every in whole rounds
            engine.flush()  # all ranks have one model; between two averagings each has its own
        if leads:
            numbers = {"tokens_s": tokens / (time.perf_counter() - begun_s), "loss": loss.item()}
            numbers["validation"] = mean_loss(engine.evaluate, validation)
            tw.log_stats(engine, partial(report, args.out, numbers))
        if leads or members is None:  # ranks save together; of members one does
            engine.save(args.out, extra={"sampler": sampler})
        tokens, begun_s = 0, time.perf_counter()
    engine.close()


if __name__ == "__main__":
    parser = arguments(rate=1.2e-2)
    parser.add_argument("--k-steps", type=int, default=8, help="steps between two averagings")
    parser.add_argument("--join", help="address of thinwire host")
    parser.add_argument("--token", help="file with the host's token")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.join:
        with tw.join(args.join, run=f"pretrain-{args.size}", token_file=args.token) as members:
            signal.signal(signal.SIGTERM, lambda *_: members.leave())  # after the running round
            members.on_change(lambda now: print(f"step {now.step}: {now.size} members", flush=True))
            main(args, members)
    elif "RANK" in os.environ:
        dist.init_process_group()
        main(args)
        dist.destroy_process_group()
    else:
        main(args)
