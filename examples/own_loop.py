"""A loop of your own; the engine does what comes after the loss: torchrun --nproc-per-node 2
examples/own_loop.py.
"""

import os

import torch
import torch.distributed as dist

import thinwire as tw


def main() -> None:
    if "RANK" in os.environ:  # under torchrun; without it the same code runs as one worker
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    teacher = torch.nn.Linear(64, 10)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = tw.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    strategy = tw.DistributedStrategy(
        dgc=tw.DGC(sparsity=(0.99,)), gradient_merge=tw.GradientMerge(k_steps=2)
    )
    engine = strategy.prepare(model, optimizer)  # no loss function: it is yours

    torch.manual_seed(1 + rank)
    for step in range(200):
        x = torch.randn(32, 64)
        outputs = engine.model(x)
        loss = torch.nn.functional.cross_entropy(outputs, teacher(x).argmax(1))
        loss = loss + 1e-4 * outputs.square().mean()  # whatever you like
        engine.minimize(loss)  # backward, exchange, update: one microstep
        if step % 50 == 49:
            mean = engine.mean_loss(loss)  # over the ranks, when you ask for it
            if rank == 0:
                print(
                    f"microstep {step + 1}: mean loss {mean:.3f}, {engine.stats()['bytes_sent']:,} "
                    "bytes sent"
                )
    engine.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
