"""Making replicas equal: tensors of rank 0 copied to all."""

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.comm.group import Group

__all__ = ["copy_from_first_"]


@torch.no_grad()
def copy_from_first_(tensors: Iterable[Tensor], group: Group, *, what: str) -> None:
    """Overwrite `tensors` with those of rank 0, whatever their dtypes.

    Args:
        tensors: The same shapes, dtypes and order on all ranks; empty ones are passed over.
        group: The ranks.
        what: The occasion in plain words, for errors.

    Communication: one broadcast of all bytes per device.
    """
    held = [tensor for tensor in tensors if tensor.numel()]
    for device in dict.fromkeys(tensor.device for tensor in held):
        here = [tensor for tensor in held if tensor.device == device]
        flat = torch.cat([_real(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in here])
        group.broadcast_(flat, what=what).wait()
        at = 0
        for tensor in here:
            nbytes = tensor.numel() * tensor.element_size()
            # a copy, since a view of another type needs an aligned start
            real = _real(tensor)
            real.copy_(flat[at : at + nbytes].clone().view(real.dtype).view(real.shape))
            at += nbytes


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
