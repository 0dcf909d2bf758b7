"""LARS instead of an SGD, for large batches: torchrun --nproc-per-node 2 examples/lars.py."""

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
        lars=tw.LARS(lars_coeff=0.02, exclude_from_weight_decay=("*.bias",))
    )
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0, momentum=0.9)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)

    torch.manual_seed(1 + rank)
    for step in range(100):
        x = torch.randn(512, 64)
        loss = engine.train_step(x, teacher(x).argmax(1))
        if rank == 0 and step % 25 == 24:
            ratios = engine.trust_ratios()
            print(
                f"step {step + 1}: loss {loss.item():.3f}, trust ratio of the first layer "
                f"{ratios['0.weight']:.2g}"
            )
    engine.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
