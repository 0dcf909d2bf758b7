"""A loop of your own; the engine does what comes after the loss: torchrun --nproc-per-node 2
examples/own_loop.py. Started again, it goes on from its last checkpoint.
"""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS, FOLDER = 5, "checkpoints/own_loop"


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size, batch=16)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        strategy = tw.DistributedStrategy(
            dgc=tw.DGC(sparsity=(0.99,)), gradient_merge=tw.GradientMerge(k_steps=2)
        )
        engine = strategy.prepare(model, optimizer)  # no loss function: it is yours
        done = engine.extra["epochs"] if engine.load(FOLDER, if_any=True) else 0
        for epoch in range(done, EPOCHS):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                outputs = model(images)
                loss = torch.nn.functional.cross_entropy(outputs, labels)
                loss = loss + 1e-4 * outputs.square().mean()  # whatever you like
                engine.minimize(loss)  # backward, exchange, update: one microstep
            engine.save(FOLDER, extra={"epochs": epoch + 1})
            mean = engine.mean_loss(loss)  # over the ranks, when you ask for it
            if rank == 0:
                sent = engine.stats()["bytes_sent"]
                print(f"epoch {epoch + 1}: mean loss {mean:.3f}, {sent:,} bytes sent")
        engine.flush()
        if rank == 0:
            print(f"{accuracy(model, held_out):.1%} of the held-out digits after {EPOCHS} epochs")


if __name__ == "__main__":
    main()
