"""Batches of bytes for the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["Batches"]

Pair = tuple[Tensor, Tensor]


@final
class Batches:
    """Batches of bytes: the same for every strategy, different on every rank."""

    def __init__(self, config: Mapping[str, Any], rank: int) -> None:
        self.train = torch.from_file(
            config["train_file"], size=config["train_bytes"], dtype=torch.uint8
        )
        self.held_out = torch.from_file(
            config["held_out_file"], size=config["held_out_bytes"], dtype=torch.uint8
        )
        self.context, self.batch = config["context"], config["batch"]
        self.random = torch.Generator().manual_seed(config["seed"] * 1_000_003 + rank)
        fixed = torch.Generator().manual_seed(config["seed"])
        self.held_out_starts = self._starts(self.held_out, config["held_out_sequences"], fixed)

    def _starts(self, text: Tensor, count: int, random: torch.Generator) -> Tensor:
        return torch.randint(len(text) - self.context, (count,), generator=random)

    def _cut(self, text: Tensor, starts: Tensor) -> Pair:
        pieces = torch.stack(
            [text[start : start + self.context + 1] for start in starts.tolist()]
        ).long()
        return pieces[:, :-1], pieces[:, 1:]

    def next_batch(self) -> Pair:
        """Inputs and targets, each of shape (batch, context), for the next training step of this
        rank.
        """
        return self._cut(self.train, self._starts(self.train, self.batch, self.random))

    def held_out_batches(self, rank: int, world: int) -> list[Pair]:
        """This rank's share of the held-out sequences."""
        mine = self.held_out_starts[rank::world]
        return (
            [self._cut(self.held_out, part) for part in torch.split(mine, self.batch)]
            if len(mine)
            else []
        )
