"""What autograd cannot see of loops that write to addresses."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["tell_autograd"]


def tell_autograd(*lists: Sequence[Tensor]) -> None:
    """Tensors have changed, so that a graph that still needs the old values complains."""
    torch.autograd.graph.increment_version([tensor for tensors in lists for tensor in tensors])
