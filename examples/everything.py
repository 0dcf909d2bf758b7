"""All that composes, in one strategy: torchrun --nproc-per-node 2
examples/everything.py. Started again, it goes on from its last checkpoint.
"""

import torch
from digits_task import loaders, net, ranks

import thinwire as tw

EPOCHS, FOLDER = 5, "checkpoints/everything"


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(0, 1)
        model = net()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        strategy = tw.DistributedStrategy(
            amp=tw.AMP("bfloat16", loss_scale=tw.DynamicLossScale(init_loss_scale=2.0**15)),
            recompute=tw.Recompute(checkpoints=("1",)),
            pipeline=tw.Pipeline(stages=size, micro_batches=2),
            gradient_merge=tw.GradientMerge(k_steps=2),
            dgc=tw.DGC(sparsity=(0.99,)),  # of the change that local steps have made
            lamb=tw.LAMB(exclude_from_weight_decay=("*.bias",)),
            localsgd=tw.LocalSGD(k_steps=4),
        )
        if rank == 0:
            strategy.explain()
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
            print(f"held-out loss {held_out_loss:.3f} after {EPOCHS} epochs")


if __name__ == "__main__":
    main()
