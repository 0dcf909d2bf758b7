"""Less memory for activations, paid with a second forward pass: torchrun --nproc-per-node 2
examples/recompute.py.
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
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Dropout(0.1))
        for _ in range(4)
    ]
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(64, 256))
    model.add_module("blocks", torch.nn.Sequential(*blocks))
    model.add_module("last", torch.nn.Linear(256, 10))
    strategy = tw.DistributedStrategy(recompute=tw.Recompute(checkpoints=("blocks.*",)))
    optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-3)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)

    torch.manual_seed(1 + rank)
    for step in range(100):
        x = torch.randn(64, 64)
        loss = engine.train_step(x, teacher(x).argmax(1))
        if rank == 0 and step % 25 == 24:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    engine.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
