"""Less memory for activations, at the cost of a second forward pass: torchrun --nproc-per-node 2
examples/recompute.py. Started again, it goes on from its last checkpoint.
"""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS, FOLDER = 5, "checkpoints/recompute"


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        strategy = tw.DistributedStrategy(recompute=tw.Recompute(checkpoints=("0", "1")))
        engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)
        done = engine.extra["epochs"] if engine.load(FOLDER, if_any=True) else 0
        for epoch in range(done, EPOCHS):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                loss = engine.train_step(images, labels)
            engine.save(FOLDER, extra={"epochs": epoch + 1})
            if rank == 0:
                print(f"epoch {epoch + 1}: loss {loss:.3f}")
        engine.flush()
        if rank == 0:
            print(f"{accuracy(model, held_out):.1%} of the held-out digits after {EPOCHS} epochs")


if __name__ == "__main__":
    main()
