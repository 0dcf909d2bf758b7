"""Hyper-parameters of an optimizer's groups as text, for comparisons over ranks at every step."""

import json
import re
from typing import Any

import torch
from torch import Tensor

__all__ = ["Settings"]

_ELSEWHERE = ("params", "param_names", "lr")
"""Compared at the start, or on its own."""


class Settings:
    """Texts of all groups, written anew only where a value has changed."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Any, ...], str]] = []

    def of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Per group a JSON object from names to values as Python writes them."""
        texts = []
        for index, group in enumerate(optimizer.param_groups):
            values = tuple((key, value) for key, value in group.items() if key not in _ELSEWHERE)
            if index == len(self._known):
                self._known.append(((), ""))
            before, text = self._known[index]
            if not text or not _same(values, before):
                text = json.dumps({key: _text(value) for key, value in sorted(values)})
                self._known[index] = values, text
            texts.append(text)
        return texts


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether these are plain values, and equal; one that can change inside is looked at again."""
    plain = all(isinstance(value, int | float | str | tuple | None) for _, value in now)
    return plain and now == before


def _text(value: Any) -> str:
    """What two processes write alike."""
    written = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", written)
