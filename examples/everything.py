"""All that composes, in one strategy; a checkpoint on the way: torchrun --nproc-per-node 2
examples/everything.py.
"""

import os

import torch
import torch.distributed as dist

import thinwire as tw


def main() -> None:
    if "RANK" in os.environ:  # under torchrun; without it the same code runs as one worker
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    teacher = torch.nn.Linear(64, 10)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    strategy = tw.DistributedStrategy(
        amp=tw.AMP("bfloat16", loss_scale=tw.DynamicLossScale(init_loss_scale=2.0**15)),
        recompute=tw.Recompute(checkpoints=("2",)),
        pipeline=tw.Pipeline(
            stages=dist.get_world_size() if dist.is_initialized() else 1, micro_batches=2
        ),
        gradient_merge=tw.GradientMerge(k_steps=2),
        dgc=tw.DGC(sparsity=(0.99,)),  # of the change that local steps have made
        lamb=tw.LAMB(exclude_from_weight_decay=("*.bias",)),
        localsgd=tw.LocalSGD(k_steps=4),
    )
    if rank == 0:
        strategy.explain()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)

    torch.manual_seed(1)
    for step in range(200):
        x = torch.randn(64, 64)
        loss = engine.train_step(x, teacher(x).argmax(1))
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    engine.flush()

    engine.save(
        "checkpoints", extra={"epoch": 1}
    )  # every rank its part; survives a kill at any point
    engine.load(
        "checkpoints", if_any=True
    )  # goes on bit for bit, also on another number of ranks; engine.extra
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
