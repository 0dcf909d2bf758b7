"""An evaluator follows a training bit for bit: torchrun --nproc-per-node 2 examples/follow.py.

On another machine it is `python examples/follow.py WHERE`, with any address that fsspec knows.
"""

import subprocess
import sys
import tempfile

import torch
from digits_task import accuracy, loaders, net, ranks

import thinwire as tw

EPOCHS = 5


def follow(where: str) -> None:
    _, held_out = loaders(0, 1)
    model = net()
    for version in tw.follow(where, model, poll=0.05):
        right = accuracy(model, held_out)
        print(f"version {version.number}, step {version.step}: {right:.1%} of the held-out digits")


def train(where: str, rank: int, size: int) -> None:
    batches, _ = loaders(rank, size)
    model = net()
    optimizer = tw.optim.Muon(tw.optim.muon_groups(model), lr=6e-3)
    config = tw.LocalSGD(k_steps=16, begin_step=10, compression=tw.Quantized(1))
    strategy = tw.DistributedStrategy(localsgd=config)
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy)
    engine.publish(where)  # after each averaging, by rank 0
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            engine.train_step(images, labels)
    engine.flush()
    engine.close()  # ends the evaluator's loop


def main() -> None:
    if len(sys.argv) > 1:
        follow(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as where, ranks() as (rank, size):
        if rank:
            train(where, rank, size)
            return
        command = [sys.executable, __file__, where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as evaluator:
            train(where, rank, size)
            print(evaluator.communicate()[0], end="")


if __name__ == "__main__":
    main()
