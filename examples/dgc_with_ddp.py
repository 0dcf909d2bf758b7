"""Where DDP was there before, three lines change: torchrun --nproc-per-node 2
examples/dgc_with_ddp.py.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    teacher = torch.nn.Linear(64, 10)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    ddp = DistributedDataParallel(model)
    optimizer = tw.optim.DGCMomentum(
        model.named_parameters(), lr=0.1, sparsity=(0.99,)
    )  # was torch.optim.SGD
    handle = optimizer.attach(
        ddp
    )  # new: the exchange runs in the backward pass and overlaps with it

    torch.manual_seed(1 + rank)
    for step in range(200):
        x = torch.randn(64, 64)
        loss = torch.nn.functional.cross_entropy(ddp(x), teacher(x).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    handle.remove()  # new, and only needed where the model outlives the optimizer
    if rank == 0:
        print(f"{optimizer.stats()['ratio']:.0f} times fewer bytes than dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
