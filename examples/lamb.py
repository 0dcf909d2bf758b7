"""LAMB instead of an Adam, for large batches, with a warm-up: torchrun --nproc-per-node 2
examples/lamb.py.
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
    strategy = tw.DistributedStrategy(lamb=tw.LAMB(exclude_from_weight_decay=("*.bias",)))
    rate = tw.schedules.WarmUp(0.01, 20).then(tw.schedules.CosineDecay(0.0, 0.01, 80), at=20)
    optimizer = tw.optim.Adam(model.named_parameters(), lr=rate)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)

    torch.manual_seed(1 + rank)
    for step in range(100):
        x = torch.randn(512, 64)
        loss = engine.train_step(x, teacher(x).argmax(1))
        if rank == 0 and step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    engine.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
