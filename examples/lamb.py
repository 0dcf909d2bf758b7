"""LAMB instead of an Adam, for large batches, with a warm-up: torchrun --nproc-per-node 2
examples/lamb.py. Started again, it goes on from its last checkpoint.
"""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS, FOLDER = 30, "checkpoints/lamb"


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size, batch=256)
        model = net()
        decay = tw.schedules.CosineDecay(0.0, 0.04, EPOCHS * len(train) - 10)
        rate = tw.schedules.WarmUp(0.04, 10).then(decay, at=10)
        optimizer = tw.optim.AdamW(model.named_parameters(), lr=rate)
        strategy = tw.DistributedStrategy(lamb=tw.LAMB(exclude_from_weight_decay=("*.bias",)))
        engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)
        done = engine.extra["epochs"] if engine.load(FOLDER, if_any=True) else 0
        for epoch in range(done, EPOCHS):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                loss = engine.train_step(images, labels)
            engine.save(FOLDER, extra={"epochs": epoch + 1})
            if rank == 0 and epoch % 10 == 9:
                print(f"epoch {epoch + 1}: loss {loss:.3f}")
        engine.flush()
        if rank == 0:
            print(f"{accuracy(model, held_out):.1%} of the held-out digits after {EPOCHS} epochs")


if __name__ == "__main__":
    main()
