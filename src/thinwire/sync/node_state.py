"""The ranks of a node count as one, so what they have accumulated must be one too."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.comm import Nodes, require_agreement

__all__ = ["make_common_"]


@torch.no_grad()
def make_common_(state: Mapping[str, Tensor], nodes: Nodes) -> None:
    """Give all ranks of each node the mean of their `state`, where they do not hold the same
    already; changed in place.

    State that was saved with every rank, or other ranks, as a source of its own differs inside a
    node. The mean keeps the update that is still pending: that is the mean over all ranks.

    Args:
        state: Momentum and residuals by name, the same names and shapes on all ranks.
        nodes: The ranks.

    Raises:
        Mismatch: Ranks hold state of different tensors, or one of them is elsewhere.

    Communication: one agreement over all ranks, one inside the node; all-reduces inside a node that
    differs.
    """
    facts = {"state of": [f"{name} {list(tensor.shape)}" for name, tensor in state.items()]}
    require_agreement(nodes.everybody, facts, what="comparing the state inside the nodes")
    checksum = 0
    for tensor in state.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(flat.numpy().data, checksum)
    answers = nodes.inner.gather_bytes(
        checksum.to_bytes(4, "little"), what="comparing the state inside the node"
    )
    if len(set(answers)) > 1:
        pending = [
            nodes.inner.sum_(
                _wide(tensor).contiguous().clone(), what="averaging the state inside the node"
            )
            for tensor in state.values()
        ]
        for tensor, total in zip(state.values(), pending, strict=True):
            tensor.copy_(total.wait().div_(nodes.node_size))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
