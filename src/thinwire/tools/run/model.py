"""The models that come with the command: a byte-level transformer and a convolutional net."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.optim import muon_groups
from thinwire.tools.run.size import HEAD_WIDTH, ConvolutionSize, ModelSize
from thinwire.tools.run.text import CLASSES

__all__ = ["ByteTransformer", "ConvolutionalNet"]

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised input and added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.merge = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.widen, self.narrow = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        self.heads = width // HEAD_WIDTH

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, context, width) to the same."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, context, width))
        fed: Tensor = self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return x + fed


class ByteTransformer(nn.Module):
    """Predicts the next byte: learned positions, pre-normalised blocks, no biases, a separate
    output layer.

    Args:
        size: Width, layers and context.

    Source: the usual decoder of Radford et al. 2019, with residual branches that start small by the
    depth.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.out = nn.Linear(size.width, VOCABULARY, bias=False)
        self._initialise(size)

    def _initialise(self, size: ModelSize) -> None:
        for name, p in self.named_parameters():
            if p.ndim == 1:
                continue
            nn.init.normal_(p, std=_spread(name, p.shape[1], size.layers))

    def forward(self, text: Tensor) -> Tensor:
        """Logits of shape (batch, context, 256) for integer bytes of shape (batch, context)."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits


class ConvolutionalNet(nn.Module):
    """Tells ten classes of images apart: four convolutions, each with batch normalisation, the mean
    over all places, and a linear layer; no residual branches.

    Args:
        size: Width.
    """

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
        """Logits of shape (batch, 10) for images of shape (batch, 1, height, width)."""
        logits: Tensor = self.out(self.features(images).mean(dim=(2, 3)))
        return logits


def _convolution(inputs: int, outputs: int, *, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def _spread(name: str, inputs: int, layers: int) -> float:
    if name.startswith(("bytes.", "positions.")):
        # the first norm divides by it, and their gradient with it: small ones learn in leaps under
        # SGD
        return 1.0
    if name == "out.weight":
        return 0.02
    return 1 / math.sqrt(
        inputs * (2 * layers if name.endswith(("merge.weight", "narrow.weight")) else 1)
    )


def muon_numel(model: nn.Module) -> int:
    """Count the trainable numbers that Muon would train with `muon_groups`; AdamW has the rest."""
    return sum(
        p.numel()
        for group in muon_groups(model)
        for _, p in group["params"]
        if group["muon"] and p.requires_grad and p.ndim == 2 and not p.is_complex()
    )
