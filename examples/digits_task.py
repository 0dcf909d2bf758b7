"""What the examples train: a small convolutional net on the 1,797 scanned digits of scikit-learn.

Needs `pip install scikit-learn`. By itself it trains with torch alone, densely: torchrun
--nproc-per-node 2 examples/digits_task.py
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HELD_OUT = 297


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """This rank and how many there are, by torchrun or thinwire run; without them one worker."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    yield (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if dist.is_initialized():
        dist.destroy_process_group()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """To train on, and held out: images (1, 8, 8) in [0, 1] and labels."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    train = TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT])
    return train, TensorDataset(images[-HELD_OUT:], labels[-HELD_OUT:])


def loaders(rank: int, size: int, batch: int = 32) -> tuple[DataLoader, DataLoader]:
    """This rank's share of the digits, in an order of its own in each epoch; and all held out."""
    train, held_out = digits()
    share = DistributedSampler(train, size, rank)
    return DataLoader(train, batch, sampler=share, drop_last=True), DataLoader(held_out, 100)


def net() -> nn.Sequential:
    """80,122 parameters, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(512, 144), nn.ReLU()),
        nn.Linear(144, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """The share of the digits that it tells right."""
    right = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(right).mean().item()


def main() -> None:
    with ranks() as (rank, size):
        train, held_out = loaders(rank, size)
        model = net()
        trained = model if size == 1 else nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for epoch in range(5):
            train.sampler.set_epoch(epoch)
            for images, labels in train:
                nn.functional.cross_entropy(trained(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0:
                print(f"epoch {epoch + 1}: {accuracy(model, held_out):.1%} of the held-out digits")


if __name__ == "__main__":
    main()
