"""Deep gradient compression in a loop of your own: torchrun --nproc-per-node 2 examples/dgc.py."""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS = 5


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size)
        model = net()
        optimizer = tw.optim.DGCMomentum(
            model.named_parameters(),
            lr=0.05,
            momentum=0.9,
            rampup_begin_step=10,  # dense until then
            rampup_step=30,
            sparsity=(0.75, 0.9375, 0.99),  # the fraction that is *not* sent
        )
        for epoch in range(EPOCHS):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                sent = optimizer.stats()["bytes_sent"]
                print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {sent:,} bytes sent")
        if rank == 0:
            print(f"{accuracy(model, held_out):.1%} of the held-out digits")
            print(f"{optimizer.stats()['ratio']:.1f} times fewer bytes than dense")


if __name__ == "__main__":
    main()
