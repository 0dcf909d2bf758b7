"""A model in two stages on two ranks, in micro-batches: torchrun --nproc-per-node 2
examples/pipeline.py. Started again, it goes on from its last checkpoint.
"""

import torch
from digits_task import loaders, net, ranks

import thinwire as tw

EPOCHS, FOLDER = 5, "checkpoints/pipeline"


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(0, 1)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        strategy = tw.DistributedStrategy(pipeline=tw.Pipeline(stages=size, micro_batches=4))
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
        images, labels = next(iter(held_out))
        held_out_loss = engine.evaluate(images, labels)  # all stages take part
        if rank == 0:
            trained = sum(p.numel() for p in engine.model.parameters())
            print(f"held-out loss {held_out_loss:.3f}; rank 0 trained {trained:,} parameters")


if __name__ == "__main__":
    main()
