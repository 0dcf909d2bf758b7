"""Where DDP was there before, three lines change: torchrun --nproc-per-node 2
examples/dgc_with_ddp.py.
"""

import torch
from digits_task import accuracy, loaders, net, ranks
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

EPOCHS = 5


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size)
        model = net()
        ddp = DistributedDataParallel(model)
        # was torch.optim.SGD
        optimizer = tw.optim.DGCMomentum(model.named_parameters(), lr=0.05, sparsity=(0.99,))
        # new: the exchange runs in the backward pass and overlaps with it
        handle = optimizer.attach(ddp)

        for epoch in range(EPOCHS):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                loss = torch.nn.functional.cross_entropy(ddp(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        handle.remove()  # new, and only needed where the model outlives the optimizer
        if rank == 0:
            print(f"{accuracy(model, held_out):.1%} of the held-out digits")
            print(f"{optimizer.stats()['ratio']:.1f} times fewer bytes than dense")


if __name__ == "__main__":
    main()
