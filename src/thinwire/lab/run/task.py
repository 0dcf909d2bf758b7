"""The task of the comparison: predict the next byte of a text."""

from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.lab.run.config import RunConfig
from thinwire.lab.run.model import ByteTransformer

__all__ = ["Batches", "evaluate", "initial_model", "loss_of", "random_batch"]

Pair = tuple[Tensor, Tensor]


def initial_model(config: RunConfig) -> ByteTransformer:
    """Make the model that every strategy starts from, equal on all ranks."""
    torch.manual_seed(config.seed)
    return ByteTransformer(config.model)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats.

    Args:
        outputs: Logits of shape (batch, context, 256), of any floating type.
        targets: Bytes of shape (batch, context).
    """
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())


def evaluate(model: nn.Module, batches: list[Pair]) -> float:
    """Mean held-out loss per byte over all ranks, in nats; every rank brings its own batches."""
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in batches:
            loss = loss_of(model(inputs), targets)
            total += torch.tensor([loss.item() * targets.numel(), targets.numel()])
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def random_batch(config: RunConfig, seed: int) -> Pair:
    """Inputs and targets of one training step that mean nothing."""
    size = (2, config.batch, config.model.context)
    inputs, targets = torch.randint(256, size, generator=torch.Generator().manual_seed(seed))
    return inputs, targets


@final
class Batches:
    """Batches of bytes: the same for every strategy, different on every rank.

    Args:
        config: Of the run.
        rank: Of this process.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        self.train, self.held_out = _bytes_of(config.train_file), _bytes_of(config.held_out_file)
        self.context, self.batch = config.model.context, config.batch
        self.random = torch.Generator().manual_seed(config.seed * 1_000_003 + rank)
        fixed = torch.Generator().manual_seed(config.seed)
        self.held_out_starts = self._starts(self.held_out, config.held_out_sequences, fixed)

    def _starts(self, text: Tensor, count: int, random: torch.Generator) -> Tensor:
        return torch.randint(len(text) - self.context, (count,), generator=random)

    def _take(self, text: Tensor, starts: Tensor) -> Pair:
        pieces = torch.stack(
            [text[start : start + self.context + 1] for start in starts.tolist()]
        ).long()
        return pieces[:, :-1], pieces[:, 1:]

    def next_batch(self) -> Pair:
        """Inputs and targets, each of shape (batch, context), for the next training step of this
        rank.
        """
        return self._take(self.train, self._starts(self.train, self.batch, self.random))

    def held_out_batches(self, rank: int, world: int) -> list[Pair]:
        """This rank's share of the held-out sequences."""
        mine = self.held_out_starts[rank::world]
        return (
            [self._take(self.held_out, part) for part in torch.split(mine, self.batch)]
            if len(mine)
            else []
        )


def _bytes_of(path: str) -> Tensor:
    return torch.from_file(path, size=Path(path).stat().st_size, dtype=torch.uint8)
