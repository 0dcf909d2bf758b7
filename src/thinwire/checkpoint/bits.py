"""The bits of a tensor, whatever its device, strides and dtype."""

import torch
from torch import Tensor

__all__ = ["bits"]


def bits(tensor: Tensor) -> Tensor:
    """Its elements in order as bytes on the CPU: uint8, one dimension; shares memory with `tensor`
    where it can.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # one element counts as contiguous whatever its stride, and a view as bytes wants 1
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
