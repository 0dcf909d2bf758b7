"""Average now and then instead of in every step: torchrun --nproc-per-node 2
examples/local_sgd.py.
"""

import os

import torch
import torch.distributed as dist

import thinwire as tw

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


def train(config: tw.LocalSGD | tw.AdaptiveLocalSGD, rank: int) -> tuple[float, dict[str, float]]:
    torch.manual_seed(0)
    teacher = torch.nn.Linear(64, 10)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # or any other

    torch.manual_seed(1 + rank)  # every rank sees data of its own
    with tw.local_sgd(model, optimizer, config) as sync:
        for _ in range(200):
            x = torch.randn(64, 64)
            loss = torch.nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
            loss.backward()
            sync.observe(loss)  # the adaptive interval follows it
            optimizer.step()  # averages after the step when its turn has come
            optimizer.zero_grad()

    torch.manual_seed(99)
    x = torch.randn(2000, 64)
    with torch.no_grad():
        return float(
            torch.nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        ), sync.stats()


def main() -> None:
    if "RANK" in os.environ:  # under torchrun; without it the same code runs as one worker
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, config in METHODS.items():
        loss, stats = train(config, rank)
        if rank == 0:
            print(
                f"{name:15} held-out loss {loss:.3f}, {stats['averagings']:3} averagings, "
                f"{stats['ratio']:5.0f} times fewer bytes than a dense gradient in every step"
            )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
