"""Deep gradient compression in a loop of your own: torchrun --nproc-per-node 2 examples/dgc.py."""

import os

import torch
import torch.distributed as dist

import thinwire as tw


def main() -> None:
    if "RANK" in os.environ:  # under torchrun; without it the same code runs as one worker
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)  # all ranks must start from equal parameters
    teacher = torch.nn.Linear(64, 10)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    optimizer = tw.optim.DGCMomentum(
        model.named_parameters(),
        lr=0.1,
        momentum=0.9,
        rampup_begin_step=20,  # dense until then
        rampup_step=60,
        sparsity=(0.75, 0.9375, 0.99),  # the fraction that is *not* sent
    )

    torch.manual_seed(1 + rank)  # and see different data
    for step in range(200):
        x = torch.randn(64, 64)
        loss = torch.nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 49:
            stats = optimizer.stats()
            print(f"step {step + 1}: loss {loss.item():.3f}, {stats['bytes_sent']:,} bytes sent")
    if rank == 0:
        print(f"{optimizer.stats()['ratio']:.0f} times fewer bytes than dense")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
