"""The tasks that come with the command: the next byte of a text, and scanned digits.

Batches are the same for every strategy, different on every rank.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from thinwire.tools.run.config import RunConfig
from thinwire.tools.run.model import ByteTransformer, ConvolutionalNet
from thinwire.tools.run.size import ConvolutionSize, ModelSize
from thinwire.tools.run.text import CLASSES, PIXELS, SIDE, WHITE

__all__ = ["Digits", "NextByte", "Pair", "loss_of", "seed_of"]

Pair = tuple[Any, Any]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of each prediction, in nats.

    Args:
        outputs: Logits of shape (..., classes), of any floating type.
        targets: Classes of shape (...).
    """
    return nn.functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


@final
class NextByte:
    """Predict the next byte of a text."""

    make_optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None
    alike = False

    def __init__(
        self, config: RunConfig, size: ModelSize, rank: int, world: int, device: torch.device
    ) -> None:
        torch.manual_seed(config.seed)
        self.model: nn.Module = ByteTransformer(size).to(device)
        self.loss_fn: Callable[[Any, Any], Tensor] = loss_of
        self.device = device
        self.train, self.held_out = _bytes_of(config.train_file), _bytes_of(config.held_out_file)
        self.context, self.batch = size.context, config.batch
        self.random = _random_of(config.seed, rank)
        fixed = torch.Generator().manual_seed(config.seed)
        starts = self._starts(self.held_out, config.held_out_sequences, fixed)[rank::world]
        self.held_out_batches = [
            self._take(self.held_out, part) for part in _split(starts, self.batch)
        ]

    def _starts(self, text: Tensor, count: int, random: torch.Generator) -> Tensor:
        return torch.randint(len(text) - self.context, (count,), generator=random)

    def _take(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        pieces = torch.stack(
            [text[start : start + self.context + 1] for start in starts.tolist()]
        ).long()
        pieces = pieces.to(self.device)
        return pieces[:, :-1], pieces[:, 1:]

    def next_batch(self) -> Pair:
        """See `Work`; each of shape (batch, context)."""
        return self._take(self.train, self._starts(self.train, self.batch, self.random))

    def some_batch(self, seed: int) -> Pair:
        size = (2, self.batch, self.context)
        made = torch.randint(256, size, generator=torch.Generator().manual_seed(seed))
        inputs, targets = made.to(self.device)
        return inputs, targets

    def evaluate(self, model: nn.Module) -> float:
        """See `Work`: mean loss per byte over all ranks, in nats; every rank has its share."""
        return _mean_loss(model, self.held_out_batches)


@final
class Digits:
    """Tell scanned digits apart."""

    make_optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None
    alike = False

    def __init__(
        self, config: RunConfig, size: ConvolutionSize, rank: int, world: int, device: torch.device
    ) -> None:
        torch.manual_seed(config.seed)
        self.model: nn.Module = ConvolutionalNet(size).to(device)
        self.loss_fn: Callable[[Any, Any], Tensor] = loss_of
        self.device, self.batch = device, config.batch
        self.train, held_out = (
            _bytes_of(path).view(-1, PIXELS + 1)
            for path in (config.train_file, config.held_out_file)
        )
        self.random = _random_of(config.seed, rank)
        share = torch.arange(rank, len(held_out), world)
        self.held_out_batches = [self._take(held_out[part]) for part in _split(share, self.batch)]

    def _take(self, records: Tensor) -> tuple[Tensor, Tensor]:
        images = records[:, :PIXELS].float().view(-1, 1, SIDE, SIDE) / WHITE
        return images.to(self.device), records[:, PIXELS].long().to(self.device)

    def next_batch(self) -> Pair:
        """See `Work`; images of shape (batch, 1, 8, 8) from 0 to 1, and classes of (batch,)."""
        chosen = torch.randint(len(self.train), (self.batch,), generator=self.random)
        return self._take(self.train[chosen])

    def some_batch(self, seed: int) -> Pair:
        random = torch.Generator().manual_seed(seed)
        images = torch.rand(self.batch, 1, SIDE, SIDE, generator=random)
        classes = torch.randint(CLASSES, (self.batch,), generator=random)
        return images.to(self.device), classes.to(self.device)

    def evaluate(self, model: nn.Module) -> float:
        """See `Work`: mean loss per digit over all ranks, in nats; every rank has its share.

        The running statistics of the batches are those that the model holds on each rank.
        """
        return _mean_loss(model, self.held_out_batches)


def _mean_loss(model: nn.Module, batches: Sequence[Pair]) -> float:
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for inputs, targets in batches:
            loss = loss_of(model(inputs), targets)
            total += torch.tensor([loss.item() * targets.numel(), targets.numel()])
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def seed_of(seed: int, rank: int) -> int:
    """The seed of the batches of one rank."""
    return (seed * 1_000_003 + rank) % 2**63


def _random_of(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(seed, rank))


def _split(chosen: Tensor, batch: int) -> Sequence[Tensor]:
    """Pieces of a rank's share of the held-out part; none where there are fewer than ranks."""
    return torch.split(chosen, batch) if len(chosen) else []


def _bytes_of(path: str) -> Tensor:
    return torch.from_file(path, size=Path(path).stat().st_size, dtype=torch.uint8)
