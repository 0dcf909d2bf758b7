"""A GPT of any size in torch alone, and batches of the standard library's text as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

SIZES = {
    "tiny": (300, 64, 2),
    "34M": (16384, 512, 8),
    "124M": (50257, 768, 12),
    "350M": (50257, 1024, 24),
}
"""Vocabulary, width and blocks."""


class GPT(nn.Module):
    """Logits of the next token; the head is tied to the embedding."""

    def __init__(self, size: str) -> None:
        super().__init__()
        vocabulary, width, blocks = SIZES[size]
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=h.dtype).triu(1)
        for block in self.blocks:
            h = block(h, src_mask=mask)
        return self.norm(h) @ self.tokens.weight.T


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def text() -> Tensor:
    """Return the text of the standard library as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(data: Tensor, seed: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of `rows` random places."""
    starts = torch.randint(len(data) - length - 1, (rows, 1), generator=generator(seed))
    taken = data[starts + torch.arange(length + 1)].long()
    return taken[:, :-1], taken[:, 1:]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
