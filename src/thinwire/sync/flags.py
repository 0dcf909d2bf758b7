"""What the host has to know of an exchange, read from a device in one copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.protocol import Flags

__all__ = ["read_flags"]


def read_flags(
    several: Sequence[Flags], numbers: Sequence[Tensor] = ()
) -> tuple[list[str | None], list[list[int]]]:
    """Per set of flags the first name that is not as it should be, and what the integer tensors
    hold.

    Args:
        several: Sets of flags.
        numbers: int64, shape (m,) each.

    Returns:
        The names, None where all is well, and the numbers. One copy to the host per device, for
        everything together.
    """
    waiting = [
        (i, name, flag)
        for i, flags in enumerate(several)
        for name, flag in flags.items()
        if _waits(flag)
    ]
    values = _read([*(torch.as_tensor(flag).long().view(1) for *_, flag in waiting), *numbers])
    known = [dict(flags) for flags in several]
    for (i, name, _), value in zip(waiting, values, strict=False):
        known[i][name] = bool(value[0])
    bad = [next((name for name, flag in flags.items() if not flag), None) for flags in known]
    return bad, values[len(waiting) :]


def _waits(flag: bool | Tensor) -> bool:
    return isinstance(flag, Tensor)


def _read(pieces: Sequence[Tensor]) -> list[list[int]]:
    """The numbers in each of the tensors, which are joined per device before they are copied."""
    devices = dict.fromkeys(piece.device for piece in pieces)
    hosts = {
        device: torch.cat([p for p in pieces if p.device == device]).tolist() for device in devices
    }
    return [[hosts[piece.device].pop(0) for _ in range(piece.numel())] for piece in pieces]
