"""Ranks that share a node average their gradients first, and count as one source."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from thinwire.compress.dense import by_dtype, damaged_text, joined, opened, parted, sum_of
from thinwire.compress.protocol import Bucket, Context, Sending, together
from thinwire.errors import PayloadCorrupt

__all__ = ["in_nodes"]


def in_nodes(
    context: Context,
    grads: Mapping[str, Tensor],
    send: Callable[[Mapping[str, Tensor]], Sequence[Sending]],
) -> Bucket:
    """The sendings of a node, whose ranks first average their gradients, densely.

    Args:
        context: Of the bucket.
        grads: Of this rank, by name; row-sparse ones become dense.
        send: From the means over the node, which are the same bits on all of its ranks, to what
            the node sends.

    Raises:
        PayloadCorrupt: A part of a mean was damaged on its way; after the node has sent.
    """
    dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}
    groups = by_dtype(dense)
    purpose = f"averaging dense tensors of step {context.step}, bucket {context.bucket}"
    parts = [joined(group.values()) for group in groups]
    asked = [sum_of(part, context, purpose, within_node=True) for part in parts]
    answers = yield asked
    means: dict[str, Tensor] = {}
    refusal: PayloadCorrupt | None = None
    for group, part, collective, answer in zip(groups, parts, asked, answers, strict=True):
        total, wrong = opened(collective, answer, part.dtype, context)
        means |= parted(total.div_(context.node_size), group)
        for rank, damage in enumerate([] if wrong is None else wrong.tolist()):
            if damage and refusal is None:
                text = damaged_text(rank, context)
                refusal = PayloadCorrupt(
                    f"inside node {context.source}, whose ranks count from 0: {text}"
                )
    arrived = yield from together(send({name: means[name] for name in grads}))
    if refusal is not None:
        raise refusal
    for brought in arrived:
        brought.node_means = {name: means[name] for name in brought.names}
    return arrived
