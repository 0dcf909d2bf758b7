"""Local Muon at one bit, beside local AdamW at four: torchrun --nproc-per-node 2
examples/muon_local.py.
"""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS = 5
STEPS = 16
"""Of every rank by itself, before the ranks average."""


def train(bits: int, muon: bool, rank: int, size: int) -> str:
    batches, held_out = loaders(rank, size)
    model = net()
    optimizer: torch.optim.Optimizer
    if muon:  # hidden matrices are Muon's; kernels, biases and the last layer are AdamW's
        optimizer = tw.optim.Muon(tw.optim.muon_groups(model), lr=6e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = tw.LocalSGD(k_steps=STEPS, begin_step=10, compression=tw.Quantized(bits))
    strategy = tw.DistributedStrategy(localsgd=config)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            engine.train_step(images, labels)
    engine.flush()
    stats = engine.stats()
    return (
        f"{accuracy(model, held_out):.1%} of the held-out digits, "
        f"{stats['ratio']:.0f} times fewer bytes than a dense gradient in every step"
    )


def main() -> None:
    with ranks() as (rank, size):
        for name, bits, muon in (("local Muon, 1 bit", 1, True), ("local AdamW, 4 bits", 4, False)):
            said = train(bits, muon, rank, size)
            if rank == 0:
                print(f"{name:20} {said}")


if __name__ == "__main__":
    main()
