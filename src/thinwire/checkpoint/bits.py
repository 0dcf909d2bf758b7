"""The bits of a tensor, whatever its device, strides and dtype."""

import torch
from torch import Tensor

__all__ = ["bits"]


def bits(tensor: Tensor) -> Tensor:
    """Its elements in order as bytes on the CPU: uint8, one dimension; shares memory with `tensor` where it can."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 1:  # it may count as contiguous with any stride
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)
