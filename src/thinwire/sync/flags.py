"""Yes or no about each gradient: what the host knows, and what waits on a device until all is read in one copy."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.kernels import is_static

__all__ = ["Flags", "dense_flag", "read_flags"]

Flags = Mapping[int, bool | Tensor]
"""By key whether a gradient is as it should be; a tensor has shape () and dtype bool."""


def dense_flag(grad: Tensor) -> Tensor | None:
    """Whether all of a gradient is finite, shape (), bool; None where its device is not asked in this way."""
    if grad.numel() == 0 or not is_static(grad.device):
        return None
    # the largest magnitude is not finite if any is not; one pass, and no temporary of full size
    largest: Tensor = torch.linalg.vector_norm(grad, torch.inf)
    return largest.isfinite()


def read_flags(several: Sequence[Flags], numbers: Sequence[Tensor] = ()) -> tuple[list[int | None], list[list[int]]]:
    """Per set of flags the first key that is not as it should be, and what the integer tensors hold.

    Args:
        several: Sets of flags.
        numbers: int64, shape (m,) each.

    Returns:
        The keys, None where all is well, and the numbers. One copy to the host per device, for everything together.
    """
    waiting = [(i, key, flag) for i, flags in enumerate(several) for key, flag in flags.items() if _waits(flag)]
    values = _read([*(torch.as_tensor(flag).long().view(1) for *_, flag in waiting), *numbers])
    known = [dict(flags) for flags in several]
    for (i, key, _), value in zip(waiting, values, strict=False):
        known[i][key] = bool(value[0])
    bad = [min((key for key, flag in flags.items() if not flag), default=None) for flags in known]
    return bad, values[len(waiting) :]


def _waits(flag: bool | Tensor) -> bool:
    return isinstance(flag, Tensor)


def _read(pieces: Sequence[Tensor]) -> list[list[int]]:
    """The numbers in each of the tensors, which are joined per device before they are copied."""
    devices = dict.fromkeys(piece.device for piece in pieces)
    hosts = {device: torch.cat([p for p in pieces if p.device == device]).tolist() for device in devices}
    return [[hosts[piece.device].pop(0) for _ in range(piece.numel())] for piece in pieces]
