"""LARS instead of an SGD, for large batches, with a warm-up: torchrun --nproc-per-node 2
examples/lars.py. Started again, it goes on from its last checkpoint.
"""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS, FOLDER = 30, "checkpoints/lars"


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size, batch=256)
        model = net()
        decay = tw.schedules.CosineDecay(0.0, 2.0, EPOCHS * len(train) - 10)
        rate = tw.schedules.WarmUp(2.0, 10).then(decay, at=10)
        optimizer = tw.optim.SGD(model.named_parameters(), lr=rate, momentum=0.9)
        strategy = tw.DistributedStrategy(
            lars=tw.LARS(lars_coeff=0.02, exclude_from_weight_decay=("*.bias",))
        )
        engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)
        done = engine.extra["epochs"] if engine.load(FOLDER, if_any=True) else 0
        for epoch in range(done, EPOCHS):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                loss = engine.train_step(images, labels)
            engine.save(FOLDER, extra={"epochs": epoch + 1})
            if rank == 0 and epoch % 10 == 9:
                first = engine.trust_ratios()["0.0.weight"]
                print(f"epoch {epoch + 1}: loss {loss:.3f}, trust ratio of the first {first:.2g}")
        engine.flush()
        if rank == 0:
            print(f"{accuracy(model, held_out):.1%} of the held-out digits after {EPOCHS} epochs")


if __name__ == "__main__":
    main()
