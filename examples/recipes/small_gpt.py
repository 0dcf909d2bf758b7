"""A small GPT and its text (sources of Python's standard library), which the recipes share."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 256, 64, 4, 2, 64


@cache
def text(split: str) -> Tensor:
    """The bytes of a split, "train" or "val"."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    data = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)
    train, val = data[: -len(data) // 10], data[-len(data) // 10 :]
    return (train if split == "train" else val).long()


def get_batch(split: str, size: int = 8) -> tuple[Tensor, Tensor]:
    """A random batch, as inputs and their next bytes."""
    data = text(split)
    at = torch.randint(len(data) - CONTEXT, (size, 1))
    return data[at + torch.arange(CONTEXT)], data[at + torch.arange(1, CONTEXT + 1)]


class Windows(Dataset):
    """The windows of a split, as pairs of inputs and their next bytes."""

    def __init__(self, split: str, most: int) -> None:
        self.data = text(split)
        self.most = min(most, (len(self.data) - 1) // CONTEXT)

    def __len__(self) -> int:
        return self.most

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        piece = self.data[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).chunk(3, dim=2)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in qkv)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(nn.functional.gelu(self.fc(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """AdamW with decay of matrices alone."""
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


@torch.no_grad()
def estimate_loss(model: nn.Module) -> float:
    """Mean loss of a fixed part of the held-out text."""
    model.eval()
    windows = Windows("val", 128)
    x, y = (torch.stack(parts) for parts in zip(*(windows[i] for i in range(128)), strict=True))
    _, loss = model(x, y)
    model.train()
    return float(loss)
