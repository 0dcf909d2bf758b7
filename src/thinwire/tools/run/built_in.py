"""Built-in tasks: the next byte of a text, and scanned digits."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter, functional

from thinwire.optim import muon_groups
from thinwire.tools.run.config import HEAD_WIDTH, ConvolutionSize, ModelSize, RunConfig
from thinwire.tools.run.text import CLASSES, PIXELS, SIDE, WHITE

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then feed-forward, each on normalised input and with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        linear = partial(nn.Linear, bias=False)
        self.qkv, self.merge = linear(width, 3 * width), linear(width, width)
        self.widen, self.narrow = linear(width, 4 * width), linear(4 * width, width)
        self.heads = width // HEAD_WIDTH

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (batch, context, width) to the same."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, context, width))
        fed: Tensor = self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return x + fed


class ByteTransformer(nn.Module):
    """Next-byte model: learned positions, pre-normalised blocks, no biases, an output layer."""

    # Source: the usual decoder of Radford et al. 2019, with residual branches that start small by
    # the depth.

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.out = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=_spread(name, p.shape[1], size.layers))

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape (batch, context, 256) for bytes of shape (batch, context)."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits


class ConvolutionalNet(nn.Module):
    """Classifier of ten image classes: four convolutions with batch norm, then their mean."""

    def __init__(self, size: ConvolutionSize) -> None:
        super().__init__()
        width = size.width
        self.features = nn.Sequential(
            *_convolution(1, width, stride=1),
            *_convolution(width, 2 * width, stride=2),
            *_convolution(2 * width, 2 * width, stride=1),
            *_convolution(2 * width, 4 * width, stride=2),
        )
        self.out = nn.Linear(4 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, 10) for images of shape (batch, 1, height, width)."""
        logits: Tensor = self.out(self.features(images).mean(dim=(2, 3)))
        return logits


def _convolution(inputs: int, outputs: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def _spread(name: str, inputs: int, layers: int) -> float:
    if name.startswith(("bytes.", "positions.")):
        # the first norm divides by it, and their gradient with it: small ones learn in leaps under
        # SGD
        return 1.0
    if name == "out.weight":
        return 0.02
    branches = 2 * layers if name.endswith(("merge.weight", "narrow.weight")) else 1
    return 1 / math.sqrt(inputs * branches)


def muon_shapes(model: nn.Module, *, conv: bool = False) -> list[torch.Size]:
    """Return the shapes that Muon would train with `muon_groups`; AdamW has the rest."""
    return [
        p.shape
        for group in muon_groups(model, conv=conv)
        for _, p in group["params"]
        if group["muon"] and (p.ndim == 2 or (conv and p.ndim > 2))
        if p.requires_grad and not p.is_complex()
    ]


Pair = tuple[Any, Any]
LossFunction = Callable[[Any, Any], Tensor]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy per prediction, in nats, for logits of shape (..., classes)."""
    return nn.functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


class _BuiltIn:
    """Task of one rank; `alike`: all ranks started with the same batch."""

    make_optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None
    alike = False
    loss_fn: LossFunction = staticmethod(loss_of)

    def __init__(self, config: RunConfig, rank: int, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.device = device
        self.batch = config.batch
        self.random = torch.Generator().manual_seed(seed_of(config.seed, rank))
        self.held_out_batches: list[Pair] = []

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean held-out loss per byte or digit, in nats, equal on all ranks."""
        total = torch.zeros(2, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for inputs, targets in self.held_out_batches:
                loss = loss_of(model(inputs), targets)
                total += torch.tensor([loss.item() * targets.numel(), targets.numel()])
        model.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])


@final
class NextByte(_BuiltIn):
    """Predict the next byte of a text."""

    def __init__(
        self, config: RunConfig, size: ModelSize, rank: int, world: int, device: torch.device
    ) -> None:
        super().__init__(config, rank, device)
        self.model: nn.Module = ByteTransformer(size).to(device)
        self.train, self.held_out = _bytes_of(config.train_file), _bytes_of(config.held_out_file)
        self.context = size.context
        fixed = torch.Generator().manual_seed(config.seed)
        starts = self._starts(self.held_out, config.held_out_sequences, fixed)[rank::world]
        parts = _split(starts, self.batch)
        self.held_out_batches = [self._take(self.held_out, part) for part in parts]

    def _starts(self, text: Tensor, count: int, random: torch.Generator) -> Tensor:
        return torch.randint(len(text) - self.context, (count,), generator=random)

    def _take(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [text[start : start + self.context + 1] for start in starts.tolist()]
        whole = torch.stack(pieces).long().to(self.device)
        return whole[:, :-1], whole[:, 1:]

    def next_batch(self) -> Pair:
        """Return inputs and targets of this rank's next step, each of shape (batch, context)."""
        return self._take(self.train, self._starts(self.train, self.batch, self.random))

    def some_batch(self, seed: int) -> Pair:
        """Return random inputs and targets, for warm-up and timing."""
        size = (2, self.batch, self.context)
        made = torch.randint(256, size, generator=torch.Generator().manual_seed(seed))
        inputs, targets = made.to(self.device)
        return inputs, targets


@final
class Digits(_BuiltIn):
    """Classify scanned digits."""

    def __init__(
        self, config: RunConfig, size: ConvolutionSize, rank: int, world: int, device: torch.device
    ) -> None:
        super().__init__(config, rank, device)
        self.model: nn.Module = ConvolutionalNet(size).to(device)
        files = config.train_file, config.held_out_file
        self.train, held_out = (_bytes_of(path).view(-1, PIXELS + 1) for path in files)
        share = torch.arange(rank, len(held_out), world)
        self.held_out_batches = [self._take(held_out[part]) for part in _split(share, self.batch)]

    def _take(self, records: Tensor) -> tuple[Tensor, Tensor]:
        images = records[:, :PIXELS].float().view(-1, 1, SIDE, SIDE) / WHITE
        return images.to(self.device), records[:, PIXELS].long().to(self.device)

    def next_batch(self) -> Pair:
        """Return images of shape (batch, 1, 8, 8) in [0, 1], and classes of shape (batch,)."""
        chosen = torch.randint(len(self.train), (self.batch,), generator=self.random)
        return self._take(self.train[chosen])

    def some_batch(self, seed: int) -> Pair:
        random = torch.Generator().manual_seed(seed)
        images = torch.rand(self.batch, 1, SIDE, SIDE, generator=random)
        classes = torch.randint(CLASSES, (self.batch,), generator=random)
        return images.to(self.device), classes.to(self.device)


def seed_of(seed: int, rank: int) -> int:
    """Return the seed of the batches of one rank."""
    return (seed * 1_000_003 + rank) % 2**63


def _split(chosen: Tensor, batch: int) -> Sequence[Tensor]:
    """Split a rank's share of the held-out part; empty if there are fewer samples than ranks."""
    return torch.split(chosen, batch) if len(chosen) else []


def _bytes_of(path: str) -> Tensor:
    return torch.from_file(path, size=Path(path).stat().st_size, dtype=torch.uint8)
