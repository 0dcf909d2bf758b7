"""A narrow forward pass with a loss scale that follows the overflows: torchrun --nproc-per-node 2
examples/amp.py.
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
        amp=tw.AMP(
            "bfloat16", loss_scale=tw.DynamicLossScale(init_loss_scale=2.0**15, scale_window=50)
        ),
    )
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)

    torch.manual_seed(1 + rank)
    for step in range(100):
        x = torch.randn(64, 64)
        loss = engine.train_step(x, teacher(x).argmax(1))
        if rank == 0 and step % 25 == 24:
            stats = engine.stats()
            print(f"step {step + 1}: loss {loss.item():.3f}, scale {stats['loss_scale']:.0f}")
    engine.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
