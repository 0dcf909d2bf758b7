"""What devices can do, and copies between them."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of one dimension and one device on another, in one transfer."""
    if not tensors or tensors[0].device == device:
        return list(tensors)
    there = uploaded(torch.cat([tensor.view(torch.uint8) for tensor in tensors]), device)
    found = []
    pieces = torch.split(there, [tensor.nbytes for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        aligned = piece.storage_offset() % tensor.itemsize == 0
        found.append((piece if aligned else piece.clone()).view(tensor.dtype))
    return found


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Only a transfer to the CPU waits for what came before it."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and copies_pinned(device):
        tensor = tensor.pin_memory()  # from other memory torch waits until it is copied
    return tensor.to(device, non_blocking=device.type not in ("cpu", "mps"))


@cache
def copies_pinned(device: torch.device) -> bool:
    """Return True for a device that copies from and to pinned memory while the CPU goes on."""
    own = torch.accelerator.current_accelerator()
    if own is None or own.type != device.type or own.type == "mps":
        return False
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except RuntimeError:  # its backend has none
        return False
    return True


@cache
def has_float64(device: torch.device) -> bool:
    """Return False where tensors of this type cannot be made, as on Apple's GPUs."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except TypeError:
        return False
    return True


def with_float64(tensor: Tensor) -> Tensor:
    """Return a tensor where double precision exists, perhaps on the CPU."""
    return tensor if has_float64(tensor.device) else tensor.cpu()
