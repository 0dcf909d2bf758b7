"""A decoder of Llama's shape and names: rotary positions, RMSNorm, SwiGLU, tied embeddings.

`transformers` loads its weights as they are (export.py).
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    kv_heads: int  # fewer than heads: queries in groups share keys and values
    hidden: int
    context: int
    dtype: torch.dtype = torch.float32  # of the parameters
    recompute: bool = False


SIZES = {
    "tiny": Size(64, 2, 4, 2, 192, 64),
    "small": Size(256, 4, 4, 2, 704, 128),
    "124M": Size(768, 12, 12, 12, 2048, 1024),
    "1B": Size(2048, 16, 32, 8, 8192, 2048, torch.bfloat16, recompute=True),
}
"""By name; the vocabulary, which is the tokenizer's, adds width times its size."""


def rotary(context: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of shape (context, width / 2), in float32 at any dtype of the model."""
    rates = 10_000 ** -(torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.outer(torch.arange(context, device=device).float(), rates)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


linear = partial(nn.Linear, bias=False)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        keys = size.kv_heads * self.head
        self.q_proj, self.o_proj = linear(size.width, size.width), linear(size.width, size.width)
        self.k_proj, self.v_proj = linear(size.width, keys), linear(size.width, keys)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(2, (-1, self.head)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = linear(size.width, size.hidden)
        self.up_proj = linear(size.width, size.hidden)
        self.down_proj = linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.width, eps=1e-6)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size.width, eps=1e-6)
        self.mlp = SwiGLU(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.model = nn.Module()  # whose name is in those of the parameters
        self.model.embed_tokens = nn.Embedding(vocabulary, size.width)
        self.model.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.model.norm = nn.RMSNorm(size.width, eps=1e-6)
        self.lm_head = linear(size.width, vocabulary)
        self.lm_head.weight = self.model.embed_tokens.weight  # tied
        for name, p in self.named_parameters():
            if p.dim() == 2:  # branches into the residual stream start small
                branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * size.layers) ** (branch / 2))
        self.to(size.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, context, vocabulary) for tokens of shape (batch, context)."""
        cos, sin = rotary(tokens.shape[1], self.head, tokens.device)
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.model.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def continued(model: Llama, tokens: list[int], count: int, context: int) -> list[int]:
    """The tokens and `count` more, the most likely one each time."""
    for _ in range(count):
        logits = model(torch.tensor([tokens[-context:]], device=model.lm_head.weight.device))
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens
