"""A task for `thinwire compare --task examples/tasks/digits.py:task`: a small convolutional net on
scanned digits.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import thinwire as tw

BATCH, HELD_OUT = 32, 297


def batches_of(images: torch.Tensor, labels: torch.Tensor, seed: int):
    """Random batches without end."""
    random = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (BATCH,), generator=random)
        yield images[chosen], labels[chosen]


def task(seed: int) -> tw.Task:
    """The command calls it once per rank and strategy."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 9, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = images[-HELD_OUT:], labels[-HELD_OUT:]
    train = images[:-HELD_OUT], labels[:-HELD_OUT]
    return tw.Task(
        model=model,
        loss_fn=nn.functional.cross_entropy,
        batches=lambda rank, world: batches_of(*train, seed=1000 * seed + rank),
        evaluate=lambda model: nn.functional.cross_entropy(model(held_out[0]), held_out[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    )
