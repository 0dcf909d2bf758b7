"""In what this library computes and keeps state, whatever type the parameters have."""

import torch
from torch import Tensor

__all__ = ["state_dtype"]


def state_dtype(param: Tensor) -> torch.dtype:
    """In what a method of this library keeps its state and computes: float32, float64 for float64 parameters."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32
