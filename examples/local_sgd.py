"""Average now and then instead of in every step: torchrun --nproc-per-node 2
examples/local_sgd.py.
"""

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS = 5
METHODS = {
    "LocalSGD": tw.LocalSGD(k_steps=16, begin_step=10),
    "adaptive": tw.AdaptiveLocalSGD(init_k_steps=16, begin_step=10),
    "DiLoCo": tw.LocalSGD(
        k_steps=16, begin_step=0, outer_lr=0.7, outer_momentum=0.5, outer_nesterov=True
    ),
    "4-bit changes": tw.LocalSGD(k_steps=16, begin_step=10, compression=tw.Quantized(value_bits=4)),
    "sparse changes": tw.LocalSGD(k_steps=16, begin_step=10, compression=tw.Sparse(sparsity=0.97)),
    "overlapped": tw.LocalSGD(k_steps=16, begin_step=10, fragments=2, delay=4),
}


def train(config: tw.LocalSGD | tw.AdaptiveLocalSGD, rank: int, size: int) -> str:
    batches, held_out = loaders(rank, size)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # or any other
    with tw.local_sgd(model, optimizer, config) as sync:
        for epoch in range(EPOCHS):
            batches.sampler.set_epoch(epoch)
            for images, labels in batches:
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                sync.observe(loss)  # the adaptive interval follows it
                optimizer.step()  # averages after the step when its turn has come
                optimizer.zero_grad()
    stats = sync.stats()
    return (
        f"{accuracy(model, held_out):.1%} of the held-out digits, {stats['averagings']:3} "
        f"averagings, {stats['ratio']:5.0f} times fewer bytes than a dense gradient in every step"
    )


def main() -> None:
    with ranks() as (rank, size):
        for name, config in METHODS.items():
            said = train(config, rank, size)
            if rank == 0:
                print(f"{name:15} {said}")


if __name__ == "__main__":
    main()
