"""Checks that ranks which update alike do so at the same rates and with the same settings."""

import json
import re
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import Mismatch
from thinwire.exchange.agreement import Answers, Said, Turn

__all__ = ["SameHyperparameters"]

_ELSEWHERE = ("params", "param_names", "lr")
"""Compared at the start, or on its own."""


class SameHyperparameters:
    """Compares the parameter groups of the optimizer: rates in the last agreement of an update, all
    else in every one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: list[tuple[tuple[Any, ...], str]] = []

    def say(self, turn: Turn) -> Said:
        """See `Check`."""
        groups = self._optimizer.param_groups
        said: Said = {"settings": self._settings()}
        if turn.last:  # there are methods without a learning rate
            said["rates"] = [float(group["lr"]) for group in groups if "lr" in group]
        return said

    def judge(self, turn: Turn, answers: Answers) -> None:
        """See `Check`."""
        for first, ours, rank, theirs in answers.unlike("rates"):
            raise Mismatch(
                f"{turn.what}: the learning rates of the parameter groups are {ours} on rank "
                f"{first} and {theirs} on rank {rank}. Give all ranks the same schedule, and "
                "change rates on all of them"
            )
        for first, ours, rank, theirs in answers.unlike("settings"):
            _refuse(turn, (first, ours), (rank, theirs))

    def _settings(self) -> list[str]:
        """Per group a JSON object from names to values as Python writes them, written anew only
        where a value has changed.
        """
        texts = []
        for index, group in enumerate(self._optimizer.param_groups):
            values = tuple((key, value) for key, value in group.items() if key not in _ELSEWHERE)
            if index == len(self._known):
                self._known.append(((), ""))
            before, text = self._known[index]
            if not text or not _same(values, before):
                text = json.dumps({key: _text(value) for key, value in sorted(values)})
                self._known[index] = values, text
            texts.append(text)
        return texts


def _refuse(turn: Turn, ours: tuple[int, list[str]], theirs: tuple[int, list[str]]) -> None:
    (first, mine), (rank, other) = ours, theirs
    if len(mine) != len(other):
        raise Mismatch(
            f"{turn.what}: there are {len(mine)} parameter groups on rank {first} and {len(other)} "
            f"on rank {rank}. Add groups on all ranks alike"
        )
    for index, texts in enumerate(zip(mine, other, strict=True)):
        here, there = map(json.loads, texts)
        for key in dict.fromkeys([*here, *there]):
            values = [settings.get(key, "missing") for settings in (here, there)]
            if values[0] != values[1]:
                raise Mismatch(
                    f"{turn.what}: {key} of parameter group {index} is {values[0]} on rank {first} "
                    f"and {values[1]} on rank {rank}. Change hyper-parameters on all ranks alike"
                )


def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether these are plain values, and equal; one that can change inside is looked at again."""
    plain = all(isinstance(value, int | float | str | tuple | None) for _, value in now)
    return plain and now == before


def _text(value: Any) -> str:
    """What two processes write alike."""
    written = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return re.sub(" at 0x[0-9a-f]+", "", written)
