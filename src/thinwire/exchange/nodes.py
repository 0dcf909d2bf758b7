"""Averaging inside nodes: ranks of a node count as one source and hold one state."""

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.comm import Nodes, require_agreement
from thinwire.compress.dense import by_dtype, damaged_text, joined, opened, parted, sum_of
from thinwire.compress.protocol import Bucket, Context, Sending, combined
from thinwire.errors import PayloadCorrupt


@torch.no_grad()
def make_common_(state: Mapping[str, Tensor], nodes: Nodes) -> None:
    """Give all ranks of each node the mean of their `state`, unless it is equal already."""
    facts = {"state of": [f"{name} {list(tensor.shape)}" for name, tensor in state.items()]}
    require_agreement(nodes.all_ranks, facts, action="comparing the state inside the nodes")
    # compare 4 bytes first: equal state needs no averaging
    checksum = 0
    for tensor in state.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(flat.numpy().data, checksum)
    answers = nodes.node.gather_bytes(
        checksum.to_bytes(4, "little"), action="comparing the state inside the node"
    )
    # equal answers on all ranks of a node, so all of them enter the all-reduces or none does
    if len(set(answers)) > 1:
        pending = [
            nodes.node.all_reduce_(
                tensor.contiguous().clone(), action="averaging the state inside the node"
            )
            for tensor in (t.float() if t.dtype == torch.bfloat16 else t for t in state.values())
        ]
        # all sums are launched before the first wait
        for tensor, total in zip(state.values(), pending, strict=True):
            tensor.copy_(total.wait().div_(nodes.node_size))


def in_nodes(
    context: Context,
    grads: Mapping[str, Tensor],
    send: Callable[[Mapping[str, Tensor]], Sequence[Sending]],
) -> Bucket:
    """Average the gradients of a node's ranks densely, then make the node's sendings."""
    dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}
    groups = by_dtype(dense)
    purpose = f"averaging dense tensors of step {context.step}, bucket {context.bucket}"
    parts = [joined(group.values()) for group in groups]
    # first step of the bucket: sums inside the node, one per dtype
    asked = [sum_of(part, context, purpose, within_node=True) for part in parts]
    answers = yield asked
    means: dict[str, Tensor] = {}
    refusal: PayloadCorrupt | None = None
    for group, part, collective, answer in zip(groups, parts, asked, answers, strict=True):
        # the mean is bit-identical on all ranks of the node
        total, wrong = opened(collective, answer, part.dtype, context)
        means |= parted(total.div_(context.node_size), group)
        for rank, damage in enumerate([] if wrong is None else wrong.tolist()):
            if damage and refusal is None:
                text = damaged_text(rank, context)
                refusal = PayloadCorrupt(
                    f"inside node {context.source}, whose ranks count from 0: {text}"
                )
    # send even after damage: the other nodes wait for this one's messages
    arrived = yield from combined(send({name: means[name] for name in grads}))
    if refusal is not None:
        raise refusal
    for brought in arrived:
        # residuals are taken from the mean of the node, which is what it sent
        brought.node_means = {name: means[name] for name in brought.names}
    return arrived
